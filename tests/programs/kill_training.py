"""Run as a program: `flatmin train` in forked children that are killed with SIGKILL, then resumed to the end.

    python -m tests.programs.kill_training FOLDER SEED KILLS TRAIN-ARGUMENTS…

Everything is imported before, so that a child begins at once; no tensor is made before the fork. First an uninterrupted
run; then runs whose children are killed by turns at a random moment, at a chosen one of the calls that make a file last
(fsync, replace, unlink), and with half a checkpoint written, until one may finish. What is printed, as JSON: how many
were killed, and in what the last states differ from the uninterrupted run's.
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import sklearn.datasets  # noqa: F401  # not while the clock ticks
import torch

from flatmin_lab.cli.app import app
from flatmin_lab.runs import checkpoint
from flatmin_lab.system import files
from tests import HANG_SECONDS
from tests.support.processes import forked
from tests.support.small_runs import TIMES

import_module("torch._dynamo")  # which every optimizer imports when it is made
if find_spec("tensorboard"):
    import_module("torch.utils.tensorboard")


def child(arguments: list[str], log: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """A process that runs the command; its number."""

    def act() -> None:
        prepare()
        app(arguments)

    return forked(act, log)


def ended(number: int, seconds: float) -> int | None:
    """The exit status, or None if it still runs after that time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(number, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    return None


def dies_at(call: int) -> None:
    """From now on the process kills itself at that call of those that make a file last."""
    left = [call]
    for name in ("fsync", "replace", "unlink"):
        real = getattr(os, name)

        def counting(*arguments: Any, real: Any = real, **more: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **more)

        setattr(os, name, counting)


def dies_half_way(number: int) -> None:
    """From now on the process kills itself when half of its checkpoint of that number is on the disk."""
    left, real = [number], files.atomic_write

    class Half:
        def __init__(self, file: BinaryIO) -> None:
            self.file = file

        def write(self, content: bytes) -> None:
            left[0] -= 1
            self.file.write(content[: len(content) // 2] if left[0] == 0 else content)
            if left[0] == 0:
                self.file.flush()
                os.fsync(self.file.fileno())
                os.kill(os.getpid(), signal.SIGKILL)

    @contextlib.contextmanager
    def torn(path: Path) -> Iterator[Half]:
        with real(path) as file:
            yield Half(file)

    setattr(checkpoint, "atomic_write", torn)  # noqa: B010  # where the module looks it up


def state_of(folder: Path) -> dict[str, Any]:
    """All that a run leaves, but for the time it took."""
    last = checkpoint.read(checkpoint.listed(folder)[0])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((folder / "result.json").read_text())
    state = {**last.state, "lines": lines}
    for timed in (state, result, *lines):
        for name in TIMES:
            timed.pop(name, None)
    return {**last.tensors, "state": state, "result": result}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    def same(key: str) -> bool:
        a, b = one.get(key), other.get(key)
        return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b

    return [key for key in one.keys() | other.keys() if not same(key)]


@dataclass
class Found:
    killed: int = 0  # at random moments
    points: int = 0  # at a call that makes a file last, or with half a checkpoint written
    finished: int = 0  # runs that were resumed to the end
    apart: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def main(place: Path, seed: int, kills: int, arguments: list[str]) -> None:
    whole, log = place / "whole", place / "log"
    begun = time.monotonic()
    assert ended(child([*arguments, "--out", str(whole)], log), HANG_SECONDS) == 0, log.read_text()
    length = time.monotonic() - begun
    expected = state_of(whole)
    draw, found = random.Random(seed), Found()
    while found.killed < kills:
        victim = place / f"victim-{found.killed}"
        go_on = [*arguments, "--out", str(victim), "--resume"]
        for call in (1, 2, 3, *range(4, 12, 2)):  # the first writings of a run, and later ones
            if found.killed >= kills:
                break
            for how in (partial(dies_at, call), partial(dies_half_way, call)):
                found.points += ended(child(go_on, log, how), HANG_SECONDS) == signal.SIGKILL
            number = child(go_on, log)
            if ended(number, draw.uniform(0, 0.5 * length)) is None:
                os.kill(number, signal.SIGKILL)
                os.waitpid(number, 0)
                found.killed += 1
        assert ended(child(go_on, log), HANG_SECONDS) == 0, log.read_text()
        found.apart += differences(expected, state_of(victim))
        found.left += [path.name for path in victim.glob(".*.beside")]
        found.finished += 1
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
