"""Errands that wait to be done, and what is said of one that is being done.

Who has errands (a `Queue`) hands them out one by one, and decides what becomes of one whose hand was lost.
"""

from collections import defaultdict
from typing import Any, NamedTuple, Protocol

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.execution.cluster.worker import Errand
from flatmin_lab.execution.process_pool import Died
from flatmin_lab.runs.events import Event, Failed, Note

TRIES = 3  # hands that may be lost over one thing


class Lost(NamedTuple):
    """A hand that died, or whose node did or could not go on, in the middle of its errand."""

    where: str
    why: str


class Ended(NamedTuple):
    """An errand about which there is no more to say."""


Said = tuple[int, Event] | Died | Lost | Ended


class Losses:
    """How often each errand's number has lost its hand, and on which nodes: the third time is the last."""

    def __init__(self) -> None:
        self.nodes: dict[int, list[str]] = defaultdict(list)

    def add(self, number: int, lost: Lost, node: str) -> Note | Failed:
        """One more: it is to be tried again, or has failed."""
        self.nodes[number].append(node)
        count = len(self.nodes[number])
        if count == TRIES:
            return Failed(f"lost {TRIES} times with its worker, at last on node {lost.where}: {lost.why}")
        return Note(f"lost on node {lost.where}: {lost.why}; tried again, {count + 1} of {TRIES}")

    def any(self, number: int) -> bool:
        return bool(self.nodes[number])

    def barred(self, number: int, node: str, *, others: bool) -> bool:
        """Was it lost there, and is there another node for it?"""
        return others and node in self.nodes[number]


class Queue(Protocol):
    """What is to be done."""

    def waiting(self) -> int:
        """How many errands there are at the moment, about."""

    def take(self, hands: int, node: str, *, others: bool) -> tuple[Errand, Dataset] | None:
        """The next one for that node, where so many hands could work, on other nodes too or not; None: none for it."""

    def asked(self, errand: Any) -> str | None:
        """Why an errand that is being done should stop."""
