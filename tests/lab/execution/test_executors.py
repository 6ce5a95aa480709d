"""Every run ends exactly once, whatever its task, its worker or its executor does; tests/integrations has the pool."""

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.execution.executor import Executor, run_tasks
from flatmin_lab.execution.local import LocalExecutor, ThisProcess
from flatmin_lab.execution.task_queue import (
    MAX_ATTEMPTS,
    NoWorkerError,
    Slot,
    Stop,
    TaskEnd,
    TaskFailure,
    TaskMessage,
    TaskQueue,
    WorkerLoss,
)
from flatmin_lab.runs.events import Event, Failed, Finished, Note, Started, Stopped
from tests import ROOT
from tests.support.small_runs import tiny_data

STARTED = Started(step=0, steps=1, epochs=1, parameters=1)


class Act(NamedTuple):
    """A task of one number, and what its function does."""

    number: int
    act: str
    place: Path  # for what it must remember
    device: str = "cpu"

    @property
    def numbers(self) -> tuple[int]:
        return (self.number,)

    def load_data(self) -> Dataset:
        return tiny_data()

    def paths(self) -> list[Path]:
        return []

    def moved_to(self, folder: Path) -> "Act":
        return self


class Acts(TaskQueue[Act]):
    def __init__(self, acts: list[str], place: Path, stop: Stop = lambda: None) -> None:
        super().__init__(stop)
        self.all = [Act(number, act, place) for number, act in enumerate(acts)]
        self.waiting = list(self.all)
        self.stored: list[int] = []

    def waiting_count(self) -> int:
        return 0 if self.stop() else len(self.waiting)

    def take(self, slot: Slot) -> Act | None:
        free = [act for act in self.waiting if not self.is_barred(act.number, slot)] if self.waiting_count() else []
        if not free:
            return None
        self.waiting.remove(free[0])
        return self.assign(free[0])

    def data_of(self, task: Act) -> Dataset:
        return task.load_data()

    def put_back(self, number: int, task: Act) -> None:
        self.waiting.append(task)

    def unfinished(self) -> list[int]:
        return [act.number for act in self.all if act.number not in self.done]

    def store(self, number: int, event: Event) -> None:
        self.stored.append(number)


def act_out(task: Act, data: Dataset, stop: Stop) -> Iterator[tuple[int, Event]]:
    if task.act == "fail before the start":
        raise ValueError("no such thing")
    yield task.number, STARTED
    if task.act == "raise":
        raise ValueError("no such thing")
    if task.act == "fail":
        yield task.number, Failed("it diverged", 3)
    elif task.act == "leave":
        return
    elif task.act == "wait":
        (task.place / "waiting").touch()
        while not stop():
            pass
        yield task.number, Stopped(stop() or "", 1)
    else:
        yield task.number, Finished({})


def ends(events: list[tuple[int, Event]]) -> dict[int, Event]:
    """How each number ended; each has ended once, and nothing came after it."""
    found = [(number, event) for number, event in events if isinstance(event, Finished | Failed | Stopped)]
    assert max(Counter(number for number, _ in found).values(), default=1) == 1
    for number, end in found:
        assert [event for other, event in events if other == number][-1] is end
    return dict(found)


def kinds(executor: Executor, queue: Acts) -> list[str]:
    found = ends(list(run_tasks(executor, act_out, queue)))
    assert sorted(found) == sorted(queue.stored) == list(range(len(queue.all)))
    return [type(found[number]).__name__ for number in sorted(found)]


ACTS = ["finish", "raise", "fail", "fail before the start", "leave", "finish"]
KINDS = ["Finished", "Failed", "Failed", "Failed", "Failed", "Finished"]


def test_in_this_process_everything_ends_once(tmp_path: Path) -> None:
    queue = Acts(ACTS, tmp_path)
    assert kinds(ThisProcess(), queue) == KINDS


