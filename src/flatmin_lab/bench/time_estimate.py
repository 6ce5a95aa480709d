"""How long will it take? A few steps of each kind of training, and a look at a few test pictures, are measured.

What takes the time of a step is the network, its pictures and the number of passes; so of trainings that are alike in
these one is measured. After each epoch all pictures of the test set are looked at, in large batches: in the spiral's
small network one takes about a tenth of its share in a pass of a step, too little to be derived from it.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from time import perf_counter
from typing import Any, NamedTuple

import torch

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.recipes.recipe import Job, Recipe
from flatmin_lab.runs.events import Epoch, Record
from flatmin_lab.system.rng import Surroundings
from flatmin_lab.training.build import build_model, method_of, prepared
from flatmin_lab.training.captured_forward import FULL, Answers
from flatmin_lab.training.evaluation import logits_of, measured
from flatmin_lab.training.loop import moments

WARMUP_STEPS, TIMED_SECONDS, MAX_TIMED_STEPS = (
    3,
    1.5,
    400,
)  # steps before the clock starts; how long, and how many steps, it runs
FIRST_IMAGES = 50  # pictures of a first look: a large batch of a large network takes a CPU minutes
TrainingSteps = Generator[Record | None, None, None]


def passes_per_step(recipe: Recipe) -> int:
    """Forward and backward through the network, a step."""
    if recipe.method == "amp":
        return 1 + int(recipe.settings.get("inner_iter", 1))
    return 2 if recipe.method == "adversarial" else 1


def cost_key(recipe: Recipe, data: Dataset) -> tuple[Any, ...]:
    """Trainings with the same one take the same time a step."""
    network = (recipe.model, tuple(sorted(recipe.model_settings.items())), recipe.batch_size)
    return (data.train.shape, *network, passes_per_step(recipe), recipe.augment, recipe.precision, recipe.compile)


@contextmanager
def endless_run(recipe: Recipe, data: Dataset, *, device: torch.device) -> Iterator[TrainingSteps]:
    """A training in memory that does not end by itself, and is thrown away."""
    nothing: dict[str, Any] = {"folder": None, "resume": False, "capture": True, "stop": lambda: None}
    saving: dict[str, Any] = {"checkpoint_epochs": 1, "checkpoint_minutes": 1e9}
    endless = replace(recipe, epochs=1_000_000)
    records = moments(endless, data, seed=0, device=device, step_by_step=True, **saving, **nothing)
    try:
        yield records
    finally:
        records.close()


def take_steps(records: TrainingSteps, steps: int, device: torch.device) -> None:
    """So many steps, done on the device too."""
    left = steps
    while left:
        left -= next(records) is None
    _wait(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Pace(NamedTuple):
    """Seconds of a step, and of each picture that is looked at after an epoch."""

    step_seconds: float
    image_seconds: float


def measure_pace(recipe: Recipe, data: Dataset, *, device: torch.device) -> Pace:
    return Pace(seconds_per_step(recipe, data, device=device), seconds_per_evaluation(recipe, data, device=device))


def seconds_per_step(recipe: Recipe, data: Dataset, *, device: torch.device) -> float:
    """On average; steps that come after the end of an epoch, with its look at the test set, only where all do."""
    plain: list[float] = []
    others: list[float] = []
    with endless_run(recipe, data, device=device) as records:
        take_steps(records, WARMUP_STEPS, device)
        start = perf_counter()
        while len(plain) + len(others) < MAX_TIMED_STEPS and (
            perf_counter() - start < TIMED_SECONDS or not (plain or others)
        ):
            begin, times = perf_counter(), plain
            while (record := next(records)) is not None:
                times = others if isinstance(record, Epoch) else times
            _wait(device)
            times.append(perf_counter() - begin)
    return fmean(plain or others)


@torch.no_grad()
def seconds_per_evaluation(recipe: Recipe, data: Dataset, *, device: torch.device) -> float:
    """With the network as it begins, and torch's switches as in a training."""
    known, _, _, normalise = prepared(recipe, data.to(device), seed=0)
    found = 0.0
    with Surroundings(device, deterministic=recipe.deterministic).inside():
        answers = Answers(build_model(recipe, known, method_of(recipe, normalise)).to(device))
        for size in (FIRST_IMAGES, FULL):
            split = known.test.at(torch.arange(min(size, len(known.test)), device=device))
            if found * len(split) > TIMED_SECONDS:
                break
            for _ in range(2):  # the first one warms up
                start = perf_counter()
                logits = logits_of(answers, split, normalise)
                assert logits is not None
                measured(logits, split.y)
                found = (perf_counter() - start) / len(split)
    return found


def estimate_seconds(recipe: Recipe, data: Dataset, pace: Pace) -> float:
    """A whole training at that pace, with a measurement after each epoch."""
    share = 0.9 if recipe.validation else 1.0
    train = share * len(data.train)
    evaluated = (1 - share) * len(data.train) if recipe.validation else len(data.test)
    return recipe.epochs * (pace.step_seconds * train / recipe.batch_size + pace.image_seconds * evaluated)


def estimate_all_seconds(
    jobs: Sequence[Job],
    data: Mapping[str, Dataset],
    *,
    device: torch.device,
    say: Callable[[str], object] = lambda _: None,
) -> list[float]:
    """Of each training by itself."""
    paces: dict[tuple[Any, ...], Pace] = {}
    found = []
    for job in jobs:
        key = cost_key(job.recipe, data[job.recipe.data])
        if key not in paces:
            say(f"measuring {job.recipe.name}")
            paces[key] = measure_pace(job.recipe, data[job.recipe.data], device=device)
        found.append(estimate_seconds(job.recipe, data[job.recipe.data], paces[key]))
    return found
