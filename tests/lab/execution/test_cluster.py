"""What a cluster is made of, without one: folders that travel, nodes that have room, runs that are dealt out."""

import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.processes import flatmin, words
from tests.support.small_runs import lasting, same, tiny_data, tiny_recipe

from flatmin_lab.execution.cluster import file_sync, nodes, worker
from flatmin_lab.execution.cluster.file_sync import Watched, content, put
from flatmin_lab.execution.cluster.nodes import Node, Share
from flatmin_lab.execution.cluster.run_queue import _Runs
from flatmin_lab.execution.cluster.scheduler import Crew
from flatmin_lab.execution.cluster.task_queue import Ended, Lost
from flatmin_lab.execution.cluster.worker import Changed, Hand, Unable
from flatmin_lab.execution.process_pool import Died
from flatmin_lab.execution.runner import How, Run, Task, on_data
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.runs.events import Failed, Finished, Note, Progress, RunError, Saved, Stopped
from flatmin_lab.runs.result_store import ResultStore


def tree(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


# ---- folders that travel


def test_a_folder_arrives_as_it_left_and_its_changes_come_back(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "inner").mkdir(parents=True)
    (here / "metrics.jsonl").write_text("1\n")
    (here / "inner/curve").write_bytes(b"\x00\xff")
    (here / ".lock").touch()
    (here / ".checkpoint.7-8.beside").write_text("half of it")
    put(there, content(here))
    assert tree(there) == {"metrics.jsonl": b"1\n", "inner/curve": b"\x00\xff"}
    watched = Watched(there)
    assert not watched.change()
    with (there / "metrics.jsonl").open("a") as file:
        file.write("2\n")
    (there / "inner/curve").unlink()
    (there / "result.json").write_text("{}")
    change = watched.change()
    assert (set(change.files), change.gone) == ({"metrics.jsonl", "result.json"}, ("inner/curve",))
    put(here, change)
    left = {".lock": b"", ".checkpoint.7-8.beside": b"half of it"}  # what is not the other's stays
    assert tree(here) == {**tree(there), **left}
    assert not watched.change()


def test_a_place_may_be_a_file_and_may_not_be_there_yet(tmp_path: Path) -> None:
    here, there = tmp_path / "results/a.json", tmp_path / "far/away/a.json"
    assert not content(here)
    watched = Watched(there)
    there.parent.mkdir(parents=True)
    there.write_text("{}")
    put(here, watched.change())
    assert here.read_text() == "{}"
    put(tmp_path / "third.json", content(here))
    assert (tmp_path / "third.json").read_text() == "{}"


def test_which_run_it_is_is_put_first_and_a_result_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is killed in between finds a run that is not finished, and goes on with it."""
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


# ---- a hand


def task(tmp_path: Path, **changes: Any) -> Task:
    how = How(ResultStore(tmp_path / "results", tmp_path / "runs"), checkpoint_epochs=1)
    return Task({7: Run(Job(tiny_recipe(name="sound", **changes), 0))}, "cpu", how)


def test_what_a_hand_trains_is_what_is_trained_here(tmp_path: Path) -> None:
    """To the same bits, in folders that are made from what it sends alone."""
    here, there = task(tmp_path / "here"), task(tmp_path / "there")
    own = [record for _, record in on_data(here, tiny_data(), lambda: None)]
    told: list[Any] = []
    for said in Hand(None).do(0, on_data, there, [content(place) for place in there.places()], tiny_data()):
        if isinstance(said, Changed):
            for number, change in said.changes.items():
                put(there.places()[number], change)
        else:
            told.append(said)
    assert [type(record) for _, record in told] == [type(record) for record in own if not isinstance(record, Progress)]
    assert {number for number, _ in told} == {7}
    folders = [each.how.store.folder(each.runs[7].job) for each in (here, there)]
    assert same(lasting(folders[0]), lasting(folders[1]))
    assert {path.name for path in folders[0].iterdir()} - {".lock"} == {path.name for path in folders[1].iterdir()}
    saved = next(record for _, record in told if isinstance(record, Saved))
    assert saved.path.parent == folders[1]  # a name that means something to the reader


def test_a_hand_stops_the_errand_that_was_meant_and_goes_on_with_it_later(tmp_path: Path) -> None:
    errand, worker = task(tmp_path, epochs=50), Hand(None)
    worker.stop(3, "the errand before")
    seen = 0
    said: Any = None
    for said in worker.do(4, on_data, errand, [content(place) for place in errand.places()], tiny_data()):
        if isinstance(said, Changed):
            for number, change in said.changes.items():
                put(errand.places()[number], change)
            seen += 1
            if seen == 2:
                worker.stop(4, "enough")
    assert isinstance(said[1], Stopped)
    assert said[1].reason == "enough"
    again = worker.do(5, on_data, errand, [content(place) for place in errand.places()], tiny_data())
    begun: Any = next(one for one in again if not isinstance(one, Changed))
    assert begun[1].step == said[1].step > 0


def test_what_cannot_be_done_is_told_with_the_readers_names(tmp_path: Path) -> None:
    def broken(errand: Task, data: Any, stop: Any) -> Any:
        yield 7, Note(f"look at {errand.places()[0]}/config.json")
        raise ValueError(f"{errand.places()[1]} is damaged")

    errand = task(tmp_path)
    said = list(Hand(None).do(0, broken, errand, [content(place) for place in errand.places()], tiny_data()))
    assert said[0] == (7, Note(f"look at {errand.places()[0]}/config.json"))
    assert said[-1] == Died(f"{errand.places()[1]} is damaged")


def test_a_machine_that_cannot_go_on_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    def full(errand: Task, data: Any, stop: Any) -> Any:
        yield 7, Note("begun")
        raise OSError(28, "No space left on device", str(errand.places()[0]))

    errand = task(tmp_path)
    said = list(Hand(None).do(0, full, errand, [content(place) for place in errand.places()], tiny_data()))
    assert isinstance(said[-1], Unable)
    assert f"No space left on device: '{errand.places()[0]}'" in said[-1].why
    dead = Path(tempfile.gettempdir()) / f"{worker.FOLDER}{2**22 + 1}-left"  # no process can have that number
    dead.mkdir(exist_ok=True)
    Hand(None).hello("cpu")
    assert not dead.exists()


def test_the_source_is_known_by_its_content() -> None:
    assert len(worker.source()) == 64
    assert worker.introduced("cpu").version.startswith("flatmin 0.")


# ---- nodes


def test_room_on_a_node_follows_from_its_cpus_and_gpus() -> None:
    node = Node("key", "name", 8.0, 2.0)
    assert [node.room(Share(gpus=gpus)) for gpus in (0.0, 1.0, 0.5, 0.4, 0.3, 1 / 3, 0.1)] == [8, 2, 4, 4, 6, 6, 8]
    assert Node("key", "name", 0.0, 2.0).room(Share()) == 0


def test_gpus_are_used_where_there_are_some() -> None:
    plain, with_gpus = Node("a", "a", 4.0, 0.0), Node("b", "b", 4.0, 2.0)
    assert nodes.chosen([plain], None, None) == ("cpu", Share())
    assert nodes.chosen([plain, with_gpus], None, None) == ("cuda:0", Share(gpus=1.0))
    assert nodes.chosen([plain, with_gpus], None, 0.25) == ("cuda:0", Share(gpus=0.25))
    assert nodes.chosen([plain, with_gpus], "cpu", None) == ("cpu", Share())
    assert nodes.in_words([plain, with_gpus]) == "2 nodes with 8 CPUs and 2 GPUs"
    with pytest.raises(ValueError, match="takes 1 CPU and 1 GPU of one node, and none of the cluster's 1 node"):
        nodes.chosen([plain], "cuda", None)


def test_a_cluster_that_is_dead_by_now_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the latest that was started here nor one that the environment names."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(RunError, match="no Ray cluster was started here"), nodes.connected("auto"):
        pass
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{unheard.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray/ray_current_cluster").write_text(f"{address}\n")
        with pytest.raises(RunError, match=f"no Ray cluster answers at {address}"), nodes.connected("auto"):
            pass
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(RunError, match=f"no Ray cluster answers at {address}"), nodes.connected(None):
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
    told = flatmin(*command, *flags)
    assert told.exit_code == 2
    assert message in words(told.output)
    assert not list(tmp_path.glob("*/*"))


# ---- runs that are dealt out


def dealt(tmp_path: Path, count: int, *, gpus: float, held: ExitStack, **how: Any) -> _Runs:
    crew = cast(Crew, SimpleNamespace(share=Share(gpus=gpus), device="cpu", hardware="a cluster"))
    runs = [Run(Job(tiny_recipe(name="sound"), seed)) for seed in range(count)]
    store = ResultStore(tmp_path / "results", tmp_path / "runs")
    return _Runs(runs, How(store, **how), crew, {"tiny": tiny_data()}, lambda: None, held)


def taken(queue: _Runs, hands: int) -> list[list[int]]:
    found = []
    while (given := queue.take(hands, "here", others=True)) is not None:
        found.append(list(given[0].runs))
    return found


def test_runs_share_a_gpu_as_long_as_there_is_work_for_all_hands(tmp_path: Path) -> None:
    with ExitStack() as held:
        assert taken(dealt(tmp_path / "a", 3, gpus=0.0, held=held), 2) == [[0], [1], [2]]
        assert taken(dealt(tmp_path / "b", 9, gpus=1.0, held=held), 2) == [[0, 1, 2, 3], [4, 5, 6], [7], [8]]
        assert taken(dealt(tmp_path / "c", 4, gpus=1.0, held=held), 8) == [[0], [1], [2], [3]]
        assert taken(dealt(tmp_path / "d", 4, gpus=1.0, held=held, at_once=2), 1) == [[0, 1], [2, 3]]


def test_what_was_lost_together_is_tried_again_alone_and_not_for_ever(tmp_path: Path) -> None:
    with ExitStack() as held:
        queue = dealt(tmp_path, 3, gpus=1.0, held=held)
        given = queue.take(1, "here", others=True)
        assert given is not None
        errand = given[0]
        assert list(errand.runs) == [0, 1, 2]
        assert next(queue.heard(errand, (1, Finished({"seed": 1})), "here"))[0] == 1
        told = list(queue.heard(errand, Lost("far", "it burnt"), "here"))
        assert [(number, type(record)) for number, record in told] == [(0, Note), (2, Note)]
        assert taken(queue, 1) == []  # not on the same node, where there are others
        assert list(queue.heard(errand, Ended(), "here")) == []
        assert list(queue.heard(errand, (0, Note("from the dead")), "here")) == []
        for where, kind in (("there", Note), ("elsewhere", Failed)):
            again = queue.take(1, where, others=True)
            assert again is not None
            assert list(again[0].runs) == [0]
            failed = next(queue.heard(again[0], Lost("far", "it burnt"), where))[1]
            assert isinstance(failed, kind)
        assert isinstance(failed, Failed)
        assert "lost 3 times with its worker, at last on node far: it burnt" in failed.what
        assert queue.left() == [2]
        alone = queue.take(1, "here", others=False)  # the only node that is left
        assert alone is not None
        assert list(alone[0].runs) == [2]
        full = (2, Failed("the disk is full", later=True))  # there, not here
        assert isinstance(next(queue.heard(alone[0], full, "here"))[1], Note)
        assert queue.waiting() == 1
        assert queue.how.store.state(queue.runs[0].job) == "failed"


def test_a_folder_of_another_run_is_not_touched_and_named(tmp_path: Path) -> None:
    with ExitStack() as held:
        queue = dealt(tmp_path, 2, gpus=0.0, held=held)
        folder = queue.how.store.folder(queue.runs[0].job)
        folder.mkdir(parents=True)
        (folder / "letter.txt").write_text("dear")
        assert taken(queue, 1) == [[1]]
        number, record = next(queue.told())
        assert (number, type(record)) == (0, Failed)
        assert isinstance(record, Failed)
        assert record.later
        assert f"Move {folder} away" in record.what
        assert tree(folder) == {"letter.txt": b"dear"}
