"""Learning rates: those of torch's schedulers, step by step, and the paper's."""

from collections.abc import Callable

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, MultiStepLR, OneCycleLR

from flatmin_lab.recipes.lr_schedules import SCHEDULES, rate

STEPS = 40
ORACLES: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "multi_step": lambda optimizer: MultiStepLR(optimizer, [20, 30], gamma=0.1),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, STEPS),
    "one_cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS, cycle_momentum=False),
}


def rates_of(make: Callable[[Optimizer], LRScheduler], steps: int = STEPS) -> list[float]:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name", ORACLES)
def test_it_is_torchs_schedule(name: str) -> None:
    ours = [rate(name, 0.1, step, STEPS) for step in range(STEPS)]
    assert ours == pytest.approx(rates_of(ORACLES[name]), rel=1e-9, abs=1e-12)


def test_the_warm_up_is_torchs_linear_one() -> None:
    ours = [rate("constant", 0.1, step, STEPS, warmup=5) for step in range(STEPS)]
    theirs = rates_of(lambda optimizer: LinearLR(optimizer, start_factor=0.2, total_iters=4))
    assert ours == pytest.approx(theirs, rel=1e-9)


def test_the_paper_divides_by_ten_after_epochs_100_and_150_of_200() -> None:
    of_epoch = [rate("multi_step", 0.1, 1000 * epoch, 200_000) for epoch in range(200)]
    assert of_epoch[:100] == [0.1] * 100
    assert of_epoch[100:150] == pytest.approx([0.01] * 50)
    assert of_epoch[150:] == pytest.approx([0.001] * 50)
    assert rate("multi_step", 0.1, 99_999, 200_000) == 0.1


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_short_trainings_have_rates_too(name: str, steps: int) -> None:
    for step in range(steps):
        assert 0 < rate(name, 0.1, step, steps) <= 0.1 + 1e-12
