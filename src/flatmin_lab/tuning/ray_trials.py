"""The trials of a tuning on a cluster: each is drawn on this machine when a worker is free to train it.

When a worker is lost, another one resumes its trial from the last checkpoint. A trial that has lost three workers has
failed, and the others continue. A trial that is to be pruned is asked to stop.
"""

from collections.abc import Iterator, Set

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.execution.cluster.scheduler import Scheduler
from flatmin_lab.execution.cluster.task_queue import LossCounter, TaskEnd, WorkerLoss
from flatmin_lab.execution.process_pool import Stop, TaskFailure
from flatmin_lab.runs.events import Event, Note, Stopped
from flatmin_lab.tuning.trial import PRUNED, TrialTask, run_trial_on_data


def schedule_trials(
    tasks: Iterator[TrialTask], count: int, data: Dataset, scheduler: Scheduler, pruned: Set[int], stop: Stop
) -> Iterator[tuple[TrialTask, tuple[int, Event] | TaskFailure]]:
    """Train about `count` tasks on the cluster: their events as they come; `NoNodeError` if no node can train them.

    Trials whose numbers are added to `pruned` are asked to stop.
    """
    queue = _TrialQueue(tasks, count, data, pruned, stop)
    for task, message, node in scheduler.run(run_trial_on_data, queue):
        if isinstance(message, WorkerLoss):
            if not stop():
                yield task, (task.draw.number, queue.retry_or_fail(task, message, node))
        elif not isinstance(message, TaskEnd):
            yield task, message


class _TrialQueue:
    """Trials that wait to be drawn, and those to be retried."""

    def __init__(self, tasks: Iterator[TrialTask], count: int, data: Dataset, pruned: Set[int], stop: Stop) -> None:
        self.tasks, self.count, self.data, self.pruned, self.stop = tasks, count, data, pruned, stop
        self.retries: list[TrialTask] = []
        self.losses = LossCounter()

    def waiting_count(self) -> int:
        return 0 if self.stop() else self.count + len(self.retries)

    def stop_reason(self, task: TrialTask) -> str | None:
        return self.stop() or (PRUNED if task.draw.number in self.pruned else None)

    def take(self, workers: int, node: str, *, others: bool) -> tuple[TrialTask, Dataset] | None:
        if self.stop():
            return None
        for task in self.retries:
            if not self.losses.is_barred(task.draw.number, node, others=others):
                self.retries.remove(task)
                return task, self.data
        new = next(self.tasks, None)
        self.count = 0 if new is None else max(self.count - 1, 0)
        return None if new is None else (new, self.data)

    def retry_or_fail(self, task: TrialTask, loss: WorkerLoss, node: str) -> Event:
        """Its worker was lost: it is retried on another one, unless it was pruned meanwhile or has failed."""
        if task.draw.number in self.pruned:
            return Stopped(PRUNED, 0)
        outcome = self.losses.add(task.draw.number, loss, node)
        if isinstance(outcome, Note):
            self.retries.append(task)
        return outcome
