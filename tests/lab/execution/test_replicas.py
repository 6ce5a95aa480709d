"""Trained together, in turns, each run is what it is alone: its events, its folder, its bits."""

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from cProfile import Profile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flatmin_lab import methods
from flatmin_lab.execution import replicas
from flatmin_lab.execution.replicas import (
    MAX_DISCARDED,
    MEASURED_ROUNDS,
    MIN_SPEEDUP,
    WARMUP_ROUNDS,
    Replica,
    ReplicaLimit,
    _take_turns,
    train_together,
)
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.runs.events import Epoch, Event, Failed, Finished, Progress, RunError, Saved, Started, Stopped
from flatmin_lab.system.rng import RandomScope
from flatmin_lab.training import loop
from flatmin_lab.training.loop import train
from tests.support.small_runs import TIMES, after, lasting, run, same, tiny_data, tiny_recipe

JOBS = [
    Job(tiny_recipe(method="dropout"), 0),
    Job(tiny_recipe(method="mixup", augment="vanilla", ema=0.9), 1),
    Job(tiny_recipe(method="amp", settings={"epsilon": 0.1}, epochs=2), 2),
    Job(tiny_recipe(method="rmp", label_noise=0.2), 3),
]


def folders(place: Path, count: int = len(JOBS)) -> list[Path]:
    return [place / f"seed-{number}" for number in range(count)]


