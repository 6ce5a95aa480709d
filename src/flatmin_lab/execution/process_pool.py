"""Many trainings side by side, each in a process of its own with one thread: a small network keeps one core busy.

With one thread a training gives the same bits whatever else runs, so results do not depend on the number of workers. A
worker has a pipe of its own to its parent, and no lock with anyone: one that dies (killed, out of memory) takes its own
task with it and nothing else.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from pathlib import Path
from time import monotonic
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from flatmin_lab.data.registry import load
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.runs.events import Event, Progress, RunError
from flatmin_lab.training.loop import train

Task = TypeVar("Task")
Stop = Callable[[], str | None]
Work = Callable[[Task, Stop], Iterator[tuple[int, Event]]]
PARENT = "the parent"  # who stopped it, as a worker sees it
PATIENCE = 60.0  # seconds for a worker that was asked to stop
IGNORED = ("SIGINT", "SIGTERM", "SIGHUP")  # sent to all processes of a group: what to do is the parent's business


class Died(NamedTuple):
    """How a worker ended that did not finish its task."""

    why: str


@contextmanager
def one_thread() -> Iterator[None]:
    """As a worker has it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(
    jobs: Sequence[Job], *, workers: int | None = None, root: Path | str = "data"
) -> Iterator[tuple[int, Event]]:
    """The records of all jobs as they come, each with its job's number; those inside an epoch are left out."""
    tasks = [(number, job, str(root)) for number, job in enumerate(jobs)]
    for _, said in in_processes(_train, tasks, workers=workers):
        if isinstance(said, Died):
            raise RunError(f"one of the trainings failed: {said.why}")
        yield said


def _train(task: tuple[int, Job, str], stop: Stop) -> Iterator[tuple[int, Event]]:
    number, job, root = task
    for record in train(job.recipe, load(job.recipe.data, root), seed=job.seed, stop=stop):
        if not isinstance(record, Progress):
            yield number, record


def in_processes(
    work: Work[Task], tasks: Iterable[Task], *, workers: int | None = None, stop: Stop = lambda: None
) -> Iterator[tuple[Task, tuple[int, Event] | Died]]:
    """What `work(task, stop)` yields for each task, in so many processes; `Died` where it raised, or its process died.

    `work` is a function of a module. A task is taken when a worker is free for it, so it may follow from what was said
    until then. Where `stop` gives a reason, those that work are asked to stop; no other task is begun.
    """
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads half alive
    ending = context.RawValue("b", 0)  # read without a lock
    waiting = iter(tasks)
    crew: dict[Connection, _Worker[Task]] = {}
    try:
        while True:
            while len(crew) < (workers or cores()) and (task := _following(waiting, stop)) is not None:
                worker = _Worker(context, work, ending)
                crew[worker.pipe] = worker
                worker.give(task)
            if not crew:
                return
            ending.value = bool(stop())
            for pipe in wait(list(crew), timeout=0.1):
                worker = crew[pipe]  # type: ignore[index]
                said = worker.hear()
                if said is not None:
                    yield worker.task, said
                if said is None or isinstance(said, Died):
                    if worker.is_alive() and (task := _following(waiting, stop)) is not None:
                        worker.give(task)
                    else:
                        crew.pop(worker.pipe).dismiss()
    finally:  # whatever happened, nobody goes on working for nothing
        ending.value = 1
        for worker in crew.values():
            worker.dismiss()


def _following(waiting: Iterator[Task], stop: Stop) -> Task | None:
    return None if stop() else next(waiting, None)


class _Worker(Generic[Task]):
    """A process, seen from its parent."""

    task: Task
    heard = False  # has it said anything yet?

    def __init__(self, context: SpawnContext, work: Work[Task], ending: Any) -> None:
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, work, ending))
        with _deaf():  # which it inherits, so that it is deaf while it still imports
            self.process.start()
        there.close()  # so that the end of the process is the end of the pipe

    def give(self, task: Task) -> None:
        self.task = task
        with suppress(BrokenPipeError):  # it has died: hear() will say so
            self.pipe.send(task)

    def hear(self) -> tuple[int, Event] | Died | None:
        """What came of its task; None at its end."""
        self.heard = True
        try:
            return self.pipe.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):  # also in the middle of a message
            self.process.join()
            return Died(f"its process ended with {_exit(self.process.exitcode)}")

    def is_alive(self) -> bool:
        return self.process.exitcode is None and not self.pipe.closed

    def dismiss(self) -> None:
        """Let it end; one that takes too long loses what it does now, one that still imports has nothing to lose."""
        with suppress(OSError):
            self.pipe.send(_Enough())
        until = monotonic() + (PATIENCE if self.heard else 0)
        while self.process.exitcode is None:  # it may be saying something, and wait for a reader
            if monotonic() > until:
                self.process.kill()
            with suppress(EOFError, OSError):
                while self.pipe.poll(0.05):
                    self.pipe.recv()
            self.process.join(0.05)
        self.pipe.close()


class _Enough:
    """There are no more tasks."""


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"exit code {code}"


@contextmanager
def _deaf() -> Iterator[None]:
    """To Ctrl-C alone: for a moment, a signal that ends the parent must end it."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's business
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(pipe: Connection, work: Work[Any], ending: Any) -> None:
    """A worker's life: one thread, signals are the parent's business, and without a parent there is no work."""
    for name in IGNORED:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    with suppress(EOFError, BrokenPipeError):  # the parent has gone, and nobody listens
        while not isinstance(task := pipe.recv(), _Enough):
            pipe.send(_done(pipe, work, task, ending))


def _done(pipe: Connection, work: Work[Any], task: Any, ending: Any) -> Died | None:
    """Do it, and say all that there is to say."""
    try:
        for said in work(task, lambda: PARENT if ending.value else None):
            pipe.send(said)
    except BrokenPipeError:
        raise
    except Exception as error:
        return died_of(error)
    return None


def died_of(error: Exception) -> Died:
    """What went wrong, in a line; of what is not expected to go wrong, also what kind of error it was."""
    plain = isinstance(error, RunError | ValueError | OSError)
    return Died(f"{'' if plain else type(error).__name__ + ': '}{error or type(error).__name__}")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
