"""A run that branches off another one ends with the bits of one that was trained whole, and is never taken for more."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.execution.beginnings import Beginnings
from flatmin_lab.execution.local import ThisProcess
from flatmin_lab.execution.process_pool import local_executor
from flatmin_lab.execution.run_queue import run_all
from flatmin_lab.execution.runner import Run, RunOptions, RunTask, run_task_on_data
from flatmin_lab.recipes.experiments.experiment import cell
from flatmin_lab.recipes.recipe import Job, Recipe
from flatmin_lab.runs import checkpoint
from flatmin_lab.runs.events import Epoch, Event, Failed, Finished, Note, Saved, Started
from flatmin_lab.runs.result_store import ResultStore
from flatmin_lab.training import train_state
from flatmin_lab.training.learner import Learner
from flatmin_lab.training.loop import train
from tests.support.small_runs import images, run, same, tiny_data, tiny_recipe, whole_state

EPOCHS, BATCHES = 8, 5
LATER: dict[str, Any] = {"start": 0.75}  # after six epochs


def recipe_of(name: str, method: str = "erm", settings: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    return tiny_recipe(**{"name": name, "method": method, "settings": settings or {}, "epochs": EPOCHS, **changes})


def late(epsilon: float | str = 0.1, start: float = 0.75, *, name: str = "late", **changes: Any) -> Recipe:
    settings = {"epsilon": epsilon, "start": start, **changes.pop("more", {})}
    return recipe_of(name, "amp", settings, **changes)


ERM = recipe_of("erm")
LATE = late()
BRANCHES: dict[
    str, tuple[Recipe, Recipe, int]
] = {  # a run, another one that begins as it does, and for how many epochs
    "from ERM": (ERM, LATE, 6),
    "ERM from a late start": (LATE, ERM, 6),
    "from an earlier start": (LATE, late(0.2, 0.875, name="later"), 6),
    "from a later start, with other settings": (
        late(0.2, 0.875, name="later", more={"inner_lr": 0.5, "inner_iter": 2, "ball": "tensor"}),
        late(0.1, 0.5, more={"growth": "linear", "every": 2, "ascent_share": 0.5}),
        4,
    ),
    "automatic radii with later drops": (
        late("auto", 0.75, milestones=(0.5, 0.9)),
        late("auto", 0.875, name="later", milestones=(0.5, 0.97), more={"matches": 2, "release": 0.5}),
        6,
    ),
    "automatic radii, the later one first": (
        late("auto", 0.875, name="later", milestones=(0.5, 0.97)),
        late("auto", 0.75, milestones=(0.5, 0.9), more={"inner_lr": 0.5}),
        6,
    ),
    "averaged weights, augmented and clipped": (
        replace(ERM, ema=0.9, augment="cutout", clip_norm=1.0),
        replace(LATE, ema=0.9, augment="cutout", clip_norm=1.0),
        6,
    ),
    "Adam, warmed up": (
        replace(ERM, optimizer="adamw", lr=0.01, warmup=1.5),
        replace(LATE, optimizer="adamw", lr=0.01, warmup=1.5),
        6,
    ),
    "wrong labels and dropout": (
        replace(ERM, label_noise=0.2, model="vit", model_settings={"depth": 1, "width": 12, "patch": 3}),
        replace(LATE, label_noise=0.2, model="vit", model_settings={"depth": 1, "width": 12, "patch": 3}),
        6,
    ),
    "MixUp beside AMP": (
        late(0.1, 0.5, more={"regulariser": "mixup"}),
        late(0.2, 0.75, name="later", more={"regulariser": "mixup"}),
        4,
    ),
    "bf16": (replace(ERM, precision="bf16"), replace(LATE, precision="bf16"), 6),
    "a start within an epoch": (ERM, late(0.1, 0.7), 5),
}


@pytest.fixture
def store(tmp_path: Path) -> ResultStore:
    return ResultStore(tmp_path / "results", tmp_path / "runs")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The recipe's name for each step that is taken."""
    taken: list[str] = []
    real = Learner.step

    def step(self: Learner, *given: Any) -> Any:
        taken.append(self.recipe.name)
        return real(self, *given)

    monkeypatch.setattr(Learner, "step", step)
    return taken


