"""Runs on a cluster: their folders stay on this machine and are locked here, and workers have copies.

    with open_scheduler("head:6379") as scheduler:
        for number, event in schedule_runs(runs, options, scheduler, datasets): ...

When a worker is lost, its runs are retried from their last checkpoints, each alone, so that none takes others with it
again. As with the processes of one machine, a run gives the same bits wherever it is trained.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import IO

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.execution.run_queue import RunExecutor, RunQueue, run_all
from flatmin_lab.execution.runner import Run, RunOptions, RunTask, check_folder, refusal
from flatmin_lab.execution.task_queue import Slot, Stop, WorkerLoss
from flatmin_lab.runs.events import Event, Failed, Finished, RunError, Stopped
from flatmin_lab.runs.open_folder import lock_folder
from flatmin_lab.training.loop import config_of

MAX_RUNS_PER_WORKER = 4  # that train together on a GPU: more gain little


def schedule_runs(
    runs: Sequence[Run],
    options: RunOptions,
    scheduler: RunExecutor,
    datasets: Mapping[str, Dataset],
    *,
    stop: Stop = lambda: None,
) -> Iterator[tuple[int, Event]]:
    """The events of all runs as they come, each with its run's number; failures are stored."""
    return run_all(runs, options, scheduler, datasets, stop=stop)


class ClusterRunQueue(RunQueue):
    """Runs whose folders are locked here while workers train copies of them."""

    after_losses = "look at that node's memory and disk"

    @cached_property
    def locks(self) -> dict[int, IO[bytes]]:
        return {}

    def close(self) -> None:
        for held in self.locks.values():
            held.close()

    def task_size(self, number: int, slot: Slot) -> int:
        """No more runs on a GPU than leaves work for the other workers."""
        share = math.ceil(len(self.pending) / max(slot.workers, 1))
        return min(self.options.at_once or MAX_RUNS_PER_WORKER, share)

    def can_start(self, number: int) -> bool:
        """Is its folder this run's, and not in use by another process? If so, it is locked from now on."""
        job, data = self.runs[number].job, self.datasets[self.data_name(number)]
        folder = self.options.store.folder(job)
        try:
            check_folder(folder, config_of(job.recipe, data, job.seed))
            if number not in self.locks:
                self.locks[number] = lock_folder(folder)
        except (ValueError, OSError, RunError) as error:
            self.refused.append(self.end(number, refusal(error, folder)))
            return False
        return True

    def receive_event(self, number: int, event: Event, task: RunTask, node: str) -> Iterator[tuple[int, Event]]:
        """A failure that is not the run's own fault is the node's: the run is retried."""
        if isinstance(event, Failed) and event.later:
            yield from self.interrupt(number, task, WorkerLoss(node[:6], event.what), node)
        else:
            yield from super().receive_event(number, event, task, node)

    def store(self, number: int, event: Finished | Failed | Stopped) -> None:
        super().store(number, event)
        if isinstance(event, Finished):
            self.options.store.write(self.runs[number].job, event.result)
        if number in self.locks:
            self.locks[number].close()
