"""A task of the demo: an ordinary run, or one that ends with a close-up of its network and is then discarded.

This file imports no figures, because every worker process imports it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from flatmin_lab.data.registry import load
from flatmin_lab.evaluation.close_up import close_up
from flatmin_lab.evaluation.load_run import find_run
from flatmin_lab.execution.process_pool import Stop, TrainTask, train_task
from flatmin_lab.recipes.recipe import Job, Recipe
from flatmin_lab.runs.events import Event, Finished, Progress
from flatmin_lab.training.loop import train

METHODS = ("amp", "erm")  # the longer run first


def close_up_jobs(recipes: Mapping[str, Recipe]) -> list[Job]:
    """Runs with seed 0 and a validation split."""
    return [Job(replace(recipes[method], validation=True), 0) for method in METHODS]


def train_with_close_up(task: TrainTask, stop: Stop) -> Iterator[tuple[int, Event]]:
    """The events of a job; one with a validation split has a close-up in its result."""
    number, job, root = task
    if not job.recipe.validation:
        yield from train_task(task, stop)
        return
    data = load(job.recipe.data, root)
    with TemporaryDirectory(prefix="flatmin-demo-") as folder:
        run = Path(folder) / "run"
        for event in train(job.recipe, data, seed=job.seed, folder=run, stop=stop, checkpoint_epochs=job.recipe.epochs):
            if isinstance(event, Finished):
                yield number, Finished({**event.result, "close_up": close_up(find_run(run), data)})
            elif not isinstance(event, Progress):
                yield number, event