def train_all(
    jobs: Sequence[Job],
    store: ResultStore,
    *,
    sharing: Sequence[Job] | None = None,
    data: Dataset | None = None,
    device: str = "cpu",
    **options: Any,
) -> list[tuple[int, Event]]:
    """The events of these runs in this process, one after the other unless `at_once` says more."""
    shared = tuple(jobs if sharing is None else sharing)
    task = RunTask(dict(enumerate(map(Run, jobs))), device, RunOptions(store, sharing=shared, **options))
    return list(run_task_on_data(task, data or tiny_data(), lambda: None))


def leave_after_an_epoch(job: Job, store: ResultStore, sharing: Sequence[Job] = ()) -> None:
    """As if its process had been killed."""
    task = RunTask({0: Run(job)}, "cpu", RunOptions(store, checkpoint_epochs=1, sharing=tuple(sharing)))
    events = run_task_on_data(task, tiny_data(), lambda: None)
    next(event for _, event in events if isinstance(event, Epoch))
    events.close()  # type: ignore[attr-defined]  # a generator


def started(events: Sequence[tuple[int, Event]]) -> dict[int, str | None]:
    """Where each run began, in the order in which they started."""
    return {number: event.began_from for number, event in events if isinstance(event, Started)}


def result_of(job: Job, store: ResultStore) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(store.file(job).read_text())
    return found


