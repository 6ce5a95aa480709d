"""A pool of worker processes with one thread each: a small network keeps one core busy.

With one thread a run gives the same bits whatever else runs, so results do not depend on the number of workers. A
worker has a pipe of its own to its parent and shares no lock: one that dies loses its own task and nothing else.

A worker that dies by SIGKILL was most likely killed because memory ran out, which is not its task's fault: the task is
a `WorkerLoss`, to be retried, and from then on there is one worker fewer, as long as another one is left.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from pathlib import Path
from time import monotonic
from typing import Any, Generic, TypeVar

import torch

from flatmin_lab.data.registry import load
from flatmin_lab.execution.local import LocalExecutor, ThisProcess, task_failure
from flatmin_lab.execution.task_queue import (
    Slot,
    Stop,
    Task,
    TaskEnd,
    TaskFailure,
    TaskFunction,
    TaskMessage,
    TaskQueue,
    WorkerLoss,
)
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.runs.events import Event, Progress, RunError
from flatmin_lab.training.loop import train

__all__ = [
    "ProcessPool",
    "Stop",
    "TaskFailure",
    "TrainTask",
    "cores",
    "local_executor",
    "run_in_pool",
    "train_in_pool",
    "train_task",
]
T = TypeVar("T")  # a task
Work = Callable[[T, Stop], Iterator[tuple[int, Event]]]
TrainTask = tuple[int, Job, str]  # a job, its number, and the folder of the data
PoolMessage = tuple[int, Event] | TaskFailure | WorkerLoss | TaskEnd
PARENT = "the parent"  # why a worker stops, as its runs say it
STOP_TIMEOUT_SECONDS = 60.0  # for a worker to save a checkpoint and end; then it is killed
IGNORED_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # sent to the whole process group: the parent decides what to do


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def train_task(task: TrainTask, stop: Stop) -> Iterator[tuple[int, Event]]:
    number, job, root = task
    for event in train(job.recipe, load(job.recipe.data, root), seed=job.seed, stop=stop):
        if not isinstance(event, Progress):
            yield number, event


def train_in_pool(
    jobs: Sequence[Job],
    *,
    workers: int | None = None,
    root: Path | str = "data",
    work: Work[TrainTask] = train_task,
) -> Iterator[tuple[int, Event]]:
    """Train all jobs: their events as they come, each with its job's number, without `Progress`."""
    tasks = [(number, job, str(root)) for number, job in enumerate(jobs)]
    for _, message in run_in_pool(work, tasks, workers=workers):
        if isinstance(message, TaskFailure):
            raise RunError(f"one of the runs failed: {message.why}")
        yield message


def run_in_pool(
    work: Work[T], tasks: Iterable[T], *, workers: int | None = None, stop: Stop = lambda: None
) -> Iterator[tuple[T, tuple[int, Event] | TaskFailure]]:
    """What `work(task, stop)` yields for each task, in a pool of processes.

    A task that raises, or whose worker dies, ends with `TaskFailure`. `work` must be importable from a module. When
    `stop` returns a reason, busy workers are asked to stop and no other task is started.
    """
    pending = iter(tasks)

    def take(slot: Slot) -> T | None:
        return None if stop() else next(pending, None)

    for task, message in _run(work, take, lambda task: stop(), ["cpu"] * (workers or cores())):
        if not isinstance(message, TaskEnd):
            yield task, TaskFailure(message.why) if isinstance(message, WorkerLoss) else message


class ProcessPool(LocalExecutor):
    """The executor with a process for each device."""

    def run(self, function: TaskFunction, queue: TaskQueue[Any]) -> Generator[tuple[Any, TaskMessage, str], None, None]:
        """Each process loads the data of its tasks itself."""
        work: Work[Any] = partial(_run_on_own_data, function)
        for task, message in _run(work, queue.take, queue.stop_reason, self.devices):
            yield task, message, ""


def local_executor(devices: Sequence[str], *, single_thread: bool = False) -> ThisProcess | ProcessPool:
    """A process for each device, or this one if there is one device."""
    return ProcessPool(devices, single_thread=True) if len(devices) > 1 else ThisProcess(devices, single_thread)


def _run_on_own_data(function: TaskFunction, task: Task, stop: Stop) -> Iterator[tuple[int, Event]]:
    return function(task, task.load_data(), stop)


