"""The hands of a cluster: hired where there is room, given errands, listened to, and missed when they die.

    for errand, said in crew.work(do, queue): ...

A hand is a process on a node. It gets an errand when it has said hello and has the same source as we have; so a node
that is full, dead without anyone knowing yet, or of another version holds nothing up. What a hand says comes in its
order. Where it dies, or its node does, that is `Lost`, and what becomes of its errand is the caller's business; what a
hand would say that was taken for dead is not heard.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from time import monotonic, sleep
from typing import Any, NamedTuple, Protocol

from flatmin_lab.cluster import nodes
from flatmin_lab.cluster.hand import Changed, Do, Errand, Hand, Hello, introduced
from flatmin_lab.cluster.nodes import Node, Share
from flatmin_lab.cluster.parcels import content, put
from flatmin_lab.data.dataset import Dataset
from flatmin_lab.extras import need
from flatmin_lab.machine import commit
from flatmin_lab.records import Record, RunError
from flatmin_lab.workers import PATIENCE, Died

LOOK = 1.0  # seconds between two looks at the nodes
GRACE = 60.0  # seconds in which a node must come up where there is none that could do the work
REASON = 300  # letters of what Ray says
START = 3  # hands that may die on a node before they have said hello


class Lost(NamedTuple):
    """A hand that died, or whose node did, in the middle of its errand."""

    where: str
    why: str


class NoNodeError(RunError):
    """Nobody is there to do the work."""


class Queue(Protocol):
    """What is to be done."""

    def waiting(self) -> int:
        """How many errands there are at the moment, about."""

    def take(self, hands: int) -> tuple[Errand, Dataset] | None:
        """The next one, where so many hands could work; None where there is none at the moment."""

    def asked(self, errand: Any) -> str | None:
        """Why an errand that is being done should stop."""


@dataclass(eq=False)
class _Hired:
    """A hand, seen from here."""

    actor: Any
    node: Node
    heard: Any  # its hello that is to come, or what it says of its errand
    hello: Hello | None = None
    errand: Any = None
    number: int = 0
    asked_at: float | None = None

    @property
    def busy(self) -> bool:
        return self.errand is not None


@dataclass(eq=False, kw_only=True)
class Crew:
    """Made by `joined`."""

    ray: Any
    device: str
    share: Share
    most: int | None = None  # hands at once
    say: Callable[[str], object] = lambda _: None
    hands: list[_Hired] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # nodes that cannot do it, and why
    suspect: set[str] = field(default_factory=set)  # nodes on which a hand was lost: they may be dead as well
    died: dict[str, int] = field(default_factory=dict)  # how often, before they said hello
    sent: dict[str, Any] = field(default_factory=dict)  # data sets that the cluster has, by their checksums
    numbers: Iterator[int] = field(default_factory=count)
    looked_at: float = float("-inf")
    able_at: float = field(default_factory=monotonic)  # when a node was last there that could do it

    @property
    def hardware(self) -> str:
        return f"a Ray cluster of {nodes.in_words(nodes.alive(self.ray))}"

    def room(self) -> int:
        """For how many at once."""
        there = sum(node.room(self.share) for node in nodes.alive(self.ray))
        return min(there, self.most or there)

    def work(self, do: Do, queue: Queue) -> Iterator[tuple[Any, tuple[int, Record] | Died | Lost]]:
        """Errand by errand, until there are none; what has changed in their places is put there before it is told."""
        self.able_at = monotonic()
        try:
            while True:
                for hand in [hand for hand in self.hands if hand.hello is not None and not hand.busy]:
                    self._give(hand, do, queue)
                if not any(hand.busy for hand in self.hands) and not queue.waiting():
                    return
                self._hire(queue.waiting())
                yield from self._asked(queue)
                for hand in self._ready():
                    yield from self._heard(hand)
        finally:
            for hand in list(self.hands):
                self._dismiss(hand)

    # ---- hired

    def _hire(self, wanted: int) -> None:
        """As many as have something to do, where there is room."""
        if monotonic() - self.looked_at < LOOK:
            return
        self.looked_at = monotonic()
        able = [node for node in nodes.alive(self.ray) if node.room(self.share) and node.key not in self.refused]
        if able or any(hand.busy for hand in self.hands):
            self.able_at = monotonic()
        elif wanted and (self.refused or monotonic() - self.able_at > GRACE):
            raise NoNodeError(self._nobody())
        free = wanted - sum(not hand.busy for hand in self.hands)
        for node in sorted(able, key=lambda node: (node.key in self.suspect, self._on(node))):
            room = node.room(self.share) - self._on(node)
            for _ in range(min(room, free, (self.most or free + len(self.hands)) - len(self.hands))):
                self.hands.append(self._new(node))
                free -= 1

    def _on(self, node: Node) -> int:
        return sum(hand.node.key == node.key for hand in self.hands)

    def _nobody(self) -> str:
        why = "; ".join(self.refused.values()) or f"no node has {self.share} any more"
        return f"no node of the cluster can train it: {why}"

    def _new(self, node: Node) -> _Hired:
        strategies = need("ray.util.scheduling_strategies", "--executor ray", extra="cluster")
        actor = (
            self.ray.remote(Hand)
            .options(
                num_cpus=self.share.cpus,
                num_gpus=self.share.gpus,
                max_concurrency=2,
                max_restarts=0,
                scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node.key, soft=False),
            )
            .remote(commit())
        )
        return _Hired(actor, node, actor.hello.remote(self.device))

    def _dismiss(self, hand: _Hired) -> None:
        """At once: what it had to say has been said."""
        self.hands.remove(hand)
        with suppress(Exception):
            self.ray.kill(hand.actor)

    # ---- given an errand

    def _give(self, hand: _Hired, do: Do, queue: Queue) -> None:
        given = queue.take(self.room())
        if given is None:
            self._dismiss(hand)  # others may need the node
            return
        hand.errand, data = given
        hand.number, hand.asked_at = next(self.numbers), None
        if data.checksum not in self.sent:
            self.sent[data.checksum] = self.ray.put(data)
        parts = [content(place) for place in hand.errand.places()]
        stream = hand.actor.do.options(num_returns="streaming")
        hand.heard = stream.remote(hand.number, do, hand.errand, parts, self.sent[data.checksum])

    def _asked(self, queue: Queue) -> Iterator[tuple[Any, Lost]]:
        """Ask those to stop that should; one that does not is not waited for for ever."""
        for hand in [hand for hand in self.hands if hand.busy]:
            if hand.asked_at is None and (reason := queue.asked(hand.errand)):
                hand.asked_at = monotonic()
                hand.actor.stop.remote(hand.number, reason)
            elif hand.asked_at is not None and monotonic() - hand.asked_at > PATIENCE:
                self._dismiss(hand)
                yield hand.errand, Lost(hand.node.name, f"it did not stop within {PATIENCE:.0f} s")

    # ---- listened to

    def _ready(self) -> list[_Hired]:
        if not self.hands:
            sleep(0.1)
            return []
        by_what = {hand.heard: hand for hand in self.hands}
        ready, _ = self.ray.wait(list(by_what), num_returns=1, timeout=0.1)
        return [by_what[what] for what in ready]

    def _heard(self, hand: _Hired) -> Iterator[tuple[Any, tuple[int, Record] | Died | Lost]]:
        if not hand.busy:
            self._greeted(hand)
            return
        try:
            said = self.ray.get(next(hand.heard))
        except StopIteration:
            hand.errand = None
        except self.ray.exceptions.RayError as error:
            self._dismiss(hand)
            self.suspect.add(hand.node.key)
            yield hand.errand, Lost(hand.node.name, _reason(error))
        else:
            if isinstance(said, Changed):
                for number, change in said.changes.items():
                    put(hand.errand.places()[number], change)
            else:
                yield hand.errand, said

    def _greeted(self, hand: _Hired) -> None:
        """The same source as here? Or it does not work with us."""
        ours = introduced("cpu")
        try:
            hello: Hello = self.ray.get(hand.heard)
        except self.ray.exceptions.RayError as error:
            self._dismiss(hand)
            self._died_early(hand.node, error)
            return
        if hello.source != ours.source:
            self._refuse(hand.node, f"it has {hello.version}, and here is {ours.version}; install the same one there")
        else:
            hand.hello, hand.heard = hello, None

    def _died_early(self, node: Node, error: Exception) -> None:
        self.died[node.key] = self.died.get(node.key, 0) + 1
        text = str(error)
        if "ModuleNotFoundError" in text or "ImportError" in text:
            missing = next((line for line in reversed(text.splitlines()) if "Error" in line), _reason(error))
            self._refuse(node, f"{missing.strip()}; install flatmin[cluster] there, the same version as here")
        elif self.died[node.key] == START:
            self._refuse(node, f"whatever is started there dies: {_reason(error)}")

    def _refuse(self, node: Node, why: str) -> None:
        if node.key not in self.refused:
            self.refused[node.key] = f"node {node.name}: {why}"
            self.say(f"left out: {self.refused[node.key]}")
        for hand in [hand for hand in self.hands if hand.node.key == node.key and not hand.busy]:
            self._dismiss(hand)


def _reason(error: Exception) -> str:
    """Ray's messages are long and full of its own names: what happened, in a few of its words."""
    if type(error).__name__ == "ActorUnavailableError":
        return "the connection to it broke"
    detail = re.search(r"exit detail: ([^.\n]+)", text := str(error).strip())
    return f"its process ended ({detail[1] if detail else text.partition(chr(10))[0][:REASON] or type(error).__name__})"


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
