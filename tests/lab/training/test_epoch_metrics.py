"""Means do not depend on when the host collects or when the numbers arrive, and a broken step is named rightly."""

import math
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from flatmin_lab.training import epoch_metrics
from flatmin_lab.training.epoch_metrics import EpochMetrics, NonFiniteLoss


def steps(number: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """What steps measure: batches of ten and a smaller one, some steps skipped, some with a measure more."""
    generator = torch.Generator().manual_seed(0)
    for i in range(number):
        loss, error, norm = torch.rand(3, generator=generator).unbind()
        measured = {"loss": loss, "error": error, "grad_norm": norm / (i % 4), "skipped": torch.tensor(i % 4 == 0)}
        yield (10 if i % 5 else 3), {**measured, "sharpness": norm} if i % 3 else measured


class Late:
    """An event that is there when it has been asked for a few times, or is waited for."""

    def __init__(self, asked: int) -> None:
        self.left = asked

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0

    def synchronize(self) -> None:
        self.left = 0


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of a transfer arrive late, each after another while."""
    real, delays = epoch_metrics._send, count()

    def sent(pending: Any) -> Any:
        return real(pending)._replace(arrival=Late(next(delays) * 7 % 5))  # type: ignore[arg-type]

    monkeypatch.setattr(epoch_metrics, "_send", sent)


def summed(every: int, *, wait: bool) -> dict[str, tuple[float, int]]:
    ours = EpochMetrics()
    for i, (images, measured) in enumerate(steps(40)):
        ours.add(images, measured)
        if i % every == 0:
            assert ours.collect(wait=wait) is None
    assert ours.collect() is None
    return ours.sums


def test_when_the_host_collects_changes_no_bit() -> None:
    expected = summed(99, wait=True)
    assert expected["loss"][1] == 8 * 3 + 32 * 10
    assert all(summed(every, wait=wait) == expected for every in (1, 3, 7) for wait in (False, True))


@pytest.mark.usefixtures("late")
def test_nor_does_it_when_numbers_come_late() -> None:
    assert summed(1, wait=False) == summed(3, wait=False) == summed(99, wait=True)


@pytest.mark.usefixtures("late")
def test_without_waiting_only_what_has_arrived_is_counted() -> None:
    ours = EpochMetrics()
    for images, measured in steps(4):
        ours.add(images, measured)
        ours.collect(wait=False)
    assert len(ours.in_flight) > 0
    assert ours.sums["loss"][1] < 33
    ours.collect()
    assert len(ours.in_flight) == 0
    assert ours.sums["loss"][1] == 33


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("every", [1, 3, 50])
@pytest.mark.parametrize("wait", [False, True])
def test_the_first_loss_that_is_not_finite_is_named(every: int, wait: bool) -> None:
    ours, broken, at = EpochMetrics(), None, 0
    for i, (images, measured) in enumerate(steps(30)):
        loss = torch.tensor(math.nan) if i >= 12 else measured["loss"]
        ours.add(images, {**measured, "loss": loss})
        if i % every == 0 or i == 29:
            broken, at = ours.collect(wait=wait or i == 29), i
            if broken is not None:
                break
    assert isinstance(broken, NonFiniteLoss)
    assert at - broken.steps_ago == 12
    assert math.isnan(broken.loss)
