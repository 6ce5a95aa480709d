"""A run is a folder, and everything that is known of it lies there:

    config.json                    the recipe, whole, the seed and the data's checksum
    metrics.jsonl                  a line an epoch
    checkpoint-*.safetensors       the last two
    state.json                     how far it is, for whoever watches; never read here
    result.json                    when it is finished
    tensorboard/                   the same numbers as curves, where TensorBoard is installed

One process at a time holds it. A folder belongs to one recipe and seed; nothing of another one is ever overwritten.
"""

import errno
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from flatmin_lab import checkpoint
from flatmin_lab.boards import Board
from flatmin_lab.checkpoint import Checkpoint, DamagedError
from flatmin_lab.files import lock, sweep, written_whole
from flatmin_lab.recipes import Recipe, differences
from flatmin_lab.records import Note, RunError

KEPT = 2


@dataclass(eq=False)
class RunFolder:
    """Made by `open_`; until it is closed, no other process can open it."""

    path: Path
    config: Mapping[str, Any]
    held: IO[bytes]
    board: Board | None = field(default=None, init=False)

    @property
    def recipe(self) -> Recipe:
        return Recipe.from_json(self.config["recipe"])

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    def close(self) -> None:
        if self.board is not None:
            self.board.close()
        self.held.close()

    # ---- checkpoints

    def save(self, step: int, saved: Checkpoint) -> Path:
        """A new checkpoint; then those before the last two go."""
        path = self.path / checkpoint.name_of(step)
        with self._writing(f"the checkpoint after step {step}"):
            checkpoint.write(path, saved)
            for old in checkpoint.listed(self.path)[KEPT:]:
                old.unlink(missing_ok=True)
            self._write_json("state.json", {"step": step, "saved": _now(), "checkpoints": self._names()})
        return path

    def newest(self) -> tuple[Checkpoint | None, list[Note]]:
        """The newest whole checkpoint, and what was found out about newer ones, which are put aside."""
        damaged: list[tuple[Path, DamagedError]] = []
        whole = None
        for path in checkpoint.listed(self.path):
            try:
                whole = checkpoint.read(path)
                break
            except DamagedError as error:
                damaged.append((path, error))
        if damaged and whole is None:
            raise RunError(
                f"no checkpoint in {self.path} is whole: {'; '.join(str(what) for _, what in damaged)}. "
                "Nothing was changed. Put good copies there, or begin anew in another folder"
            )
        notes = []
        for path, what in damaged:
            path.replace(path.with_name(f"{path.name}.damaged"))
            notes.append(Note(f"{what}; it was put aside as {path.name}.damaged, and the one before it is used"))
        return whole, notes

    def kept(self) -> str | None:
        """The newest checkpoint's name."""
        return next(iter(self._names()), None)

    def _names(self) -> list[str]:
        return [path.name for path in checkpoint.listed(self.path)]

    # ---- numbers

    def begin_metrics(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """The epochs that count, as the checkpoint knows them: lines of epochs after it will come again."""
        text = "".join(json.dumps(line) + "\n" for line in lines)
        with self._writing("metrics.jsonl"), written_whole(self.path / "metrics.jsonl") as file:
            file.write(text.encode())
        self.board = Board.where_installed(self.path / "tensorboard", after=len(lines))

    def add_metrics(self, line: Mapping[str, Any]) -> None:
        with self._writing("metrics.jsonl"), (self.path / "metrics.jsonl").open("ab") as file:
            file.write((json.dumps(line) + "\n").encode())
            if self.board is not None:
                self.board.add(line)

    # ---- the end

    @property
    def result(self) -> dict[str, Any] | None:
        return _read_json(self.path / "result.json") if (self.path / "result.json").exists() else None

    def finish(self, result: Mapping[str, Any]) -> None:
        with self._writing("result.json"):
            self._write_json("result.json", result)

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        with written_whole(self.path / name) as file:
            file.write((json.dumps(content, indent=2) + "\n").encode())

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """A full disk, a folder that is gone: what is there is kept, and the message says so."""
        try:
            yield
        except OSError as error:
            kept = self.kept()
            reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
            raise RunError(
                f"{what} could not be written to {self.path}: {reason}. "
                + (f"The checkpoint {kept} is whole" if kept else "There is no checkpoint yet")
                + "; make room, and go on with --resume"
            ) from error


def open_(path: Path, config: Mapping[str, Any], *, resume: bool) -> RunFolder:
    """A new run; with `resume`, the run that is there, if one is."""
    return _resumed(path, config) if resume and exists(path) else _begun(path, config)


def _begun(path: Path, config: Mapping[str, Any]) -> RunFolder:
    """A new run in a folder that is not there yet, or empty, or of a run that left nothing."""
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"a run is a folder, and {path} is a file; choose another place")
    if not _has_nothing_to_lose(path):
        raise FileExistsError(
            f"{path} holds a run already{_how_far(path)}; go on with --resume, or choose another folder with --out"
        )
    foreign = [entry.name for entry in path.iterdir() if not _left_behind(entry)] if path.exists() else []
    if foreign and not exists(path):
        raise FileExistsError(
            f"a run needs a folder of its own, and {path} holds {', '.join(sorted(foreign)[:3])}; choose another one"
        )
    held = _hold(path)
    folder = RunFolder(path, config, held)
    try:
        with folder._writing("config.json"):
            folder._write_json("config.json", config)
    except BaseException:
        held.close()
        raise
    return folder


