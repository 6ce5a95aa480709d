"""One trial of a tuning: a training run in a folder of its own, started or resumed, in whichever process trains it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.data.registry import load_once
from flatmin_lab.execution.task_queue import Stop
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.runs.events import DivergedError, Epoch, Event, Failed, Finished, Progress, Started, Stopped
from flatmin_lab.training.loop import train
from flatmin_lab.tuning.study import Draw

PRUNED = "pruned"  # why a trial stopped


class Pruned(Stopped):
    """The trial was pruned."""


class TrialTask(NamedTuple):
    """What is needed to train a trial."""

    draw: Draw
    recipe: Recipe
    seed: int
    folder: Path
    device: str
    root: str  # the folder of the data sets
    checkpoint_epochs: int

    @property
    def numbers(self) -> tuple[int]:
        return (self.draw.number,)

    def load_data(self) -> Dataset:
        return load_once(self.recipe.data, self.root, self.recipe.size)

    def paths(self) -> list[Path]:
        """The folders that are read and written for it."""
        return [self.folder]

    def moved_to(self, folder: Path) -> "TrialTask":
        """The same trial, with its folder in that one."""
        return self._replace(folder=folder / self.folder.name)


def train_trial(task: TrialTask, data: Dataset, stop: Stop) -> Iterator[tuple[int, Event]]:
    """Train a trial, or resume it; a resumed one yields the events of its earlier epochs again."""
    number = task.draw.number
    events = train(
        task.recipe,
        data,
        seed=task.seed,
        device=task.device,
        folder=task.folder,
        resume=True,
        stop=stop,
        checkpoint_epochs=task.checkpoint_epochs,
    )
    failed, step, started = None, 0, False
    try:
        for event in events:
            if isinstance(event, Started | Finished) and not started:
                yield from ((number, epoch) for epoch in _earlier_epochs(task.folder))
                started = True
            step = getattr(event, "step", step)
            if not isinstance(event, Progress):
                yield number, event
    except DivergedError as error:
        failed = Failed(error.what, step)
    if failed is not None:  # here, where the memory of the run is free
        yield number, failed


def _earlier_epochs(folder: Path) -> Iterator[Epoch]:
    path = folder / "metrics.jsonl"
    for text in path.read_text().splitlines() if path.exists() else ():
        line = json.loads(text)
        yield Epoch(epoch=line["epoch"], step=line["step"], numbers=line)
