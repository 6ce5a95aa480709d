"""A comparison on the laboratory's data: the same start and batches, held-out data alone, resumed, and in time."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from flatmin.comparison import AUTO, LONGER, PLAIN, read_outcome
from flatmin_lab.comparing.comparer import Comparison
from flatmin_lab.comparing.contender_recipes import entries_for
from flatmin_lab.comparing.time_budget import TimeBudget
from flatmin_lab.comparing.training_queue import Training, TrainingQueue
from flatmin_lab.data import Split, load
from flatmin_lab.execution.task_queue import Slot, TaskEnd
from flatmin_lab.recipes.lr_schedules import rate
from flatmin_lab.runs import checkpoint
from flatmin_lab.runs.events import BusyError, Finished, Started
from flatmin_lab.training.learner import Learner
from flatmin_lab.training.loop import train
from tests.support.comparisons import (
    EXECUTOR,
    Clock,
    comparison_of,
    entries_of,
    finish,
    finish_in,
    saved,
    without_times,
)
from tests.support.small_runs import after, images


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("data") / "tiny.npz")


@pytest.fixture(scope="module")
def done(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return finish(comparison_of(data, tmp_path_factory.mktemp("done") / "out"))


class Seen:
    """The first weights and the batches of every training, in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first: list[Tensor] = []
        self.batches: list[list[list[int]]] = []
        self.learner: Learner | None = None
        plain_step = Learner.step

        def step(learner: Learner, index: Tensor, *rest: Any) -> Any:
            if learner is not self.learner:
                self.learner = learner
                self.first.append(torch.cat([p.detach().flatten().clone() for p in learner.model.parameters()]))
                self.batches.append([])
            self.batches[-1].append(index.tolist())
            return plain_step(learner, index, *rest)

        monkeypatch.setattr(Learner, "step", step)


