"""A real Ray cluster of several nodes on this machine, whose nodes and workers are killed: every run still ends.

The head has no CPUs, so nothing is trained there; each test adds the nodes that it needs. A node is killed as a machine
that loses its power: its Ray processes and its workers, all at once, with SIGKILL.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from flatmin_lab.execution.cluster.nodes import Share
from flatmin_lab.execution.cluster.run_queue import schedule_runs
from flatmin_lab.execution.cluster.scheduler import Scheduler, open_scheduler
from flatmin_lab.execution.runner import Run, RunOptions
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.runs.events import Epoch, Event, Failed, Finished, Note, Started
from flatmin_lab.runs.open_folder import lock_folder
from flatmin_lab.runs.result_store import ResultStore
from tests import HANG_SECONDS, ROOT
from tests.support.processes import flatmin, words
from tests.support.small_runs import lasting, same, tiny_data, tiny_recipe

SOURCE = f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"
ENVIRONMENT = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "COLUMNS": "250"}
SIZE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100_000_000}
SMOKE = ["reproduce", "table1", "--protocol", "smoke", "--data", "cifar10", "--methods", "erm,amp", "--seeds", "0"]
TIMES = re.compile("seconds|at_once|epoch_s")  # what may differ between two machines


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    head = {**SIZE, "num_cpus": 0, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", SOURCE)  # of the nodes
        there = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        yield there
        there.shutdown()


@pytest.fixture
def add(cluster: Any) -> Iterator[Callable[..., Any]]:
    """A function that adds a node, for this test alone."""
    added: list[Any] = []

    def new(**changes: Any) -> Any:
        added.append(cluster.add_node(**{**SIZE, **changes}))
        return added[-1]

    yield new
    for node in added:
        with suppress(Exception):  # one that the test has killed
            cluster.remove_node(node)


def children(*parents: int) -> list[int]:
    shown = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid, parent in map(str.split, shown.splitlines()) if int(parent) in parents]


def processes(node: Any) -> list[int]:
    """A node's own, and its workers."""
    own = [info.process.pid for kind in node.all_processes.values() for info in kind]
    return [*own, *children(*own)]


def kill(numbers: list[int]) -> None:
    for number in numbers:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def workers(node: Any) -> list[int]:
    """Those of its processes that train."""
    return [pid for pid in processes(node) if b"ray::Worker" in words_of(pid)]


def words_of(pid: int) -> bytes:
    """The command of a process; nothing of one that has ended since it was listed, as one that was killed does."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@contextmanager
def command(*arguments: str, at: Path) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "flatmin_lab", *arguments]
    with (at / "log").open("a") as log:
        process = subprocess.Popen(words, cwd=at, env=ENVIRONMENT, stdout=log, stderr=log, text=True)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def said(at: Path) -> str:
    return (at / "log").read_text()


def ended(*arguments: str, at: Path) -> int:
    with command(*arguments, at=at) as process:
        return process.wait(HANG_SECONDS)


def until(condition: Callable[[], Any], process: subprocess.Popen[str], at: Path) -> Any:
    begun = time.monotonic()
    while not (found := condition()):
        assert process.poll() is None, said(at)
        assert time.monotonic() - begun < HANG_SECONDS, said(at)
        time.sleep(0.02)
    return found


def timeless(found: Any) -> Any:
    """Without what depends on the machine's moment."""
    if isinstance(found, dict):
        return {key: timeless(value) for key, value in found.items() if not TIMES.search(key)}
    return [timeless(value) for value in found] if isinstance(found, list) else found


def results(at: Path) -> dict[str, Any]:
    files = sorted((at / "out/smoke/results/smoke").glob("*.json"))
    return {path.name: timeless(json.loads(path.read_text())) for path in files}


def finishes(at: Path) -> list[str]:
    """The runs that said so, each as often as it did."""
    return sorted(re.findall(r"^(smoke/\S+ +seed \d+)  test error", said(at), re.MULTILINE))


# ---- nodes and workers that die


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
    assert ended(*asked, at=here) == 0, said(here)
    assert len(finishes(there)) == len(set(finishes(there))) == 4
    assert finishes(there) == finishes(here)
    assert results(there) == results(here)
    assert len(results(there)) == 4
    for folder in (here / "out/smoke/runs/smoke").iterdir():
        assert same(lasting(folder), lasting(there / "out/smoke/runs/smoke" / folder.name))
    written = {path: path.stat().st_mtime_ns for path in there.glob("out/smoke/r*/smoke/**/*.json")}
    assert len(written) >= 4
    assert ended(*asked, "--executor", "ray", "--address", cluster.address, at=there) == 0
    assert len(finishes(there)) == 4  # nothing that is done is done again
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_the_command_is_killed_or_asked_to_stop_and_goes_on(
    cluster: Any, add: Callable[..., Any], tmp_path: Path
) -> None:
    add()
    asked = [*SMOKE[:-1], "0-2", "--checkpoint-epochs", "1", "--executor", "ray", "--address", cluster.address]
    for number, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        with command(*asked, at=tmp_path) as process:
            before = len(finishes(tmp_path))
            until(lambda: len(finishes(tmp_path)) > before, process, tmp_path)  # noqa: B023
            process.send_signal(number)
            assert process.wait(HANG_SECONDS) == code, said(tmp_path)
    assert "stopped by Ctrl-C; the same command resumes" in said(tmp_path)
    assert ended(*asked, at=tmp_path) == 0, said(tmp_path)
    assert len(finishes(tmp_path)) == len(set(finishes(tmp_path))) == 12
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
    assert ended(*asked, at=here) == 0, said(here)
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


def slow_runs(count: int, epochs: int = 600) -> list[Run]:
    """Of some seconds each."""
    return [Run(Job(tiny_recipe(name="slow", epochs=epochs), seed)) for seed in range(count)]


def test_a_node_that_kills_every_worker_fails_no_run(cluster: Any, add: Callable[..., Any], tmp_path: Path) -> None:
    """As one does whose memory is too small: its runs go to another node, and it gets no new workers for a while."""
    bad, _ = add(), add()
    options = RunOptions(ResultStore(tmp_path / "results", tmp_path / "runs"), checkpoint_epochs=100)
    told: list[tuple[int, Event]] = []
    with open_scheduler(cluster.address) as scheduler:
        for number, event in schedule_runs(slow_runs(4), options, scheduler, {"tiny": tiny_data()}):
            told.append((number, event))
            if isinstance(event, Started | Epoch):
                kill(workers(bad))
    assert sorted(number for number, event in told if isinstance(event, Finished)) == [0, 1, 2, 3]
    assert not [event for _, event in told if isinstance(event, Failed)]
    assert 1 <= sum(isinstance(event, Note) and "worker lost on node" in event.text for _, event in told) <= 3


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
        told = list(schedule_runs(slow_runs(2, epochs=3), options, scheduler, {"tiny": tiny_data()}))
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
    assert ended(*asked, "--executor", "ray", "--address", cluster.address, at=tmp_path) == 0, said(tmp_path)
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


def test_an_address_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with socket.socket() as unheard, socket.create_server(("127.0.0.1", 0)) as silent:
        unheard.bind(("127.0.0.1", 0))  # and does not listen
        for place in (unheard, silent):
            address = f"127.0.0.1:{place.getsockname()[1]}"
            assert ended(*SMOKE, "--executor", "ray", "--address", address, at=tmp_path) == 1
            assert f"flatmin: no Ray cluster answers at {address}" in said(tmp_path)
    assert "Traceback" not in said(tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "0.5"], "a worker takes 1 CPU and 0.5 GPU of one node, and none of the cluster's 2 nodes"),
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
