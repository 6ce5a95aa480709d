"""Recipe + seed → one result file: train, evaluate, store. Finished runs are skipped, interrupted ones are resumed.

    for number, event in run_all([Run(job, ("attack",))], RunOptions(store), devices=["cuda:0"]): ...

On a GPU several runs train at once (replicas.py); several GPUs have a process each. On the CPU there is a pool of
processes with one thread each (process_pool.py) or, where one worker is enough, this process. Each run is evaluated
when it has finished, from its last checkpoint. A run that fails ends with `Failed`, and the others continue; the
failure is stored beside the results unless it is `later`, that is, not the run's own fault.
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
from flatmin_lab.execution.process_pool import Stop, TaskFailure, cores, one_thread, run_in_pool
from flatmin_lab.execution.replicas import train_together
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.runs.config import OtherRunError
from flatmin_lab.runs.events import Event, Failed, Finished, Measured, RunError, Stopped
from flatmin_lab.runs.open_folder import check
from flatmin_lab.runs.result import split_of
from flatmin_lab.runs.result_store import ResultStore, curves_of, remove_old_checkpoints
from flatmin_lab.system.json_data import read_json
from flatmin_lab.system.machine import facts
from flatmin_lab.training.loop import config_of


class RunOptions(NamedTuple):
    """What all runs of a call have in common."""

    store: ResultStore
    root: str = "data"
    at_once: int | None = None  # runs on one device; None: on a GPU as many as make it faster
    checkpoint_epochs: int = 10
    checkpoint_minutes: float = 10.0


class Run(NamedTuple):
    """A training run, and which measurements to take when it has finished."""

    job: Job
    parts: tuple[str, ...] = ()


class RunTask(NamedTuple):
    """Runs for one device, by their numbers."""

    runs: dict[int, Run]
    device: str
    options: RunOptions

    def paths(self) -> list[Path]:
        """The folders and files that are read and written for them."""
        store, jobs = self.options.store, [run.job for run in self.runs.values()]
        return [path for job in jobs for path in (store.folder(job), store.file(job))]

    def moved_to(self, folder: Path) -> "RunTask":
        """The same runs, with all their paths in that folder."""
        store = ResultStore(folder / "results", folder / "runs")
        return self._replace(options=self.options._replace(store=store))


def run_all(
    runs: Sequence[Run],
    options: RunOptions,
    *,
    devices: Sequence[str],
    workers: int | None = None,
    stop: Stop = lambda: None,
) -> Iterator[tuple[int, Event]]:
    """The events of all runs as they come, each with its run's number; failures are stored.

    When `stop` returns a reason, running runs save a checkpoint and end, and no others are started. When a process
    dies, the runs it was training have failed, and the rest of its task goes to a new process.
    """
    started: set[int] = set()
    ended: set[int] = set()

    def track(number: int, event: Event) -> tuple[int, Event]:
        if isinstance(event, Failed) and not event.later:
            options.store.write_failure(runs[number].job, event.what, event.step, facts(torch.device(devices[0])))
        started.add(number)
        if isinstance(event, Finished | Failed | Stopped):
            ended.add(number)
        return number, event

    while not stop() and len(ended) < len(runs):
        before = len(ended)
        left = {number: run for number, run in enumerate(runs) if number not in ended}
        for number, event in _run_once(left, options, devices, workers, stop):
            if not isinstance(event, TaskFailure):
                yield track(number, event)
            elif number not in ended and number in started:
                yield track(number, Stopped(stop() or "", 0) if stop() else Failed(event.why))
        if len(ended) == before:  # a process that dies before it starts a run would do so again
            for number in left.keys() - ended:
                yield track(number, Failed("its process ended before it had started", later=True))
    for number in range(len(runs)):
        if number not in ended:
            yield number, Stopped(stop() or "asked to stop", 0)


def _run_once(
    runs: dict[int, Run], options: RunOptions, devices: Sequence[str], workers: int | None, stop: Stop
) -> Iterator[tuple[int, Event | TaskFailure]]:
    """The events of all runs, as long as their processes live; a process that dies is a failure of each of its runs."""
    tasks = _make_tasks(runs, options, devices)
    count = (workers or cores()) if devices[0] == "cpu" else len(devices)
    if count == 1:
        for task in tasks:
            with one_thread() if task.device == "cpu" else nullcontext():  # the same bits as in a process of its own
                yield from run_task(task, stop)
        return
    for task, message in run_in_pool(run_task, tasks, workers=count, stop=stop):
        if isinstance(message, TaskFailure):
            yield from ((number, message) for number in task.runs)
        else:
            yield message


def _make_tasks(runs: dict[int, Run], options: RunOptions, devices: Sequence[str]) -> list[RunTask]:
    """On the CPU a task for each run; on GPUs a task for each GPU, with an equal part of the runs of each data set."""
    if devices[0] == "cpu":
        return [RunTask({number: run}, "cpu", options) for number, run in runs.items()]
    shares: list[dict[int, Run]] = [{} for _ in devices]
    for own in _by_data(runs):
        for index, share in enumerate(shares):
            share.update(list(own.items())[index :: len(shares)])
    return [RunTask(share, device, options) for share, device in zip(shares, devices, strict=True) if share]


def _by_data(runs: dict[int, Run]) -> Iterator[dict[int, Run]]:
    for name in dict.fromkeys(run.job.recipe.data for run in runs.values()):
        yield {number: run for number, run in runs.items() if run.job.recipe.data == name}


def run_task(task: RunTask, stop: Stop) -> Iterator[tuple[int, Event]]:
    """Train the runs of a task and evaluate each when it has finished, one data set after the other."""
    for own in _by_data(task.runs):
        name = next(iter(own.values())).job.recipe.data
        yield from run_task_on_data(task._replace(runs=own), _load_data(name, task.options.root), stop)


def run_task_on_data(task: RunTask, dataset: Dataset, stop: Stop) -> Iterator[tuple[int, Event]]:
    """The same for a task whose runs all have this data set."""
    options, device = task.options, torch.device(task.device)
    data = dataset.to(device)
    numbers, folders = [], []
    for number, (job, _) in task.runs.items():
        folder = options.store.folder(job)
        try:
            check(folder, config_of(job.recipe, data, job.seed, device), resume=True)
        except (ValueError, OSError, RunError) as error:
            what = error.what if isinstance(error, OtherRunError) else str(error)
            yield number, Failed(f"{what} Move {folder} away, or give other --runs", later=True)
        else:
            numbers.append(number)
            folders.append(folder)
    events = train_together(
        [task.runs[number].job for number in numbers],
        data,
        device=device,
        folders=folders,
        count=options.at_once,
        resume=True,
        stop=stop,
        checkpoint_epochs=options.checkpoint_epochs,
        checkpoint_minutes=options.checkpoint_minutes,
    )
    try:
        for index, event in events:
            number = numbers[index]
            ended = isinstance(event, Finished)
            for each in evaluate_run(task.runs[number], options, data, device, stop) if ended else [event]:
                yield number, each
    except RunError:  # raised at the end if runs failed; each has yielded its own Failed
        pass


def evaluate_run(run: Run, options: RunOptions, data: Dataset, device: torch.device, stop: Stop) -> Iterator[Event]:
    """Evaluate a trained run and store the result; what the result file has already is not measured again."""
    job, store = run.job, options.store
    folder = store.folder(job)
    try:
        weights = load_run.find_run(folder)
        if weights.describe()["epoch"] != job.recipe.epochs:
            (folder / "result.json").replace(folder / "result.json.damaged")
            yield Failed("its last checkpoint is damaged; the same command resumes it from the one before", later=True)
            return
        known = store.result(job) or _full_result(folder, at_once=options.at_once)
        subject = load_run.subject_of(weights, data, use_ema=False, device=device)
        if "clean_train_nll" not in known:
            known = _write_merged(store, job, known, post_training.measure_every_run(subject, job.recipe))
            yield Measured("always")
        effort = post_training.EFFORTS.get(job.recipe.name.partition("/")[0], post_training.Effort())
        for part in run.parts:
            if stop():
                yield Stopped(stop() or "", 0)
                return
            if part not in known:
                known = _write_merged(store, job, known, post_training.measure(subject, part, effort))
                yield Measured(part)
        remove_old_checkpoints(folder, weights.path)
        yield Finished(known)
    except Exception as error:
        yield Failed(f"it was trained, but could not be evaluated: {type(error).__name__}: {error}", later=True)


def _write_merged(store: ResultStore, job: Job, known: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Store what was found at once, beside what another process may have added meanwhile."""
    whole = {**known, **(store.result(job) or {}), **found}
    store.write(job, whole)
    return whole


def _full_result(folder: Path, *, at_once: int | None) -> dict[str, Any]:
    """result.json with its curves, and with how many runs shared the device, without which its seconds say nothing."""
    result = read_json(folder / "result.json")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {**result, "at_once": at_once, "curves": curves_of(lines, split_of(result))}


@lru_cache(maxsize=1)
def _load_data(name: str, root: str) -> Dataset:
    return load(name, root)
