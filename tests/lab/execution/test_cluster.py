"""The parts of the cluster executor, without a cluster: file sync, worker, nodes, queue of runs, scheduler."""

import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flatmin_lab.execution.cluster import file_sync, nodes, scheduler, worker, worker_pool
from flatmin_lab.execution.cluster.file_sync import WatchedFolder, content, put
from flatmin_lab.execution.cluster.nodes import Node, Share
from flatmin_lab.execution.cluster.run_queue import ClusterRunQueue
from flatmin_lab.execution.cluster.scheduler import Scheduler
from flatmin_lab.execution.cluster.worker import FileChanges, NodeFailure, Worker
from flatmin_lab.execution.cluster.worker_pool import COOLDOWN_SECONDS, WorkerHandle
from flatmin_lab.execution.executor import run_tasks
from flatmin_lab.execution.runner import Run, RunOptions, RunTask, run_task_on_data
from flatmin_lab.execution.task_queue import MAX_ATTEMPTS, Slot, TaskEnd, TaskFailure, WorkerLoss
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.runs.events import Failed, Finished, Note, Progress, RunError, Saved, Stopped
from flatmin_lab.runs.result_store import ResultStore
from tests.support.processes import flatmin, words
from tests.support.small_runs import lasting, same, tiny_data, tiny_recipe


