"""Which nodes of a cluster are used, and what is said of those that are not."""

import json
import re
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flatmin_lab.execution.cluster.nodes import Share
from flatmin_lab.execution.cluster.run_queue import schedule_runs
from flatmin_lab.execution.cluster.scheduler import Scheduler, open_scheduler
from flatmin_lab.execution.runner import Run, RunOptions
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.runs.events import Failed, Finished
from flatmin_lab.runs.open_folder import lock_folder
from flatmin_lab.runs.result_store import ResultStore
from tests import HANG_SECONDS, ROOT
from tests.integrations.cluster.command import SMOKE, ended, ended_here, finishes, said
from tests.support.processes import flatmin, words
from tests.support.small_runs import tiny_data, tiny_recipe


def test_a_node_where_others_work_holds_nothing_up(
    cluster: Any, add: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatmin_lab.execution.cluster.worker_pool.START_TIMEOUT_SECONDS", 3.0)
    full = add(num_cpus=2)
    options = RunOptions(ResultStore(tmp_path / "results", tmp_path / "runs"))
    heard: list[str] = []
    with open_scheduler(cluster.address, say=heard.append) as scheduler:

        class Other:
            def here(self) -> bool:
                return True

        other = scheduler.ray.remote(Other).options(num_cpus=2).remote()
        assert scheduler.ray.get(other.here.remote())
        add()
        leaves = threading.Timer(HANG_SECONDS, scheduler.ray.kill, [other])  # so that waiting for it would end
        leaves.start()
        runs = [Run(Job(tiny_recipe(name="sound"), seed)) for seed in (0, 1)]
        told = list(schedule_runs(runs, options, scheduler, {"tiny": tiny_data()}))
        assert leaves.is_alive(), "the trainings waited for the full node"
        leaves.cancel()
        scheduler.ray.kill(other)
    assert sorted(number for number, event in told if isinstance(event, Finished)) == [0, 1]
    assert not any(full.node_id[:6] in text for text in heard if "left out" in text)


def test_a_trial_is_pruned_on_another_machine(cluster: Any, add: Callable[..., Any], tmp_path: Path) -> None:
    """Before it has sent back anything."""
    add()
    asked = ["tune", "--data", "digits", "--model", "mlp", "--trials", "10", "--epochs", "4", "--seed", "1"]
    asked += ["--checkpoint-epochs", "10", "--workers", "1", "--out", "tuning"]
    assert ended_here(*asked, "--executor", "ray", "--address", cluster.address, at=tmp_path) == 0, said(tmp_path)
    states = [trial["state"] for trial in json.loads((tmp_path / "tuning/tuning.json").read_text())["trials"]]
    assert len(states) == 10
    assert "pruned" in states


# ---- what is wrong is said


def test_a_node_with_another_flatmin_is_left_out_and_named(
    cluster: Any, add: Callable[..., Any], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(ROOT / "src", other, ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "flatmin/ball.py").open("a") as file:
        file.write("# changed\n")
    stranger = add(env_vars={"PYTHONPATH": str(other)})
    asked = [*SMOKE, "--models", "vgg16", "--executor", "ray", "--address", cluster.address]
    assert ended(*asked, at=tmp_path) == 1  # nobody else is there
    told = [line for line in said(tmp_path).splitlines() if "not now: no node of the cluster can train it" in line]
    assert len(told) == 2
    for line in told:
        assert re.match(r"smoke/cifar10-vgg16-(erm|amp)", line)
        assert f"({stranger.node_id[:6]}): it has flatmin" in line
        assert "install the same one there" in line
    add()
    assert ended(*asked, at=tmp_path) == 0, said(tmp_path)
    assert len(finishes(tmp_path)) == 2


def test_a_node_that_cannot_import_flatmin_is_left_out_and_named(
    cluster: Any, add: Callable[..., Any], tmp_path: Path
) -> None:
    """Its Python finds a package of that name that holds nothing."""
    (tmp_path / "empty/flatmin_lab").mkdir(parents=True)
    (tmp_path / "empty/flatmin_lab/__init__.py").touch()
    add(env_vars={"PYTHONPATH": str(tmp_path / "empty")})
    heard: list[str] = []
    run = Run(Job(tiny_recipe(name="sound"), 0))
    options = RunOptions(ResultStore(tmp_path / "results", tmp_path / "runs"))
    with open_scheduler(cluster.address, say=heard.append) as scheduler:
        told = list(schedule_runs([run], options, scheduler, {"tiny": tiny_data()}))
    assert [type(event) for _, event in told] == [Failed]
    assert "ModuleNotFoundError" in heard[-1]
    assert "install flatmin[cluster] there" in heard[-1]


def test_an_address_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatmin_lab.execution.cluster.nodes.CONNECT_TIMEOUT_SECONDS", 0.1)
    with socket.socket() as unheard, socket.create_server(("127.0.0.1", 0)) as silent:
        unheard.bind(("127.0.0.1", 0))  # and does not listen
        for place in (unheard, silent):
            address = f"127.0.0.1:{place.getsockname()[1]}"
            told = flatmin(*SMOKE, "--executor", "ray", "--address", address)
            assert told.exit_code == 1
            assert isinstance(told.exception, SystemExit)
            assert f"flatmin: no Ray cluster answers at {address}" in words(told.output)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "0.5"], "a worker takes 1 CPU and 0.5 GPU of one node, but none of the cluster's 2 nodes"),
        (["--device", "cuda"], "a worker takes 1 CPU and 1 GPU of one node"),
        (["--gpus", "2"], "a worker takes one GPU or a fraction of one, above 0 and up to 1, got --gpus 2"),
        (["--gpus", "0.5", "--device", "cpu"], "--gpus belongs to runs on GPUs"),
        (["--device", "cuda:1"], "on a cluster Ray chooses the GPU"),
    ],
)
def test_a_share_that_does_not_fit_is_refused(
    cluster: Any, add: Callable[..., Any], flags: list[str], message: str
) -> None:
    add()
    told = flatmin(*SMOKE, "--executor", "ray", "--address", cluster.address, *flags)
    assert told.exit_code == 2
    assert message in words(told.output)