def test_all_contenders_of_a_seed_have_the_same_first_weights_and_batches(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(monkeypatch)
    comparison = finish(comparison_of(data, tmp_path / "out"))
    keys = [entry.contender.key for entry in comparison.entries]
    assert keys == [PLAIN, LONGER, "amp-0.1", AUTO]
    for seed in range(2):
        first = dict(zip(keys, seen.first[4 * seed : 4 * seed + 4], strict=True))
        batches = dict(zip(keys, seen.batches[4 * seed : 4 * seed + 4], strict=True))
        assert all(torch.equal(weights, first[PLAIN]) for weights in first.values())
        assert batches["amp-0.1"] == batches[PLAIN] == batches[LONGER][: len(batches[PLAIN])]
        assert len(batches[LONGER]) == 2 * len(batches[PLAIN])
        assert batches[AUTO][0] != batches[PLAIN][0]  # without the images that its radius is found on
    assert not torch.equal(seen.first[0], seen.first[4])


def test_an_outcome_has_what_its_run_measured_on_held_out_images_one_by_one(done: Comparison) -> None:
    for entry in done.entries:
        for seed in range(2):
            outcome = read_outcome(done.folder, entry.contender.key, seed)
            assert outcome is not None
            result = json.loads((done.folder / f"{entry.contender.key}-seed-{seed}" / "result.json").read_text())
            assert outcome.measures == {
                name: pytest.approx(result[f"validation_{name}"], abs=1e-5) for name in ("error", "nll", "ece")
            }
            for name, values in outcome.per_example.items():
                assert len(values) == 12  # a tenth of 120
                assert fmean(values) == pytest.approx(outcome.measures[name])
            assert [point["epoch"] for point in outcome.curve] == list(range(1, entry.recipe.epochs + 1))
            assert outcome.curve[-1]["error"] == pytest.approx(outcome.measures["error"])


def test_the_test_set_changes_nothing(done: Comparison, tmp_path: Path) -> None:
    other = images(30, 7)
    path = saved(tmp_path / "tiny.npz", Split(other.x, (other.y + 1) % 3))
    again = finish(comparison_of(path, tmp_path / "out", seeds=1))
    first = [outcome for outcome in done.outcomes if outcome.seed == 0]
    assert [(one.contender, one.measures, one.per_example) for one in again.outcomes] == [
        (one.contender, one.measures, one.per_example) for one in first
    ]
    for folder in (done.folder, again.folder):
        assert "test_error" not in (folder / "plain-seed-0" / "metrics.jsonl").read_text()


@pytest.mark.parametrize("steps", [3, 40])
def test_stopped_in_the_middle_it_goes_on_to_the_same_comparison(
    data: Path, done: Comparison, tmp_path: Path, steps: int
) -> None:
    stopped = finish(comparison_of(data, tmp_path / "out"), stop=after(steps))
    assert len(stopped.outcomes) < 8
    there = {path: path.stat().st_mtime_ns for path in stopped.folder.glob("*-seed-*.json")}
    finish(comparison_of(data, tmp_path / "out"))
    assert {path: path.stat().st_mtime_ns for path in there} == there
    assert without_times(tmp_path / "out") == without_times(done.folder)


def test_more_seeds_go_on_from_those_that_are_there(data: Path, tmp_path: Path) -> None:
    first = finish(comparison_of(data, tmp_path / "out", seeds=1, epochs=1))
    began = [
        (training.seed, training.entry.contender.key)
        for training, event in comparison_of(data, tmp_path / "out", seeds=2, epochs=1).run(EXECUTOR)
        if isinstance(event, Started)
    ]
    assert began == [(1, entry.contender.key) for entry in first.entries]


def test_longer_training_has_the_same_schedule_stretched(data: Path) -> None:
    plain, longer = (entry.recipe for entry in entries_of(data, load(data), warmup=1.0, epochs=4)[:2])
    assert (longer.epochs, longer.warmup) == (8, 2.0)
    assert replace(longer, epochs=4, warmup=1.0) == plain

    def rates(recipe: Any) -> list[float]:
        steps, warmup = 10 * recipe.epochs, round(10 * recipe.warmup)
        return [rate(recipe.schedule, recipe.lr, step, steps, warmup=warmup) for step in range(steps)]

    assert rates(longer)[1::2] == pytest.approx(rates(plain))


def test_a_longer_training_has_as_many_passes_as_amp(data: Path) -> None:
    made = load(data)
    changes = {"model": "mlp", "epochs": 4}
    for settings, epochs in (({"inner_iter": 2}, 12), ({"every": 2}, 6), ({"start": 0.5}, 6)):
        entries = entries_for(str(data), made, changes=changes, settings=settings)
        assert entries[1].recipe.epochs == epochs
        assert all(entry.contender.passes == epochs / 4 for entry in entries[1:])
    assert AUTO not in [
        one.contender.key for one in entries_for(str(data), made, changes=changes, settings={"ascent_share": 0.5})
    ]


def test_radii_lie_around_the_one_that_suits(data: Path) -> None:
    made = load("digits")
    entries = entries_for("digits", made, changes={}, settings={})
    assert [entry.contender.epsilon for entry in entries[2:]] == [0.1, 0.3, 0.9, None]
    assert [entry.recipe.settings["epsilon"] for entry in entries[2:]] == [0.1, 0.3, 0.9, "auto"]
    with pytest.raises(ValueError, match=r"tries several radii, got epsilon=0\.1; name them with --radii"):
        entries_for("digits", made, changes={}, settings={"epsilon": 0.1})


# ---- time


def test_seeds_are_trained_as_long_as_there_is_time(data: Path, tmp_path: Path) -> None:
    clock = Clock()
    budget = TimeBudget(160, clock)  # a seed takes 1 + 2 + 2 + 2 passes of 10 seconds
    found = finish_in(comparison_of(data, tmp_path / "out", seeds=3, epochs=1, budget=budget), clock, seconds_a_pass=10)
    assert {(one.contender, one.seed) for one in found.outcomes} == {
        (entry.contender.key, seed) for entry in found.entries for seed in (0, 1)
    }
    assert clock.now == 140
    assert found.stopped.startswith("2 of 3 seeds were trained in 2.7 minutes, because one seed of all 4 contenders")
    assert found.verdict().seeds == 2
    again = finish(comparison_of(data, tmp_path / "out", seeds=3, epochs=1))
    assert (len(again.outcomes), again.stopped) == (12, "")


def test_a_first_seed_that_does_not_fit_is_explained_after_its_first_training(data: Path, tmp_path: Path) -> None:
    clock = Clock()
    budget = TimeBudget(60, clock)
    found = finish_in(comparison_of(data, tmp_path / "out", budget=budget), clock, seconds_a_pass=50)
    assert [one.contender for one in found.outcomes] == [PLAIN]
    assert found.stopped == (
        "Not even one seed fits into 60 seconds: one seed of all 4 contenders takes about 5.8 minutes. Give more "
        "--minutes, lower --epochs (now 2), or name fewer --radii."
    )
    assert found.verdict().answer == "cannot tell"


def test_until_a_training_has_ended_only_the_first_seed_is_begun(data: Path, tmp_path: Path) -> None:
    comparison, clock = comparison_of(data, tmp_path), Clock()
    trainings = [Training(entry, seed) for seed in range(2) for entry in comparison.entries]
    queue = TrainingQueue(
        trainings,
        comparison.data,
        TimeBudget(1000, clock),
        lambda: None,
        folder=tmp_path,
        root="data",
        checkpoint_epochs=1,
    )
    slot = Slot("cpu", workers=8)
    taken = [queue.take(slot) for _ in range(5)]
    first, *_, none = taken
    assert [task and task.seed for task in taken] == [0, 0, 0, 0, None]
    assert none is None
    assert first is not None
    list(queue.receive(first, (0, Started(step=0, steps=4, epochs=2, parameters=1)), ""))
    clock.now = 10
    list(queue.receive(first, (0, Finished({})), ""))
    list(queue.receive(first, TaskEnd(), ""))
    assert queue.budget.estimate(3) == 30
    following = queue.take(slot)
    assert following is not None
    assert following.seed == 1


@pytest.mark.parametrize("seconds", [None, 1000.0])
def test_on_a_gpu_a_task_is_all_that_is_left_of_a_seed(data: Path, tmp_path: Path, seconds: float | None) -> None:
    comparison = comparison_of(data, tmp_path)
    trainings = [Training(entry, seed) for seed in range(2) for entry in comparison.entries][1:]
    queue = TrainingQueue(
        trainings,
        comparison.data,
        TimeBudget(seconds),
        lambda: None,
        folder=tmp_path,
        root="data",
        checkpoint_epochs=1,
    )
    tasks = [queue.take(Slot(device, workers=2)) for device in ("cuda:0", "cuda:1")]
    expected = [[0, 1, 2], [3, 4, 5, 6]] if seconds is None else [[0, 1, 2]]  # the next one when this has ended
    assert [list(task.numbers) for task in tasks if task] == expected
    assert not queue.out_of_time


# ---- what goes wrong


def test_a_training_that_diverges_has_ended_and_the_others_go_on(data: Path, tmp_path: Path) -> None:
    comparison = finish(comparison_of(data, tmp_path / "out", seeds=1, lr=1e30))
    assert all(one.failed is not None for one in comparison.outcomes)
    assert len(comparison.outcomes) == 4
    assert comparison.verdict().sentence == "Cannot tell: every run diverged; lower the learning rate first."
    again = comparison_of(data, tmp_path / "out", seeds=1, lr=1e30)
    assert list(again.run(EXECUTOR)) == []  # it would again


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 3}, "epochs is 2 there and 3 here"),
        ({"radii": (0.1, 0.2)}, "contenders is .* there and .* here"),
        ({"lr": 0.05}, "lr is 0.1 there and 0.05 here"),
    ],
    ids=str,
)
def test_a_folder_belongs_to_one_comparison(data: Path, done: Comparison, change: dict[str, Any], message: str) -> None:
    before = (done.folder / "comparison.json").read_bytes()
    with pytest.raises(ValueError, match=f"holds another comparison: {message}.*choose another folder with --out"):
        finish(comparison_of(data, done.folder, **change))
    assert (done.folder / "comparison.json").read_bytes() == before


