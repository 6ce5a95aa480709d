"""A pool of worker processes: every task is done, and one that fails or dies takes no other with it."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from flatmin_lab.execution.process_pool import Stop, TaskFailure, _WorkerProcess, run_in_pool
from flatmin_lab.execution.task_queue import WorkerLoss
from flatmin_lab.runs.events import Event, Note
from tests import HANG_SECONDS


def work(task: tuple[int, str, str], stop: Stop) -> Iterator[tuple[int, Event]]:
    """What a test asks of a worker."""
    number, act, place = task
    yield number, Note("begun")
    if act == "raise":
        raise ValueError("no such thing")
    if act == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "signal":  # as it comes to all processes of a group
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            os.kill(os.getpid(), getattr(signal, name))
        time.sleep(0.05)
    if act == "last":
        Path(place).touch()
        until = time.monotonic() + HANG_SECONDS
        while not stop() and time.monotonic() < until:
            time.sleep(0.01)
        Path(place).write_text(f"stopped by {stop()}")
        yield number, Note(f"stopped by {stop()}")
        return
    yield number, Note("done")


def test_all_is_done_and_what_fails_or_dies_says_so() -> None:
    acts = ["do", "raise", "signal", "die", "do", "do"]
    tasks = [(number, act, "") for number, act in enumerate(acts)]
    ends: dict[int, Event | TaskFailure] = {}
    for task, said in run_in_pool(work, tasks, workers=2):
        ends[task[0]] = said if isinstance(said, TaskFailure) else said[1]
    for number, act in enumerate(acts):
        end = ends[number]
        if act in ("do", "signal"):
            assert end == Note("done")
        else:
            assert isinstance(end, TaskFailure)
            assert ("no such thing" if act == "raise" else "SIGKILL") in end.why


def test_busy_workers_are_asked_to_stop_and_no_other_task_is_started(tmp_path: Path) -> None:
    flag = tmp_path / "working"
    tasks = [(0, "last", str(flag)), (1, "do", "")]
    said = list(run_in_pool(work, tasks, workers=1, stop=lambda: "Ctrl-C" if flag.exists() else None))
    assert [task[0] for task, _ in said] == [0, 0]
    assert said[-1][1] == (0, Note("stopped by the parent"))


def test_a_caller_that_leaves_early_leaves_no_worker_behind(tmp_path: Path) -> None:
    flag = tmp_path / "working"
    events = run_in_pool(work, [(0, "last", str(flag))], workers=1)
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert flag.read_text() == "stopped by the parent"  # and not by its own time-out


def test_a_death_in_the_middle_of_a_message_is_a_death() -> None:
    class Broken:
        closed = False

        def recv(self) -> None:
            raise OSError("got end of file during message")

    worker = object.__new__(_WorkerProcess)
    worker.pipe = Broken()  # type: ignore[assignment]
    for code, expected in {
        1: TaskFailure("its process ended with exit code 1"),
        -11: TaskFailure("its process ended with signal 11 (SIGSEGV)"),
        -9: WorkerLoss("", "its process was killed (SIGKILL), most likely because memory ran out"),
    }.items():
        worker.process = SimpleNamespace(join=lambda: None, exitcode=code)  # type: ignore[assignment]
        assert worker.receive() == expected
