"""The events that a training run yields; it prints nothing.

`Progress` comes now and then within an epoch, `Epoch` after each, `Finished` at the end; `Stopped` instead if the
run was asked to stop, and `Failed` if one of many runs fails and the others continue. Numbers are plain Python
numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


class RunError(RuntimeError):
    """A run that could not continue, although the request was valid."""


class DivergedError(RunError):
    """A loss or a weight is not finite: another learning rate or radius may help. `what` says which."""

    def __init__(self, text: str, what: str) -> None:
        super().__init__(text)
        self.what = what


class BusyError(RunError):
    """Another process is using that folder."""


class OtherRankError(RunError):
    """Another rank of the same run failed, so all of them stop."""


class OtherRankRefusedError(OtherRankError, ValueError):
    """Another rank's request was invalid."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """Where a run starts: at step 0, at its checkpoint, or at that of another run, which began the same way."""

    step: int
    steps: int
    epochs: int
    parameters: int
    threads: int | None = None  # of the CPU, if the run is on it
    began_from: str | None = None  # the other run


@dataclass(frozen=True, kw_only=True)
class Progress:
    """`numbers` are means of the epoch so far: loss, error and, for AMP, sharpness and delta_norm."""

    epoch: int  # from 1
    step: int  # steps of the run that are done
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
    """One part of the evaluation of a finished run has been written."""

    part: str


@dataclass(frozen=True)
class Note:
    """Something the user should know: a damaged checkpoint was skipped, torch has another version."""

    text: str


@dataclass(frozen=True)
class Stopped:
    """The run was asked to stop; it is saved if it has a folder."""

    reason: str
    step: int


@dataclass(frozen=True)
class Postponed(Stopped):
    """It would not end in time: it was not started, or was given up and is saved."""

    given_up: bool = False


@dataclass(frozen=True)
class Timed:
    """What a part of a run took, for estimates of others of its kind: the start, the end, or passes over a batch.

    Of passes, the part is how many runs trained at once.
    """

    kind: str
    part: int | Literal["start", "end"]
    amount: float
    seconds: float
    whole: bool = True  # of passes: with the evaluations after their epochs


@dataclass(frozen=True)
class Failed:
    """One of many runs failed: why, and after how many steps, if it got that far."""

    what: str
    step: int | None = None
    later: bool = False  # not the run's fault, try again later: another process has it, the disk is full, the GPU broke
    busy: bool = False  # another process is training it
    diverged: bool = False  # a loss or a weight was not finite


@dataclass(frozen=True)
class Finished:
    result: Mapping[str, Any]


Event = Started | Progress | Epoch | Saved | Measured | Note | Timed | Stopped | Failed | Finished
