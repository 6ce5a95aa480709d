"""Recipe + seed → one result file: trained, measured, written down. Finished ones are skipped, others gone on with.

    for number, record in carry_out([Run(job, ("attack",))], How(store), devices=["cuda:0"]): ...

On a GPU several trainings run at once (replicas.py), with several GPUs a process each. On a CPU there are processes
with one thread each or, where one is enough, this one. Each training is measured when it has finished, from its last
checkpoint. One that fails says so (`Failed`, which is written down unless it is `later`: nothing of its own), and the
others go on.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.data.registry import load
from flatmin_lab.evaluation import load_run, post_training
from flatmin_lab.execution.process_pool import Died, Stop, cores, in_processes, one_thread
from flatmin_lab.execution.replicas import together
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.runs.config import OtherRunError
from flatmin_lab.runs.events import Event, Failed, Finished, Measured, RunError, Stopped
from flatmin_lab.runs.open_folder import check
from flatmin_lab.runs.result import split_of
from flatmin_lab.runs.result_store import ResultStore, curves_of, remove_old_checkpoints
from flatmin_lab.system.json_data import read_json
from flatmin_lab.system.machine import facts
from flatmin_lab.training.loop import config_of


class How(NamedTuple):
    """What every task needs to know, beside its trainings."""

    store: ResultStore
    root: str = "data"
    at_once: int | None = None  # on a device; None: on a GPU as many as pay
    checkpoint_epochs: int = 10
    checkpoint_minutes: float = 10.0


class Run(NamedTuple):
    """A training, and what is to be measured of it."""

    job: Job
    parts: tuple[str, ...] = ()


class Task(NamedTuple):
    """Trainings on one device, by their numbers."""

    runs: dict[int, Run]
    device: str
    how: How

    def places(self) -> list[Path]:
        """All that is read and written for them."""
        store, jobs = self.how.store, [run.job for run in self.runs.values()]
        return [place for job in jobs for place in (store.folder(job), store.file(job))]

    def moved(self, folder: Path) -> "Task":
        """The same trainings with all their places in that folder."""
        store = ResultStore(folder / "results", folder / "runs")
        return self._replace(how=self.how._replace(store=store))


def carry_out(
    runs: Sequence[Run], how: How, *, devices: Sequence[str], workers: int | None = None, stop: Stop = lambda: None
) -> Iterator[tuple[int, Event]]:
    """The records of all runs as they come, each with its number; what fails is written down.

    Where `stop` gives a reason, those that were begun save and end, and the others are not begun. Where a process dies,
    what it was training has failed, and the rest of its share goes to a new one.
    """
    begun: set[int] = set()
    ended: set[int] = set()

    def heard(number: int, record: Event) -> tuple[int, Event]:
        if isinstance(record, Failed) and not record.later:
            how.store.write_failure(runs[number].job, record.what, record.step, facts(torch.device(devices[0])))
        begun.add(number)
        if isinstance(record, Finished | Failed | Stopped):
            ended.add(number)
        return number, record

    while not stop() and len(ended) < len(runs):
        before = len(ended)
        left = {number: run for number, run in enumerate(runs) if number not in ended}
        for number, record in _once(left, how, devices, workers, stop):
            if not isinstance(record, Died):
                yield heard(number, record)
            elif number not in ended and number in begun:
                yield heard(number, Stopped(stop() or "", 0) if stop() else Failed(record.why))
        if len(ended) == before:  # a process that dies before it has begun anything would do so again
            for number in left.keys() - ended:
                yield heard(number, Failed("its process ended before it had begun", later=True))
    for number in range(len(runs)):
        if number not in ended:
            yield number, Stopped(stop() or "asked to stop", 0)


def _once(
    runs: dict[int, Run], how: How, devices: Sequence[str], workers: int | None, stop: Stop
) -> Iterator[tuple[int, Event | Died]]:
    """All of them, as far as their processes live; of a dead one's share, each with how it died."""
    tasks = _tasks(runs, how, devices)
    count = (workers or cores()) if devices[0] == "cpu" else len(devices)
    if count == 1:
        for task in tasks:
            with one_thread() if task.device == "cpu" else nullcontext():  # as in a process of its own: the same bits
                yield from work(task, stop)
        return
    for task, told in in_processes(work, tasks, workers=count, stop=stop):
        if isinstance(told, Died):
            yield from ((number, told) for number in task.runs)
        else:
            yield told