def tree(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


# ---- file sync


def test_a_folder_is_copied_and_its_changes_come_back(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "inner").mkdir(parents=True)
    (here / "metrics.jsonl").write_text("1\n")
    (here / "inner/curve").write_bytes(b"\x00\xff")
    (here / ".lock").touch()
    (here / ".checkpoint.7-8.beside").write_text("half of it")
    put(there, content(here))
    assert tree(there) == {"metrics.jsonl": b"1\n", "inner/curve": b"\x00\xff"}
    watched = WatchedFolder(there)
    assert not watched.change()
    with (there / "metrics.jsonl").open("a") as file:
        file.write("2\n")
    (there / "inner/curve").unlink()
    (there / "result.json").write_text("{}")
    change = watched.change()
    assert (set(change.files), change.gone) == ({"metrics.jsonl", "result.json"}, ("inner/curve",))
    put(here, change)
    left = {".lock": b"", ".checkpoint.7-8.beside": b"half of it"}  # what was not copied stays
    assert tree(here) == {**tree(there), **left}
    assert not watched.change()


def test_a_path_may_be_a_file_and_may_not_exist_yet(tmp_path: Path) -> None:
    here, there = tmp_path / "results/a.json", tmp_path / "far/away/a.json"
    assert not content(here)
    watched = WatchedFolder(there)
    there.parent.mkdir(parents=True)
    there.write_text("{}")
    put(here, watched.change())
    assert here.read_text() == "{}"
    put(tmp_path / "third.json", content(here))
    assert (tmp_path / "third.json").read_text() == "{}"


def test_the_config_is_written_first_and_the_result_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill in between there is an unfinished run, which can be resumed."""
    here, order = tmp_path / "here", list[str]()
    here.mkdir()
    for name in ("result.json", "checkpoint-00000009.safetensors", "config.json", "state.json", "a", "z"):
        (here / name).write_text(name)
    whole = content(here)

    def noted(path: Path) -> Any:
        order.append(path.name)
        return path.open("wb")

    monkeypatch.setattr(file_sync, "atomic_write", noted)
    put(tmp_path / "there", whole)
    assert (order[0], order[-1]) == ("config.json", "result.json")
    assert len(order) == 6


# ---- a worker


def make_task(tmp_path: Path, **changes: Any) -> RunTask:
    options = RunOptions(ResultStore(tmp_path / "results", tmp_path / "runs"), checkpoint_epochs=1)
    return RunTask({7: Run(Job(tiny_recipe(name="sound", **changes), 0))}, "cpu", options)


def test_a_worker_trains_what_this_process_trains(tmp_path: Path) -> None:
    """To the same bits, in folders made only from what it sends."""
    here, there = make_task(tmp_path / "here"), make_task(tmp_path / "there")
    own = [event for _, event in run_task_on_data(here, tiny_data(), lambda: None)]
    events: list[Any] = []
    for said in Worker(None).run(0, run_task_on_data, there, [content(place) for place in there.paths()], tiny_data()):
        if isinstance(said, FileChanges):
            for number, change in said.changes.items():
                put(there.paths()[number], change)
        else:
            events.append(said)
    assert [type(event) for _, event in events] == [type(event) for event in own if not isinstance(event, Progress)]
    assert {number for number, _ in events} == {7}
    folders = [each.options.store.folder(each.runs[7].job) for each in (here, there)]
    assert same(lasting(folders[0]), lasting(folders[1]))
    assert {path.name for path in folders[0].iterdir()} - {".lock"} == {path.name for path in folders[1].iterdir()}
    saved = next(event for _, event in events if isinstance(event, Saved))
    assert saved.path.parent == folders[1]  # the path on the user's machine


def test_a_worker_stops_only_the_task_it_was_asked_to_and_resumes_it_later(tmp_path: Path) -> None:
    task, worker = make_task(tmp_path, epochs=50), Worker(None)
    worker.stop(3, "the task before")
    seen = 0
    said: Any = None
    for said in worker.run(4, run_task_on_data, task, [content(place) for place in task.paths()], tiny_data()):
        if isinstance(said, FileChanges):
            for number, change in said.changes.items():
                put(task.paths()[number], change)
            seen += 1
            if seen == 2:
                worker.stop(4, "enough")
    assert isinstance(said[1], Stopped)
    assert said[1].reason == "enough"
    again = worker.run(5, run_task_on_data, task, [content(place) for place in task.paths()], tiny_data())
    begun: Any = next(one for one in again if not isinstance(one, FileChanges))
    assert begun[1].step == said[1].step > 0


def test_a_task_failure_names_the_paths_of_the_users_machine(tmp_path: Path) -> None:
    def broken(task: RunTask, data: Any, stop: Any) -> Any:
        yield 7, Note(f"look at {task.paths()[0]}/config.json")
        raise ValueError(f"{task.paths()[1]} is damaged")

    task = make_task(tmp_path)
    said = list(Worker(None).run(0, broken, task, [content(place) for place in task.paths()], tiny_data()))
    assert said[0] == (7, Note(f"look at {task.paths()[0]}/config.json"))
    assert said[-1] == TaskFailure(f"{task.paths()[1]} is damaged")


def test_a_node_that_cannot_continue_says_so_and_leaves_nothing_behind(tmp_path: Path) -> None:
    def full(task: RunTask, data: Any, stop: Any) -> Any:
        yield 7, Note("started")
        raise OSError(28, "No space left on device", str(task.paths()[0]))

    task = make_task(tmp_path)
    said = list(Worker(None).run(0, full, task, [content(place) for place in task.paths()], tiny_data()))
    assert isinstance(said[-1], NodeFailure)
    assert f"No space left on device: '{task.paths()[0]}'" in said[-1].why


def test_folders_of_killed_workers_are_removed_and_those_of_other_nodes_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # nodes may share it
    nobody = 2**22 + 1  # no process can have that number
    dead, alive, elsewhere = (
        tmp_path / f"{worker.FOLDER_PREFIX}{node}-{number}-left"
        for node, number in ((worker.this_node(), nobody), (worker.this_node(), os.getpid()), ("other", nobody))
    )
    for folder in (dead, alive, elsewhere):
        folder.mkdir()
    Worker(None).info("cpu")
    assert [folder.exists() for folder in (dead, alive, elsewhere)] == [False, True, True]


def test_the_source_is_known_by_its_content() -> None:
    assert len(worker.source_digest()) == 64
    assert worker.worker_info("cpu").version.startswith("flatmin 0.")


# ---- nodes


def test_room_on_a_node_follows_from_its_cpus_and_gpus() -> None:
    node = Node("key", "name", 8.0, 2.0)
    assert [node.room(Share(gpus=gpus)) for gpus in (0.0, 1.0, 0.5, 0.4, 0.3, 1 / 3, 0.1)] == [8, 2, 4, 4, 6, 6, 8]
    assert Node("key", "name", 0.0, 2.0).room(Share()) == 0


def test_gpus_are_used_where_there_are_some() -> None:
    plain, with_gpus = Node("a", "a", 4.0, 0.0), Node("b", "b", 4.0, 2.0)
    assert nodes.choose_device([plain], None, None) == ("cpu", Share())
    assert nodes.choose_device([plain, with_gpus], None, None) == ("cuda:0", Share(gpus=1.0))
    assert nodes.choose_device([plain, with_gpus], None, 0.25) == ("cuda:0", Share(gpus=0.25))
    assert nodes.choose_device([plain, with_gpus], "cpu", None) == ("cpu", Share())
    assert nodes.describe_nodes([plain, with_gpus]) == "2 nodes with 8 CPUs and 2 GPUs"
    with pytest.raises(ValueError, match="takes 1 CPU and 1 GPU of one node, but none of the cluster's 1 node"):
        nodes.choose_device([plain], "cuda", None)


def test_a_cluster_that_is_dead_by_now_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the latest that was started here nor one that the environment names."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(RunError, match="no Ray cluster was started here"), nodes.ray_connection("auto"):
        pass
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{unheard.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray/ray_current_cluster").write_text(f"{address}\n")
        with pytest.raises(RunError, match=f"no Ray cluster answers at {address}"), nodes.ray_connection("auto"):
            pass
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(RunError, match=f"no Ray cluster answers at {address}"), nodes.ray_connection(None):
            pass


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--executor", "slurm"], "unknown executor 'slurm'; choose from local, ray"),
        (["--address", "head:6379"], "--address belong to --executor ray; add it, or leave them out"),
        (["--gpus", "0.5"], "--gpus belong to --executor ray"),
        (["--executor", "ray", "--address", "ray://head:10001"], "--address takes HOST:PORT of a Ray cluster"),
        (["--executor", "ray", "--address", "head"], "--address takes HOST:PORT of a Ray cluster"),
    ],
)
@pytest.mark.parametrize("command", [["reproduce", "table1", "--protocol", "smoke"], ["tune", "--data", "digits"]])
def test_flags_that_do_not_go_together_are_refused(
    command: list[str], flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = flatmin(*command, *flags)
    assert done.exit_code == 2
    assert message in words(done.output)
    assert not list(tmp_path.glob("*/*"))


# ---- the queue of runs


def queue_of(tmp_path: Path, count: int, *, held: ExitStack, **options: Any) -> ClusterRunQueue:
    runs = [Run(Job(tiny_recipe(name="sound"), seed)) for seed in range(count)]
    store = ResultStore(tmp_path / "results", tmp_path / "runs")
    queue = ClusterRunQueue(runs, RunOptions(store, **options), dict, {"tiny": tiny_data()}, lambda: None)
    return held.enter_context(closing(queue))


NODES = ("here", "there", "elsewhere")


def slot(node: str, *, workers: int = 1, nodes: Sequence[str] = NODES) -> Slot:
    return Slot("cuda:0", node, workers, [other for other in nodes if other != node])


def taken(queue: ClusterRunQueue, workers: int) -> list[list[int]]:
    found = []
    while (task := queue.take(slot("here", workers=workers))) is not None:
        found.append(list(task.numbers))
    return found


def test_runs_share_a_gpu_as_long_as_there_is_work_for_all_workers(tmp_path: Path) -> None:
    with ExitStack() as held:
        assert taken(queue_of(tmp_path / "a", 3, held=held, at_once=1), 2) == [[0], [1], [2]]
        assert taken(queue_of(tmp_path / "b", 9, held=held), 2) == [[0, 1, 2, 3], [4, 5, 6], [7], [8]]
        assert taken(queue_of(tmp_path / "c", 4, held=held), 8) == [[0], [1], [2], [3]]
        assert taken(queue_of(tmp_path / "d", 4, held=held, at_once=2), 1) == [[0, 1], [2, 3]]


def test_runs_that_were_lost_together_are_retried_alone_and_not_for_ever(tmp_path: Path) -> None:
    with ExitStack() as held:
        queue = queue_of(tmp_path, 3, held=held)
        task = queue.take(slot("here"))
        assert task is not None
        assert list(task.runs) == [0, 1, 2]
        assert next(queue.receive(task, (1, Finished({"seed": 1})), "here"))[0] == 1
        events = list(queue.receive(task, WorkerLoss("far", "it burnt"), "here"))
        assert [(number, type(event)) for number, event in events] == [(0, Note), (2, Note)]
        assert taken(queue, 1) == []  # not on the same node, where there are others
        assert list(queue.receive(task, TaskEnd(), "here")) == []
        assert list(queue.receive(task, (0, Note("from the dead")), "here")) == []
        for where, kind in (("there", Note), ("elsewhere", Failed)):
            again = queue.take(slot(where))
            assert again is not None
            assert list(again.runs) == [0]
            failed = next(queue.receive(again, WorkerLoss("far", "it burnt"), where))[1]
            assert isinstance(failed, kind)
        assert isinstance(failed, Failed)
        assert "worker lost 3 times, the last time on node far: it burnt" in failed.what
        assert queue.unfinished() == [2]
        alone = queue.take(slot("here", nodes=["here"]))  # the only node that is left
        assert alone is not None
        assert list(alone.runs) == [2]
        full = (2, Failed("the disk is full", later=True))  # there, not here
        assert isinstance(next(queue.receive(alone, full, "here"))[1], Note)
        assert queue.waiting_count() == 1
        assert queue.options.store.state(queue.runs[0].job) == "failed"


def test_a_run_that_every_node_has_lost_once_is_not_barred_from_all(tmp_path: Path) -> None:
    """It would wait for ever for a third node."""
    with ExitStack() as held:
        queue, two = queue_of(tmp_path, 1, held=held), ("here", "there")
        for node in two:
            assert (task := queue.take(slot(node, nodes=two))) is not None
            assert isinstance(next(queue.receive(task, WorkerLoss(node, "it burnt"), node))[1], Note)
            assert (queue.take(slot(node, nodes=NODES))) is None  # a third node has not lost it
        assert queue.take(slot("here", nodes=two)) is not None


def test_a_folder_of_another_run_is_not_touched_and_named(tmp_path: Path) -> None:
    with ExitStack() as held:
        queue = queue_of(tmp_path, 2, held=held, at_once=1)
        folder = queue.options.store.folder(queue.runs[0].job)
        folder.mkdir(parents=True)
        (folder / "letter.txt").write_text("dear")
        assert taken(queue, 1) == [[1]]
        number, event = next(queue.take_refused())
        assert (number, type(event)) == (0, Failed)
        assert isinstance(event, Failed)
        assert event.later
        assert f"Move {folder} away" in event.what
        assert tree(folder) == {"letter.txt": b"dear"}


# ---- the scheduler


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Actor:
    """A worker whose task says `messages`."""

    def __init__(self, messages: Iterator[Any]) -> None:
        self.messages = messages
        self.run = self

    def options(self, **_: Any) -> "Actor":
        return self

    def remote(self, *_: Any) -> Iterator[Any]:
        return self.messages


class SimulatedRay:
    """Nodes of some CPUs; what is put is delivered as it is."""

    exceptions = SimpleNamespace(RayError=ConnectionError)

    def __init__(self, cpus: dict[str, float]) -> None:
        self.cpus = cpus

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": name, "NodeManagerAddress": name, "Alive": True, "Resources": {"CPU": cpus}}
            for name, cpus in self.cpus.items()
        ]

    def put(self, value: Any) -> Any:
        return value

    def get(self, reference: Any) -> Any:
        return reference

    def kill(self, actor: Actor) -> None:
        pass


@dataclass(eq=False, kw_only=True)
class SimulatedScheduler(Scheduler):
    """Workers start on nodes that no other job fills, and do what `act` says. Each look at them takes a second."""

    clock: Clock
    act: Callable[[str, int], Iterator[Any]]  # the messages of a node's task; the run's number
    filled: Callable[[str], bool] = lambda _: False
    began: list[tuple[str, float]] = field(default_factory=list)  # each task: its node, and when
    started_on: list[str] = field(default_factory=list)  # the node of each worker

    def _start_worker(self, node: Node) -> WorkerHandle:
        self.started_on.append(node.key)
        return WorkerHandle(None, node, pending=worker.worker_info("cpu"), started_at=self.clock())

    def _assign(self, handle: WorkerHandle, function: Any, queue: Any) -> None:
        handle.actor = Actor(self._messages(handle))
        super()._assign(handle, function, queue)

    def _messages(self, handle: WorkerHandle) -> Iterator[Any]:
        self.began.append((handle.node.key, self.clock()))
        for number in handle.task.numbers:
            yield from self.act(handle.node.key, number)

    def _ready_workers(self) -> list[WorkerHandle]:
        self.clock.now += 1
        assert self.clock.now < 3600, "it waits for ever"
        return [handle for handle in self.workers if handle.is_busy or not self.filled(handle.node.key)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (scheduler, worker_pool):
        monkeypatch.setattr(module, "monotonic", clock)
    return clock


def finish(number: int, *, seconds: int = 1) -> Iterator[Any]:
    for _ in range(seconds - 1):
        yield number, Note("it trains")
    yield number, Finished({"seed": number})


def lose_first_on(node: str) -> Callable[[str, int], Iterator[Any]]:
    lost: list[int] = []

    def act(where: str, number: int) -> Iterator[Any]:
        if where == node and number not in lost:
            lost.append(number)
            yield NodeFailure("no memory")
        yield from finish(number)

    return act


def simulate(
    clock: Clock,
    tmp_path: Path,
    rooms: dict[str, float],
    act: Any,
    *,
    runs: int = 1,
    filled: Any = None,
    **options: Any,
) -> tuple[SimulatedScheduler, list[type]]:
    """Runs on nodes with so many CPUs: the scheduler at the end, and the kinds of events."""
    busy = {} if filled is None else {"filled": filled}
    simulated = SimulatedScheduler(ray=SimulatedRay(rooms), device="cpu", share=Share(), clock=clock, act=act, **busy)
    with ExitStack() as held:
        events = run_tasks(simulated, run_task_on_data, queue_of(tmp_path, runs, held=held, **options))
        return simulated, [type(event) for _, event in events if not isinstance(event, Note)]


def test_a_run_returns_to_the_node_that_lost_it_while_another_job_fills_the_others(
    clock: Clock, tmp_path: Path
) -> None:
    """Not before that node's cooldown is over, and however large the other is: one worker waits there for room."""
    simulated, ends = simulate(clock, tmp_path, {"a": 1, "b": 64}, lose_first_on("a"), filled=lambda node: node == "b")
    assert ends == [Finished]
    (first, lost_at), (second, again_at) = simulated.began
    assert (first, second) == ("a", "a")
    assert COOLDOWN_SECONDS < again_at - lost_at < COOLDOWN_SECONDS + 10
    assert simulated.started_on == ["a", "b", "a"]


def test_a_run_goes_to_a_node_that_gets_room_before_the_one_that_lost_it(clock: Clock, tmp_path: Path) -> None:
    def filled(node: str) -> bool:
        return node == "b" and clock() < 20

    simulated, ends = simulate(clock, tmp_path, {"a": 1, "b": 1}, lose_first_on("a"), filled=filled)
    assert ends == [Finished]
    assert [node for node, _ in simulated.began] == ["a", "b"]


def test_a_run_waits_for_a_node_that_works_for_us(clock: Clock, tmp_path: Path) -> None:
    """Its place comes free by itself; back on the node that kills its workers, the run would soon have failed."""

    def act(node: str, number: int) -> Iterator[Any]:
        yield from [NodeFailure("no memory")] if node == "a" else finish(number, seconds=200)

    simulated, ends = simulate(clock, tmp_path, {"a": 1, "b": 1}, act, runs=2, at_once=1)
    assert ends == [Finished, Finished]
    assert [node for node, _ in simulated.began].count("b") == 2


def test_a_run_that_every_worker_is_lost_with_fails_though_another_job_fills_the_others(
    clock: Clock, tmp_path: Path
) -> None:
    def lose(node: str, number: int) -> Iterator[Any]:
        yield NodeFailure("no memory")

    simulated, ends = simulate(clock, tmp_path, {"a": 1, "b": 1}, lose, filled=lambda node: node == "b")
    assert ends == [Failed]
    assert len(simulated.began) == MAX_ATTEMPTS


def test_a_cluster_that_has_gone_is_not_reported_as_a_broken_pipe_alone(clock: Clock, tmp_path: Path) -> None:
    def go(node: str, number: int) -> Iterator[Any]:
        yield number, Note("it trains")
        raise OSError("Broken pipe")  # as Ray raises it, without a number

    with pytest.raises(RunError, match=r"the Ray cluster has gone \(Broken pipe\).*the same command resumes"):
        simulate(clock, tmp_path, {"a": 1}, go)


class StartingRay:
    """Ray whose first starts fail, as where another cluster takes its port."""

    def __init__(self, failing: int) -> None:
        self.failing, self.calls = failing, list[str]()

    def init(self, address: str, **_: Any) -> None:
        self.calls.append(address)
        if len([call for call in self.calls if call == address]) <= self.failing:
            raise RuntimeError("Failed to start GCS. \nLast 0 lines of error files:")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_a_cluster_here_is_started_again_where_another_one_took_its_port() -> None:
    ray = StartingRay(failing=2)
    nodes._init_ray(ray, "local")
    assert ray.calls == ["local", "shutdown", "local", "shutdown", "local"]
    with pytest.raises(RunError, match=r"on this machine \(Failed to start GCS.*, 3 times\).*Leave out --executor"):
        nodes._init_ray(StartingRay(failing=3), "local")
    elsewhere = StartingRay(failing=1)
    with pytest.raises(RunError, match=r"joined at host:1 \(Failed to start GCS"):
        nodes._init_ray(elsewhere, "host:1")
    assert elsewhere.calls == ["host:1"]
