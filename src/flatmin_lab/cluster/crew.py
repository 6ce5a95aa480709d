"""The hands of a cluster: hired where there is room, given errands, listened to, and missed when they die.

    for errand, said, node in crew.work(do, queue): ...

A hand is a process on a node. It gets an errand when it has said hello and has the same source as we have; so a node
that is full, dead without anyone knowing yet, or of another version holds nothing up. What a hand says comes in its
order. Where it dies, or its node does or cannot go on, that is `Lost`, and what becomes of its errand is the caller's
business; what a hand would say that was taken for dead is not heard. A node where hands are lost rests for a while, as
long as there are others.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from time import monotonic, sleep
from typing import Any, NamedTuple, Protocol

from flatmin_lab.cluster import nodes
from flatmin_lab.cluster.hand import Changed, Do, Errand, Hand, Hello, Unable, introduced
from flatmin_lab.cluster.nodes import Node, Share
from flatmin_lab.cluster.parcels import content, put
from flatmin_lab.cluster.told import told
from flatmin_lab.data.dataset import Dataset
from flatmin_lab.extras import need
from flatmin_lab.machine import commit
from flatmin_lab.records import Record, RunError
from flatmin_lab.workers import PATIENCE, Died

LOOK = 1.0  # seconds between two looks at the nodes
SLOW = 15.0  # seconds after which a hand that has not said hello is not counted on: its node may be full
GRACE = 60.0  # seconds in which a node must come up where there is none that could do the work
REST, LONGEST = 30.0, 600.0  # seconds without work for a node where a hand was lost; twice as many each time, at most
START = 3  # hands in a row that may die on a node before they have said hello


class Lost(NamedTuple):
    """A hand that died, or whose node did or could not go on, in the middle of its errand."""

    where: str
    why: str


class Ended(NamedTuple):
    """An errand about which there is no more to say."""


class NoNodeError(RunError):
    """Nobody is there to do the work."""


Said = tuple[int, Record] | Died | Lost | Ended


class Queue(Protocol):
    """What is to be done."""

    def waiting(self) -> int:
        """How many errands there are at the moment, about."""

    def take(self, hands: int, node: str, *, others: bool) -> tuple[Errand, Dataset] | None:
        """The next one for that node, where so many hands could work, on other nodes too or not; None: none for it."""

    def asked(self, errand: Any) -> str | None:
        """Why an errand that is being done should stop."""


@dataclass(eq=False)
class _Hired:
    """A hand, seen from here."""

    actor: Any
    node: Node
    heard: Any  # its hello that is to come, or what it says of its errand
    since: float = field(default_factory=monotonic)
    hello: Hello | None = None
    errand: Any = None
    number: int = 0
    asked_at: float | None = None

    @property
    def busy(self) -> bool:
        return self.errand is not None

    @property
    def counts(self) -> bool:
        """Is it here, or may it be here soon?"""
        return self.hello is not None or monotonic() - self.since < SLOW


@dataclass(eq=False)
class _Record:
    """What is known of a node's past."""

    losses: int = 0
    early: int = 0  # of these, hands in a row that had not even said hello
    lost_at: float = float("-inf")
    rests_until: float = 0.0

    def lost(self, *, early: bool = False) -> None:
        """Hands that are lost together, with their node, are one loss."""
        if monotonic() - self.lost_at > LOOK:
            self.losses, self.early = self.losses + 1, self.early + early
            self.lost_at = monotonic()
            self.rests_until = self.lost_at + min(REST * 2 ** (self.losses - 1), LONGEST)


