"""A crew: the hands of a cluster, which are given errands, listened to, and missed when they die.

    for errand, said, node in crew.work(do, queue): ...

What a hand says comes in its order, and what has changed in an errand's places before it. Where a hand dies, or its
node does or cannot go on, that is `Lost`, and what becomes of its errand is the queue's business; what a hand would say
that was taken for dead is not heard.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from time import monotonic, sleep
from typing import Any

from flatmin_lab.execution.cluster import nodes
from flatmin_lab.execution.cluster.file_sync import content, put
from flatmin_lab.execution.cluster.nodes import Node, told
from flatmin_lab.execution.cluster.task_queue import Ended, Lost, Queue, Said
from flatmin_lab.execution.cluster.worker import Changed, Do, Errand, Unable
from flatmin_lab.execution.cluster.worker_pool import Hired, Hiring
from flatmin_lab.execution.process_pool import PATIENCE
from flatmin_lab.runs.events import RunError


@dataclass(eq=False, kw_only=True)
class Crew(Hiring):
    """Made by `joined`."""

    sent: dict[str, Any] = field(default_factory=dict)  # data sets that the cluster has, by their checksums
    numbers: Iterator[int] = field(default_factory=count)

    def work(self, do: Do, queue: Queue) -> Iterator[tuple[Any, Said, str]]:
        """Errand by errand, until there are none; what has changed in their places is put there before it is told."""
        self.able_at = monotonic()
        try:
            while True:
                for hand in [hand for hand in self.hands if hand.hello is not None and not hand.busy]:
                    self._give(hand, do, queue)
                if not any(hand.busy for hand in self.hands) and not queue.waiting():
                    return
                self.hire(queue.waiting())
                yield from self._asked(queue)
                for hand in self._ready():
                    yield from self._heard(hand)
        finally:
            for hand in list(self.hands):
                self.dismiss(hand)

    # ---- given an errand

    def _give(self, hand: Hired, do: Do, queue: Queue) -> None:
        greeted = sum(other.hello is not None for other in self.hands)
        others = any(node.key != hand.node.key for node in self.able())
        given = None
        if self.most is None or greeted <= self.most:
            given = queue.take(self.room(), hand.node.key, others=others)
            if given is None and queue.waiting():
                self.record(hand.node).lost()  # all that waits was lost there: not again so soon
        if given is None:
            self.dismiss(hand)  # others may need the node
            return
        hand.errand, data = given
        hand.number, hand.asked_at = next(self.numbers), None
        if data.checksum not in self.sent:
            self.sent[data.checksum] = self.ray.put(data)
        parts = [content(place) for place in hand.errand.places()]
        stream = hand.actor.do.options(num_returns="streaming")
        hand.heard = stream.remote(hand.number, do, hand.errand, parts, self.sent[data.checksum])

    def _asked(self, queue: Queue) -> Iterator[tuple[Any, Lost, str]]:
        """Ask those to stop that should; one that does not is not waited for for ever."""
        for hand in [hand for hand in self.hands if hand.busy]:
            if hand.asked_at is None and (reason := queue.asked(hand.errand)):
                hand.asked_at = monotonic()
                hand.actor.stop.remote(hand.number, reason)
            elif hand.asked_at is not None and monotonic() - hand.asked_at > PATIENCE:
                yield self._lost(hand, f"it did not stop within {PATIENCE:.0f} s")

    # ---- listened to

    def _ready(self) -> list[Hired]:
        if not self.hands:
            sleep(0.1)
            return []
        by_what = {hand.heard: hand for hand in self.hands}
        ready, _ = self.ray.wait(list(by_what), num_returns=1, timeout=0.1)
        return [by_what[what] for what in ready]

    def _heard(self, hand: Hired) -> Iterator[tuple[Any, Said, str]]:
        if not hand.busy:
            self.greet(hand)
            return
        errand, node = hand.errand, hand.node
        try:
            said = self.ray.get(next(hand.heard))
        except StopIteration:
            hand.errand = None
            self.past.pop(node.key, None)
            yield errand, Ended(), node.key
        except self.ray.exceptions.RayError as error:
            yield self._lost(hand, told(error))
        else:
            if isinstance(said, Unable):
                yield self._lost(hand, said.why)
            elif isinstance(said, Changed):
                self._put(errand, said)
            else:
                yield errand, said, node.key

    def _lost(self, hand: Hired, why: str) -> tuple[Any, Lost, str]:
        self.dismiss(hand)
        self.record(hand.node).lost()
        return hand.errand, Lost(hand.node.name, why), hand.node.key

    @staticmethod
    def _put(errand: Errand, said: Changed) -> None:
        for number, change in said.changes.items():
            place = errand.places()[number]
            try:
                put(place, change)
            except OSError as error:
                raise RunError(
                    f"what a worker sent back could not be written to {place} ({error}); make room, and the same "
                    "command goes on from the checkpoints that are there"
                ) from error


@contextmanager
def joined(
    address: str | None,
    *,
    device: str | None = None,
    gpus: float | None = None,
    most: int | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> Iterator[Crew]:
    """A cluster's crew, of which each has its share of a node: a CPU, or `gpus` of a GPU."""
    with nodes.connected(address) as ray:
        there: Sequence[Node] = nodes.alive(ray)
        where, share = nodes.chosen(there, device, gpus)
        crew = Crew(ray=ray, device=where, share=share, most=most, say=say)
        say(f"{nodes.in_words(there)}: room for {crew.room()} at once, each with {share}")
        yield crew
