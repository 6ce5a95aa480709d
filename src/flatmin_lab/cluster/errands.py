"""Errands that wait to be done, and what is said of one that is being done.

Who has errands (a `Queue`) hands them out one by one, and decides what becomes of one whose hand was lost.
"""

from typing import Any, NamedTuple, Protocol

from flatmin_lab.cluster.hand import Errand
from flatmin_lab.data.dataset import Dataset
from flatmin_lab.records import Record
from flatmin_lab.workers import Died


class Lost(NamedTuple):
    """A hand that died, or whose node did or could not go on, in the middle of its errand."""

    where: str
    why: str


class Ended(NamedTuple):
    """An errand about which there is no more to say."""


Said = tuple[int, Record] | Died | Lost | Ended


class Queue(Protocol):
    """What is to be done."""

    def waiting(self) -> int:
        """How many errands there are at the moment, about."""

    def take(self, hands: int, node: str, *, others: bool) -> tuple[Errand, Dataset] | None:
        """The next one for that node, where so many hands could work, on other nodes too or not; None: none for it."""

    def asked(self, errand: Any) -> str | None:
        """Why an errand that is being done should stop."""
