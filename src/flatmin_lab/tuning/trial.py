"""A trial's training, for whoever trains it: in a run folder of its own, from its beginning or from where it was left.

One that is to be pruned finds a file in its folder, and stops before the next step.
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.data.registry import load
from flatmin_lab.execution.process_pool import Stop
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.runs.events import DivergedError, Epoch, Failed, Finished, Progress, Record, Started, Stopped
from flatmin_lab.training.loop import train
from flatmin_lab.tuning.study import Draw

PRUNED = "pruned"  # why a training stopped, and the file in its folder that says so


class TrialTask(NamedTuple):
    """A trial's training, for whoever trains it."""

    draw: Draw
    recipe: Recipe
    seed: int
    folder: Path
    device: str
    root: str  # where the data are
    checkpoint_epochs: int

    def paths(self) -> list[Path]:
        """All that is read and written for it."""
        return [self.folder]

    def moved_to(self, folder: Path) -> "TrialTask":
        """The same training in that folder."""
        return self._replace(folder=folder / self.folder.name)


def is_pruned(record: Record) -> bool:
    return isinstance(record, Stopped) and record.reason == PRUNED


def run_trial(task: TrialTask, stop: Stop) -> Iterator[tuple[int, Record]]:
    """In a process of its own."""
    yield from run_trial_on_data(task, _load_data(task.recipe.data, task.root, task.recipe.size), stop)


def run_trial_on_data(task: TrialTask, data: Dataset, stop: Stop) -> Iterator[tuple[int, Record]]:
    """As it is trained, by its number."""
    for record in train_trial(task, data, stop):
        if not isinstance(record, Progress):
            yield task.draw.number, record


def train_trial(task: TrialTask, data: Dataset, stop: Stop) -> Iterator[Record]:
    """A trial's training, from its beginning or from where it was left; epochs from before are told again."""

    def asked() -> str | None:
        return stop() or (PRUNED if (task.folder / PRUNED).exists() else None)

    records = train(
        task.recipe,
        data,
        seed=task.seed,
        device=task.device,
        folder=task.folder,
        resume=True,
        stop=asked,
        checkpoint_epochs=task.checkpoint_epochs,
    )
    failed, step, begun = None, 0, False
    try:
        for record in records:
            if isinstance(record, Started | Finished) and not begun:
                yield from _earlier_epochs(task.folder)
                begun = True
            step = getattr(record, "step", step)
            yield record
    except DivergedError as error:
        failed = Failed(error.what, step)
    if failed is not None:  # here, where the training's memory is free
        yield failed


def _earlier_epochs(folder: Path) -> Iterator[Epoch]:
    path = folder / "metrics.jsonl"
    for text in path.read_text().splitlines() if path.exists() else ():
        line = json.loads(text)
        yield Epoch(epoch=line["epoch"], step=line["step"], numbers=line)


@lru_cache(maxsize=1)
def _load_data(name: str, root: str, size: tuple[int, int] | None) -> Dataset:
    return load(name, root, size=size)
