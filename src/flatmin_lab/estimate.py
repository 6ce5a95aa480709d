"""How long will it take? A few steps of each kind of training are measured, and multiplied.

What takes the time of a step is the network, its pictures and the number of passes; so of trainings that are alike in
these one is measured. The evaluation after each epoch is one more pass over the test set, without gradients.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.recipe import Job, Recipe
from flatmin_lab.records import Record
from flatmin_lab.train import moments

WARM, SECONDS, MOST = 3, 1.5, 400  # steps before the clock starts; how long, and how many steps, it runs
FORWARD = 1 / 3  # the share of a pass through a network that is not backward
Moments = Generator[Record | None, None, None]


def passes(recipe: Recipe) -> int:
    """Forward and backward through the network, a step."""
    if recipe.method == "amp":
        return 1 + int(recipe.settings.get("inner_iter", 1))
    return 2 if recipe.method == "adversarial" else 1


def kind(recipe: Recipe, data: Dataset) -> tuple[Any, ...]:
    """Trainings with the same one take the same time a step."""
    network = (recipe.model, tuple(sorted(recipe.model_settings.items())), recipe.batch_size)
    return (data.train.shape, *network, passes(recipe), recipe.augment, recipe.precision, recipe.compile)


@contextmanager
def begun(recipe: Recipe, data: Dataset, *, device: torch.device) -> Iterator[Moments]:
    """A training in memory that does not end by itself, and is thrown away."""
    nothing: dict[str, Any] = {"folder": None, "resume": False, "capture": True, "stop": lambda: None}
    saving: dict[str, Any] = {"checkpoint_epochs": 1, "checkpoint_minutes": 1e9}
    endless = replace(recipe, epochs=1_000_000)
    records = moments(endless, data, seed=0, device=device, step_by_step=True, **saving, **nothing)
    try:
        yield records
    finally:
        records.close()


def taken(records: Moments, steps: int, device: torch.device) -> int:
    """So many steps, done on the device too."""
    left = steps
    while left:
        left -= next(records) is None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return steps


def seconds_a_step(recipe: Recipe, data: Dataset, *, device: torch.device) -> float:
    with begun(recipe, data, device=device) as records:
        taken(records, WARM, device)
        start, steps = perf_counter(), 0
        while steps < MOST and perf_counter() - start < SECONDS:
            steps += taken(records, 1, device)
        return (perf_counter() - start) / steps


def seconds_of(recipe: Recipe, data: Dataset, step: float) -> float:
    """A whole training, given the time of a step; with a measurement after each epoch."""
    share = 0.9 if recipe.validation else 1.0
    train = share * len(data.train)
    measured = (1 - share) * len(data.train) if recipe.validation else len(data.test)
    picture = step / recipe.batch_size / passes(recipe)
    return recipe.epochs * (step * train / recipe.batch_size + FORWARD * picture * measured)


def seconds_of_all(
    jobs: Sequence[Job],
    data: Mapping[str, Dataset],
    *,
    device: torch.device,
    say: Callable[[str], object] = lambda _: None,
) -> list[float]:
    """Of each training by itself."""
    steps: dict[tuple[Any, ...], float] = {}
    found = []
    for job in jobs:
        key = kind(job.recipe, data[job.recipe.data])
        if key not in steps:
            say(f"measuring {job.recipe.name}")
            steps[key] = seconds_a_step(job.recipe, data[job.recipe.data], device=device)
        found.append(seconds_of(job.recipe, data[job.recipe.data], steps[key]))
    return found