def test_what_had_not_started_is_tried_again_and_what_had_is_not(tmp_path: Path) -> None:
    tried: list[str] = []

    def noted(task: Act, data: Dataset, stop: Stop) -> Iterator[tuple[int, Event]]:
        tried.append(task.act)
        return act_out(task, data, stop)

    events = list(run_tasks(ThisProcess(), noted, Acts(ACTS, tmp_path)))
    assert Counter(tried) == {"finish": 2, "raise": 1, "fail": 1, "fail before the start": 2, "leave": MAX_ATTEMPTS}
    unstarted = ends(events)[3]
    assert isinstance(unstarted, Failed)
    assert unstarted.later


def test_when_asked_to_stop_what_runs_and_what_waits_is_stopped(tmp_path: Path) -> None:
    acts = ["finish", "wait", "finish"]
    queue = Acts(acts, tmp_path, stop=lambda: "enough" if (tmp_path / "waiting").exists() else None)
    found = ends(list(run_tasks(ThisProcess(), act_out, queue)))
    assert found == {0: Finished({}), 1: Stopped("enough", 1), 2: Stopped("enough", 0)}


class Chaos(LocalExecutor):
    """Workers of three nodes that do anything at any time, and the messages of the dead."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        object.__setattr__(self, "chance", chance)

    chance: random.Random

    def run(self, function: Any, queue: Any) -> Generator[tuple[Any, TaskMessage, str], None, None]:
        old: list[Any] = []
        while queue.waiting_count():
            node = self.chance.choice("abc")
            task = queue.take(Slot("cpu", node, 3, others="abc".replace(node, "")))
            if task is None:
                continue
            old.append(task)
            for _ in range(self.chance.randrange(4)):
                said = self.chance.choice(old)
                events: list[Event] = [STARTED, Note("text"), Finished({}), Failed("no"), Stopped("asked", 1)]
                event = self.chance.choice(events)
                yield said, (said.number, event), node
            if self.chance.random() < 0.02:
                raise NoWorkerError("none is left")
            ways: list[TaskMessage] = [TaskEnd(), TaskFailure("it raised"), WorkerLoss(node, "it burnt")]
            yield task, self.chance.choice(ways), node


@pytest.mark.parametrize("seed", range(200))
def test_whatever_an_executor_says_everything_ends_once(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    stops: Callable[[], str | None] = lambda: "enough" if chance.random() < 0.01 else None  # noqa: E731
    queue = Acts(["any"] * 8, tmp_path, stops if seed % 2 else lambda: None)
    kinds(Chaos(chance), queue)


def test_a_lost_worker_s_run_is_retried_elsewhere_and_fails_the_third_time(tmp_path: Path) -> None:
    queue = Acts(["any"], tmp_path)
    said: list[Event] = []
    for node in "abc":
        task = queue.take(Slot("cpu", node, 3, others="abc".replace(node, "")))
        assert task is not None
        said += [event for _, event in queue.receive(task, WorkerLoss(node, "it burnt"), node)]
        assert queue.take(Slot("cpu", node, 3, others="abc".replace(node, ""))) is None
    assert [type(event) for event in said] == [Note, Note, Failed]


# ---- the cluster's code


def loaded_after(code: str, tmp_path: Path) -> set[str]:
    """Which of the cluster's modules a program has imported."""
    shown = "import sys; print([m for m in sys.modules if m == 'ray' or m.startswith('flatmin_lab.execution.cluster')])"
    command = [sys.executable, "-c", f"{code}\n{shown}"]
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    names: list[str] = eval(done.stdout.splitlines()[-1])
    return set(names)


def test_the_cluster_s_code_is_imported_only_where_it_is_picked(tmp_path: Path) -> None:
    opened = """
from flatmin_lab.cli import app
from flatmin_lab.cli.options import open_executor
from flatmin_lab.cli.display import silent
try:
    with open_executor({executor!r}, address={address!r}, gpus=None, device="cpu", workers=2, console=silent()):
        pass
except ValueError:
    pass  # no address of a cluster
"""
    assert loaded_after(opened.format(executor="local", address=None), tmp_path) == set()
    there = loaded_after(opened.format(executor="ray", address="nowhere"), tmp_path)
    assert "flatmin_lab.execution.cluster.scheduler" in there
    assert "ray" not in there  # before there is a cluster to connect to
