"""The trials of a tuning as tasks: each is drawn in this process when a worker is free to train it.

When a worker is killed, or lost on a cluster, another one resumes its trial from the last checkpoint; after the third
loss the trial has failed; the others continue. A trial that cannot be trained ends the tuning.
"""

from collections.abc import Callable, Iterator, Set

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.execution.task_queue import NoWorkerError, Slot, Stop, TaskFailure, TaskQueue
from flatmin_lab.runs.events import Event, RunError
from flatmin_lab.tuning.study import Draw
from flatmin_lab.tuning.trial import PRUNED, TrialTask


class TrialQueue(TaskQueue[TrialTask]):
    """Trials that wait to be drawn, about `count`, and those to be retried; those in `pruned` are asked to stop."""

    def __init__(
        self,
        draws: Iterator[Draw],
        count: int,
        task_of: Callable[[Draw, str], TrialTask],
        data: Dataset,
        pruned: Set[int],
        stop: Stop,
    ) -> None:
        super().__init__(stop)
        self.draws, self.count, self.task_of, self.data, self.pruned = draws, count, task_of, data, pruned
        self.retries: list[int] = []
        self.tasks: dict[int, TrialTask] = {}  # all that were handed out, by number

    def waiting_count(self) -> int:
        return 0 if self.stop() else self.count + len(self.retries)

    def stop_reason(self, task: TrialTask) -> str | None:
        return self.stop() or (PRUNED if task.draw.number in self.pruned else None)

    def take(self, slot: Slot) -> TrialTask | None:
        if self.stop():
            return None
        number = next((number for number in self.retries if not self.is_barred(number, slot)), None)
        if number is not None:
            self.retries.remove(number)
            return self.assign(self.tasks[number])
        draw = next(self.draws, None)
        self.count = 0 if draw is None else max(self.count - 1, 0)
        if draw is None:
            return None
        self.tasks[draw.number] = self.task_of(draw, slot.device)
        return self.assign(self.tasks[draw.number])

    def data_of(self, task: TrialTask) -> Dataset:
        return self.data

    def put_back(self, number: int, task: TrialTask) -> None:
        self.retries.append(number)

    def unfinished(self) -> list[int]:
        return [number for number in self.tasks if number not in self.done]

    def fail(self, number: int, task: TrialTask, failure: TaskFailure) -> Iterator[tuple[int, Event]]:
        raise failure.error or RunError(
            f"trial {number} cannot be trained: {failure.why}; the same command resumes, and keeps all that have ended"
        )

    def abandon(self, error: NoWorkerError) -> Iterator[tuple[int, Event]]:
        raise error
