"""The laws of tests/lab/execution/test_executors.py for a pool of processes, also where processes die."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from time import time

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.execution.deadline import Deadline
from flatmin_lab.execution.executor import run_tasks
from flatmin_lab.execution.pace import kind_of
from flatmin_lab.execution.process_pool import ProcessPool
from flatmin_lab.execution.run_queue import run_all
from flatmin_lab.execution.runner import Run, RunOptions
from flatmin_lab.execution.task_queue import MAX_ATTEMPTS, Stop
from flatmin_lab.recipes.experiments.experiment import cell
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.runs.events import Event, Failed, Finished, Note, Postponed, Stopped, Timed
from flatmin_lab.runs.result_store import ResultStore
from tests.lab.execution.test_executors import ACTS, KINDS, Act, Acts, act_out, ends, kinds

POOL = ProcessPool(["cpu", "cpu"])


def act_or_die(task: Act, data: Dataset, stop: Stop) -> Iterator[tuple[int, Event]]:
    if task.act == "crash before the start, once" and not (task.place / "crashed").exists():
        (task.place / "crashed").touch()
        os.abort()
    for number, event in act_out(task, data, stop):
        yield number, event
        if task.act == "crash":
            os.abort()
        if task.act == "be killed once" and (task.place / "killed").exists():
            continue
        if task.act.startswith("be killed"):
            if task.act == "be killed once":
                (task.place / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_in_a_pool_everything_ends_once(tmp_path: Path) -> None:
    assert kinds(POOL, Acts(ACTS, tmp_path)) == KINDS


def test_in_a_pool_a_run_is_started_if_it_will_end_in_time(tmp_path: Path) -> None:
    """Passes that take a hundred seconds, 30 of ERM and 60 of AMP, in 4000 seconds; what is measured comes back."""
    recipes = [cell("smoke", "cifar10", "vgg16", method) for method in ("amp", "erm", "flooding")]
    limit = Deadline(4000 / 60, time() + 4000.0)
    kind = kind_of(recipes[0])
    limit.pace.add(Timed(kind, 1, 1e12, 1e14))
    options = RunOptions(ResultStore(tmp_path / "results", tmp_path / "runs"), deadline=limit)
    found = dict(run_all([Run(Job(recipe, 0)) for recipe in recipes], options, POOL))
    assert [type(found[number]) for number in range(3)] == [Postponed, Finished, Finished]
    assert limit.pace.sums[kind, "end", True][0] == 2


def test_when_asked_to_stop_what_runs_and_what_waits_is_stopped(tmp_path: Path) -> None:
    queue = Acts(["wait", "wait", "finish"], tmp_path, stop=lambda: "enough" if list(tmp_path.iterdir()) else None)
    found = ends(list(run_tasks(POOL, act_out, queue)))
    assert [type(found[number]) for number in range(3)] == [Stopped] * 3
    assert found[2] == Stopped("enough", 0)


def test_a_process_that_dies_fails_its_run_alone_and_one_that_had_not_started_is_done(tmp_path: Path) -> None:
    acts = ["finish", "crash", "crash before the start, once", "finish"]
    found = ends(list(run_tasks(POOL, act_or_die, Acts(acts, tmp_path))))
    assert [type(found[number]) for number in range(4)] == [Finished, Failed, Finished, Finished]
    died = found[1]
    assert isinstance(died, Failed)
    assert "SIGABRT" in died.what


def test_what_was_killed_for_memory_is_retried_with_one_process_fewer_and_fails_the_third_time(tmp_path: Path) -> None:
    events = list(run_tasks(POOL, act_or_die, Acts(["be killed", "be killed once", "finish"], tmp_path)))
    found = ends(events)
    assert [type(found[number]) for number in range(3)] == [Failed, Finished, Finished]
    killed = "its process was killed (SIGKILL), most likely because memory ran out"
    assert found[0] == Failed(f"worker lost {MAX_ATTEMPTS} times, the last time: {killed}")
    notes = [event.text for _, event in events if isinstance(event, Note)]
    assert len(notes) == 3
    assert notes[0] == f"worker lost: {killed}, so one process fewer runs from now on; retried, attempt 2 of 3"
    assert all("fewer" not in text for text in notes[1:])  # one is left


def test_a_caller_that_leaves_early_leaves_no_process_behind(tmp_path: Path) -> None:
    events = run_tasks(POOL, act_out, Acts(["wait"], tmp_path))
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert (tmp_path / "waiting").exists()  # and it was waited for
