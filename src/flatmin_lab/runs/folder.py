"""A run is a folder that holds everything known of the run:

    config.json                    the complete recipe, the seed and the data's checksum
    metrics.jsonl                  a line per epoch
    checkpoint-*.safetensors       the last two, and those that other runs can begin from
    state.json                     how far it is, for monitoring; never read here
    result.json                    when it is finished
    validation.safetensors         written just before it for a run with a validation split: error and NLL of each image
    evaluation.json, landscape.json    evaluations after training
    code/                          copies of the user's own model and optimizer, as they were when the run started
    tensorboard/                   the same numbers as curves, where TensorBoard is installed

One process at a time locks it, where the file system can lock. A folder belongs to one recipe and seed, and so does
each checkpoint; nothing that another run has measured or saved, and no foreign file, is ever overwritten.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.recipes.user_files import copy_in, file_of, named_files
from flatmin_lab.runs import checkpoint
from flatmin_lab.runs.checkpoint import Checkpoint, newest_whole
from flatmin_lab.runs.config import IDENTITY
from flatmin_lab.runs.events import Note, RunError
from flatmin_lab.runs.tensorboard import Board
from flatmin_lab.system.files import atomic_write, is_full_disk
from flatmin_lab.system.json_data import read_json

CODE = "code"  # the folder of the copies
VALIDATION = "validation.safetensors"
KEPT_CHECKPOINTS = 2  # if the newest is damaged, the one before it is used


@dataclass(eq=False)
class RunFolder:
    """Made by `open_folder.open_run_folder`; until it is closed, no other process can open it."""

    path: Path
    config: Mapping[str, Any]
    lock_file: IO[bytes]
    board: Board | None = field(default=None, init=False)
    notes: list[Note] = field(default_factory=list, init=False)  # for the user, until `take_notes` yields them
    kept_steps: Collection[int] = field(default=(), init=False)  # their checkpoints stay: other runs can begin there

    @property
    def identity(self) -> dict[str, Any]:
        return {key: self.config[key] for key in IDENTITY}

    def write_config(self) -> None:
        with self._writing("config.json"):
            self._copy_code()
            self._write_json("config.json", self.config)

    def _copy_code(self) -> None:
        recipe = Recipe.from_json(self.config["recipe"])
        for name, own in named_files(recipe).items():
            if (copy := copy_in(self.path / CODE, name, own)) is not None:
                copy.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(copy) as file:
                    file.write(file_of(name, own).read_bytes())

    def take_notes(self) -> Iterator[Note]:
        """The notes since the last call."""
        while self.notes:
            yield self.notes.pop(0)

    def close(self) -> None:
        try:
            self._use_board(lambda board: board.close())
        finally:
            self.lock_file.close()

    # ---- checkpoints

    def save(self, step: int, saved: Checkpoint) -> Path:
        """Write a new checkpoint, then delete all but the last two and those that stay."""
        path = self.path / checkpoint.name_of(step)
        with self._writing(f"the checkpoint after step {step}"):
            checkpoint.write(path, Checkpoint(saved.tensors, {**saved.state, "run": self.identity}))
        for old in checkpoint.listed(self.path)[KEPT_CHECKPOINTS:]:
            if checkpoint.step_of(old) in self.kept_steps:
                continue
            with suppress(OSError):  # the next save tries again
                old.unlink(missing_ok=True)
        with self._writing("state.json"):
            self._write_json("state.json", {"step": step, "saved": _now(), "checkpoints": self._names()})
        return path

    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest intact checkpoint; damaged newer ones are put aside, and a note says so."""
        _, whole, damaged = newest_whole(checkpoint.listed(self.path), self.config)
        if damaged and whole is None:
            raise RunError(
                f"no checkpoint in {self.path} is intact: {'; '.join(str(what) for _, what in damaged)}. "
                "Nothing was changed. Put good copies there, or start again in another folder"
            )
        for path, what in damaged:
            path.replace(path.with_name(f"{path.name}.damaged"))
            self.notes.append(Note(f"{what}; it was put aside as {path.name}.damaged, and the one before it is used"))
        return whole

    def newest_name(self) -> str | None:
        """The newest checkpoint's name."""
        return next(iter(self._names()), None)

    def _names(self) -> list[str]:
        return [path.name for path in checkpoint.listed(self.path)]

    # ---- numbers

    def begin_metrics(self, lines: Sequence[Mapping[str, Any]], *, step: int, of_other: bool = False) -> None:
        """Write the epochs before that step, as its checkpoint has them: later ones will be trained again.

        If they are of another run, which this one begins with, TensorBoard does not have them yet.
        """
        path = self.path / "metrics.jsonl"
        with self._writing("metrics.jsonl"):
            if step == 0 and path.exists() and path.stat().st_size:
                aside = next(p for n in count(1) if not (p := path.with_name(f"metrics.jsonl.before-{n}")).exists())
                path.replace(aside)
                self.notes.append(
                    Note(
                        "there is no checkpoint: training starts at the first step, and the epochs measured so far "
                        f"are kept in {aside.name}"
                    )
                )
            with atomic_write(path) as file:
                file.write("".join(_json(line) + "\n" for line in lines).encode())
        try:
            self.board = Board.where_installed(self.path / "tensorboard", after=0 if of_other else len(lines))
        except OSError as error:
            self._without_board(error)
        for line in lines if of_other else ():
            self._use_board(lambda board, line=line: board.add(line))  # type: ignore[misc]

    def add_metrics(self, line: Mapping[str, Any]) -> None:
        with self._writing("metrics.jsonl"), (self.path / "metrics.jsonl").open("ab") as file:
            file.write((_json(line) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())  # so that after a power cut a finished run has all its lines
        self._use_board(lambda board: board.add(line))

    def _use_board(self, act: Callable[[Board], None]) -> None:
        if self.board is not None:
            try:
                act(self.board)
            except (OSError, RuntimeError) as error:
                self._without_board(error)

    def _without_board(self, error: Exception) -> None:
        """Missing curves must not stop a run: the numbers are in metrics.jsonl."""
        self.board = None
        self.notes.append(Note(f"no more TensorBoard curves: {error}"))

    # ---- the end

    def result(self) -> dict[str, Any] | None:
        """The result of a finished run. A damaged one is put aside, and made again from the last checkpoint."""
        path = self.path / "result.json"
        if not path.exists():
            return None
        try:
            return read_json(path)
        except ValueError as error:
            path.replace(path.with_name("result.json.damaged"))
            self.notes.append(Note(f"{error}; it was put aside as result.json.damaged"))
            return None

    def write_divergence(self, what: str, step: int) -> None:
        """For monitoring: why the run stopped. A later checkpoint overwrites it."""
        with suppress(OSError):
            self._write_json("state.json", {"step": step, "diverged": what, "checkpoints": self._names()})

    def write_image_scores(self, scores: Mapping[str, Tensor]) -> None:
        """Error and NLL of each image of the validation split: with them, two runs are compared image by image."""
        with self._writing(VALIDATION):
            checkpoint.write(self.path / VALIDATION, Checkpoint(scores, {"run": self.identity}))

    def write_result(self, result: Mapping[str, Any]) -> None:
        with self._writing("result.json"):
            self._write_json("result.json", result)

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        with atomic_write(self.path / name) as file:
            file.write((_json(content, indent=2) + "\n").encode())

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Turn a full disk or a missing folder into an error that says which checkpoint is safe."""
        try:
            self._check_still_held()
            yield
        except OSError as error:
            full = is_full_disk(error)
            kept = self.newest_name()
            raise RunError(
                f"{what} could not be written to {self.path}: {'the disk is full' if full else error}. "
                f"{f'The checkpoint {kept} is intact' if kept else 'There is no checkpoint yet'}; "
                f"{'make room, and ' if full else ''}repeat the command, which resumes (flatmin train: with --resume)"
            ) from error

    def _check_still_held(self) -> None:
        """Was the folder removed, and perhaps made again by another run? Then nothing in it is ours."""
        try:
            there = (self.path / ".lock").stat()
        except FileNotFoundError:
            there = None
        here = os.fstat(self.lock_file.fileno())
        if there is None or (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            raise RunError(
                f"{self.path} was removed or replaced while this run was training; nothing was written to it"
            )


def _json(content: Mapping[str, Any], *, indent: int | None = None) -> str:
    return json.dumps(content, indent=indent, allow_nan=False)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def read_image_scores(folder: Path, measure: str) -> Tensor | None:
    """A run's error or NLL of each validation image; None where there are none, or none that can be read."""
    try:
        found = checkpoint.read(folder / VALIDATION).tensors[measure]
    except (checkpoint.DamagedError, OSError, KeyError):
        return None
    return found if found.ndim == 1 and len(found) and bool(found.isfinite().all()) else None
