"""Hands are hired where there is room for them, greeted, and dismissed.

A hand counts when it has said hello and has the same source as we have; so a node that is full, dead without anyone
knowing yet, or of another version holds nothing up. A node where hands are lost rests for a while, as long as there are
others; one with another source is left out.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from flatmin_lab.execution.cluster import nodes
from flatmin_lab.execution.cluster.nodes import Node, Share, told
from flatmin_lab.execution.cluster.worker import Hand, Hello, introduced
from flatmin_lab.runs.events import RunError
from flatmin_lab.system.machine import commit
from flatmin_lab.system.optional_deps import need

LOOK = 1.0  # seconds between two looks at the nodes
SLOW = 15.0  # seconds after which a hand that has not said hello is not counted on: its node may be full
GRACE = 60.0  # seconds in which a node must come up where there is none that could do the work
REST, LONGEST = 30.0, 600.0  # seconds without work for a node where a hand was lost; twice as many each time, at most
START = 3  # hands in a row that may die on a node before they have said hello


class NoNodeError(RunError):
    """Nobody is there to do the work."""


@dataclass(eq=False)
class Hired:
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
class Past:
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
class Hiring:
    """The hands of a cluster."""

    ray: Any
    device: str
    share: Share
    most: int | None = None  # hands at once
    say: Callable[[str], object] = lambda _: None
    hands: list[Hired] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # nodes that have another source, and which
    past: dict[str, Past] = field(default_factory=dict)  # of nodes where hands were lost
    looked_at: float = float("-inf")
    able_at: float = field(default_factory=monotonic)  # when a node was last there that could do it
    waits: bool = False  # has it been said that there is no room?

    @property
    def hardware(self) -> str:
        return f"a Ray cluster of {nodes.in_words(nodes.alive(self.ray))}"

    def room(self) -> int:
        """For how many at once."""
        there = sum(node.room(self.share) for node in self.able())
        return min(there, self.most or there)

    def able(self) -> list[Node]:
        return [node for node in nodes.alive(self.ray) if node.room(self.share) and node.key not in self.refused]

    def record(self, node: Node) -> Past:
        return self.past.setdefault(node.key, Past())

    def hire(self, wanted: int) -> None:
        """As many as have something to do, where there is room; where hands were lost, only if there is no other."""
        if monotonic() - self.looked_at < LOOK:
            return
        self.looked_at = monotonic()
        able = self.able()
        self._check(able, wanted)
        rested = [node for node in able if self.record(node).rests_until < monotonic()] or able
        free = wanted - sum(hand.counts and not hand.busy for hand in self.hands)
        for node in sorted(rested, key=lambda node: (self.record(node).losses, self._on(node))):
            spare = (self.most or free + len(self.hands)) - sum(hand.counts for hand in self.hands)
            for _ in range(min(node.room(self.share) - self._on(node), free, spare)):
                self.hands.append(self._new(node))
                free -= 1

    def _check(self, able: Sequence[Node], wanted: int) -> None:
        """Is anybody there, or to be waited for?"""
        here = any(hand.hello is not None for hand in self.hands)
        if here or any(self.record(node).early < START for node in able):
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

    def _new(self, node: Node) -> Hired:
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
        return Hired(actor, node, actor.hello.remote(self.device))

    def dismiss(self, hand: Hired) -> None:
        """At once: what it had to say has been said."""
        self.hands.remove(hand)
        with suppress(Exception):
            self.ray.kill(hand.actor)

    def greet(self, hand: Hired) -> None:
        """The same source as here? Or it does not work with us."""
        ours = introduced("cpu")
        try:
            hello: Hello = self.ray.get(hand.heard)
        except self.ray.exceptions.RayError as error:
            self.dismiss(hand)
            self._died_early(hand.node, error)
            return
        if hello.source != ours.source:
            self._refuse(hand.node, f"it has {hello.version}, and here is {ours.version}; install the same one there")
            return
        here, there = ours.facts["torch"], hello.facts["torch"]
        if here != there and not any(hand.node.key == other.node.key and other.hello for other in self.hands):
            self.say(f"note: node {hand.node.name} has torch {there}, and here is {here}: not the same bits")
        hand.hello, hand.heard = hello, None
        self.record(hand.node).early = 0

    def _died_early(self, node: Node, error: Exception) -> None:
        text = str(error)
        if "ModuleNotFoundError" in text or "ImportError" in text:
            missing = next((line for line in reversed(text.splitlines()) if "Error" in line), told(error))
            self._refuse(node, f"{missing.strip()}; install flatmin[cluster] there, the same version as here")
        else:
            self.record(node).lost(early=True)

    def _refuse(self, node: Node, why: str) -> None:
        if node.key not in self.refused:
            self.refused[node.key] = f"node {node.name}: {why}"
            self.say(f"left out: {self.refused[node.key]}")
        for hand in [hand for hand in self.hands if hand.node.key == node.key and not hand.busy]:
            self.dismiss(hand)
