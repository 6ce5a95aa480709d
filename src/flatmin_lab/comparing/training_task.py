"""Contenders of one seed, trained together or one by one, and their results on the held-out examples.

Each has a run folder, started or resumed, and beside it an outcome file, which says that it has ended. A run that
diverges has an outcome too.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flatmin.comparison import Outcome
from flatmin.comparison.held_out import Measured
from flatmin.comparison.outcome import file_name
from flatmin_lab.comparing.contender_recipes import Entry
from flatmin_lab.data.dataset import Dataset
from flatmin_lab.data.registry import load_once
from flatmin_lab.execution.replicas import train_together
from flatmin_lab.execution.task_queue import Stop
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.runs.events import Event, Failed, Finished, Progress, RunError
from flatmin_lab.runs.folder import read_image_scores
from flatmin_lab.runs.result_store import remove_old_checkpoints

MEASURES, PER_EXAMPLE = ("error", "nll", "ece"), ("error", "nll")
CURVES = {**{name: f"validation_{name}" for name in MEASURES}, "training loss": "train_loss"}


class TrainingTask(NamedTuple):
    """Contenders of one seed, by the numbers of their runs, for one device."""

    entries: Mapping[int, Entry]
    seed: int
    folder: Path  # of the comparison
    device: str
    root: str  # the folder of the data sets
    checkpoint_epochs: int

    @property
    def numbers(self) -> Collection[int]:
        return self.entries.keys()

    def load_data(self) -> Dataset:
        recipe = next(iter(self.entries.values())).recipe
        return load_once(recipe.data, self.root, recipe.size)

    def paths(self) -> list[Path]:
        """The folders and files that are read and written for it."""
        keys = [entry.contender.key for entry in self.entries.values()]
        return [
            path
            for key in keys
            for path in (run_folder(self.folder, key, self.seed), self.folder / file_name(key, self.seed))
        ]

    def moved_to(self, folder: Path) -> "TrainingTask":
        """The same runs, in that folder."""
        return self._replace(folder=folder)


def run_folder(folder: Path, contender: str, seed: int) -> Path:
    return folder / Path(file_name(contender, seed)).stem


def train_contenders(task: TrainingTask, dataset: Dataset, stop: Stop) -> Iterator[tuple[int, Event]]:
    """Train them, and write the outcome of each before its last event."""
    data, numbers = dataset.to(task.device), list(task.entries)
    entries = list(task.entries.values())
    events = train_together(
        [Job(entry.recipe, task.seed) for entry in entries],
        data,
        device=task.device,
        folders=[run_folder(task.folder, entry.contender.key, task.seed) for entry in entries],
        resume=True,
        stop=stop,
        checkpoint_epochs=task.checkpoint_epochs,
    )
    try:
        for index, event in events:
            entry = entries[index]
            if isinstance(event, Failed) and event.diverged:
                Outcome(entry.contender.key, task.seed, {}, failed=event.what).write(task.folder)
            if isinstance(event, Finished):
                yield numbers[index], _ended(task, entry, event)
            elif not isinstance(event, Progress):
                yield numbers[index], event
    except RunError:  # raised at the end if runs failed; each has yielded its own Failed
        pass


def _ended(task: TrainingTask, entry: Entry, ended: Finished) -> Finished | Failed:
    """Write the outcome of a run: how it ended, and what was measured."""
    outcome = outcome_of(task, entry, ended.result)
    outcome.write(task.folder)
    remove_old_checkpoints(run_folder(task.folder, entry.contender.key, task.seed))
    return ended if outcome.failed is None else Failed(outcome.failed, diverged=True)


def outcome_of(task: TrainingTask, entry: Entry, result: Mapping[str, Any]) -> Outcome:
    """The result of a finished run on the held-out tenth of its training set, image by image from its folder."""
    folder = run_folder(task.folder, entry.contender.key, task.seed)
    last = {name: result[f"validation_{name}"] for name in MEASURES}
    scores = {name: read_image_scores(folder, name) for name in PER_EXAMPLE}
    found = Measured(
        {name: math.nan if value is None else value for name, value in last.items()},
        {name: each.tolist() for name, each in scores.items() if each is not None},
    )
    failed = found.failure()
    return Outcome(
        entry.contender.key,
        task.seed,
        {} if failed else found.measures,
        per_example={} if failed else found.per_example,
        curve=_curve(folder),
        seconds=float(result["seconds"]),
        failed=failed,
    )


def _curve(folder: Path) -> list[dict[str, float]]:
    """What was measured after each epoch, where it is finite."""
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            "epoch": line["epoch"],
            **{name: line[key] for name, key in CURVES.items() if _is_finite(line.get(key))},
        }
        for line in lines
    ]


def _is_finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)