def epochs_kept(job: Job, store: ResultStore) -> list[int]:
    return [checkpoint.step_of(path) // BATCHES for path in checkpoint.listed(store.folder(job))]


def is_whole(job: Job, store: ResultStore, place: Path, device: str = "cpu") -> bool:
    """Is it to the last bit the run that `train` makes alone?"""
    run(job.recipe, place, seed=job.seed, device=device)
    return same(whole_state(store.folder(job)), whole_state(place))


# ---- the same bits


@pytest.mark.parametrize(("first", "second", "epochs"), BRANCHES.values(), ids=BRANCHES)
def test_a_run_that_branched_off_has_the_bits_of_one_trained_whole(
    tmp_path: Path, store: ResultStore, steps: list[str], first: Recipe, second: Recipe, epochs: int
) -> None:
    one, other = Job(first, 3), Job(second, 3)
    events = train_all([one, other], store)
    assert [type(event) for _, event in events if isinstance(event, Finished | Failed)] == [Finished, Finished]
    assert started(events) == {0: None, 1: f"{first.name}-3"}
    assert steps.count(first.name) == EPOCHS * BATCHES
    assert steps.count(second.name) == (EPOCHS - epochs) * BATCHES
    shared = result_of(other, store)["shared"]
    assert (shared["run"], shared["epochs"]) == (f"{first.name}-3", epochs)
    assert 0 < shared["seconds"] < result_of(other, store)["seconds"]
    assert "shared" not in result_of(one, store)
    assert is_whole(one, store, tmp_path / "one")
    assert is_whole(other, store, tmp_path / "other")


def test_killed_right_after_the_branch_it_is_resumed_as_any_other_run(tmp_path: Path, store: ResultStore) -> None:
    jobs = [Job(ERM, 0), Job(LATE, 0)]
    train_all(jobs[:1], store, sharing=jobs)
    task = RunTask({0: Run(jobs[1])}, "cpu", RunOptions(store, sharing=tuple(jobs)))
    events = run_task_on_data(task, tiny_data(), lambda: None)
    begun = next(event for _, event in events if isinstance(event, Started))
    events.close()  # type: ignore[attr-defined]  # a generator
    assert (begun.step, begun.began_from) == (6 * BATCHES, "erm-0")
    folder = store.folder(jobs[1])
    assert epochs_kept(jobs[1], store) == [6]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 6
    for path in checkpoint.listed(store.folder(jobs[0])):  # it is a run of its own now
        path.unlink()
    again = train_all(jobs[1:], store, sharing=jobs)
    assert started(again) == {0: None}
    assert next(event.step for _, event in again if isinstance(event, Started)) == 6 * BATCHES
    result = result_of(jobs[1], store)
    assert (result["shared"]["run"], result["shared"]["epochs"], result["resumed"]) == ("erm-0", 6, 1)
    assert is_whole(jobs[1], store, tmp_path / "whole")


def test_a_branch_of_a_branch_and_of_a_run_that_was_interrupted(tmp_path: Path, store: ResultStore) -> None:
    """The longest beginning is taken, wherever the run that trained it had begun."""
    half, last = late(0.1, 0.5, name="half"), late(0.1, 0.875, name="last")
    jobs = [Job(half, 0), Job(LATE, 0), Job(last, 0)]
    for _ in range(3):
        leave_after_an_epoch(jobs[0], store, sharing=jobs)
    events = train_all(jobs, store)
    assert started(events) == {0: None, 1: "half-0", 2: "late-0"}
    assert [result_of(job, store).get("shared", {}).get("epochs") for job in jobs] == [None, 4, 6]
    assert all(is_whole(job, store, tmp_path / job.recipe.name) for job in jobs)


def test_curves_of_the_beginning_are_in_the_folder_and_in_the_result(store: ResultStore) -> None:
    jobs = [Job(ERM, 0), Job(LATE, 0)]
    train_all(jobs, store)
    lines = [(store.folder(job) / "metrics.jsonl").read_text().splitlines() for job in jobs]
    assert lines[0][:6] == lines[1][:6]  # times too: they are what the beginning took
    assert [json.loads(line)["epoch"] for line in lines[1]] == list(range(1, EPOCHS + 1))
    assert len(result_of(jobs[1], store)["curves"]["nll"]) == EPOCHS
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = accumulators.EventAccumulator(str(store.folder(jobs[1]) / "tensorboard"))
    board.Reload()
    assert [point.step for point in board.Scalars("test_nll")] == list(range(1, EPOCHS + 1))


# ---- what is not shared


def test_nothing_is_shared_with_another_seed_or_without_the_runs_being_named(store: ResultStore) -> None:
    jobs = [Job(ERM, 0), Job(LATE, 1)]
    assert started(train_all(jobs, store)) == {0: None, 1: None}
    jobs = [Job(replace(ERM, name="erm-2"), 0), Job(replace(LATE, name="late-2"), 0)]
    events = train_all(jobs, store, sharing=())
    assert started(events) == {0: None, 1: None}
    assert not any(isinstance(event, Note) for _, event in events)
    assert [epochs_kept(job, store) for job in jobs] == [[8], [8]]


def test_nothing_is_shared_with_other_data(tmp_path: Path, store: ResultStore) -> None:
    jobs, other = [Job(ERM, 0), Job(LATE, 0)], replace(tiny_data(), test=images(30, 7))
    train_all(jobs[:1], store, sharing=jobs, data=other)
    events = train_all(jobs[1:], store, sharing=jobs)
    assert started(events) == {0: None}
    assert ["data_sha256 is" in event.text for _, event in events if isinstance(event, Note)] == [True]
    assert is_whole(jobs[1], store, tmp_path / "whole")


@pytest.mark.parametrize("name", train_state.SAME_BITS)
def test_nothing_is_shared_under_other_conditions(
    monkeypatch: pytest.MonkeyPatch, store: ResultStore, name: str
) -> None:
    jobs, real = [Job(ERM, 0), Job(LATE, 0)], train_state.run_facts
    with monkeypatch.context() as patched:
        patched.setattr(train_state, "run_facts", lambda *given: {**real(*given), name: "another"})
        train_all(jobs[:1], store, sharing=jobs)
    events = train_all(jobs[1:], store, sharing=jobs)
    assert started(events) == {0: None}
    (note,) = [event.text for _, event in events if isinstance(event, Note)]
    assert f"{name} is 'another' there and " in note
    assert "shared" not in result_of(jobs[1], store)


def test_nothing_is_shared_of_which_an_earlier_part_had_other_conditions(
    monkeypatch: pytest.MonkeyPatch, store: ResultStore
) -> None:
    """The facts of a checkpoint are those of its last part alone."""
    jobs, real = [Job(ERM, 0), Job(LATE, 0)], train_state.run_facts
    with monkeypatch.context() as patched:
        patched.setattr(train_state, "run_facts", lambda *given: {**real(*given), "torch": "1.0"})
        leave_after_an_epoch(jobs[0], store, sharing=jobs)
    again = train_all(jobs, store, checkpoint_epochs=1)
    assert started(again) == {0: None, 1: None}
    notes = [event.text for number, event in again if number == 1 and isinstance(event, Note)]
    assert ["parts of it were trained under other conditions" in text for text in notes] == [True]


@pytest.mark.parametrize(
    ("recipe", "steps_done", "why"),
    [
        (replace(ERM, lr=0.05), 15, "after epoch 3 it is another training: 0 are the same"),
        (ERM, EPOCHS * BATCHES, "after epoch 8 it is another training: 6 are the same"),
        (ERM, 12, "after epoch 2 and 2 batches it is another training: 6 are the same"),
    ],
    ids=["another recipe", "too far", "within an epoch"],
)
def test_a_checkpoint_is_judged_by_what_it_says_and_not_by_its_place(
    tmp_path: Path, store: ResultStore, recipe: Recipe, steps_done: int, why: str
) -> None:
    jobs = [Job(ERM, 0), Job(LATE, 0)]
    store.folder(jobs[0]).mkdir(parents=True)
    place = store.folder(jobs[0]) / checkpoint.name_of(6 * BATCHES)
    for event in train(recipe, tiny_data(), folder=tmp_path / "other", checkpoint_minutes=0):
        if isinstance(event, Saved) and event.step == steps_done:
            place.write_bytes(event.path.read_bytes())
    events = train_all(jobs[1:], store, sharing=jobs)
    assert started(events) == {0: None}
    assert [why in event.text for _, event in events if isinstance(event, Note)] == [True]
    assert is_whole(jobs[1], store, tmp_path / "whole")


def test_a_damaged_beginning_is_not_used_and_the_next_one_is(tmp_path: Path, store: ResultStore) -> None:
    half = late(0.1, 0.5, name="half")
    jobs = [Job(half, 0), Job(ERM, 0), Job(LATE, 0)]
    train_all(jobs[:2], store, sharing=jobs)
    assert Beginnings(store, jobs, 44).places(jobs[2]) != []
    (longest, *_) = Beginnings(store, jobs, 44).places(jobs[2])
    content = bytearray(longest.read_bytes())
    content[-9] ^= 1
    longest.write_bytes(bytes(content))
    events = train_all(jobs[2:], store, sharing=jobs)
    (note,) = [event.text for _, event in events if isinstance(event, Note)]
    assert "was altered after it was written" in note
    assert started(events) == {0: None}
    assert is_whole(jobs[2], store, tmp_path / "whole")


def test_before_a_damaged_checkpoint_there_is_another_one(tmp_path: Path, store: ResultStore) -> None:
    jobs = [Job(ERM, 0), Job(LATE, 0)]
    for _ in range(3):
        leave_after_an_epoch(jobs[0], store)
    assert epochs_kept(jobs[0], store) == [3, 2]
    checkpoint.listed(store.folder(jobs[0]))[0].write_bytes(b"cut off")
    events = train_all(jobs[1:], store, sharing=jobs)
    begun = next(event for _, event in events if isinstance(event, Started))
    assert (begun.step, begun.began_from) == (2 * BATCHES, "erm-0")
    assert is_whole(jobs[1], store, tmp_path / "whole")


# ---- how long a beginning stays


def test_a_beginning_survives_until_nobody_needs_it(store: ResultStore) -> None:
    half, last = late(0.1, 0.5, name="half"), late(0.1, 0.875, name="last")
    jobs = [Job(recipe, 0) for recipe in (ERM, half, LATE, last)]
    train_all(jobs[:1], store, sharing=jobs, checkpoint_epochs=1)
    assert epochs_kept(jobs[0], store) == [8, 7, 6, 4]
    train_all(jobs[1:2], store, sharing=jobs)
    assert epochs_kept(jobs[0], store) == [8, 7, 6]
    train_all(jobs[3:], store, sharing=jobs)
    assert epochs_kept(jobs[0], store) == [8, 6]
    train_all(jobs[2:3], store, sharing=jobs)
    assert [epochs_kept(job, store) for job in jobs] == [[8]] * 4
    assert [result_of(job, store).get("shared", {}).get("epochs") for job in jobs] == [None, 4, 6, 7]


def test_a_run_of_another_data_set_leaves_beginnings_alone(store: ResultStore) -> None:
    """Its epochs have another number of steps."""
    jobs = [Job(ERM, 0), Job(LATE, 0), Job(replace(ERM, name="larger", data="larger"), 0)]
    train_all(jobs[:1], store, sharing=jobs)
    train_all(jobs[2:], store, sharing=jobs, data=replace(tiny_data(train=64), name="larger"))
    assert epochs_kept(jobs[0], store) == [8, 6]


def test_what_a_run_is_not_asked_to_keep_goes_as_ever(store: ResultStore) -> None:
    jobs = [Job(ERM, 0), Job(LATE, 0)]
    train_all(jobs[:1], store, sharing=jobs[:1], checkpoint_epochs=1)
    assert epochs_kept(jobs[0], store) == [8]
    assert started(train_all(jobs[1:], store, sharing=jobs)) == {0: None}


# ---- several at once


def test_a_run_waits_while_another_one_trains_its_beginning_and_others_go_first(
    tmp_path: Path, store: ResultStore, steps: list[str]
) -> None:
    last = late(0.1, 0.875, name="last")
    jobs = [Job(ERM, 0), Job(LATE, 0), Job(last, 0), Job(replace(ERM, name="alone"), 1)]
    events = train_all(jobs, store, at_once=3)
    assert list(started(events)) == [0, 3, 1, 2]
    assert started(events) == {0: None, 3: None, 1: "erm-0", 2: "erm-0"}
    assert steps.count("late") == 2 * BATCHES
    assert steps.count("last") == 1 * BATCHES
    ends = [number for number, event in events if isinstance(event, Finished)]
    begins = [place for place, (number, event) in enumerate(events) if number == 1 and isinstance(event, Started)]
    assert begins[0] < next(place for place, (n, event) in enumerate(events) if n == 0 and isinstance(event, Finished))
    assert sorted(ends) == [0, 1, 2, 3]
    assert all(is_whole(job, store, tmp_path / f"{job.recipe.name}") for job in jobs)


@pytest.mark.parametrize("at_once", [1, 2])
def test_what_another_machine_has_left_takes_no_beginning_s_place(
    monkeypatch: pytest.MonkeyPatch, store: ResultStore, steps: list[str], at_once: int
) -> None:
    """No run begins with it here: one waits for another that trains it, or finds what that has kept."""
    last = late(0.1, 0.875, name="last")
    jobs, real = [Job(ERM, 0), Job(LATE, 0), Job(last, 0)], train_state.run_facts
    with monkeypatch.context() as patched:
        patched.setattr(train_state, "run_facts", lambda *given: {**real(*given), "commit": "another"})
        train_all(jobs[:1], store, sharing=jobs)
    events = train_all(jobs[1:], store, sharing=jobs, at_once=at_once)
    assert started(events) == {0: None, 1: "late-0"}
    assert steps.count("last") == 2 * BATCHES


def test_runs_that_share_nothing_wait_for_nobody(store: ResultStore) -> None:
    events = train_all([Job(ERM, 0), Job(LATE, 0)], store, sharing=(), at_once=2)
    assert [(number, type(event)) for number, event in events[:2]] == [(0, Started), (1, Started)]


def test_a_run_whose_beginning_fails_is_trained_whole(
    monkeypatch: pytest.MonkeyPatch, store: ResultStore, tmp_path: Path
) -> None:
    jobs, real, left = [Job(ERM, 0), Job(LATE, 0)], Learner.step, [8]

    def step(self: Learner, *given: Any) -> Any:
        if self.recipe.name == "erm":
            left[0] -= 1
            if not left[0]:
                raise RuntimeError("it breaks")
        return real(self, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "step", step)
        events = train_all(jobs, store, at_once=2)
    assert started(events) == {0: None, 1: None}
    assert isinstance(dict(events)[0], Failed)
    assert is_whole(jobs[1], store, tmp_path / "whole")


def test_a_run_that_has_begun_waits_for_nobody(store: ResultStore) -> None:
    jobs = [Job(ERM, 0), Job(LATE, 0)]
    leave_after_an_epoch(jobs[1], store)
    heard = train_all(jobs, store, at_once=2)
    assert started(heard) == {1: None, 0: "late-0"}
    assert [event.step for _, event in heard if isinstance(event, Started)] == [BATCHES, BATCHES]


def test_processes_share_what_lies_there_and_a_single_one_everything(store: ResultStore) -> None:
    """Two processes do not wait for each other; each of the runs ends as ever."""
    erm = cell("smoke", "cifar10", "vgg16", "erm")
    jobs = [Job(erm, 0)] + [
        Job(cell("smoke", "cifar10", "vgg16", "amp", variant=f"start-{start}", settings={"start": start}), 0)
        for start in (0.7, 0.8)
    ]
    options = RunOptions(store, sharing=tuple(jobs))
    runs = [Run(job) for job in jobs]
    ends = dict(run_all(runs[:1], options, local_executor(["cpu"], single_thread=True)))
    assert isinstance(ends[0], Finished)
    ends = dict(run_all(runs[1:], options, local_executor(["cpu"] * 2, single_thread=True)))
    assert [type(end) for end in ends.values()] == [Finished, Finished]
    assert [result_of(job, store)["shared"]["epochs"] for job in jobs[1:]] == [2, 2]
    assert all(len(checkpoint.listed(store.folder(job))) == 1 for job in jobs)
    elsewhere = ResultStore(store.results / "whole", store.runs / "whole")
    whole = dict(run_all(runs, RunOptions(elsewhere), ThisProcess(single_thread=True)))
    assert [type(end) for end in whole.values()] == [Finished] * 3
    for job in jobs:
        assert result_of(job, elsewhere)["test_nll"] == result_of(job, store)["test_nll"]
        assert same(whole_state(elsewhere.folder(job)), whole_state(store.folder(job)))


def test_a_cluster_trains_every_run_whole(tmp_path: Path, store: ResultStore) -> None:
    """A node has copies of a run's own folder alone."""
    task = RunTask({0: Run(Job(LATE, 0))}, "cpu", RunOptions(store, sharing=(Job(ERM, 0), Job(LATE, 0))))
    assert task.moved_to(tmp_path / "node").options.sharing == ()


@pytest.mark.cuda
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("more", [{}, {"precision": "bf16", "channels_last": True}, {"ema": 0.9, "clip_norm": 1.0}])
def test_on_a_gpu_runs_that_branched_off_have_the_bits_of_runs_trained_whole(
    tmp_path: Path, store: ResultStore, more: dict[str, Any], count: int
) -> None:
    last = late(0.2, 0.875, name="last")
    jobs = [Job(replace(recipe, deterministic=True, **more), 0) for recipe in (ERM, LATE, last)]
    events = train_all(jobs, store, device="cuda", at_once=count)
    assert started(events) == {0: None, 1: "erm-0", 2: "erm-0"}
    assert all(is_whole(job, store, tmp_path / job.recipe.name, "cuda") for job in jobs)
