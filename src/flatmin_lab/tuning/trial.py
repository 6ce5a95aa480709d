"""One trial of a tuning: a training run in a folder of its own, started or resumed, in whichever process trains it.

A trial that is to be pruned finds a file in its folder, and stops before the next step.
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
from flatmin_lab.runs.events import DivergedError, Epoch, Event, Failed, Finished, Progress, Started, Stopped
from flatmin_lab.training.loop import train
from flatmin_lab.tuning.study import Draw

PRUNED = "pruned"  # why a trial stopped, and the name of the file that stops it


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

    def paths(self) -> list[Path]:
        """The folders that are read and written for it."""
        return [self.folder]

    def moved_to(self, folder: Path) -> "TrialTask":
        """The same trial, with its folder in that one."""
        return self._replace(folder=folder / self.folder.name)


def run_trial(task: TrialTask, stop: Stop) -> Iterator[tuple[int, Event]]:
    """Train a trial in a worker process, which loads the data itself."""
    yield from run_trial_on_data(task, _load_data(task.recipe.data, task.root, task.recipe.size), stop)


def run_trial_on_data(task: TrialTask, data: Dataset, stop: Stop) -> Iterator[tuple[int, Event]]:
    """Train a trial: its events with its number, without `Progress`."""
    for event in train_trial(task, data, stop):
        if not isinstance(event, Progress):
            yield task.draw.number, event


def train_trial(task: TrialTask, data: Dataset, stop: Stop) -> Iterator[Event]:
    """Train a trial, or resume it; a resumed one yields the events of its earlier epochs again."""

    def stop_or_prune() -> str | None:
        return stop() or (PRUNED if (task.folder / PRUNED).exists() else None)

    events = train(
        task.recipe,
        data,
        seed=task.seed,
        device=task.device,
        folder=task.folder,
        resume=True,
        stop=stop_or_prune,
        checkpoint_epochs=task.checkpoint_epochs,
    )
    failed, step, started = None, 0, False
    try:
        for event in events:
            if isinstance(event, Started | Finished) and not started:
                yield from _earlier_epochs(task.folder)
                started = True
            step = getattr(event, "step", step)
            yield event
    except DivergedError as error:
        failed = Failed(error.what, step)
    if failed is not None:  # here, where the memory of the run is free
        yield failed


def _earlier_epochs(folder: Path) -> Iterator[Epoch]:
    path = folder / "metrics.jsonl"
    for text in path.read_text().splitlines() if path.exists() else ():
        line = json.loads(text)
        yield Epoch(epoch=line["epoch"], step=line["step"], numbers=line)


@lru_cache(maxsize=1)
def _load_data(name: str, root: str, size: tuple[int, int] | None) -> Dataset:
    return load(name, root, size=size)
