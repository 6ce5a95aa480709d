"""Runs that take a moment: a few images, a tiny network, and what a run leaves in its folder."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from flatmin_lab.data import Batches, Dataset, Normalisation, Split, augmentation
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.runs import checkpoint
from flatmin_lab.runs.events import Event, Saved
from flatmin_lab.training.learner import Learner
from flatmin_lab.training.loop import train

TIMES = ("seconds", "cpu_seconds", "resumed", "shared")  # what a run says of how it was computed, not of what


def images(count: int, seed: int) -> Split:
    """Three classes of 6 by 6: a bright row, column or diagonal, in noise."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    x = torch.randint(0, 100, (count, 1, 6, 6), generator=generator, dtype=torch.uint8)
    place = torch.arange(6)
    for i, label in enumerate(y.tolist()):
        row, column = ((2, place), (place, 2), (place, place))[label]
        x[i, 0, row, column] = 200
    return Split(x, y)


def tiny_data(train: int = 44, test: int = 30) -> Dataset:
    return Dataset("tiny", images(train, 0), images(test, 1), ["row", "column", "diagonal"])


def tiny_recipe(**changes: Any) -> Recipe:
    """Five steps an epoch, the last one smaller."""
    values = {"model": "convnet", "model_settings": {"width": 3}, "epochs": 3, "batch_size": 10, "augment": "none"}
    return Recipe(data="tiny", **{**values, **changes})


def learner_of(recipe: Recipe, data: Dataset, *, seed: int = 0, device: str = "cpu", capture: bool = True) -> Learner:
    """The learner at the start of a run, to be stepped by hand."""
    there = data.to(device)
    batches = Batches(
        split=there.train,
        batch_size=recipe.batch_size,
        normalise=Normalisation.of(there.train),
        augment=augmentation(recipe.augment, there),
        seed=seed,
    )
    return Learner(recipe, there, batches, seed=seed, device=torch.device(device), capture=capture)


def lasting(folder: Path) -> dict[str, Any]:
    """What the newest checkpoint of a folder holds, without times and places."""
    saved = checkpoint.read(checkpoint.listed(folder)[0])
    state = {key: value for key, value in saved.state.items() if key not in (*TIMES, "facts")}
    state["lines"] = [{k: v for k, v in line.items() if k not in TIMES} for line in state["lines"]]
    return {**saved.tensors, "state": state}


def whole_state(folder: Path) -> dict[str, Any]:
    """The last checkpoint, the lines and the result, without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((folder / "result.json").read_text())
    for timed in (result, *lines):
        for name in TIMES:
            timed.pop(name, None)
    return {**lasting(folder), "lines": lines, "result": result}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(a, other[key]) if isinstance(a, torch.Tensor) else a == other[key] for key, a in one.items()
    )


def after(steps: int) -> Callable[[], str | None]:
    """A `stop` that gives a reason after so many calls."""
    asked = [0]

    def stop() -> str | None:
        asked[0] += 1
        return "enough" if asked[0] > steps else None

    return stop


def run(recipe: Recipe, folder: Path | None = None, **more: Any) -> list[Event]:
    return list(train(recipe, tiny_data(), folder=folder, **more))


def saves(events: list[Event]) -> Iterator[int]:
    return (event.step for event in events if isinstance(event, Saved))
