"""A step log writes the means of what steps measured; it changes no bit, and reads the device once a line."""

import copy
import csv
import json
import logging
import math
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatmin
from flatmin.optim.telemetry import step_log
from flatmin.optim.telemetry.step_log import NAMES, SKIPS_IN_A_ROW
from tests.support.cases import same
from tests.support.host_sync import HostReads

Numbers = dict[str, float]


def training(
    method: Callable[..., Any] = flatmin.AMP, epsilon: float = 0.1
) -> tuple[nn.Module, Any, Callable[[Tensor], None]]:
    """A model, its optimizer, and a step on a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = method(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), epsilon=epsilon, model=model)

    def step(x: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    return model, optimizer, step


def batches(count: int) -> list[Tensor]:
    return list(torch.randn(count, 16, 4, generator=torch.Generator().manual_seed(1)))


class Lines(list[tuple[int, Numbers]]):
    def __call__(self, step: int, numbers: Numbers) -> None:
        self.append((step, numbers))


def read_by_hand(optimizer: Any) -> Numbers:
    last = {name: float(value) for name, value in vars(optimizer.last).items() if value is not None}
    return last | {"sharpness": last["loss_perturbed"] - last["loss"], "epsilon": 0.1, "lr": 0.1}


@pytest.mark.parametrize("method", [flatmin.AMP, flatmin.RMP])
def test_a_line_has_the_means_of_its_steps_and_training_keeps_every_bit(method: Callable[..., Any]) -> None:
    plain, plain_optimizer, plain_step = training(method)
    by_hand = []
    torch.manual_seed(2)
    for x in batches(7):
        plain_step(x)
        by_hand.append(read_by_hand(plain_optimizer))
    model, optimizer, step = training(method)
    lines = Lines()
    torch.manual_seed(2)
    with flatmin.StepLog(optimizer, lines, every=3):
        for x in batches(7):
            step(x)
    assert same(model.parameters(), plain.parameters())
    assert [number for number, _ in lines] == [3, 6, 7]
    for (_, numbers), rows in zip(lines, (by_hand[:3], by_hand[3:6], by_hand[6:]), strict=True):
        expected = {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in numbers}
        assert numbers == pytest.approx(expected, rel=1e-5)
        assert numbers.keys() == set(NAMES) - ({"sharpness"} if method is flatmin.RMP else set())


def test_between_two_lines_the_host_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    read, reads = step_log._on_host, list[int]()

    def counted_read(kept: list[flatmin.Last]) -> list[Numbers]:
        reads.append(len(kept))
        return read(kept)

    monkeypatch.setattr(step_log, "_on_host", counted_read)
    (x,) = batches(1)
    _, optimizer, step = training()
    step(x)
    with HostReads() as usual:
        step(x)
    with flatmin.StepLog(optimizer, Lines(), every=3):
        for number in range(6):
            with HostReads() as counted:
                step(x)
            assert number % 3 == 2 or counted.count == usual.count
    assert reads == [3, 3]


def test_blocks_and_steps_without_a_radius_leave_out_what_they_do_not_measure() -> None:
    model, optimizer, step = training()
    lines = Lines()
    with flatmin.StepLog(optimizer, lines, every=1):
        optimizer.zero_grad()
        model(batches(1)[0]).square().mean().backward()
        with optimizer.perturbed():
            model(batches(1)[0]).square().mean().backward()
        optimizer.step()
        optimizer.param_groups[0]["epsilon"] = 0.0
        step(batches(1)[0])
    (_, blocks), (_, plain) = lines
    assert blocks.keys() == {"grad_norm", "delta_norm", "on_ball", "skipped", "epsilon", "lr"}
    assert plain.keys() == {"loss", "skipped", "epsilon", "lr"}
    assert plain["epsilon"] == 0.0


def test_epsilon_is_that_of_a_group_that_is_perturbed() -> None:
    model, _, _ = training()
    still, moved = list(model.parameters())[:1], list(model.parameters())[1:]
    groups: list[dict[str, Any]] = [{"params": still, "epsilon": 0.0, "lr": 0.3}, {"params": moved}]
    optimizer = flatmin.AMP(torch.optim.SGD(groups, lr=0.1), epsilon=0.2)
    lines = Lines()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batches(1)[0]).square().mean()
        loss.backward()
        return loss

    with flatmin.StepLog(optimizer, lines):
        optimizer.step(closure)
    assert (lines[0][1]["epsilon"], lines[0][1]["lr"]) == (0.2, 0.1)


def test_epsilon_is_that_of_the_micro_batches_that_are_perturbed_whichever_is_last() -> None:
    moved, still = nn.Linear(4, 1), nn.Linear(4, 1)
    groups: list[dict[str, Any]] = [{"params": moved.parameters()}, {"params": still.parameters(), "epsilon": 0.0}]
    optimizer = flatmin.AMP(torch.optim.SGD(groups, lr=0.1), epsilon=0.2)

    def closure_of(part: nn.Module) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = part(batches(1)[0]).square().mean()
            loss.backward()
            return loss

        return closure

    optimizer.step([closure_of(moved), closure_of(still)])
    assert optimizer.last.on_ball == 1
    assert optimizer.last.epsilon == 0.2
    optimizer.step([closure_of(still)])
    assert optimizer.last.epsilon == 0.0


def test_epsilon_is_that_of_the_last_step_of_a_line() -> None:
    _, optimizer, step = training()
    lines = Lines()
    with flatmin.StepLog(optimizer, lines, every=2):
        for epsilon in (0.1, 0.2):
            optimizer.param_groups[0]["epsilon"] = epsilon
            step(batches(1)[0])
            optimizer.param_groups[0]["epsilon"] = 0.7  # for the next step
    assert [numbers["epsilon"] for _, numbers in lines] == [0.2]


def test_epsilon_is_that_of_the_last_step_of_a_line_that_was_perturbed() -> None:
    _, optimizer, step = training()
    scheduler, lines = flatmin.RadiusScheduler(optimizer, 7, start=0.0, every=2), Lines()
    with flatmin.StepLog(optimizer, lines, every=2):
        for _ in range(7):
            step(batches(1)[0])
            scheduler.step()
        optimizer.param_groups[0]["epsilon"] = 0.0
        for _ in range(3):
            step(batches(1)[0])
    assert [numbers["epsilon"] for _, numbers in lines] == [0.1, 0.1, 0.1, 0.1, 0.0]
    assert ["delta_norm" in numbers for _, numbers in lines] == [True] * 4 + [False]


@pytest.mark.parametrize("start", [0.0, 0.5])
def test_the_rate_is_that_of_one_group_whether_a_step_is_perturbed_or_not(start: float) -> None:
    model, _, _ = training()
    still, moved = list(model.parameters())[:1], list(model.parameters())[1:]
    groups: list[dict[str, Any]] = [{"params": still, "epsilon": 0.0, "lr": 0.3}, {"params": moved}]
    optimizer = flatmin.AMP(torch.optim.SGD(groups, lr=0.1), epsilon=0.2)
    scheduler, lines = flatmin.RadiusScheduler(optimizer, 6, start=start, every=2), Lines()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batches(1)[0]).square().mean()
        loss.backward()
        return loss

    with flatmin.StepLog(optimizer, lines, every=1):
        for _ in range(6):
            optimizer.step(closure)
            scheduler.step()
    assert {numbers["epsilon"] for _, numbers in lines} == {0.0, 0.2}
    assert {numbers["lr"] for _, numbers in lines} == {0.1}


def test_fewer_steps_a_line_may_be_asked_for_later() -> None:
    lines = Lines()
    _, optimizer, step = training()
    with flatmin.StepLog(optimizer, lines, every=50) as log:
        for x in batches(3):
            step(x)
        log.every = 2
        for x in batches(3):
            step(x)
    assert [number for number, _ in lines] == [4, 6]


def test_a_log_is_not_copied_and_its_optimizer_may_be() -> None:
    _, optimizer, step = training()
    with flatmin.StepLog(optimizer, lines := Lines(), every=1) as log:
        for copy_of in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"cannot be copied or pickled; .* load this one's state_dict"):
                copy_of(log)
        copy.deepcopy(optimizer)
        step(batches(1)[0])
    assert len(lines) == 1


def test_pythons_logging_has_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    _, optimizer, step = training()
    caplog.set_level("INFO")
    with flatmin.StepLog(optimizer, logging.getLogger("mine")):
        step(batches(1)[0])
    assert "step 1: {'loss'" in caplog.text


def test_a_captured_step_is_logged_too() -> None:
    model, optimizer, _ = training()
    lines = Lines()
    step = flatmin.captured_step(model, lambda model, x: model(x).square().mean(), optimizer, capture=False)
    with flatmin.StepLog(optimizer, lines, every=2):
        for x in batches(4):
            step(x)
    assert [number for number, _ in lines] == [2, 4]
    assert all(numbers["sharpness"] > 0 for _, numbers in lines)


# ---- skipped steps


@pytest.mark.parametrize("every", [1, 4, 100])
def test_ten_skipped_steps_in_a_row_warn_once(every: int) -> None:
    _, optimizer, step = training()
    bad = torch.full((16, 4), math.nan)
    log = flatmin.StepLog(optimizer, every=every)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(SKIPS_IN_A_ROW - 1):
            step(bad)
        step(batches(1)[0])
        log.write()
        assert not caught
        for _ in range(3 * SKIPS_IN_A_ROW):
            step(bad)
        log.close()
    (warning,) = caught
    assert "10 steps in a row were skipped" in str(warning.message)


def test_a_skipped_step_counts_as_such_and_in_no_mean() -> None:
    lines, alone = Lines(), Lines()
    for target, spoilt in ((lines, True), (alone, False)):
        _, optimizer, step = training()
        with flatmin.StepLog(optimizer, target, every=10):
            step(batches(1)[0])
            if spoilt:
                step(torch.full((16, 4), math.inf))
    assert lines[0][1] == {**alone[0][1], "skipped": 1}


# ---- where to


def test_files_have_a_row_a_line_and_are_continued(tmp_path: Path) -> None:
    places = tmp_path / "new" / "steps.jsonl", tmp_path / "steps.csv"
    lines, state = Lines(), None
    for _ in range(2):
        _, optimizer, step = training()
        with flatmin.StepLog(optimizer, *places, lines, every=2) as log:
            if state is not None:
                log.load_state_dict(state)
            for x in batches(3):
                step(x)
            state = log.state_dict()
    found = [json.loads(line) for line in places[0].read_text().splitlines()]
    assert [row.pop("step") for row in found] == [2, 3, 5, 6]
    assert found == [numbers for _, numbers in lines]
    with places[1].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [{name: float(row[name]) for name in NAMES} for row in rows] == found
    assert [row["step"] for row in rows] == ["2", "3", "5", "6"]


def test_json_has_no_nan(tmp_path: Path) -> None:
    model, optimizer, step = training(epsilon=0.0)
    with flatmin.StepLog(optimizer, tmp_path / "steps.jsonl"):
        step(torch.full((16, 4), math.nan))  # a step of the base's own, which does not look
    assert json.loads((tmp_path / "steps.jsonl").read_text())["loss"] is None
    assert all(weight.isnan().any() for weight in model.parameters())


def test_trackers_are_called_as_they_expect(tmp_path: Path) -> None:
    called: list[tuple[Any, ...]] = []
    board = SimpleNamespace(add_scalar=lambda name, value, step: called.append(("tensorboard", name, value, step)))
    mlflow = SimpleNamespace(log_metrics=lambda metrics, step: called.append(("mlflow", metrics, step)))
    wandb = SimpleNamespace(log=lambda metrics, step: called.append(("wandb", metrics, step)))
    lines = Lines()
    _, optimizer, step = training()
    with flatmin.StepLog(optimizer, board, mlflow, wandb, lines, every=5, prefix="mine/"):
        step(batches(1)[0])
    named = {f"mine/{name}": value for name, value in lines[0][1].items()}
    assert called[:-2] == [("tensorboard", name, value, 1) for name, value in named.items()]
    assert called[-2:] == [("mlflow", named, 1), ("wandb", named, 1)]


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    lines = Lines()
    _, optimizer, step = training()
    with tensorboard.SummaryWriter(str(tmp_path)) as writer, flatmin.StepLog(optimizer, writer, lines, every=2):
        for x in batches(4):
            step(x)
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("amp/sharpness")]
    assert [step for step, _ in found] == [2, 4]
    assert [value for _, value in found] == pytest.approx([numbers["sharpness"] for _, numbers in lines])


def test_after_close_nothing_is_written() -> None:
    lines = Lines()
    _, optimizer, step = training()
    flatmin.StepLog(optimizer, lines, every=1).close()
    step(batches(1)[0])
    assert lines == []


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((3,), {}, "a target must be a path, a SummaryWriter, .* got an object of type int"),
        (("steps.txt",), {}, "must end in .jsonl or .csv, got steps.txt"),
        ((), {"every": 0}, "every must be a whole number of at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_told(arguments: tuple[Any, ...], settings: dict[str, Any], message: str) -> None:
    _, optimizer, _ = training()
    with pytest.raises((TypeError, ValueError), match=message):
        flatmin.StepLog(optimizer, *arguments, **settings)
    with pytest.raises(TypeError, match=r"reads `last` of a flatmin.AMP or flatmin.RMP, got .*SGD"):
        flatmin.StepLog(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
