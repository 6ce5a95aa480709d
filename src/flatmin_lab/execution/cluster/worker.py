"""A worker: a process on a node of the cluster that runs one task at a time and streams back all its events.

A task comes with the content of its files and folders. They are copied into a temporary folder of the node, the task
runs there, and every change is sent back before the event that reports it. So the scheduler always has what is needed
to retry a task on another node: only what was done since the last checkpoint is lost with a worker.
"""

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import flatmin
from flatmin_lab.data.dataset import Dataset
from flatmin_lab.execution.cluster.file_sync import Change, WatchedFolder, put
from flatmin_lab.execution.local import task_failure
from flatmin_lab.execution.task_queue import Task, TaskFailure, TaskFunction
from flatmin_lab.runs.events import Event, Failed, Finished, Measured, Note, Progress, RunError, Saved, Stopped
from flatmin_lab.system.machine import facts
from flatmin_lab.system.threads import computing_with

FOLDER_PREFIX = "flatmin-worker-"  # followed by the node and the process id there


class FileChanges(NamedTuple):
    """What has changed in each of a task's paths, by the number of the path."""

    changes: dict[int, Change]


class NodeFailure(NamedTuple):
    """The node could not continue a task, because its disk is full or it is out of memory; another node may."""

    why: str


class WorkerInfo(NamedTuple):
    """Which flatmin and which hardware a worker has."""

    flatmin: str
    source: str
    facts: dict[str, Any]

    @property
    def version(self) -> str:
        return f"flatmin {self.flatmin} (source {self.source[:7]})"


def worker_info(device: str) -> WorkerInfo:
    return WorkerInfo(flatmin.__version__, source_digest(), facts(torch.device(device)))


@cache
def source_digest() -> str:
    """A digest of all source files of flatmin and flatmin_lab: equal versions may have different sources."""
    digest = hashlib.sha256()
    above = Path(flatmin.__file__).parents[1]
    for path in sorted(path for name in ("flatmin", "flatmin_lab") for path in (above / name).rglob("*.py")):
        digest.update(f"{path.relative_to(above).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


class Worker:
    """A Ray actor with two threads: one runs a task, the other receives requests to stop it."""

    def __init__(self, commit: str | None) -> None:
        if commit is not None:  # the source is the same, but may be here without its git history
            os.environ["FLATMIN_COMMIT"] = commit
        self.stop_request: tuple[int, str] | None = None

    def info(self, device: str) -> WorkerInfo:
        _remove_leftovers()
        return worker_info(device)

    def stop(self, number: int, reason: str) -> None:
        """Stop that task only: the next one may have started."""
        self.stop_request = (number, reason)

    def run(
        self, number: int, function: TaskFunction, task: Task, contents: Sequence[Change], data: Dataset
    ) -> Iterator[tuple[int, Event] | FileChanges | TaskFailure | NodeFailure]:
        """A task's events and changes; `TaskFailure` if it cannot be done, `NodeFailure` if it cannot be done here."""
        names: dict[str, str] = {}
        try:
            with tempfile.TemporaryDirectory(prefix=f"{FOLDER_PREFIX}{this_node()}-{os.getpid()}-") as folder:
                here = task.moved_to(Path(folder))
                names = {str(own): str(name) for own, name in zip(here.paths(), task.paths(), strict=True)}
                for path, content in zip(here.paths(), contents, strict=True):
                    put(path, content)
                yield from self._run(number, function, here, data, names)
        except (OSError, RunError, MemoryError, torch.OutOfMemoryError) as error:
            yield NodeFailure(_replace_paths(task_failure(error).why, names))
        except Exception as error:
            yield TaskFailure(_replace_paths(task_failure(error).why, names))

    def _run(
        self, number: int, function: TaskFunction, here: Task, data: Dataset, names: dict[str, str]
    ) -> Iterator[tuple[int, Event] | FileChanges]:
        watched = [WatchedFolder(path) for path in here.paths()]

        def stop() -> str | None:
            return self.stop_request[1] if self.stop_request is not None and self.stop_request[0] == number else None

        with computing_with(1) if here.device == "cpu" else nullcontext():
            for which, event in function(here, data, stop):
                if isinstance(event, Saved | Measured | Finished | Stopped | Failed):
                    yield _collect_changes(watched)
                if not isinstance(event, Progress):
                    yield which, _with_user_paths(event, names)


def _remove_leftovers() -> None:
    """Remove the folders that killed workers of this node have left; nodes may share the folder of all of them."""
    prefix = f"{FOLDER_PREFIX}{this_node()}-"
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        pid = folder.name.removeprefix(prefix).partition("-")[0]
        if pid.isdecimal() and not _is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


@cache
def this_node() -> str:
    """Where a process id is unique: a machine since its last boot, and a container on it."""
    known = [platform.node()]
    with suppress(OSError):  # not Linux
        known += [Path("/proc/sys/kernel/random/boot_id").read_text(), str(Path("/proc/self/ns/pid").readlink())]
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:12]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # alive, but another user's
        pass
    return True


def _collect_changes(watched: Sequence[WatchedFolder]) -> FileChanges:
    return FileChanges({number: change for number, folder in enumerate(watched) if (change := folder.change())})


def _with_user_paths(event: Event, names: dict[str, str]) -> Event:
    """The event with the paths of the user's machine in place of this node's."""
    match event:
        case Note():
            return Note(_replace_paths(event.text, names))
        case Failed():
            return replace(event, what=_replace_paths(event.what, names))
        case Saved():
            return replace(event, path=Path(_replace_paths(str(event.path), names)))
    return event


def _replace_paths(text: str, names: dict[str, str]) -> str:
    for own, name in names.items():
        text = text.replace(own, name)
    return text
