"""The scheduler: assigns tasks to the workers of a cluster, yields their events, and notices when a worker is lost.

    for task, message, node in scheduler.run(function, queue): ...

The events of a task come in their order, each after the file changes that it reports. When a worker or its node dies or
cannot continue, that is a `WorkerLoss`: the queue decides whether its task is retried, and nothing more is taken from
that worker.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from time import monotonic, sleep
from typing import Any

from flatmin_lab.execution.cluster import nodes
from flatmin_lab.execution.cluster.file_sync import content, put
from flatmin_lab.execution.cluster.nodes import Node, describe_loss
from flatmin_lab.execution.cluster.task_queue import TaskEnd, TaskMessage, TaskQueue, WorkerLoss
from flatmin_lab.execution.cluster.worker import DataTaskFunction, FileChanges, NodeFailure, Task
from flatmin_lab.execution.cluster.worker_pool import WorkerHandle, WorkerPool
from flatmin_lab.execution.process_pool import STOP_TIMEOUT_SECONDS
from flatmin_lab.runs.events import RunError


@dataclass(eq=False, kw_only=True)
class Scheduler(WorkerPool):
    """Made by `open_scheduler`."""

    sent_data: dict[str, Any] = field(default_factory=dict)  # references to the data sets that Ray holds, by checksum
    task_numbers: Iterator[int] = field(default_factory=count)

    def run(self, function: DataTaskFunction, queue: TaskQueue) -> Iterator[tuple[Any, TaskMessage, str]]:
        """Run `function` on the tasks of the queue until there are none: each message with its task and its node."""
        self.usable_at = monotonic()
        try:
            while True:
                for worker in [worker for worker in self.workers if worker.info is not None and not worker.is_busy]:
                    self._assign(worker, function, queue)
                if not any(worker.is_busy for worker in self.workers) and not queue.waiting_count():
                    return
                self.start_workers(queue.waiting_count())
                yield from self._ask_to_stop(queue)
                for worker in self._ready_workers():
                    yield from self._receive(worker)
        finally:
            for worker in list(self.workers):
                self.stop_worker(worker)

    # ---- to the workers

    def _assign(self, worker: WorkerHandle, function: DataTaskFunction, queue: TaskQueue) -> None:
        """Give an idle worker the next task, or stop it."""
        up = sum(other.info is not None for other in self.workers)
        others = any(node.key != worker.node.key for node in self.usable_nodes())
        taken = None
        if self.max_workers is None or up <= self.max_workers:
            taken = queue.take(self.room(), worker.node.key, others=others)
            if taken is None and queue.waiting_count():
                self.history(worker.node).record_loss()  # all that waits was lost there: no new workers for a while
        if taken is None:
            self.stop_worker(worker)  # others may need the node
            return
        worker.task, data = taken
        worker.task_number, worker.stop_asked_at = next(self.task_numbers), None
        if data.checksum not in self.sent_data:
            self.sent_data[data.checksum] = self.ray.put(data)
        contents = [content(path) for path in worker.task.paths()]
        stream = worker.actor.run.options(num_returns="streaming")
        worker.pending = stream.remote(
            worker.task_number, function, worker.task, contents, self.sent_data[data.checksum]
        )

    def _ask_to_stop(self, queue: TaskQueue) -> Iterator[tuple[Any, WorkerLoss, str]]:
        """Ask workers to stop whose task should; one that does not within the timeout is lost."""
        for worker in [worker for worker in self.workers if worker.is_busy]:
            if worker.stop_asked_at is None and (reason := queue.stop_reason(worker.task)):
                worker.stop_asked_at = monotonic()
                worker.actor.stop.remote(worker.task_number, reason)
            elif worker.stop_asked_at is not None and monotonic() - worker.stop_asked_at > STOP_TIMEOUT_SECONDS:
                yield self._lose(worker, f"it did not stop within {STOP_TIMEOUT_SECONDS:.0f} s")

    # ---- from the workers

    def _ready_workers(self) -> list[WorkerHandle]:
        if not self.workers:
            sleep(0.1)
            return []
        by_pending = {worker.pending: worker for worker in self.workers}
        ready, _ = self.ray.wait(list(by_pending), num_returns=1, timeout=0.1)
        return [by_pending[reference] for reference in ready]

    def _receive(self, worker: WorkerHandle) -> Iterator[tuple[Any, TaskMessage, str]]:
        if not worker.is_busy:
            self.check_worker(worker)
            return
        task, node = worker.task, worker.node
        try:
            message = self.ray.get(next(worker.pending))
        except StopIteration:
            worker.task = None
            self.histories.pop(node.key, None)
            yield task, TaskEnd(), node.key
        except self.ray.exceptions.RayError as error:
            yield self._lose(worker, describe_loss(error))
        else:
            if isinstance(message, NodeFailure):
                yield self._lose(worker, message.why)
            elif isinstance(message, FileChanges):
                self._apply_changes(task, message)
            else:
                yield task, message, node.key

    def _lose(self, worker: WorkerHandle, why: str) -> tuple[Any, WorkerLoss, str]:
        self.stop_worker(worker)
        self.history(worker.node).record_loss()
        return worker.task, WorkerLoss(worker.node.name, why), worker.node.key

    @staticmethod
    def _apply_changes(task: Task, message: FileChanges) -> None:
        for number, change in message.changes.items():
            path = task.paths()[number]
            try:
                put(path, change)
            except OSError as error:
                raise RunError(
                    f"what a worker sent back could not be written to {path} ({error}); make room, and the same "
                    "command resumes from the checkpoints that are there"
                ) from error


@contextmanager
def open_scheduler(
    address: str | None,
    *,
    device: str | None = None,
    gpus: float | None = None,
    max_workers: int | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> Iterator[Scheduler]:
    """A scheduler on the cluster at that address, whose workers each take a CPU, or on GPUs `gpus` of a GPU too."""
    with nodes.ray_connection(address) as ray:
        found: Sequence[Node] = nodes.alive_nodes(ray)
        where, share = nodes.choose_device(found, device, gpus)
        scheduler = Scheduler(ray=ray, device=where, share=share, max_workers=max_workers, say=say)
        room = scheduler.room()
        say(f"{nodes.describe_nodes(found)}: room for {room} worker{'s' if room != 1 else ''}, each with {share}")
        yield scheduler