def _resumed(path: Path, config: Mapping[str, Any]) -> RunFolder:
    """The run of a folder, whose recipe, seed and data must be those of the config."""
    known = stored(path)
    check_same(path, known, config)
    held = _hold(path)
    sweep(path)
    return RunFolder(path, known, held)


def exists(path: Path) -> bool:
    return (path / "config.json").exists()


def stored(path: Path) -> dict[str, Any]:
    """The folder's config.json, checked."""
    if not exists(path):
        raise FileNotFoundError(f"{path} is not a run folder: it has no config.json")
    known = _read_json(path / "config.json")
    missing = {"recipe", "seed", "data_sha256"} - known.keys()
    if missing:
        raise ValueError(f"{path / 'config.json'} is not a run's: it has no {', '.join(sorted(missing))}")
    return known


def check_same(path: Path, known: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Two configs may differ in what does not change the numbers: versions, machine, time."""
    apart = differences(known["recipe"], asked["recipe"])
    apart += differences({"seed": known["seed"]}, {"seed": asked["seed"]})
    if not apart and known["data_sha256"] != asked["data_sha256"]:
        apart = [f"the data set has another content (SHA-256 {known['data_sha256']}, here {asked['data_sha256']})"]
    if apart:
        raise ValueError(
            f"{path} holds a run of another recipe: {'; '.join(apart)}. "
            "Leave these flags out to go on with it, or choose another folder with --out"
        )


def _hold(path: Path) -> IO[bytes]:
    try:
        path.mkdir(parents=True, exist_ok=True)
        held = (path / ".lock").open("ab")
    except OSError as error:
        raise RunError(f"{path} cannot be written to ({error}); choose another folder with --out") from error
    try:
        lock(held, f"another process is training in {path}; wait for it to end, or choose another folder with --out")
    except BlockingIOError as error:
        held.close()
        raise RunError(str(error)) from error
    return held


def _has_nothing_to_lose(path: Path) -> bool:
    """No run, or one that ended before its first epoch and checkpoint: of wrong flags, or killed at once."""
    if not exists(path):
        return True
    measured = (path / "metrics.jsonl").exists() and (path / "metrics.jsonl").stat().st_size > 0
    return not (measured or (path / "result.json").exists() or any(path.glob("checkpoint-*")))


def _left_behind(entry: Path) -> bool:
    """What a run leaves that was killed before it had written its config."""
    return entry.name == ".lock" or entry.name.startswith(".config.json.")


def _how_far(path: Path) -> str:
    if (path / "result.json").exists():
        return " (finished)"
    steps = [found.stem.rpartition("-")[2].lstrip("0") or "0" for found in checkpoint.listed(path)[:1]]
    return f" (saved after step {steps[0]})" if steps else ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it must hold an object, got {type(content).__name__}")
    return content


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