def _run(
    work: Work[T], take: Callable[[Slot], T | None], stop_reason: Callable[[T], str | None], devices: Sequence[str]
) -> Iterator[tuple[T, PoolMessage]]:
    """What `work` yields for the tasks, and how each ended. A task is taken when a worker is free for it."""
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's thread pools in a broken state
    idle = [Slot(device, workers=len(devices)) for device in devices]
    pool: dict[Connection, _WorkerProcess[T]] = {}
    try:
        while True:
            while idle and (task := take(idle[0])) is not None:
                worker = _WorkerProcess(context, work, idle.pop(0))
                pool[worker.pipe] = worker
                worker.assign(task)
            if not pool:
                return
            for worker in pool.values():
                worker.stopping.value = bool(stop_reason(worker.task))
            for pipe in wait(list(pool), timeout=0.1):
                worker = pool[pipe]  # type: ignore[index]
                message = worker.receive()
                is_one_fewer = isinstance(message, WorkerLoss) and len(pool) > 1
                if isinstance(message, WorkerLoss) and is_one_fewer:
                    message = message._replace(why=f"{message.why}, so one process fewer runs from now on")
                yield worker.task, message
                if isinstance(message, TaskFailure | WorkerLoss | TaskEnd):
                    if worker.is_alive() and (task := take(worker.slot)) is not None:
                        worker.assign(task)
                        continue
                    pool.pop(worker.pipe).shut_down()
                    if not is_one_fewer:
                        idle.append(worker.slot)
    finally:  # whatever happened, no worker is left behind
        for worker in pool.values():
            worker.stopping.value = 1
        for worker in pool.values():
            worker.shut_down()


class _WorkerProcess(Generic[T]):
    """A worker process, seen from its parent."""

    task: T
    has_reported = False  # has it sent anything yet?

    def __init__(self, context: SpawnContext, work: Work[T], slot: Slot) -> None:
        self.slot = slot
        self.pipe, there = context.Pipe()
        self.stopping = context.RawValue("b", 0)  # read without a lock
        self.process = context.Process(target=_worker_main, args=(there, work, self.stopping))
        with _sigint_ignored():  # inherited, so that Ctrl-C does not end it while it still imports
            self.process.start()
        there.close()  # so that the end of the process is the end of the pipe

    def assign(self, task: T) -> None:
        self.task, self.stopping.value = task, 0
        with suppress(BrokenPipeError):  # it has died: receive() will say so
            self.pipe.send(task)

    def receive(self) -> PoolMessage:
        """The next message about its task."""
        self.has_reported = True
        try:
            return self.pipe.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):  # also in the middle of a message
            self.process.join()
            return _death(self.process.exitcode)

    def is_alive(self) -> bool:
        return self.process.exitcode is None and not self.pipe.closed

    def shut_down(self) -> None:
        """Let it end. One that takes too long is killed; one that has sent nothing yet has nothing to lose: at once."""
        with suppress(OSError):
            self.pipe.send(_NoMoreTasks())
        until = monotonic() + (STOP_TIMEOUT_SECONDS if self.has_reported else 0)
        while self.process.exitcode is None:  # it may be blocked on a full pipe
            if monotonic() > until:
                self.process.kill()
            with suppress(EOFError, OSError):
                while self.pipe.poll(0.05):
                    self.pipe.recv()
            self.process.join(0.05)
        self.pipe.close()


class _NoMoreTasks:
    """Sent to a worker in place of a task: it ends."""


def _death(code: int | None) -> TaskFailure | WorkerLoss:
    """What the exit code of a process means for its task."""
    if code is None or code >= 0:
        return TaskFailure(f"its process ended with exit code {code}")
    name = signal.Signals(-code).name
    if name == "SIGKILL":
        return WorkerLoss("", "its process was killed (SIGKILL), most likely because memory ran out")
    return TaskFailure(f"its process ended with signal {-code} ({name})")


@contextmanager
def _sigint_ignored() -> Iterator[None]:
    """For a moment, and Ctrl-C alone: other signals must still end the parent."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _worker_main(pipe: Connection, work: Work[Any], stopping: Any) -> None:
    """Receive tasks and run them, with one thread, ignoring signals, until the parent says so or dies."""
    for name in IGNORED_SIGNALS:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    with suppress(EOFError, BrokenPipeError):  # the parent has gone
        while not isinstance(task := pipe.recv(), _NoMoreTasks):
            pipe.send(_run_task(pipe, work, task, stopping))


def _run_task(pipe: Connection, work: Work[Any], task: Any, stopping: Any) -> TaskFailure | TaskEnd:
    """Send all that a task yields, and return how it ended."""
    try:
        for message in work(task, lambda: PARENT if stopping.value else None):
            pipe.send(message)
    except BrokenPipeError:
        raise
    except Exception as error:
        return task_failure(error)
    return TaskEnd()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
