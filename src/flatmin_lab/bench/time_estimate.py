"""How long will runs take? Estimated from a few steps of each kind of run, and an evaluation of a few test images.

The time of a step depends on the network, the images and the number of passes, so one run of each such kind is timed.
After each epoch the whole test set is evaluated in large batches. This is timed too: in the spiral's small network an
image takes about a tenth of its share of a training pass, so it cannot be derived from that.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from statistics import fmean
from time import perf_counter
from typing import Any, NamedTuple

import torch

from flatmin_lab import methods
from flatmin_lab.data.dataset import Dataset
from flatmin_lab.recipes.recipe import Job, Recipe
from flatmin_lab.runs.events import Epoch, Event
from flatmin_lab.system.rng import RandomScope
from flatmin_lab.training.build import build_method, build_model, prepare_data
from flatmin_lab.training.captured_forward import EVAL_BATCH_SIZE, CapturedForward
from flatmin_lab.training.evaluation import logits_of, score_logits
from flatmin_lab.training.loop import training_steps

WARMUP_STEPS = 3  # before the clock starts
TIMED_SECONDS, MAX_TIMED_STEPS = 1.5, 400  # whichever comes first
FIRST_IMAGES = 50  # of a first evaluation: a large batch of a large network takes a CPU minutes
TrainingSteps = Generator[Event | None, None, None]


def passes_per_step(recipe: Recipe) -> float:
    """Forward and backward passes over a batch in a step, one that perturbs."""
    return methods.passes_per_step(recipe.method, recipe.settings)


def kinds_of_steps(recipe: Recipe) -> list[tuple[float, Recipe]]:
    """The shares of a run's steps that take the same time, each with a recipe all of whose steps are such.

    A run that perturbs late, or not in every step, has two.
    """
    schedule = {key: recipe.settings[key] for key in asdict(methods.CONSTANT).keys() & recipe.settings.keys()}
    if not schedule:
        return [(1.0, recipe)]
    share = methods.perturbed_share(schedule)
    settings = {key: value for key, value in recipe.settings.items() if key not in schedule}
    without_radius = {key: value for key, value in settings.items() if key not in methods.OF_AUTO}
    plain = replace(recipe, settings={**without_radius, "epsilon": 0.0})
    kinds = [(1 - share, plain), (share, replace(recipe, settings=settings))]
    return [(part, kind) for part, kind in kinds if part > 0]


def cost_key(recipe: Recipe, data: Dataset) -> tuple[Any, ...]:
    """Runs with the same key take the same time per step."""
    network = (recipe.model, tuple(sorted(recipe.model_settings.items())), recipe.batch_size)
    return (data.train.shape, *network, passes_per_step(recipe), recipe.augment, recipe.precision, recipe.compile)


@contextmanager
def endless_run(recipe: Recipe, data: Dataset, *, device: torch.device) -> Iterator[TrainingSteps]:
    """A run in memory that does not end by itself and leaves nothing behind."""
    nothing: dict[str, Any] = {"folder": None, "resume": False, "capture": True, "stop": lambda: None}
    saving: dict[str, Any] = {"checkpoint_epochs": 1, "checkpoint_minutes": 1e9}
    threads = torch.get_num_threads()  # the caller's, which its result file names
    endless = replace(recipe, epochs=1_000_000)
    events = training_steps(endless, data, seed=0, device=device, threads=threads, **saving, **nothing)
    try:
        yield events
    finally:
        events.close()


def take_steps(events: TrainingSteps, steps: int, device: torch.device) -> None:
    """Take so many steps, and wait until the device has finished them."""
    left = steps
    while left:
        left -= next(events) is None
    _wait(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Pace(NamedTuple):
    """Seconds of a training step, and of each image that is evaluated after an epoch."""

    step_seconds: float
    image_seconds: float


def measure_pace(recipe: Recipe, data: Dataset, *, device: torch.device) -> Pace:
    return Pace(seconds_per_step(recipe, data, device=device), seconds_per_evaluation(recipe, data, device=device))


def seconds_per_step(recipe: Recipe, data: Dataset, *, device: torch.device) -> float:
    """The mean; steps that include the evaluation after an epoch count only if there are no others."""
    plain: list[float] = []
    others: list[float] = []
    with endless_run(recipe, data, device=device) as events:
        take_steps(events, WARMUP_STEPS, device)
        start = perf_counter()
        while len(plain) + len(others) < MAX_TIMED_STEPS and (
            perf_counter() - start < TIMED_SECONDS or not (plain or others)
        ):
            begin, times = perf_counter(), plain
            while (event := next(events)) is not None:
                times = others if isinstance(event, Epoch) else times
            _wait(device)
            times.append(perf_counter() - begin)
    return fmean(plain or others)


@torch.no_grad()
def seconds_per_evaluation(recipe: Recipe, data: Dataset, *, device: torch.device) -> float:
    """Seconds per evaluated image, with the initial network and torch's settings as in a training run."""
    known, _, _, normalise, _ = prepare_data(recipe, data.to(device), seed=0)
    found = 0.0
    with RandomScope(device, deterministic=recipe.deterministic).active():
        answers = CapturedForward(build_model(recipe, known, build_method(recipe, normalise)).to(device))
        for size in (FIRST_IMAGES, EVAL_BATCH_SIZE):
            split = known.test.at(torch.arange(min(size, len(known.test)), device=device))
            if found * len(split) > TIMED_SECONDS:
                break
            for _ in range(2):  # the first warms up
                start = perf_counter()
                logits = logits_of(answers, split, normalise)
                assert logits is not None
                score_logits(logits, split.y)
                found = (perf_counter() - start) / len(split)
    return found


def estimate_seconds(recipe: Recipe, data: Dataset, pace: Pace) -> float:
    """Seconds of a whole run at that pace, with an evaluation after each epoch."""
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
    """Seconds of each run by itself."""
    paces: dict[tuple[Any, ...], Pace] = {}
    found = []
    for job in jobs:
        there, seconds = data[job.recipe.data], 0.0
        for share, recipe in kinds_of_steps(job.recipe):
            key = cost_key(recipe, there)
            if key not in paces:
                say(f"measuring {recipe.name}")
                paces[key] = measure_pace(recipe, there, device=device)
            seconds += share * estimate_seconds(recipe, there, paces[key])
        found.append(seconds)
    return found
