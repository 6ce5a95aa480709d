"""The scheduler: assigns tasks to the workers of a cluster, yields their events, and notices when a worker is lost.

    for task, message, node in scheduler.run(function, queue): ...

The events of a task come in their order, each after the file changes that it reports. When a worker or its node dies or
cannot continue, that is a `WorkerLoss`: the queue decides whether its task is retried, and nothing more is taken from
that worker.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from time import monotonic, sleep
from typing import Any

import torch

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.execution.cluster import nodes
from flatmin_lab.execution.cluster.file_sync import content, put
from flatmin_lab.execution.cluster.nodes import Node, describe_loss
from flatmin_lab.execution.cluster.run_queue import ClusterRunQueue
from flatmin_lab.execution.cluster.worker import FileChanges, NodeFailure
from flatmin_lab.execution.cluster.worker_pool import WorkerHandle, WorkerPool
from flatmin_lab.execution.process_pool import STOP_TIMEOUT_SECONDS
from flatmin_lab.execution.runner import Run, RunOptions
from flatmin_lab.execution.task_queue import Slot, Stop, Task, TaskEnd, TaskFunction, TaskMessage, TaskQueue, WorkerLoss
from flatmin_lab.runs.events import RunError
from flatmin_lab.system.machine import devices_named, facts


@dataclass(eq=False, kw_only=True)
class Scheduler(WorkerPool):
    """Made by `open_scheduler`."""

    sent_data: dict[str, Any] = field(default_factory=dict)  # references to the data sets that Ray holds, by checksum
    task_numbers: Iterator[int] = field(default_factory=count)

    @property
    def device_here(self) -> str:
        return devices_named(None)[0]

    def facts(self) -> Mapping[str, Any]:
        return {**facts(torch.device("cpu")), "threads": 1, "hardware": self.hardware}

    def capacity(self, tasks: int) -> tuple[int, str]:
        return self.room(), f"{self.room()} at once, if the cluster's nodes are like this one"

    def run_queue(
        self, runs: Sequence[Run], options: RunOptions, datasets: Mapping[str, Dataset], stop: Stop
    ) -> ClusterRunQueue:
        given = options if self.share.gpus else options._replace(at_once=1)  # a CPU worker has one core
        return ClusterRunQueue(runs, given, self.facts, datasets, stop)

    def run(self, function: TaskFunction, queue: TaskQueue[Any]) -> Generator[tuple[Any, TaskMessage, str], None, None]:
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
        except OSError as error:
            if error.errno is not None:  # of a file of ours; Ray's have none
                raise
            raise RunError(
                f"the Ray cluster has gone ({error}): its head has ended, or Ray on this machine has; the same command "
                "resumes once there is a cluster again"
            ) from error
        finally:
            for worker in list(self.workers):
                self.stop_worker(worker)

    # ---- to the workers

    def _assign(self, worker: WorkerHandle, function: TaskFunction, queue: TaskQueue[Any]) -> None:
        """Give an idle worker the next task, or stop it."""
        up = sum(other.info is not None for other in self.workers)
        task = None
        if self.max_workers is None or up <= self.max_workers:
            task = queue.take(Slot(self.device, worker.node.key, self.room(), self._other_nodes(worker.node)))
            if task is None and queue.waiting_count():
                self.history(worker.node).record_loss()  # all that waits was lost there: no new workers for a while
        if task is None:
            self.stop_worker(worker)  # others may need the node
            return
        worker.task, data = task, queue.data_of(task)
        worker.task_number, worker.stop_asked_at = next(self.task_numbers), None
        if data.checksum not in self.sent_data:
            self.sent_data[data.checksum] = self.ray.put(data)
        contents = [content(path) for path in worker.task.paths()]
        stream = worker.actor.run.options(num_returns="streaming")
        worker.pending = stream.remote(
            worker.task_number, function, worker.task, contents, self.sent_data[data.checksum]
        )

    def _other_nodes(self, node: Node) -> list[str]:
        """Those that can run what was lost on `node`, now or when a worker of ours has done its task.

        Not those that other jobs fill, perhaps for days: then it returns to `node`, which gets no new worker before
        its cooldown is over.
        """
        return [other.key for other in self.usable_nodes() if other.key != node.key and not self.is_filled(other)]

    def _ask_to_stop(self, queue: TaskQueue[Any]) -> Iterator[tuple[Any, WorkerLoss, str]]:
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

    def _receive(self, worker: WorkerHandle) -> Generator[tuple[Any, TaskMessage, str], None, None]:
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
