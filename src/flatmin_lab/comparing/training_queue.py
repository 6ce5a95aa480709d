"""The runs of a comparison as tasks: all contenders of seed 0, then of seed 1, … within the time limit.

On the CPU a task is one run; on a GPU it is all that is left of a seed, trained together. A seed is started if all of
it would end in time, and a run within a seed if it would. That is unknown until the first run has ended: with a time
limit, only the first seed is started until then. A run that diverges has ended; any other error ends the comparison.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from flatmin_lab.comparing.contender_recipes import Entry
from flatmin_lab.comparing.time_budget import TimeBudget
from flatmin_lab.comparing.training_task import TrainingTask
from flatmin_lab.data.dataset import Dataset
from flatmin_lab.execution.task_queue import NoWorkerError, Slot, Stop, TaskEnd, TaskFailure, TaskMessage, TaskQueue
from flatmin_lab.runs.events import Event, Failed, RunError, Started, Stopped


class Training(NamedTuple):
    entry: Entry
    seed: int


class TrainingQueue(TaskQueue[TrainingTask]):
    """Runs that wait, seed by seed; `out_of_time` once one would not end in time."""

    def __init__(
        self,
        trainings: Sequence[Training],
        data: Dataset,
        budget: TimeBudget,
        stop: Stop,
        *,
        folder: Path,
        root: str,
        checkpoint_epochs: int,
    ) -> None:
        super().__init__(stop)
        self.trainings, self.data, self.budget = trainings, data, budget
        self.folder, self.root, self.checkpoint_epochs = folder, root, checkpoint_epochs
        self.pending = list(range(len(trainings)))  # seed by seed
        self.begun: set[int] = set()  # seeds
        self.began_at: dict[int, float] = {}  # when the first run of a task started, by its first number
        self.timed: set[int] = set()  # runs that started at their first step and have not failed
        self.out_of_time = False

    def waiting_count(self) -> int:
        return 0 if self.stop() or self.out_of_time else len(self.pending)

    def take(self, slot: Slot) -> TrainingTask | None:
        if not self.waiting_count():
            return None
        seed = self.trainings[self.pending[0]].seed
        of_seed = [number for number in self.pending if self.trainings[number].seed == seed]
        numbers = of_seed[:1] if slot.device == "cpu" else of_seed
        is_known = self.budget.seconds is None or self.budget.passes
        if self.begun and seed not in self.begun and not is_known and self.assigned:
            return None  # asked again when a run has ended
        if not self.budget.fits(self._passes(numbers) if seed in self.begun else self._passes_in_turn(of_seed, slot)):
            self.out_of_time = True
            return None
        self.begun.add(seed)
        self.pending = [number for number in self.pending if number not in numbers]
        entries = {number: self.trainings[number].entry for number in numbers}
        return self.assign(TrainingTask(entries, seed, self.folder, slot.device, self.root, self.checkpoint_epochs))

    def _passes(self, numbers: Collection[int]) -> float:
        return sum(self.trainings[number].entry.contender.passes for number in numbers)

    def _passes_in_turn(self, numbers: Sequence[int], slot: Slot) -> float:
        """Those that one worker trains one after the other, if all workers share these runs."""
        if slot.device != "cpu":
            return self._passes(numbers)
        longest = max(self._passes([number]) for number in numbers)
        return max(longest, self._passes(numbers) / slot.workers)

    def receive(self, task: TrainingTask, message: TaskMessage, node: str) -> Iterator[tuple[int, Event]]:
        """A task that was trained from its first step to its last says how long a pass takes."""
        if isinstance(message, TaskEnd) and self.timed.issuperset(task.numbers):
            self.budget.record(self._passes(task.numbers), self.budget.clock() - self.began_at[min(task.numbers)])
        yield from super().receive(task, message, node)

    def receive_event(self, number: int, event: Event, task: TrainingTask, node: str) -> Iterator[tuple[int, Event]]:
        if isinstance(event, Started) and event.step == 0:
            self.timed.add(number)
            self.began_at.setdefault(min(task.numbers), self.budget.clock())
        elif isinstance(event, Failed | Stopped):
            self.timed.discard(number)
        yield from super().receive_event(number, event, task, node)

    def data_of(self, task: TrainingTask) -> Dataset:
        return self.data

    def put_back(self, number: int, task: TrainingTask) -> None:
        self.pending = sorted({*self.pending, number})
        self.timed.discard(number)  # its time includes what was lost
        self.began_at.pop(min(task.numbers), None)

    def unfinished(self) -> list[int]:
        return [number for number in range(len(self.trainings)) if number not in self.done]

    def fail(self, number: int, task: TrainingTask, failure: TaskFailure) -> Iterator[tuple[int, Event]]:
        raise failure.error or RunError(f"a run cannot be trained: {failure.why}")

    def abandon(self, error: NoWorkerError) -> Iterator[tuple[int, Event]]:
        raise error