@dataclass(eq=False, kw_only=True)
class Crew:
    """Made by `joined`."""

    ray: Any
    device: str
    share: Share
    most: int | None = None  # hands at once
    say: Callable[[str], object] = lambda _: None
    hands: list[_Hired] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # nodes that have another source, and which
    past: dict[str, _Record] = field(default_factory=dict)  # of nodes where hands were lost
    sent: dict[str, Any] = field(default_factory=dict)  # data sets that the cluster has, by their checksums
    numbers: Iterator[int] = field(default_factory=count)
    looked_at: float = float("-inf")
    able_at: float = field(default_factory=monotonic)  # when a node was last there that could do it
    waits: bool = False  # has it been said that there is no room?

    @property
    def hardware(self) -> str:
        return f"a Ray cluster of {nodes.in_words(nodes.alive(self.ray))}"

    def room(self) -> int:
        """For how many at once."""
        there = sum(node.room(self.share) for node in self._able())
        return min(there, self.most or there)

    def work(self, do: Do, queue: Queue) -> Iterator[tuple[Any, Said, str]]:
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

    def _able(self) -> list[Node]:
        return [node for node in nodes.alive(self.ray) if node.room(self.share) and node.key not in self.refused]

    def _past(self, node: Node) -> _Record:
        return self.past.setdefault(node.key, _Record())

    def _hire(self, wanted: int) -> None:
        """As many as have something to do, where there is room; where hands were lost, only if there is no other."""
        if monotonic() - self.looked_at < LOOK:
            return
        self.looked_at = monotonic()
        able = self._able()
        self._check(able, wanted)
        rested = [node for node in able if self._past(node).rests_until < monotonic()] or able
        free = wanted - sum(hand.counts and not hand.busy for hand in self.hands)
        for node in sorted(rested, key=lambda node: (self._past(node).losses, self._on(node))):
            spare = (self.most or free + len(self.hands)) - sum(hand.counts for hand in self.hands)
            for _ in range(min(node.room(self.share) - self._on(node), free, spare)):
                self.hands.append(self._new(node))
                free -= 1

    def _check(self, able: Sequence[Node], wanted: int) -> None:
        """Is anybody there, or to be waited for?"""
        here = any(hand.hello is not None for hand in self.hands)
        if here or any(self._past(node).early < START for node in able):
            self.able_at = monotonic()
        only_others = bool(self.refused) and not able
        if wanted and (only_others or monotonic() - self.able_at > GRACE):
            why = "; ".join(self.refused.values()) or (
                f"whatever is started on {able[0].name} dies" if able else f"none has {self.share} any more"
            )
            raise NoNodeError(
                f"no node of the cluster can train it: {why}; add nodes that can, and give the same command"
            )
        slow = [hand for hand in self.hands if not hand.counts]
        if slow and not here and not self.waits:
            self.waits = True
            self.say(f"waiting for room: others work on {', '.join(sorted({hand.node.name for hand in slow}))}")

    def _on(self, node: Node) -> int:
        return sum(hand.node.key == node.key for hand in self.hands)

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
        greeted = sum(other.hello is not None for other in self.hands)
        others = any(node.key != hand.node.key for node in self._able())
        given = None
        if self.most is None or greeted <= self.most:
            given = queue.take(self.room(), hand.node.key, others=others)
            if given is None and queue.waiting():
                self._past(hand.node).lost()  # all that waits was lost there: not again so soon
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

    def _asked(self, queue: Queue) -> Iterator[tuple[Any, Lost, str]]:
        """Ask those to stop that should; one that does not is not waited for for ever."""
        for hand in [hand for hand in self.hands if hand.busy]:
            if hand.asked_at is None and (reason := queue.asked(hand.errand)):
                hand.asked_at = monotonic()
                hand.actor.stop.remote(hand.number, reason)
            elif hand.asked_at is not None and monotonic() - hand.asked_at > PATIENCE:
                yield self._lost(hand, f"it did not stop within {PATIENCE:.0f} s")

    # ---- listened to

    def _ready(self) -> list[_Hired]:
        if not self.hands:
            sleep(0.1)
            return []
        by_what = {hand.heard: hand for hand in self.hands}
        ready, _ = self.ray.wait(list(by_what), num_returns=1, timeout=0.1)
        return [by_what[what] for what in ready]

    def _heard(self, hand: _Hired) -> Iterator[tuple[Any, Said, str]]:
        if not hand.busy:
            self._greeted(hand)
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

    def _lost(self, hand: _Hired, why: str) -> tuple[Any, Lost, str]:
        self._dismiss(hand)
        self._past(hand.node).lost()
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
            return
        here, there = ours.facts["torch"], hello.facts["torch"]
        if here != there and not any(hand.node.key == other.node.key and other.hello for other in self.hands):
            self.say(f"note: node {hand.node.name} has torch {there}, and here is {here}: not the same bits")
        hand.hello, hand.heard = hello, None
        self._past(hand.node).early = 0

    def _died_early(self, node: Node, error: Exception) -> None:
        text = str(error)
        if "ModuleNotFoundError" in text or "ImportError" in text:
            missing = next((line for line in reversed(text.splitlines()) if "Error" in line), told(error))
            self._refuse(node, f"{missing.strip()}; install flatmin[cluster] there, the same version as here")
        else:
            self._past(node).lost(early=True)

    def _refuse(self, node: Node, why: str) -> None:
        if node.key not in self.refused:
            self.refused[node.key] = f"node {node.name}: {why}"
            self.say(f"left out: {self.refused[node.key]}")
        for hand in [hand for hand in self.hands if hand.node.key == node.key and not hand.busy]:
            self._dismiss(hand)


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
