"""Recipe + seed → one result file: trained, measured, written down. Finished ones are skipped, others gone on with.

    for number, record in carry_out(jobs, ledger, devices=["cuda:0"], parts=("attack",)): ...

On a GPU several trainings run at once (replicas.py), with several GPUs a process each; on a CPU a process a training,
with one thread. Each training is measured when it has finished, from its last checkpoint. One that fails says so
(`Failed`), and the others go on.
"""

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flatmin_lab import afterwards, trained
from flatmin_lab.data.catalogue import load
from flatmin_lab.data.dataset import Dataset
from flatmin_lab.ledger import Ledger, curves_of, tidy
from flatmin_lab.machine import facts
from flatmin_lab.recipe import Job
from flatmin_lab.records import Failed, Finished, Record, RunError, Stopped
from flatmin_lab.replicas import together
from flatmin_lab.results import split_of
from flatmin_lab.run_config import read_json
from flatmin_lab.run_opening import check
from flatmin_lab.train import config_of
from flatmin_lab.workers import Died, Stop, in_processes


class How(NamedTuple):
    """What every task needs to know, beside its trainings."""

    ledger: Ledger
    parts: tuple[str, ...] = ()
    root: str = "data"
    at_once: int | None = None  # on a GPU; None: as many as pay
    checkpoint_epochs: int = 10
    checkpoint_minutes: float = 10.0


class Task(NamedTuple):
    """Trainings on one device, by their numbers."""

    jobs: dict[int, Job]
    device: str
    how: How


def carry_out(
    jobs: Sequence[Job], how: How, *, devices: Sequence[str], workers: int | None = None, stop: Stop = lambda: None
) -> Iterator[tuple[int, Record]]:
    """The records of all jobs as they come, each with its job's number; what fails is written down.

    Where `stop` gives a reason, those that were begun save and end, and the others are not begun.
    """
    tasks = _tasks(jobs, how, devices)
    ended: set[int] = set()

    def heard(number: int, record: Record) -> tuple[int, Record]:
        if isinstance(record, Failed) and not record.busy:
            where = torch.device(devices[0])
            how.ledger.write_failure(jobs[number], record.what, record.step, facts(where))
        if isinstance(record, Finished | Failed | Stopped):
            ended.add(number)
        return number, record

    if len(devices) == 1 and devices[0] != "cpu":
        for task in tasks:
            if not stop():
                for said in work(task, stop):
                    yield heard(*said)
    else:
        at_once = workers if devices[0] == "cpu" else len(devices)
        for task, told in in_processes(work, tasks, workers=at_once, stop=stop):
            if isinstance(told, Died):
                for number in task.jobs.keys() - ended:
                    yield heard(number, Failed(told.why))
            else:
                yield heard(*told)
    for number in range(len(jobs)):
        if number not in ended:
            yield number, Stopped(stop() or "asked to stop", 0)


def _tasks(jobs: Sequence[Job], how: How, devices: Sequence[str]) -> list[Task]:
    """On a CPU one a training; on GPUs one a GPU, the trainings of each data set dealt out in turn."""
    if devices[0] == "cpu":
        return [Task({number: job}, "cpu", how) for number, job in enumerate(jobs)]
    shares: list[dict[int, Job]] = [{} for _ in devices]
    for name in dict.fromkeys(job.recipe.data for job in jobs):
        own = [(number, job) for number, job in enumerate(jobs) if job.recipe.data == name]
        for place, share in enumerate(shares):
            share.update(own[place :: len(shares)])
    return [Task(share, device, how) for share, device in zip(shares, devices, strict=True) if share]


def work(task: Task, stop: Stop) -> Iterator[tuple[int, Record]]:
    """All that a task says: of its trainings and, after each, of its measurement. One data set after the other."""
    for name in dict.fromkeys(job.recipe.data for job in task.jobs.values()):
        own = {number: job for number, job in task.jobs.items() if job.recipe.data == name}
        yield from _on_one_set(task._replace(jobs=own), _data(name, task.how.root), stop)


def _on_one_set(task: Task, pictures: Dataset, stop: Stop) -> Iterator[tuple[int, Record]]:
    how, device = task.how, torch.device(task.device)
    data = pictures.to(device)
    numbers, folders = [], []
    for number, job in task.jobs.items():
        try:
            check(how.ledger.folder(job), config_of(job.recipe, data, job.seed, device), resume=True)
        except (ValueError, OSError, RunError) as error:
            yield number, Failed(str(error))
        else:
            numbers.append(number)
            folders.append(how.ledger.folder(job))
    records = together(
        [task.jobs[number] for number in numbers],
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
            yield number, finished(task.jobs[number], how, data, device) if ended else record
    except RunError:  # of those that failed, each of which has said so
        pass


def finished(job: Job, how: How, data: Dataset, device: torch.device) -> Record:
    """Measure what was trained, and write it down; what is in the result file already is not measured again."""
    folder = how.ledger.folder(job)
    try:
        run = trained.find(folder)
        known = how.ledger.result(job) or _whole(folder, at_once=1 if device.type == "cpu" else how.at_once)
        subject = trained.subject_of(run, data, averaged=False, device=device)
        if "clean_train_nll" not in known:
            known |= afterwards.always(subject, job.recipe)
            how.ledger.write(job, known)  # what takes longer comes later
        effort = afterwards.EFFORTS.get(job.recipe.name.partition("/")[0], afterwards.Effort())
        for part in how.parts:
            if part not in known:
                known |= afterwards.further(subject, part, effort)
                how.ledger.write(job, known)
        tidy(folder)
        return Finished(known)
    except Exception as error:
        return Failed(f"it was trained, and could not be measured: {type(error).__name__}: {error}")


def _whole(folder: Path, *, at_once: int | None) -> dict[str, Any]:
    """result.json, with whom it shared its device, without which its seconds say nothing, and its curves."""
    result = read_json(folder / "result.json")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {**result, "at_once": at_once, "curves": curves_of(lines, split_of(result))}


@lru_cache(maxsize=1)
def _data(name: str, root: str) -> Dataset:
    return load(name, root)