def test_a_folder_that_another_process_has_is_left_to_it(cluster: Any, add: Callable[..., Any], tmp_path: Path) -> None:
    add()
    runs = [Run(Job(tiny_recipe(name="sound"), seed)) for seed in (0, 1)]
    options = RunOptions(ResultStore(tmp_path / "results", tmp_path / "runs"))
    with lock_folder(options.store.folder(runs[0].job)), open_scheduler(cluster.address) as scheduler:
        told = list(schedule_runs(runs, options, scheduler, {"tiny": tiny_data()}))
    ends = {number: event for number, event in told if isinstance(event, Finished | Failed)}
    assert isinstance(ends[0], Failed)
    assert ends[0].busy
    assert isinstance(ends[1], Finished)


# ---- fractions of a GPU


def test_two_workers_share_a_gpu_and_each_has_its_part_of_the_runs(
    cluster: Any, add: Callable[..., Any], tmp_path: Path
) -> None:
    """A GPU that Ray believes in; the runs themselves are on the CPU."""
    add(num_cpus=4, num_gpus=1)
    runs = [Run(Job(tiny_recipe(name="sound"), seed)) for seed in range(4)]
    options = RunOptions(ResultStore(tmp_path / "results", tmp_path / "runs"))
    most = 0
    with open_scheduler(cluster.address, gpus=0.5) as found:
        assert (found.device, found.share, found.room()) == ("cuda:0", Share(gpus=0.5), 2)
        scheduler = Scheduler(ray=found.ray, device="cpu", share=found.share)
        finished = []
        for number, event in schedule_runs(runs, options, scheduler, {"tiny": tiny_data()}):
            most = max(most, len(scheduler.workers))
            finished += [number] if isinstance(event, Finished) else []
    assert most == 2
    assert sorted(finished) == [0, 1, 2, 3]
    assert next(scheduler.task_numbers) == 3  # tasks: two runs, one, and one
