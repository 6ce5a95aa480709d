"""Many runs on an executor, each evaluated and stored when it has finished.

    for number, event in run_all([Run(job, ("attack",))], RunOptions(store), executor): ...

On the CPU a task is one run; on a GPU it is an equal part of the runs of a data set, which train together. A run that
fails ends with `Failed`, and the others continue; the failure is stored beside the results unless it is `later`, that
is, not the run's own fault.
"""

import math
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any, Protocol

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.execution.executor import Executor, run_tasks
from flatmin_lab.execution.pace import kind_of
from flatmin_lab.execution.runner import Run, RunOptions, RunTask, run_task_on_data
from flatmin_lab.execution.task_queue import Slot, Stop, TaskEnd, TaskFailure, TaskMessage, TaskQueue, WorkerLoss
from flatmin_lab.runs.events import Event, Failed, Finished, Stopped, Timed


class RunExecutor(Executor, Protocol):
    """An executor that says how runs wait for it."""

    def run_queue(
        self, runs: Sequence[Run], options: RunOptions, datasets: Mapping[str, Dataset], stop: Stop
    ) -> "RunQueue": ...


def run_all(
    runs: Sequence[Run],
    options: RunOptions,
    executor: RunExecutor,
    datasets: Mapping[str, Dataset] | None = None,
    *,
    stop: Stop = lambda: None,
) -> Iterator[tuple[int, Event]]:
    """The events of all runs as they come, each with its run's number; failures are stored.

    When `stop` returns a reason, running runs save a checkpoint and end, and no others are started. When a process
    crashes, the runs it was training have failed, and the rest of its task goes to a new process; when one is killed,
    they are retried. Data sets that are not given are loaded by name.
    """
    with closing(executor.run_queue(runs, options, datasets or {}, stop)) as queue:
        yield from run_tasks(executor, run_task_on_data, queue)


class RunQueue(TaskQueue[RunTask]):
    """Runs that are trained on this machine; their processes lock their folders and write their results."""

    after_losses = "use fewer --workers"  # what to do when a run has lost its last worker

    def __init__(
        self,
        runs: Sequence[Run],
        options: RunOptions,
        facts: Callable[[], Mapping[str, Any]],
        datasets: Mapping[str, Dataset],
        stop: Stop,
    ) -> None:
        super().__init__(stop)
        self.runs, self.options, self.facts, self.datasets = runs, options, facts, datasets
        self.pending = list(range(len(runs)))  # in their order

    def close(self) -> None:
        """Nothing is handed out any more."""

    def waiting_count(self) -> int:
        return 0 if self.stop() else len(self.pending)

    def unfinished(self) -> list[int]:
        return [number for number in range(len(self.runs)) if number not in self.done]

    def put_back(self, number: int, task: RunTask) -> None:
        insort(self.pending, number)

    def take(self, slot: Slot) -> RunTask | None:
        """The next run, and on a GPU others with the same data set; those whose worker was lost run alone."""
        taken: list[int] = []
        size = 1
        for number in list(self.pending) if self.waiting_count() else ():
            if self.is_barred(number, slot) or (taken and not self._can_share_worker(number, taken[0])):
                continue
            if len(taken) == size:
                break
            size = size if taken else self.task_size(number, slot)
            self.pending.remove(number)
            if self.can_start(number):
                taken.append(number)
        if not taken:
            return None
        return self.assign(RunTask({number: self.runs[number] for number in taken}, slot.device, self.options))

    def task_size(self, number: int, slot: Slot) -> int:
        """How many runs to train together: on a GPU, its equal part of the runs of the data set."""
        same = self.groups.count(self.groups[number])
        return 1 if slot.device == "cpu" else math.ceil(same / slot.workers)

    def can_start(self, number: int) -> bool:
        """Can it be handed out? If not, it has ended."""
        return True

    def data_name(self, number: int) -> str:
        return self.runs[number].job.recipe.data

    def _can_share_worker(self, number: int, other: int) -> bool:
        was_lost = self.lost_on[number] or self.lost_on[other]
        return self.groups[number] == self.groups[other] and not was_lost

    @cached_property
    def groups(self) -> list[str]:
        """What runs that train together have in common: the data set, and with a deadline what a pass takes."""
        recipes = [run.job.recipe for run in self.runs]
        return [recipe.data if self.options.deadline is None else kind_of(recipe) for recipe in recipes]

    def receive(self, task: RunTask, message: TaskMessage, node: str) -> Iterator[tuple[int, Event]]:
        """What a run took, also after its end, is for those that are started later."""
        timed = None if isinstance(message, TaskFailure | WorkerLoss | TaskEnd) else message[1]
        if not isinstance(timed, Timed):
            yield from super().receive(task, message, node)
        elif self.options.deadline is not None:
            self.options.deadline.pace.add(timed)

    def data_of(self, task: RunTask) -> Dataset:
        name = self.data_name(next(iter(task.numbers)))
        return self.datasets[name] if name in self.datasets else task.load_data()

    def describe_losses(self, last: WorkerLoss) -> str:
        way_out = f"its last checkpoint is kept; {self.after_losses}, and try again with --retry"
        return f"{super().describe_losses(last)}; {way_out}"

    def store(self, number: int, event: Finished | Failed | Stopped) -> None:
        if isinstance(event, Failed) and not event.later:
            self.options.store.write_failure(self.runs[number].job, event.what, event.step, self.facts())
