"""Nodes and workers are killed, and the command itself: every run still ends, once, with the same bits."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flatmin_lab.execution.cluster.run_queue import schedule_runs
from flatmin_lab.execution.cluster.scheduler import open_scheduler
from flatmin_lab.execution.runner import Run, RunOptions
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.runs.events import Epoch, Event, Failed, Finished, Note, Started
from flatmin_lab.runs.result_store import ResultStore
from tests import HANG_SECONDS
from tests.integrations.cluster.command import (
    SMOKE,
    command,
    ended,
    ended_here,
    finishes,
    results,
    said,
    timeless,
    until,
)
from tests.integrations.cluster.nodes import kill, processes, workers
from tests.support.small_runs import lasting, same, tiny_data, tiny_recipe


def test_a_node_is_killed_in_the_middle_and_every_run_ends_once_with_the_bits_of_one_machine(
    cluster: Any, add: Callable[..., Any], tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    doomed = add()
    asked = [*SMOKE, "--checkpoint-epochs", "1"]
    with command(*asked, "--executor", "ray", "--address", cluster.address, at=there) as process:
        until(lambda: list(there.glob("out/smoke/runs/smoke/*/checkpoint-*")), process, there)
        kill(processes(doomed))
        done = finishes(there)
        add()
        assert process.wait(HANG_SECONDS) == 0, said(there)
    assert len(done) < 4
    assert "worker lost on node" in said(there)
    assert "resumed after step" in said(there)
    assert ended_here(*asked, "--workers", "1", at=here) == 0, said(here)
    assert len(finishes(there)) == len(set(finishes(there))) == 4
    assert finishes(there) == finishes(here)
    assert results(there) == results(here)
    assert len(results(there)) == 4
    for folder in (here / "out/smoke/runs/smoke").iterdir():
        assert same(lasting(folder), lasting(there / "out/smoke/runs/smoke" / folder.name))
    written = {path: path.stat().st_mtime_ns for path in there.glob("out/smoke/r*/smoke/**/*.json")}
    assert len(written) >= 4
    assert ended_here(*asked, "--executor", "ray", "--address", cluster.address, at=there) == 0
    assert len(finishes(there)) == 4  # nothing that is done is done again
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_the_command_is_killed_or_asked_to_stop_and_goes_on(
    cluster: Any, add: Callable[..., Any], tmp_path: Path
) -> None:
    add()
    asked = [*SMOKE[:-1], "0-3", "--models", "vgg16", "--checkpoint-epochs", "1"]
    asked += ["--executor", "ray", "--address", cluster.address]
    for number, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        with command(*asked, at=tmp_path) as process:
            before = len(finishes(tmp_path))
            until(lambda: len(finishes(tmp_path)) > before, process, tmp_path)  # noqa: B023
            process.send_signal(number)
            assert process.wait(HANG_SECONDS) == code, said(tmp_path)
    assert "stopped by Ctrl-C; the same command resumes" in said(tmp_path)
    assert ended(*asked, at=tmp_path) == 0, said(tmp_path)
    assert len(finishes(tmp_path)) == len(set(finishes(tmp_path))) == 8
    assert "Traceback" not in said(tmp_path)


def test_trials_are_those_of_one_machine_also_where_a_worker_is_killed(
    cluster: Any, add: Callable[..., Any], tmp_path: Path
) -> None:
    asked = ["tune", "--data", "digits", "--trials", "3", "--epochs", "4", "--workers", "1", "--out", "tuning"]
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    node = add()
    with command(*asked, "--executor", "ray", "--address", cluster.address, at=there) as process:
        until(lambda: list(there.glob("tuning/trial-1/checkpoint-*")), process, there)
        kill(workers(node))
        assert process.wait(HANG_SECONDS) == 0, said(there)
    assert "worker lost on node" in said(there)
    assert ended_here(*asked, at=here) == 0, said(here)
    trials = [timeless(json.loads((at / "tuning/tuning.json").read_text())["trials"]) for at in (here, there)]
    assert len(trials[0]) == 3
    assert trials[0] == trials[1]


def test_a_run_that_is_lost_three_times_has_failed_and_the_others_continue(
    cluster: Any, add: Callable[..., Any], tmp_path: Path
) -> None:
    node = add()
    runs = [Run(Job(tiny_recipe(name=name, epochs=epochs), 0)) for name, epochs in (("doomed", 2000), ("sound", 3))]
    options = RunOptions(ResultStore(tmp_path / "results", tmp_path / "runs"))
    told: list[tuple[int, Event]] = []
    with open_scheduler(cluster.address) as scheduler:
        for number, event in schedule_runs(runs, options, scheduler, {"tiny": tiny_data()}):
            told.append((number, event))
            if number == 0 and isinstance(event, Started):
                kill(workers(node))
    ends = [(number, event) for number, event in told if isinstance(event, Finished | Failed)]
    assert sorted(number for number, _ in ends) == [0, 1]
    failed = dict(ends)[0]
    assert isinstance(failed, Failed)
    assert re.match("worker lost 3 times, the last time on node .* try again with --retry", failed.what)
    assert sum(isinstance(event, Note) and "retried, attempt" in event.text for _, event in told) == 2
    assert [options.store.state(run.job) for run in runs] == ["failed", "done"]


def test_a_node_that_kills_every_worker_fails_no_run(
    cluster: Any, add: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does whose memory is too small: its runs go to another node, and it gets no new workers for a while."""
    monkeypatch.setattr("flatmin_lab.execution.cluster.worker_pool.COOLDOWN_SECONDS", HANG_SECONDS)  # all of this test
    bad = add()
    runs = [Run(Job(tiny_recipe(name="slow", epochs=150), seed)) for seed in range(4)]  # some seconds each
    options = RunOptions(ResultStore(tmp_path / "results", tmp_path / "runs"), checkpoint_epochs=50)
    told: list[tuple[int, Event]] = []
    with open_scheduler(cluster.address) as scheduler:
        for number, event in schedule_runs(runs, options, scheduler, {"tiny": tiny_data()}):
            if not told:
                add()  # the other node: not before, so that the first run is on the bad one
            told.append((number, event))
            if isinstance(event, Started | Epoch):
                kill(workers(bad))
    assert sorted(number for number, event in told if isinstance(event, Finished)) == [0, 1, 2, 3]
    assert not [event for _, event in told if isinstance(event, Failed)]
    assert sum(isinstance(event, Note) and "worker lost on node" in event.text for _, event in told) == 1
    assert scheduler.histories[bad.node_id].losses == 1  # nor was one lost before it had a run
