"""What a training says while it runs: it yields these, and prints nothing.

`Progress` comes now and then inside an epoch, `Epoch` after each one, `Finished` at the end; `Stopped` instead where it
was asked to stop, and `Failed` where it is one of many and the others go on. Numbers are plain Python numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class RunError(RuntimeError):
    """A training that could not go on, although what was asked for made sense."""


class DivergedError(RunError):
    """A loss or a weight is not finite: training on would not help, another rate or radius might. `what` says which."""

    def __init__(self, text: str, what: str) -> None:
        super().__init__(text)
        self.what = what


BUSY = "another process"


class BusyError(RunError):
    """Another process is at work in that folder: its message begins so."""


class OtherRankError(RunError):
    """Another process of those that train a model together could not go on, so none of them does."""


class OtherRankRefusedError(OtherRankError, ValueError):
    """What another process was asked for makes no sense."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """Where a training begins: at step 0, or where a checkpoint left it."""

    step: int
    steps: int
    epochs: int
    parameters: int


@dataclass(frozen=True, kw_only=True)
class Progress:
    """`numbers` are means of the epoch so far: loss, error and, for AMP, sharpness and delta_norm."""

    epoch: int  # from 1
    step: int  # of the training, how many are done
    numbers: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """The line of an epoch in metrics.jsonl."""

    epoch: int
    step: int
    numbers: Mapping[str, Any]


@dataclass(frozen=True)
class Saved:
    path: Path
    step: int


@dataclass(frozen=True)
class Measured:
    """Of a training that has finished, one part of what is measured afterwards has been written down."""

    part: str


@dataclass(frozen=True)
class Note:
    """Something that the reader should know: a damaged checkpoint that was passed over, another torch."""

    text: str


@dataclass(frozen=True)
class Stopped:
    """Asked to stop, and saved where there is a folder."""

    reason: str
    step: int


@dataclass(frozen=True)
class Failed:
    """One of many trainings could not go on, for that reason and after so many steps, if it came so far."""

    what: str
    step: int | None = None
    later: bool = False  # nothing is wrong with the training: another process has it, the disk is full, the GPU broke

    @property
    def busy(self) -> bool:
        """Another process has it."""
        return self.later and self.what.startswith(BUSY)


@dataclass(frozen=True)
class Finished:
    result: Mapping[str, Any]


Event = Started | Progress | Epoch | Saved | Measured | Note | Stopped | Failed | Finished
