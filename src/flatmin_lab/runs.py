"""Many trainings side by side, each in a process of its own with one thread: a small network keeps one core busy.

With one thread a training gives the same bits whatever else runs, so results do not depend on the number of workers.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flatmin_lab.data.catalogue import load
from flatmin_lab.recipes import Recipe
from flatmin_lab.records import Progress, Record, RunError
from flatmin_lab.train import train

shared: dict[str, Any] = {}  # in a worker: the queue that it speaks into, and the event that stops it


class Job(NamedTuple):
    recipe: Recipe
    seed: int


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(
    jobs: Sequence[Job], *, workers: int | None = None, root: Path | str = "data"
) -> Iterator[tuple[int, Record]]:
    """The records of all jobs as they come, each with its job's number; those inside an epoch are left out."""
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads half alive
    said, stop = context.SimpleQueue(), context.RawValue("b", 0)  # read without a lock
    pool = ProcessPoolExecutor(
        min(workers or cores(), len(jobs)), mp_context=context, initializer=_prepare, initargs=(said, stop)
    )
    with pool:
        with _deaf_to_ctrl_c():  # which a worker inherits, so that it is deaf while it still imports
            waiting = {pool.submit(_work, number, job, str(root)) for number, job in enumerate(jobs)}
        try:
            while waiting or not said.empty():
                if not said.empty():
                    yield said.get()
                    continue
                ended = {future for future in waiting if future.done()}
                for future in ended:
                    _check(future)
                waiting -= ended
                time.sleep(0.02)
        finally:  # whatever happened, nobody goes on working for nothing
            stop.value = 1
            pool.shutdown(cancel_futures=True)


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's business
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _prepare(said: Any, stop: Any) -> None:
    """A worker begins: one thread, Ctrl-C is the parent's business, and without a parent there is no work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    shared.update(said=said, stop=stop)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _work(number: int, job: Job, root: str) -> None:
    stop = shared["stop"]
    data = load(job.recipe.data, root)
    for record in train(job.recipe, data, seed=job.seed, stop=lambda: "the parent" if stop.value else None):
        if not isinstance(record, Progress):
            shared["said"].put((number, record))


def _check(future: Future[None]) -> None:
    error = future.exception()
    if error is not None:
        raise RunError(f"one of the trainings failed: {error or type(error).__name__}") from error
