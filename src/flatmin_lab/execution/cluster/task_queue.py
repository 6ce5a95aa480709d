"""A queue of tasks for the scheduler, and the messages about a task that runs.

A `TaskQueue` hands out tasks one by one and decides what happens to a task whose worker was lost: it is retried, and
fails with the third loss (`LossCounter`).
"""

from collections import defaultdict
from typing import Any, NamedTuple, Protocol

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.execution.cluster.worker import Task
from flatmin_lab.execution.process_pool import TaskFailure
from flatmin_lab.runs.events import Event, Failed, Note

MAX_ATTEMPTS = 3  # workers lost with one task before it has failed: it may be what kills them


class WorkerLoss(NamedTuple):
    """A worker died, or its node died or could not continue, in the middle of a task."""

    where: str  # the node
    why: str


class TaskEnd(NamedTuple):
    """The last message about a task."""


TaskMessage = tuple[int, Event] | TaskFailure | WorkerLoss | TaskEnd


class LossCounter:
    """How many workers were lost with each run or trial, by its number, and on which nodes."""

    def __init__(self) -> None:
        self.nodes: dict[int, list[str]] = defaultdict(list)

    def add(self, number: int, loss: WorkerLoss, node: str) -> Note | Failed:
        """Count one more: `Note` if it is to be retried, or `Failed`."""
        self.nodes[number].append(node)
        count = len(self.nodes[number])
        if count == MAX_ATTEMPTS:
            return Failed(f"worker lost {MAX_ATTEMPTS} times, the last time on node {loss.where}: {loss.why}")
        return Note(f"worker lost on node {loss.where}: {loss.why}; retried, attempt {count + 1} of {MAX_ATTEMPTS}")

    def has_any(self, number: int) -> bool:
        return bool(self.nodes[number])

    def is_barred(self, number: int, node: str, *, others: bool) -> bool:
        """Was a worker lost with it on that node, and are there other nodes?"""
        return others and node in self.nodes[number]


class TaskQueue(Protocol):
    """Where the scheduler gets its tasks from."""

    def waiting_count(self) -> int:
        """About how many tasks there are at the moment."""

    def take(self, workers: int, node: str, *, others: bool) -> tuple[Task, Dataset] | None:
        """The next task for a worker on that node, or None if there is none for it.

        `workers` is how many fit on the cluster, `others` whether there are nodes beside this one.
        """

    def stop_reason(self, task: Any) -> str | None:
        """Why a running task should stop, or None."""