def _tasks(runs: dict[int, Run], how: How, devices: Sequence[str]) -> list[Task]:
    """On a CPU one a training; on GPUs one a GPU, the trainings of each data set dealt out in turn."""
    if devices[0] == "cpu":
        return [Task({number: run}, "cpu", how) for number, run in runs.items()]
    shares: list[dict[int, Run]] = [{} for _ in devices]
    for own in _by_data(runs):
        for place, share in enumerate(shares):
            share.update(list(own.items())[place :: len(shares)])
    return [Task(share, device, how) for share, device in zip(shares, devices, strict=True) if share]


def _by_data(runs: dict[int, Run]) -> Iterator[dict[int, Run]]:
    for name in dict.fromkeys(run.job.recipe.data for run in runs.values()):
        yield {number: run for number, run in runs.items() if run.job.recipe.data == name}


def work(task: Task, stop: Stop) -> Iterator[tuple[int, Event]]:
    """All that a task says: of its trainings and, after each, of its measurement. One data set after the other."""
    for own in _by_data(task.runs):
        name = next(iter(own.values())).job.recipe.data
        yield from on_data(task._replace(runs=own), _data(name, task.how.root), stop)


def on_data(task: Task, pictures: Dataset, stop: Stop) -> Iterator[tuple[int, Event]]:
    """All that a task says whose trainings have one data set."""
    how, device = task.how, torch.device(task.device)
    data = pictures.to(device)
    numbers, folders = [], []
    for number, (job, _) in task.runs.items():
        folder = how.store.folder(job)
        try:
            check(folder, config_of(job.recipe, data, job.seed, device), resume=True)
        except (ValueError, OSError, RunError) as error:
            what = error.what if isinstance(error, OtherRunError) else str(error)
            yield number, Failed(f"{what} Move {folder} away, or give other --runs", later=True)
        else:
            numbers.append(number)
            folders.append(folder)
    records = together(
        [task.runs[number].job for number in numbers],
        data,
        device=device,
        folders=folders,
        count=how.at_once,
        resume=True,
        stop=stop,
        checkpoint_epochs=how.checkpoint_epochs,
        checkpoint_minutes=how.checkpoint_minutes,
    )
    try:
        for place, record in records:
            number = numbers[place]
            ended = isinstance(record, Finished)
            for told in finished(task.runs[number], how, data, device, stop) if ended else [record]:
                yield number, told
    except RunError:  # of those that failed, each of which has said so
        pass


def finished(run: Run, how: How, data: Dataset, device: torch.device, stop: Stop) -> Iterator[Event]:
    """Measure what was trained, and write it down; what is in the result file already is not measured again."""
    job, store = run.job, how.store
    folder = store.folder(job)
    try:
        weights = load_run.find_run(folder)
        if weights.describe()["epoch"] != job.recipe.epochs:
            (folder / "result.json").replace(folder / "result.json.damaged")
            yield Failed("its last weights are damaged; the same command trains it on from those before", later=True)
            return
        known = store.result(job) or _whole(folder, at_once=how.at_once)
        subject = load_run.subject_of(weights, data, use_ema=False, device=device)
        if "clean_train_nll" not in known:
            known = _added(store, job, known, post_training.measure_every_run(subject, job.recipe))
            yield Measured("always")
        effort = post_training.EFFORTS.get(job.recipe.name.partition("/")[0], post_training.Effort())
        for part in run.parts:
            if stop():
                yield Stopped(stop() or "", 0)
                return
            if part not in known:
                known = _added(store, job, known, post_training.measure(subject, part, effort))
                yield Measured(part)
        remove_old_checkpoints(folder, weights.path)
        yield Finished(known)
    except Exception as error:
        yield Failed(f"it was trained, and could not be measured: {type(error).__name__}: {error}", later=True)


def _added(store: ResultStore, job: Job, known: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Write it down at once, beside what another process may have added meanwhile."""
    whole = {**known, **(store.result(job) or {}), **found}
    store.write(job, whole)
    return whole


def _whole(folder: Path, *, at_once: int | None) -> dict[str, Any]:
    """result.json, with whom it shared its device, without which its seconds say nothing, and its curves."""
    result = read_json(folder / "result.json")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {**result, "at_once": at_once, "curves": curves_of(lines, split_of(result))}


@lru_cache(maxsize=1)
def _data(name: str, root: str) -> Dataset:
    return load(name, root)
