"""Executors on this machine: this process, where tasks follow each other, and what it shares with a pool of processes.

The runs of a task may train together (replicas.py).
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.execution.run_queue import RunQueue
from flatmin_lab.execution.runner import Run, RunOptions
from flatmin_lab.execution.task_queue import Slot, Stop, TaskEnd, TaskFailure, TaskFunction, TaskMessage, TaskQueue
from flatmin_lab.runs.events import RunError
from flatmin_lab.system.machine import facts, hardware
from flatmin_lab.system.threads import computing_with


@dataclass(frozen=True)
class LocalExecutor:
    """A worker for each of the devices; a device may be listed several times."""

    devices: Sequence[str] = ("cpu",)
    single_thread: bool = False

    @property
    def device(self) -> str:
        return self.devices[0]

    @property
    def device_here(self) -> str:
        return self.device

    @property
    def hardware(self) -> str:
        return hardware(torch.device(self.device))

    def facts(self) -> Mapping[str, Any]:
        return facts(torch.device(self.device)) | ({"threads": 1} if self.single_thread else {})

    def capacity(self, tasks: int) -> tuple[int, str]:
        on_cpu, count = self.device == "cpu", len(self.devices)
        count = min(count, max(tasks, 1)) if on_cpu else count
        return count, f"{count} {'process' if on_cpu else 'GPU'}{('es' if on_cpu else 's') if count > 1 else ''}"

    def run_queue(
        self, runs: Sequence[Run], options: RunOptions, datasets: Mapping[str, Dataset], stop: Stop
    ) -> RunQueue:
        at_once = len(self.devices) if self.device == "cpu" else options.at_once
        return RunQueue(runs, options._replace(at_once=at_once), self.facts, datasets, stop)


class ThisProcess(LocalExecutor):
    """The executor without workers; with a single thread, a task gives the same bits as in a pool."""

    def run(self, function: TaskFunction, queue: TaskQueue[Any]) -> Generator[tuple[Any, TaskMessage, str], None, None]:
        while (task := queue.take(Slot(self.device))) is not None:
            with computing_with(1) if self.single_thread else nullcontext():
                ended: TaskEnd | TaskFailure = TaskEnd()
                try:
                    for message in function(task, queue.data_of(task), partial(queue.stop_reason, task)):
                        yield task, message, ""
                except Exception as error:
                    ended = task_failure(error)._replace(error=error)
                yield task, ended, ""


def task_failure(error: Exception) -> TaskFailure:
    """The error in one line; an unexpected kind of error is named too."""
    plain = isinstance(error, RunError | ValueError | OSError)
    return TaskFailure(f"{'' if plain else type(error).__name__ + ': '}{error or type(error).__name__}")
