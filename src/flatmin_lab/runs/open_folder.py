"""Opening a run's folder: a new run needs an empty one, and a resumed run its own.

The folder is checked before it is locked, so that a refused one stays untouched, and again once no other process can
change it.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from flatmin_lab.runs import checkpoint
from flatmin_lab.runs.config import OtherRunError, check_same, exists, read_config
from flatmin_lab.runs.events import BusyError, RunError
from flatmin_lab.runs.folder import CODE, VALIDATION, RunFolder
from flatmin_lab.system.files import TEMPORARY_SUFFIX, fsync_folder, lock, nearest_existing, remove_temporary_files

RUN_FILES = {"config.json", "metrics.jsonl", "state.json", VALIDATION, "result.json", "tensorboard", CODE, ".lock"}


def open_run_folder(path: Path, config: Mapping[str, Any], *, resume: bool) -> RunFolder:
    """Open the folder for a new run or, with `resume`, for the run that it holds, if any."""
    check(path, config, resume=resume)
    lock_file = lock_folder(path)
    try:
        is_resumed = check(path, config, resume=resume)
        remove_temporary_files(path)
        folder = RunFolder(path, read_config(path) if is_resumed else config, lock_file)
        if not is_resumed:
            folder.write_config()
    except BaseException:
        lock_file.close()
        raise
    return folder


def check(path: Path, config: Mapping[str, Any], *, resume: bool) -> bool:
    """Does the folder hold this run, to resume? Raises where it holds anything else that could be lost."""
    _check_path(path)
    if exists(path) and (resume or _has_progress(path)):
        known = read_config(path)
        if resume:
            check_same(path, known, config)
            return True
        raise FileExistsError(_taken(path, known, config))
    known_names = RUN_FILES if exists(path) else {CODE, ".lock"}
    foreign = [entry.name for entry in _entries(path) if entry.name not in known_names]
    if foreign:
        raise FileExistsError(
            f"a run needs a folder of its own, but {path} holds {', '.join(sorted(foreign)[:3])}; choose another one"
        )
    return False


def _taken(path: Path, known: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Why a new run cannot have the folder; if it holds another run, how that differs."""
    try:
        check_same(path, known, config)
    except OtherRunError as error:
        return (
            f"{path} already holds another run{_progress(path)}: {error.differences}; choose another folder with --out"
        )
    if (path / "result.json").exists():
        return (
            f"{path} already holds this run, finished; --resume shows its numbers, and --out with another folder "
            "trains it again"
        )
    return (
        f"{path} already holds this run{_progress(path)}; resume it with --resume, or choose another folder with --out"
    )


def _check_path(path: Path) -> None:
    """Can the folder be made and written to? Missing folders are made in the nearest parent that exists."""
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"a run is a folder, but {path} is a file; choose another place")
    above = nearest_existing(path)
    if not above.is_dir():
        raise FileExistsError(f"a run is a folder, but {path} would be inside the file {above}; choose another place")
    if not os.access(above, os.W_OK | os.X_OK):
        raise RunError(f"{path} cannot be written to (no permission in {above}); choose another folder")


@contextmanager
def folder_of_runs(path: Path, what: str, *, doing: str) -> Iterator[None]:
    """Lock a folder that holds many runs, made if missing, for this process; `what` it is, as in "tuning"."""
    if exists(path):
        raise FileExistsError(f"a {what} is a folder of runs, but {path} is a run itself; choose another with --out")
    with lock_folder(path, f"another process is {doing} in"):
        remove_temporary_files(path)
        yield


def lock_folder(path: Path, taken: str = "another process is training in") -> IO[bytes]:
    """Lock the folder, made if missing, for this process until the file is closed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        fsync_folder(path.parent)
        lock_file = (path / ".lock").open("ab")
    except OSError as error:
        raise RunError(f"{path} cannot be written to ({error}); choose another folder") from error
    try:
        lock(lock_file, f"{taken} {path}; wait for it to end, or choose another folder")
    except BlockingIOError as error:
        lock_file.close()
        raise BusyError(str(error)) from error
    return lock_file


def _has_progress(path: Path) -> bool:
    """Is there an epoch, a checkpoint or a result? A run without had wrong flags, or was killed at once."""
    measured = (path / "metrics.jsonl").exists() and (path / "metrics.jsonl").stat().st_size > 0
    return measured or (path / "result.json").exists() or any(path.glob("checkpoint-*")) or not _is_run(path)


def _is_run(path: Path) -> bool:
    try:
        read_config(path)
    except ValueError:
        return False
    return True


def _entries(path: Path) -> list[Path]:
    """What a folder holds, without the temporary files of a killed run."""
    found = list(path.iterdir()) if path.exists() else []
    return [entry for entry in found if not (entry.name.startswith(".") and entry.name.endswith(TEMPORARY_SUFFIX))]


def _progress(path: Path) -> str:
    if (path / "result.json").exists():
        return " (finished)"
    steps = [checkpoint.step_of(found) for found in checkpoint.listed(path)[:1]]
    return f" (saved after step {steps[0]})" if steps else ""
