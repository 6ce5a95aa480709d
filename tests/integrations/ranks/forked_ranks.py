"""Run as a program: cases of test_train_ranks.py, each in forked processes that are told their places as by torchrun.

    python -m tests.integrations.ranks.forked_ranks FOLDER CASES

CASES is JSON. By name: the flags of `flatmin train`, for all ranks and for one, and what happens to a rank; or jobs of
train_jobs.py. What is printed, as JSON: the exit codes, and what each rank wrote. All is imported before, once, so that
a process begins at once.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import sklearn.datasets  # noqa: F401  # not while the clock ticks

import flatmin
from flatmin_lab.cli.app import app
from flatmin_lab.training.learner import Learner
from tests import HANG_SECONDS
from tests.integrations.ranks import processes
from tests.integrations.ranks.train_jobs import JOBS
from tests.support.ports import reserved_port
from tests.support.processes import forked

import_module("torch._dynamo")


def another_version() -> None:
    flatmin.__version__ = "0.0.0"


def at_step(number: int, act: Callable[[], Any]) -> None:
    """From now on, that happens before the step of that number."""
    left, real = [number], Learner.step

    def counting(learner: Learner, *inputs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            act()
        return real(learner, *inputs)

    setattr(Learner, "step", counting)  # noqa: B010


def crash() -> None:
    raise ZeroDivisionError("of the model's own")


FATES: dict[str, Callable[[int], None]] = {
    "version": lambda _: another_version(),
    "crash": lambda step: at_step(step, crash),
    "SIGKILL": lambda step: at_step(step, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "SIGTERM": lambda step: at_step(step, lambda: os.kill(os.getpid(), signal.SIGTERM)),
}


def child(rank: int, size: int, port: int, case: dict[str, Any], log: Path) -> int:
    """A process of that rank; its number."""

    def begin() -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), COLUMNS="300")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        act(rank, size, case, log.parent)

    return forked(begin, log)


def act(rank: int, size: int, case: dict[str, Any], folder: Path) -> None:
    if "jobs" in case:
        place = folder / case["place"]
        processes.work(rank, {name: partial(JOBS[name], folder=place) for name in case["jobs"]}, size, str(place))
        return
    for fate, step in case.get("fates", {}).get(str(rank), {}).items():
        FATES[fate](step)
    app([*case["flags"], *case.get("own", {}).get(str(rank), [])])


def run(case: dict[str, Any], folder: Path, name: str) -> dict[str, Any]:
    size, begun = int(case.get("ranks", 2)), time.monotonic()
    logs = [folder / f"{name}-{rank}.log" for rank in range(size)]
    codes: dict[int, int | None] = dict.fromkeys(range(size))
    with reserved_port() as port:
        waiting = {child(rank, size, port, case, log): rank for rank, log in enumerate(logs)}
        while waiting and time.monotonic() - begun < HANG_SECONDS:
            for number, rank in list(waiting.items()):
                done, status = os.waitpid(number, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    del waiting[number]
            time.sleep(0.005)
    for number in waiting:  # these would wait for ever
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
    seconds = round(time.monotonic() - begun, 2)
    return {"codes": list(codes.values()), "said": [log.read_text() for log in logs], "seconds": seconds}


if __name__ == "__main__":
    cases = json.loads(sys.argv[2])
    sys.stdout.write(json.dumps({name: run(case, Path(sys.argv[1]), name) for name, case in cases.items()}))