def ends(events: Iterator[tuple[int, Event]]) -> dict[int, Event]:
    """The last event of each."""
    return dict(events)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each run leaves when it has the process for itself."""
    place = tmp_path_factory.mktemp("alone")
    torch.set_num_threads(1)  # as for a test, which this comes before: bits depend on it
    for job, folder in zip(JOBS, folders(place), strict=True):
        run(job.recipe, folder, seed=job.seed)
    return [lasting(folder) for folder in folders(place)]


@pytest.mark.parametrize("count", [None, 1, 2, 9])
def test_each_is_the_same_as_alone(tmp_path: Path, alone: list[dict[str, Any]], count: int | None) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    drawn = []
    events = train_together(JOBS, tiny_data(), folders=folders(tmp_path), count=count)
    for _, event in events:
        if isinstance(event, Finished):
            drawn.append(torch.rand(()))
    assert torch.equal(torch.stack(drawn), expected)  # the caller's numbers are its own
    assert all(same(lasting(folder), one) for folder, one in zip(folders(tmp_path), alone, strict=True))


def test_they_take_turns_and_the_next_one_starts_when_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PROGRESS_SECONDS", float("inf"))  # on a slow machine such an event takes a turn
    heard = [(number, type(event)) for number, event in train_together(JOBS, tiny_data(), count=2)]
    assert heard[:2] == [(0, Started), (1, Started)]
    assert heard.index((2, Started)) > heard.index((0, Finished))
    epochs = [number for number, kind in heard if kind is Epoch]
    assert epochs[:4] == [0, 1, 0, 1]
    assert [sum(kind is Finished for n, kind in heard if n == number) for number in range(4)] == [1] * 4


def test_events_are_those_of_a_run_alone() -> None:
    def plain(event: Event) -> Any:
        if isinstance(event, Epoch):
            return replace(event, numbers={k: v for k, v in event.numbers.items() if k not in TIMES})
        if isinstance(event, Finished):
            return {key: value for key, value in event.result.items() if key not in TIMES}
        return event

    heard: list[list[Event]] = [[] for _ in JOBS]
    for number, event in train_together(JOBS, tiny_data(), count=3):
        heard[number].append(event)
    for job, mine in zip(JOBS, heard, strict=True):
        expected = train(job.recipe, tiny_data(), seed=job.seed)
        without = [[plain(r) for r in found if not isinstance(r, Progress)] for found in (mine, expected)]
        assert without[0] == without[1]


@pytest.mark.parametrize("first", [3, 11, 30])
def test_stopped_all_save_and_go_on_to_the_same_bits(tmp_path: Path, alone: list[dict[str, Any]], first: int) -> None:
    settings: dict[str, Any] = {"folders": folders(tmp_path), "count": 2, "checkpoint_epochs": 99}
    last = ends(train_together(JOBS, tiny_data(), stop=after(first), **settings))
    stopped = [event for event in last.values() if isinstance(event, Stopped)]
    assert len(last) == len(JOBS)
    assert stopped
    assert isinstance(last[3], Stopped)
    assert last[3].step == 0  # not begun
    assert not folders(tmp_path)[3].exists()
    again = ends(train_together(JOBS, tiny_data(), resume=True, **settings))
    assert all(isinstance(event, Finished) for event in again.values())
    assert all(same(lasting(folder), one) for folder, one in zip(folders(tmp_path), alone, strict=True))


def test_a_run_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    jobs = [JOBS[0], Job(tiny_recipe(lr=1e30, warmup=1.0, epochs=2, schedule="constant"), 1), JOBS[2]]
    heard: list[tuple[int, Event]] = []
    with pytest.raises(RunError, match=r"1 of 3 runs failed: the loss of step \d+"):
        heard.extend(train_together(jobs, tiny_data(), folders=folders(tmp_path, 3), count=2))
    for pair in train_together(jobs, tiny_data(), count=2):
        heard.append(pair)
        if isinstance(pair[1], Failed):
            assert pair[0] == 1
            assert "the loss of step" in pair[1].what
            assert pair[1].step
            break
    assert (folders(tmp_path, 3)[2] / "result.json").exists()


# ---- whatever happens to one of them

Steps = Generator[Event | None, None, None]


def turns(
    runs: list[Callable[[], Steps]], limit: ReplicaLimit, stop: Callable[[], str | None] = lambda: None
) -> Iterator[tuple[int, Event]]:
    """Made-up runs in turns."""
    idle: list[torch.cuda.Stream] = []

    def begin(number: int) -> Replica:
        return Replica(number, runs[number](), torch.device("cpu"), idle)

    return _take_turns(deque(range(len(runs))), begin, limit, stop)


def good() -> Steps:
    yield Started(step=0, steps=3, epochs=1, parameters=1)
    yield from [None] * 3
    yield Finished({})


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileExistsError("it is in use"), "it is in use"),
        (ValueError("no such thing"), "no such thing"),
        (torch.OutOfMemoryError("no memory"), "no memory"),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
    ],
)
def test_any_error_is_that_run_s_own(error: Exception, said: str) -> None:
    """It is raised at the end; the memory that the run held is free long before."""

    class Memory:
        pass

    held: list[weakref.ref[Memory]] = []

    def bad() -> Steps:
        memory = Memory()
        held.append(weakref.ref(memory))
        yield Started(step=10, steps=30, epochs=1, parameters=1)
        yield from [None] * WARMUP_ROUNDS
        raise error

    heard: list[tuple[int, Event]] = []
    free: list[bool] = []

    def hears(pair: tuple[int, Event]) -> None:
        heard.append(pair)
        if isinstance(pair[1], Failed):
            free.append(held[0]() is None)

    with pytest.raises(RunError, match=f"1 of 3 runs failed: {said}") as raised:
        deque(map(hears, turns([good, bad, good], ReplicaLimit(count=2))))
    assert free == [True]
    assert raised.value.__cause__ is error
    assert (1, Failed(said, 10 + WARMUP_ROUNDS)) in heard
    assert [number for number, event in heard if isinstance(event, Finished)] == [0, 2]


def test_one_that_finds_no_memory_beside_the_others_comes_later() -> None:
    tries: list[int] = []

    def long() -> Steps:
        yield from [None] * 9
        yield from good()

    def large() -> Steps:
        tries.append(len(tries))
        if len(tries) < 3:
            raise torch.OutOfMemoryError("no memory")
        yield from good()

    limit = ReplicaLimit(count=3)
    heard = list(turns([good, large, long], limit))
    assert len(tries) == 3
    assert (limit.count, limit.settled) == (1, True)
    assert [number for number, event in heard if isinstance(event, Finished)] == [0, 2, 1]
    assert not any(isinstance(event, Failed) for _, event in heard)
    tries.clear()
    with pytest.raises(RunError, match="no memory"):  # alone, it will not find any later
        list(turns([large], ReplicaLimit()))


def test_all_are_closed_although_one_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def stubborn(self: Replica) -> None:
        closed.append(self.number)
        self.events.close()
        raise RuntimeError(f"number {self.number} cannot be closed")

    monkeypatch.setattr(Replica, "close", stubborn)
    events = turns([good, good, good], ReplicaLimit(count=3))
    next(events)
    with pytest.raises(RuntimeError, match="number 0"):
        events.close()  # type: ignore[attr-defined]  # it is a generator
    assert closed == [0, 1, 2]


def test_a_stream_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self, device: torch.device) -> None:
            made.append(self)

        def wait_stream(self, other: object) -> None: ...

        def synchronize(self) -> None: ...

    made: list[Stream] = []
    idle: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    for _ in range(3):
        pair = [Replica(number, good(), torch.device("cuda"), idle) for number in range(2)]
        for replica in pair:
            replica.close()
    assert len(made) == 2


def test_what_makes_no_sense_is_refused_before_anything_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        train_together(JOBS, tiny_data(), count=0)
    for wrong, message in (
        (folders(tmp_path)[:2], "got 2 folders for 4 runs"),
        ([*folders(tmp_path)[:3], tmp_path / "x" / ".." / "seed-1"], "seed-1 twice"),
    ):
        with pytest.raises(ValueError, match=f"a folder of its own, .*{message}"):
            train_together(JOBS, tiny_data(), folders=wrong)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="would be inside the file"):
        train_together(JOBS, tiny_data(), folders=[*folders(tmp_path)[:3], tmp_path / "file" / "run"])
    with pytest.raises(ValueError, match="--no-capture"):
        train_together([*JOBS, Job(tiny_recipe(compile=True), 4)], tiny_data(), capture=False)
    run(JOBS[3].recipe, folders(tmp_path)[3], seed=3)
    with pytest.raises(FileExistsError, match="--resume"):
        train_together(JOBS, tiny_data(), folders=folders(tmp_path))
    monkeypatch.setattr("flatmin_lab.runs.open_folder.os.access", lambda *_: False)
    with pytest.raises(RunError, match=r"cannot be written to \(no permission in .*; choose another folder"):
        train_together(JOBS, tiny_data(), folders=folders(tmp_path))
    assert not folders(tmp_path)[0].exists()


def test_left_early_no_folder_stays_held(tmp_path: Path) -> None:
    events = train_together(JOBS, tiny_data(), folders=folders(tmp_path), count=3)
    assert any(isinstance(event, Saved) for _, event in events)
    events.close()  # type: ignore[attr-defined]  # it is a generator
    again = ends(train_together(JOBS, tiny_data(), folders=folders(tmp_path), count=3, resume=True))
    assert all(isinstance(event, Finished) for event in again.values())


def test_a_data_set_that_is_there_is_not_copied() -> None:
    data = tiny_data()
    assert data.to("cpu") is data
    assert data.train.to(torch.device("cpu")) is data.train


def test_a_turn_costs_little() -> None:
    """Our own calls, and what they call directly: 52 to 57 in torch 2.11 to 2.15; it does not grow with the turns."""
    for deterministic in (False, True):
        scope = RandomScope(torch.device("cpu"), deterministic=deterministic)
        with scope.active():
            pass  # the first time torch imports what it needs
        work = Profile()
        for _ in range(500):
            with work, scope.active():
                pass
        ours = [entry for entry in work.getstats() if "flatmin" in getattr(entry.code, "co_filename", "")]
        calls = sum(entry.callcount + sum(inner.callcount for inner in entry.calls or ()) for entry in ours)
        assert 20 < calls / 500 < 60


class Machine:
    """A GPU on which `speeds[n − 1]` steps a second are done by n replicas, with memory for so many."""

    def __init__(self, speeds: list[float], fits: int) -> None:
        self.speeds, self.fits = speeds, fits
        self.now, self.replicas = 0.0, 0
        self.limit = ReplicaLimit(settled=False, free=lambda: 10 * (self.fits - self.replicas), clock=lambda: self.now)

    def rounds(self, count: int, *, only_steps: bool = True, slow: float = 0.0) -> None:
        for _ in range(count):
            self.replicas = self.limit.count
            self.now += self.replicas / self.speeds[self.replicas - 1] + slow
            self.limit.finish_round(self.replicas, only_steps=only_steps)


class TestReplicaLimit:
    @pytest.mark.parametrize(
        ("speeds", "fits", "expected"),
        [
            ([100.0, 190.0, 250.0, 251.0, 300.0], 9, 4),  # the fourth brings nothing, so there is no fifth
            ([100.0, 99.0, 300.0], 9, 2),
            ([100.0, 100 * MIN_SPEEDUP + 0.1, 100 * MIN_SPEEDUP**2 + 0.3, 1.0], 9, 4),
            ([100.0, 200.0, 300.0, 400.0], 3, 3),
            ([100.0, 200.0], 1, 1),
        ],
    )
    def test_another_one_comes_while_it_pays_and_memory_lasts(
        self, speeds: list[float], fits: int, expected: int
    ) -> None:
        machine = Machine(speeds, fits)
        machine.rounds(10 * (WARMUP_ROUNDS + MEASURED_ROUNDS))
        assert machine.limit.count == expected
        assert machine.limit.settled

    def test_there_must_be_memory_for_a_beginning_and_not_only_for_what_stays(self) -> None:
        for peak, expected in ((20, 4), (40, 2), (90, 1)):
            machine = Machine([100.0, 200.0, 300.0, 400.0, 500.0], 5)
            machine.limit.peak = lambda peak=peak: peak  # type: ignore[misc]
            machine.rounds(10 * (WARMUP_ROUNDS + MEASURED_ROUNDS))
            assert machine.limit.count == expected

    def test_a_need_that_cannot_be_known_ends_it(self) -> None:
        """Another process gave memory back meanwhile."""
        machine = Machine([100.0, 200.0], 5)
        machine.limit.initial_free = 0
        machine.rounds(WARMUP_ROUNDS + MEASURED_ROUNDS)
        assert (machine.limit.count, machine.limit.settled) == (1, True)

    def test_what_is_no_step_is_not_measured(self) -> None:
        """The end of an epoch in the middle of a measurement would make the replicas look slow."""
        machine = Machine([100.0, 200.0, 201.0], 9)
        machine.rounds(WARMUP_ROUNDS + MEASURED_ROUNDS)
        machine.rounds(MEASURED_ROUNDS)
        machine.rounds(1, only_steps=False, slow=100.0)
        assert not machine.limit.settled
        machine.rounds(WARMUP_ROUNDS + MEASURED_ROUNDS)
        assert machine.limit.count == 3

    def test_epochs_shorter_than_a_measurement_end_it_all_the_same(self) -> None:
        machine = Machine([100.0, 200.0, 201.0], 9)
        for _ in range(3 * (MAX_DISCARDED + WARMUP_ROUNDS + MEASURED_ROUNDS)):
            machine.rounds(2)
            machine.rounds(1, only_steps=False)
        assert machine.limit.count == 3
        assert machine.limit.settled

    def test_a_number_that_is_given_stays(self) -> None:
        for count in (1, 4):
            limit = ReplicaLimit.for_device(torch.device("cpu"), count)
            assert (limit.count, limit.settled) == (count, True)
        assert ReplicaLimit.for_device(torch.device("cpu"), None).count == 1


# ---- on a GPU


@pytest.mark.cuda
@pytest.mark.parametrize("count", [None, 3, 8])
def test_on_a_gpu_each_is_the_same_as_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int | None) -> None:
    """All methods at once, each on its stream with its graphs and its random numbers."""
    monkeypatch.setattr(replicas, "MEASURED_ROUNDS", 4)  # so that the count rises in so short a run
    jobs = [
        Job(tiny_recipe(method=method, deterministic=True, augment="vanilla"), seed)
        for seed, method in enumerate(methods.METHODS)
    ]
    mine, alone = folders(tmp_path / "together", len(jobs)), folders(tmp_path / "alone", len(jobs))
    for job, folder in zip(jobs, alone, strict=True):
        run(job.recipe, folder, seed=job.seed, device="cuda")
    last = ends(train_together(jobs, tiny_data(), device="cuda", folders=mine, count=count))
    assert all(isinstance(event, Finished) for event in last.values())
    for job, one, other in zip(jobs, mine, alone, strict=True):
        assert same(lasting(one), lasting(other)), job.recipe.method


@pytest.mark.cuda
def test_on_a_gpu_stopped_all_go_on_to_the_same_bits(tmp_path: Path) -> None:
    jobs = [Job(replace(job.recipe, deterministic=True), job.seed) for job in JOBS]
    settings: dict[str, Any] = {"device": "cuda", "count": 3}
    ends(train_together(jobs, tiny_data(), folders=folders(tmp_path / "whole"), **settings))
    ends(train_together(jobs, tiny_data(), folders=folders(tmp_path / "torn"), stop=after(20), **settings))
    again = ends(train_together(jobs, tiny_data(), folders=folders(tmp_path / "torn"), resume=True, **settings))
    assert all(isinstance(event, Finished) for event in again.values())
    for one, other in zip(folders(tmp_path / "whole"), folders(tmp_path / "torn"), strict=True):
        assert same(lasting(one), lasting(other))


@pytest.mark.cuda
def test_on_a_gpu_there_is_one_copy_of_the_data() -> None:
    data = tiny_data().to("cuda")
    assert data.to("cuda") is data
    assert data.to(torch.device("cuda", 0)) is data


@pytest.mark.cuda
def test_random_states_are_objects_of_their_own() -> None:
    """A graph draws from the state that it was captured with, whichever one is in place when it is replayed."""
    ours = [RandomScope(torch.device("cuda"), deterministic=False) for _ in range(2)]
    torch.cuda.manual_seed(5)
    expected = torch.rand(2, device="cuda")
    torch.cuda.manual_seed(5)
    graphs, drawn = [torch.cuda.CUDAGraph() for _ in ours], [torch.zeros(1, device="cuda") for _ in ours]
    for number, (scope, graph, there) in enumerate(zip(ours, graphs, drawn, strict=True)):
        with scope.active():
            torch.cuda.manual_seed(number)
            with torch.cuda.graph(graph):
                there.copy_(torch.rand(1, device="cuda"))
    seen: list[list[float]] = [[], []]
    for _ in range(3):
        for number, (scope, graph, there) in enumerate(zip(ours, graphs, drawn, strict=True)):
            with scope.active():
                graph.replay()
                seen[number].append(there.item())
    outside = torch.rand(2, device="cuda")
    assert torch.equal(outside, expected)
    for number, mine in enumerate(seen):
        torch.cuda.manual_seed(number)
        assert mine == [torch.rand(1, device="cuda").item() for _ in range(3)]