def test_other_data_are_refused(done: Comparison, tmp_path: Path) -> None:
    path = saved(tmp_path / "tiny.npz", train=140)
    with pytest.raises(ValueError, match="data_sha256 is"):
        finish(comparison_of(path, done.folder))


def test_a_folder_of_something_else_is_refused(data: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(FileExistsError, match=r"needs a folder of its own, but .* holds thesis.txt"):
        finish(comparison_of(data, tmp_path))


def test_a_second_process_is_refused(data: Path, tmp_path: Path) -> None:
    first = comparison_of(data, tmp_path / "out", seeds=1, epochs=1).run(EXECUTOR)
    next(first)
    with pytest.raises(BusyError, match="another process is comparing in"):
        next(comparison_of(data, tmp_path / "out", seeds=1, epochs=1).run(EXECUTOR))
    list(first)


def test_a_run_that_ended_before_its_outcome_was_written_is_not_trained_again(
    data: Path, done: Comparison, tmp_path: Path
) -> None:
    comparison = finish(comparison_of(data, tmp_path / "out"), stop=lambda: "at once")
    folder = comparison.folder / "plain-seed-0"
    list(train(comparison.entries[0].recipe, comparison.data, seed=0, folder=folder))  # killed right after it
    metrics = (folder / "metrics.jsonl").read_text()
    for damaged in checkpoint.listed(folder):
        damaged.write_bytes(damaged.read_bytes()[:-9])  # nothing is measured again
    finish(comparison_of(data, comparison.folder))
    assert (folder / "metrics.jsonl").read_text() == metrics
    assert without_times(comparison.folder) == without_times(done.folder)
