"""Runs (recipe + seed → one result file) on a cluster: each ends exactly once, whatever dies in between.

    with open_scheduler("head:6379") as scheduler:
        for number, event in schedule_runs(runs, options, scheduler, datasets): ...

The run folders stay on this machine and are locked here; a worker has a copy, and its changes are sent back. When a
worker is lost, its runs are retried from their last checkpoints, each alone, so that none takes others with it again. A
run that has lost three workers has failed. As with the processes of one machine, a run gives the same bits wherever it
is trained.
"""

import math
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import IO

import torch

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.execution.cluster.scheduler import Scheduler
from flatmin_lab.execution.cluster.task_queue import LossCounter, TaskEnd, TaskMessage, WorkerLoss
from flatmin_lab.execution.cluster.worker_pool import NoNodeError
from flatmin_lab.execution.process_pool import Stop, TaskFailure
from flatmin_lab.execution.runner import Run, RunOptions, RunTask, run_task_on_data
from flatmin_lab.runs.config import OtherRunError
from flatmin_lab.runs.events import BusyError, Event, Failed, Finished, RunError, Stopped
from flatmin_lab.runs.open_folder import check, lock_folder
from flatmin_lab.system.machine import facts
from flatmin_lab.training.loop import config_of

MAX_RUNS_PER_WORKER = 4  # that train together on a GPU: more gain little


def schedule_runs(
    runs: Sequence[Run],
    options: RunOptions,
    scheduler: Scheduler,
    datasets: Mapping[str, Dataset],
    *,
    stop: Stop = lambda: None,
) -> Iterator[tuple[int, Event]]:
    """The events of all runs as they come, each with its run's number; failures are stored."""
    with ExitStack() as held:
        queue = _RunQueue(runs, options, scheduler, datasets, stop, held)
        try:
            for task, message, node in scheduler.run(run_task_on_data, queue):
                yield from queue.receive(task, message, node)
                yield from queue.take_unreported()
        except NoNodeError as error:
            for number in queue.unfinished():
                yield queue.end(number, Failed(str(error), later=True))
        yield from queue.take_unreported()
        for number in queue.unfinished():
            yield number, Stopped(stop() or "asked to stop", 0)


class _RunQueue:
    """Which runs wait, run and have ended, and how many workers each has lost."""

    def __init__(
        self,
        runs: Sequence[Run],
        options: RunOptions,
        scheduler: Scheduler,
        datasets: Mapping[str, Dataset],
        stop: Stop,
        held: ExitStack,
    ) -> None:
        self.runs, self.scheduler, self.datasets, self.stop, self.held = runs, scheduler, datasets, stop, held
        self.options = options if scheduler.share.gpus else options._replace(at_once=1)  # a CPU worker has one core
        self.pending = list(range(len(runs)))  # in their order
        self.done: set[int] = set()
        self.losses = LossCounter()
        self.locks: dict[int, IO[bytes]] = {}
        self.assigned: dict[int, RunTask] = {}  # the task of each run that is being trained
        self.unreported: list[tuple[int, Event]] = []  # of runs that could not start

    def unfinished(self) -> list[int]:
        return [number for number in range(len(self.runs)) if number not in self.done]

    def take_unreported(self) -> Iterator[tuple[int, Event]]:
        while self.unreported:
            yield self.unreported.pop(0)

    # ---- tasks for the scheduler

    def waiting_count(self) -> int:
        return 0 if self.stop() else len(self.pending)

    def stop_reason(self, task: RunTask) -> str | None:
        return self.stop()

    def take(self, workers: int, node: str, *, others: bool) -> tuple[RunTask, Dataset] | None:
        """On a GPU several runs with one data set, but no more than leaves work for the other workers.

        A run whose worker was lost goes to another node, if there is one.
        """
        size = min(self.options.at_once or MAX_RUNS_PER_WORKER, math.ceil(len(self.pending) / max(workers, 1)))
        taken: list[int] = []
        for number in list(self.pending) if self.waiting_count() else ():
            full = len(taken) == (size if self.scheduler.share.gpus else 1)
            if full or (taken and not self._can_share_worker(number, taken[0])):
                break
            if self.losses.is_barred(number, node, others=others):
                continue
            self.pending.remove(number)
            if self._can_start(number):
                taken.append(number)
        if not taken:
            return None
        task = RunTask({number: self.runs[number] for number in taken}, self.scheduler.device, self.options)
        self.assigned |= dict.fromkeys(taken, task)
        return task, self._dataset(taken[0])

    def _can_share_worker(self, number: int, other: int) -> bool:
        lost = self.losses.has_any(number) or self.losses.has_any(other)
        return self._dataset(number) is self._dataset(other) and not lost

    def _dataset(self, number: int) -> Dataset:
        return self.datasets[self.runs[number].job.recipe.data]

    def _can_start(self, number: int) -> bool:
        """Is its folder this run's, and not in use by another process? If so, it is locked from now on."""
        job, data = self.runs[number].job, self._dataset(number)
        folder = self.options.store.folder(job)
        try:
            check(folder, config_of(job.recipe, data, job.seed), resume=True)
            if number not in self.locks:
                self.locks[number] = self.held.enter_context(lock_folder(folder))
        except (ValueError, OSError, RunError) as error:
            what = error.what if isinstance(error, OtherRunError) else str(error)
            way_out = "" if isinstance(error, RunError) else f" Move {folder} away, or give other --runs"
            busy = isinstance(error, BusyError)
            self.unreported.append(self.end(number, Failed(f"{what}{way_out}", later=True, busy=busy)))
            return False
        return True

    # ---- messages from the workers

    def receive(self, task: RunTask, message: TaskMessage, node: str) -> Iterator[tuple[int, Event]]:
        if isinstance(message, TaskEnd):
            message = WorkerLoss(node[:6], "its task ended without a result")
        if isinstance(message, WorkerLoss | TaskFailure):
            for number in [number for number, own in self.assigned.items() if own is task]:
                if isinstance(message, TaskFailure):
                    yield self.end(number, Failed(message.why))
                else:
                    yield self._retry_or_fail(number, message, node)
            return
        number, event = message
        if self.assigned.get(number) is not task:  # another worker has it by now
            return
        if isinstance(event, Failed) and event.later:  # not the run's own fault: that node could not train it
            yield self._retry_or_fail(number, WorkerLoss(node[:6], event.what), node)
        else:
            yield self.end(number, event) if isinstance(event, Finished | Failed | Stopped) else (number, event)

    def _retry_or_fail(self, number: int, loss: WorkerLoss, node: str) -> tuple[int, Event]:
        """Its worker was lost: back into the queue, to resume from its last checkpoint on another one."""
        self.assigned.pop(number)
        if reason := self.stop():
            return self.end(number, Stopped(reason, 0))
        outcome = self.losses.add(number, loss, node)
        if isinstance(outcome, Failed):
            way_out = "its last checkpoint is kept; look at that node's memory and disk, and try again with --retry"
            return self.end(number, Failed(f"{outcome.what}; {way_out}"))
        insort(self.pending, number)
        return number, outcome

    def end(self, number: int, event: Event) -> tuple[int, Event]:
        store, job = self.options.store, self.runs[number].job
        if isinstance(event, Finished):
            store.write(job, event.result)
        elif isinstance(event, Failed) and not event.later:
            store.write_failure(
                job, event.what, event.step, {**facts(torch.device("cpu")), "hardware": self.scheduler.hardware}
            )
        self.done.add(number)
        self.assigned.pop(number, None)
        if number in self.locks:
            self.locks[number].close()
        return number, event
