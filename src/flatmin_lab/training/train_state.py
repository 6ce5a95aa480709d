"""The state of a run between two steps, saved to its folder and restored from it.

After `batch` batches of `epoch` (from 0) it is the learner, the sums of this epoch and the lines of earlier ones. A
checkpoint holds all of it, so a run is resumed bit for bit. Of several ranks only the main one has the folder: it reads
the checkpoint, and broadcasts it to the others.

A new run can begin with the checkpoint of another one, if that is the same training until there: same seed, data and
conditions, and recipes of which recipes/common_beginning.py says so. It is then saved as the run's own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import torch

import flatmin
from flatmin_lab.recipes.common_beginning import common_epochs
from flatmin_lab.recipes.recipe import Recipe, differences
from flatmin_lab.runs import checkpoint
from flatmin_lab.runs.checkpoint import Checkpoint
from flatmin_lab.runs.events import Event, Note, RunError, Saved
from flatmin_lab.runs.folder import RunFolder
from flatmin_lab.system.cpu_clock import CpuClock
from flatmin_lab.system.machine import facts
from flatmin_lab.system.user_code import DEVICE_ERRORS
from flatmin_lab.training.epoch_metrics import EpochMetrics
from flatmin_lab.training.learner import Learner
from flatmin_lab.training.ranks import RankGroup

SAME_BITS = (
    "hardware",
    "threads",
    "torch",
    "flatmin",
    "commit",
    "ranks",
)  # a resumed run has the same bits only if these are equal


class TrainState:
    """Starts at step 0; `resume` loads the newest checkpoint."""

    def __init__(self, learner: Learner, device: torch.device, ranks: RankGroup) -> None:
        self.learner, self.device, self.ranks = learner, device, ranks
        self.epoch = self.batch = 0
        self.metrics = EpochMetrics()
        self.lines: list[dict[str, Any]] = []
        self.seconds_before = 0.0  # of training, before the run was resumed
        self.cpu_clock, self.has_cpu_time = CpuClock(), True  # of the whole run, not of a part
        self.resumed = 0  # how often
        self.is_mixed = False  # were parts of it trained under other conditions?
        self.shared: dict[str, Any] | None = None  # the run that trained its beginning, its epochs and its seconds
        self.began_from: str | None = None  # that run, if this one began just now
        self.since = self.saved_at = monotonic()

    @property
    def step(self) -> int:
        return self.epoch * len(self.learner.batches) + self.batch

    def seconds(self) -> float:
        """Seconds of training, over all resumptions."""
        return self.seconds_before + monotonic() - self.since

    def end_epoch(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        self.epoch, self.batch, self.metrics = self.epoch + 1, 0, EpochMetrics()

    # ---- the run folder

    def resume(self, folder: RunFolder | None, beginnings: Sequence[Path] = ()) -> Iterator[Event]:
        """Resume from the folder's newest checkpoint; without one, begin from the first of the others' that fits."""
        self.since = self.saved_at = monotonic()
        with self.ranks.raise_together():
            saved = None if folder is None else folder.newest_checkpoint()
        saved = self.ranks.broadcast(saved)
        if saved is not None:
            with _loading(saved):
                self._load(saved)
            yield from self._note_other_machine(saved.state["facts"])
        elif folder is not None and self.ranks.size == 1:
            yield from self._begin_from(beginnings, folder)
        with self.ranks.raise_together():
            if folder is not None:
                folder.begin_metrics(self.lines, step=self.step, of_other=self.began_from is not None)
        if folder is not None:
            yield from folder.take_notes()

    def _begin_from(self, places: Iterable[Path], folder: RunFolder) -> Iterator[Event]:
        """Load the first checkpoint that is of the same training, and save it as this run's own."""
        for place in places:
            try:
                saved = checkpoint.read(place)
                name = self._check_same_training(saved.state, folder.identity)
            except (OSError, ValueError, TypeError, KeyError) as error:
                yield Note(f"it does not begin with {place}: {error}")
                continue
            with _loading(saved):
                self._load(saved, of_other=True)
            self.began_from = name
            self.shared = {"run": name, "epochs": self.epoch, "seconds": round(self.seconds_before, 3)}
            yield self.save(folder)
            return

    def _check_same_training(self, there: Mapping[str, Any], own: Mapping[str, Any]) -> str:
        """Raise where a checkpoint of another run is not what this run would have there; the other run's name."""
        run, facts = there["run"], (there["facts"], run_facts(self.device, self.ranks))
        apart = differences(*({key: one[key] for key in ("seed", "data_sha256")} for one in (run, own)))
        apart += differences(*({key: known.get(key) for key in SAME_BITS} for known in facts))
        if there.get("mixed"):
            apart.append("parts of it were trained under other conditions")
        recipe = Recipe.from_json(run["recipe"])
        common = common_epochs(recipe, self.learner.recipe, batches=len(self.learner.batches))
        if there["batch"] or not 0 < there["epoch"] <= common:
            within = f" and {there['batch']} batches" if there["batch"] else ""
            apart.append(f"after epoch {there['epoch']}{within} it is another training: {common} are the same")
        if apart:
            raise ValueError("; ".join(apart))
        return f"{recipe.name}-{run['seed']}"

    def _load(self, saved: Checkpoint, *, of_other: bool = False) -> None:
        self.learner.load(saved, of_other=of_other)
        self.epoch, self.batch = saved.state["epoch"], saved.state["batch"]
        self.metrics.load(saved.state["sums"])
        self.lines = list(saved.state["lines"])
        self.seconds_before, self.since = saved.state["seconds"], monotonic()
        self.has_cpu_time = "cpu_seconds" in saved.state  # earlier checkpoints have none
        self.cpu_clock.load(saved.state.get("cpu_seconds", 0.0))
        is_over = self.epoch == self.learner.recipe.epochs  # only its result is made again
        self.resumed = saved.state.get("resumed", 0) + (not is_over and not of_other)
        self.is_mixed, self.shared = saved.state.get("mixed", False), saved.state.get("shared")

    def _note_other_machine(self, before: Mapping[str, Any]) -> Iterator[Event]:
        then, now = ({"ranks": 1, **known} for known in (before, run_facts(self.device, self.ranks)))
        apart = [f"{key} {then[key]} then, {now[key]} now" for key in SAME_BITS if then.get(key) != now[key]]
        if apart:
            self.is_mixed = True
            yield Note(
                f"resumed under other conditions ({'; '.join(apart)}): correct, but perhaps not bit for bit the same"
            )

    def save(self, folder: RunFolder) -> Saved:
        """Write a checkpoint, between two steps."""
        state = {
            "epoch": self.epoch,
            "batch": self.batch,
            "sums": self.metrics.sums,
            "lines": self.lines,
            "seconds": self.seconds(),
            **({"cpu_seconds": self.cpu_clock.seconds()} if self.has_cpu_time else {}),
            "resumed": self.resumed,
            **({"mixed": True} if self.is_mixed else {}),
            **({"shared": self.shared} if self.shared else {}),
            "facts": run_facts(self.device, self.ranks),
            **self.learner.state(),
        }
        path = folder.save(self.step, Checkpoint(self.learner.tensors(), state))
        self.saved_at = monotonic()
        return Saved(path, self.step)


@contextmanager
def _loading(saved: Checkpoint) -> Iterator[None]:
    """Turn what is missing in an intact checkpoint, or does not fit, into an error that says which version wrote it."""
    try:
        yield
    except (RunError, *DEVICE_ERRORS):
        raise
    except (KeyError, TypeError, RuntimeError) as error:
        version = saved.state.get("facts", {}).get("flatmin", "of another version")
        raise RunError(
            f"the newest checkpoint cannot be loaded ({type(error).__name__}: {error}). It was written by flatmin "
            f"{version}, and this is {flatmin.__version__}: resume with that version, and with the network's code as "
            "it was, or train anew in another folder"
        ) from error


def run_facts(device: torch.device, ranks: RankGroup) -> dict[str, Any]:
    """The machine that a number was measured with, and the number of ranks, if several."""
    return facts(device) | ({"ranks": ranks.size} if ranks.size > 1 else {})
