"""Comparisons that take seconds: a few images in a file, a perceptron, and a clock that the test moves."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flatmin_lab.comparing.comparer import Comparison, about_entries
from flatmin_lab.comparing.contender_recipes import Entry, entries_for
from flatmin_lab.comparing.time_budget import TimeBudget
from flatmin_lab.data import Dataset, Split, load
from flatmin_lab.execution.local import ThisProcess
from flatmin_lab.execution.task_queue import Stop
from flatmin_lab.runs.events import Finished
from tests.support.small_runs import images

EXECUTOR = ThisProcess(["cpu"], single_thread=True)


def saved(path: Path, test: Split | None = None, *, train: int = 120) -> Path:
    """A few images in a file: a tenth of the training set is twelve of them."""
    splits = {"train": images(train, 0), "test": images(30, 1) if test is None else test}
    arrays: dict[str, Any] = {f"{kind}_{name}": getattr(splits[name], kind).numpy() for name in splits for kind in "xy"}
    np.savez(path, **arrays)
    return path


def entries_of(path: Path, data: Dataset, *, radii: Sequence[float] = (0.1,), **changes: Any) -> list[Entry]:
    usual = {"model": "mlp", "epochs": 2, "augment": "none"}
    return entries_for(str(path), data, changes={**usual, **changes}, settings={}, radii=radii)


def comparison_of(
    path: Path, folder: Path, *, seeds: int = 2, budget: TimeBudget | None = None, **more: Any
) -> Comparison:
    data = load(path)
    entries = entries_of(path, data, **more)
    about = about_entries(entries, data, seeds=seeds)
    return Comparison(entries, data, folder, about, budget=budget or TimeBudget(None))


def finish(comparison: Comparison, stop: Stop = lambda: None) -> Comparison:
    for _ in comparison.run(EXECUTOR, stop=stop):
        pass
    return comparison


class Clock:
    """Stands still but for what the test adds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def finish_in(comparison: Comparison, clock: Clock, *, seconds_a_pass: float) -> Comparison:
    """Run it as if every plain training took so long, and AMP's twice that."""
    for training, event in comparison.run(EXECUTOR):
        if isinstance(event, Finished):
            clock.now += seconds_a_pass * training.entry.contender.passes
    return comparison


def without_times(folder: Path) -> dict[str, Any]:
    """comparison.json without what differs from call to call."""
    found: dict[str, Any] = json.loads((folder / "comparison.json").read_text())
    for outcome in found["outcomes"]:
        del outcome["seconds"]
    found["sentence"] = found["sentence"].partition(" That is ")[0]
    return {key: value for key, value in found.items() if key not in ("command", "commit", "threads")}
