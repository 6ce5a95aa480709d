"""What works on a node of a cluster: a process that is given errands, one at a time, and says all that it does.

An errand comes with its places as they are where it was given out. They are laid out in a folder of this machine, the
work is done there, and whatever has changed goes back before the record that tells of it. So who gives out errands has
all that is needed to give one out again: what is lost with a machine is what it did since its last checkpoint.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

import flatmin
from flatmin_lab.data.dataset import Dataset
from flatmin_lab.execution.cluster.file_sync import Change, Watched, put
from flatmin_lab.execution.process_pool import Died, Stop, died_of, one_thread
from flatmin_lab.runs.events import Event, Failed, Finished, Measured, Note, Progress, RunError, Saved, Stopped
from flatmin_lab.system.machine import facts

Own = TypeVar("Own")
FOLDER = "flatmin-hand-"  # and the number of its process


class Errand(Protocol):
    """What is to be done, in some places: folders and files, the same ones in the same order wherever it is done."""

    @property
    def device(self) -> str: ...
    def places(self) -> Sequence[Path]: ...
    def moved(self: Own, folder: Path) -> Own: ...


Do = Callable[[Any, Dataset, Stop], Iterator[tuple[int, Event]]]


class Changed(NamedTuple):
    """By the places' numbers."""

    changes: dict[int, Change]


class Unable(NamedTuple):
    """A machine that cannot go on with it, because its disk is full or its memory gone. Another one may."""

    why: str


class Hello(NamedTuple):
    """What a hand works with."""

    flatmin: str
    source: str
    facts: dict[str, Any]

    @property
    def version(self) -> str:
        return f"flatmin {self.flatmin} (source {self.source[:7]})"


def introduced(device: str) -> Hello:
    return Hello(flatmin.__version__, source(), facts(torch.device(device)))


@cache
def source() -> str:
    """A digest of flatmin and the laboratory: two with the same version may be different all the same."""
    digest = hashlib.sha256()
    above = Path(flatmin.__file__).parents[1]
    for path in sorted(path for name in ("flatmin", "flatmin_lab") for path in (above / name).rglob("*.py")):
        digest.update(f"{path.relative_to(above).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


class Hand:
    """Ray makes it an actor with two threads: one works, the other hears that it should stop."""

    def __init__(self, commit: str | None) -> None:
        if commit is not None:  # the same source, which may lie here without its history
            os.environ["FLATMIN_COMMIT"] = commit
        self.asked: tuple[int, str] | None = None

    def hello(self, device: str) -> Hello:
        _sweep()
        return introduced(device)

    def stop(self, number: int, reason: str) -> None:
        """Only that errand; the next one may have begun."""
        self.asked = (number, reason)

    def do(
        self, number: int, do: Do, errand: Errand, given: Sequence[Change], data: Dataset
    ) -> Iterator[tuple[int, Event] | Changed | Died | Unable]:
        """All that is said of an errand; `Died` where it cannot be done, `Unable` where it cannot be done here."""
        names: dict[str, str] = {}
        try:
            with tempfile.TemporaryDirectory(prefix=f"{FOLDER}{os.getpid()}-") as folder:
                here = errand.moved(Path(folder))
                names = {str(there): str(name) for there, name in zip(here.places(), errand.places(), strict=True)}
                for place, parts in zip(here.places(), given, strict=True):
                    put(place, parts)
                yield from self._done(number, do, here, data, names)
        except (OSError, RunError, MemoryError, torch.OutOfMemoryError) as error:
            yield Unable(_with_names(died_of(error).why, names))
        except Exception as error:
            yield Died(_with_names(died_of(error).why, names))

    def _done(
        self, number: int, do: Do, here: Errand, data: Dataset, names: dict[str, str]
    ) -> Iterator[tuple[int, Event] | Changed]:
        watched = [Watched(place) for place in here.places()]

        def stop() -> str | None:
            return self.asked[1] if self.asked is not None and self.asked[0] == number else None

        with one_thread() if here.device == "cpu" else nullcontext():
            for which, record in do(here, data, stop):
                if isinstance(record, Saved | Measured | Finished | Stopped | Failed):
                    yield _changed(watched)
                if not isinstance(record, Progress):
                    yield which, _translated(record, names)


def _sweep() -> None:
    """Remove what hands that were killed have left on this machine."""
    for left in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        number = left.name.removeprefix(FOLDER).partition("-")[0]
        if number.isdecimal() and not _lives(int(number)):
            shutil.rmtree(left, ignore_errors=True)


def _lives(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    return True


def _changed(watched: Sequence[Watched]) -> Changed:
    return Changed({number: change for number, place in enumerate(watched) if (change := place.change())})


def _translated(record: Event, names: dict[str, str]) -> Event:
    """With the names of places where the reader is, not here."""
    match record:
        case Note():
            return Note(_with_names(record.text, names))
        case Failed():
            return replace(record, what=_with_names(record.what, names))
        case Saved():
            return replace(record, path=Path(_with_names(str(record.path), names)))
    return record


def _with_names(text: str, names: dict[str, str]) -> str:
    for there, name in names.items():
        text = text.replace(there, name)
    return text
