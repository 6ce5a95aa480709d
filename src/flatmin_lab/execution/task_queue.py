"""The bookkeeping of runs and trials, the same for every executor: each ends exactly once, whatever dies in between.

    its task raised, or its process crashed        it has failed; one that had not started yet waits again
    its worker was killed, or lost with its node   it is retried, elsewhere if possible; the third time it has failed
    asked to stop                                  it is stopped, whatever happens to its worker

A task is one or several runs, or a trial of a tuning, each known by its number. A subclass of `TaskQueue` says which
tasks there are, and what is stored of an end.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.runs.events import Event, Failed, Finished, Note, RunError, Stopped

MAX_ATTEMPTS = 3  # workers lost with one run before it has failed: it may be what kills them
TaskT = TypeVar("TaskT")
T = TypeVar("T", bound="Task")
Stop = Callable[[], str | None]  # why to stop, or None
TaskFunction = Callable[[Any, Dataset, Stop], Iterator[tuple[int, Event]]]


class Slot(NamedTuple):
    """A worker that is free for a task."""

    device: str
    node: str = ""  # of a cluster
    workers: int = 1  # of the executor, this one included
    others: Collection[str] = ()  # the cluster's other nodes that can run it and are not filled by other jobs


class Task(Protocol):
    """What a worker runs, on some files and folders: `paths` lists the same ones in the same order on every machine."""

    @property
    def device(self) -> str: ...
    @property
    def numbers(self) -> Collection[int]: ...
    def load_data(self) -> Dataset: ...
    def paths(self) -> Sequence[Path]: ...
    def moved_to(self: TaskT, folder: Path) -> TaskT: ...


class TaskFailure(NamedTuple):
    """A task raised an error, or its process crashed: it would do so again."""

    why: str
    error: Exception | None = None  # of a task in this process


class WorkerLoss(NamedTuple):
    """A worker was killed, or its node died or could not continue, in the middle of a task: another one may do it."""

    where: str  # the node of a cluster; empty on this machine
    why: str


class TaskEnd(NamedTuple):
    """The last message about a task that did not fail."""


TaskMessage = tuple[int, Event] | TaskFailure | WorkerLoss | TaskEnd


class NoWorkerError(RunError):
    """No worker can run the tasks, now or soon."""


class TaskQueue(ABC, Generic[T]):
    """Which numbers run and have ended, and how many workers each has lost; a subclass knows those that wait."""

    def __init__(self, stop: Stop) -> None:
        self.stop = stop
        self.assigned: dict[int, T] = {}  # the task of each number that runs
        self.started: set[int] = set()
        self.done: set[int] = set()
        self.lost_on: dict[int, list[str]] = defaultdict(list)  # nodes
        self.came_back: set[int] = set()  # from a process that had started nothing of its task
        self.refused: list[tuple[int, Event]] = []  # ends of those that could not be handed out

    # ---- what a subclass says

    @abstractmethod
    def waiting_count(self) -> int:
        """About how many tasks there are at the moment."""

    @abstractmethod
    def take(self, slot: Slot) -> T | None:
        """The next task for that worker, or None if there is none for it."""

    @abstractmethod
    def data_of(self, task: T) -> Dataset:
        """The data set of a task; a process of its own loads it itself, by `Task.load_data`."""

    @abstractmethod
    def put_back(self, number: int, task: T) -> None:
        """It waits again."""

    @abstractmethod
    def unfinished(self) -> list[int]:
        """All that wait or run."""

    def store(self, number: int, event: Finished | Failed | Stopped) -> None:
        """It has ended."""

    def stop_reason(self, task: T) -> str | None:
        """Why a running task should stop, or None."""
        return self.stop()

    def abandon(self, error: NoWorkerError) -> Iterator[tuple[int, Event]]:
        """No worker can run what is left."""
        for number in self.unfinished():
            yield self.end(number, Failed(str(error), later=True))

    # ---- what all have in common

    def assign(self, task: T) -> T:
        self.assigned |= dict.fromkeys(task.numbers, task)
        return task

    def end(self, number: int, event: Finished | Failed | Stopped) -> tuple[int, Event]:
        self.done.add(number)
        self.assigned.pop(number, None)
        self.store(number, event)
        return number, event

    def take_refused(self) -> Iterator[tuple[int, Event]]:
        while self.refused:
            yield self.refused.pop(0)

    def is_barred(self, number: int, slot: Slot) -> bool:
        """Was a worker lost with it on that node, and on some other node not? Lost on all, it may go anywhere."""
        lost = self.lost_on[number]
        return slot.node in lost and any(node not in lost for node in slot.others)

    def receive(self, task: T, message: TaskMessage, node: str) -> Iterator[tuple[int, Event]]:
        """What a message about a task means for its numbers; nothing for those that another worker has by now."""
        if isinstance(message, TaskEnd):
            message = WorkerLoss(node[:6], "its task ended without a result")
        if isinstance(message, TaskFailure | WorkerLoss):
            for number in [number for number, own in self.assigned.items() if own is task]:
                yield from self.interrupt(number, task, message, node)
            return
        number, event = message
        if self.assigned.get(number) is task:
            self.started.add(number)
            yield from self.receive_event(number, event, task, node)

    def receive_event(self, number: int, event: Event, task: T, node: str) -> Iterator[tuple[int, Event]]:
        yield self.end(number, event) if isinstance(event, Finished | Failed | Stopped) else (number, event)

    def interrupt(self, number: int, task: T, how: TaskFailure | WorkerLoss, node: str) -> Iterator[tuple[int, Event]]:
        """Its task is over, and it has not ended."""
        self.assigned.pop(number)
        if reason := self.stop_reason(task):
            yield self.end(number, Stopped(reason, 0))
        elif isinstance(how, WorkerLoss):
            yield self._retry_or_fail(number, task, how, node)
        else:
            yield from self.fail(number, task, how)

    def fail(self, number: int, task: T, failure: TaskFailure) -> Iterator[tuple[int, Event]]:
        """One that had not started waits again, but only once for a process that started nothing."""
        if number in self.started:
            yield self.end(number, Failed(failure.why))
        elif number in self.came_back:
            yield self.end(number, Failed("its process ended before it had started", later=True))
        else:
            if self.started.isdisjoint(task.numbers):
                self.came_back.add(number)
            self.put_back(number, task)

    def _retry_or_fail(self, number: int, task: T, loss: WorkerLoss, node: str) -> tuple[int, Event]:
        self.lost_on[number].append(node)
        count = len(self.lost_on[number])
        if count == MAX_ATTEMPTS:
            return self.end(number, Failed(self.describe_losses(loss)))
        self.put_back(number, task)
        where = f" on node {loss.where}" if loss.where else ""
        text = f"worker lost{where}: {loss.why}; retried, attempt {count + 1} of {MAX_ATTEMPTS}"
        return number, Note(text)

    def describe_losses(self, last: WorkerLoss) -> str:
        where = f" on node {last.where}" if last.where else ""
        return f"worker lost {MAX_ATTEMPTS} times, the last time{where}: {last.why}"
