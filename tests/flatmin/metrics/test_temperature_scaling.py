"""The temperature is where the loss is least: against scipy, and at the ends where there is none in between."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flatmin.metrics import ece, error, nll, temperature, temperature_interval

optimize = pytest.importorskip("scipy.optimize", reason="an oracle, installed with flatmin[dev]")


def drawn(count: int, classes: int, seed: int, *, true: float = 1.0) -> tuple[Tensor, Tensor]:
    """Labels drawn from softmax(logits / true): a model whose right temperature is known, but for chance."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * true * torch.randn(count, classes, generator=generator)
    return logits, torch.multinomial((logits / true).softmax(dim=1), 1, generator=generator)[:, 0]


def slope(beta: float, logits: Tensor, labels: Tensor) -> float:
    """The derivative of the loss, by autograd: not the formula of the code."""
    at = torch.tensor(beta, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits.double() * at, labels), at)
    return float(gradient)


def test_it_is_scipys_minimum_whatever_the_logits() -> None:
    largest = 0.0

    @given(
        count=st.integers(2, 300),
        classes=st.sampled_from([2, 3, 10, 100]),
        true=st.floats(0.02, 50),
        scale=st.sampled_from([0.1, 1.0, 10.0]),
        dtype=st.sampled_from([torch.float32, torch.float64]),
        seed=st.integers(0, 10**6),
    )
    @settings(max_examples=100, deadline=None, derandomize=True)
    def compare(count: int, classes: int, true: float, scale: float, dtype: torch.dtype, seed: int) -> None:
        nonlocal largest
        logits, labels = drawn(count, classes, seed, true=true)
        logits = (scale * logits).to(dtype)
        found = float(temperature(logits, labels))
        if torch.equal(logits.argmax(dim=1), labels) or slope(1e3, logits, labels) <= 0:
            assert found == pytest.approx(1e-3)  # with no prediction wrong, autograd's slope is rounding: 1e-290
        elif slope(1e-3, logits, labels) >= 0:
            assert found == pytest.approx(1e3)
        else:
            best = optimize.brentq(slope, 1e-3, 1e3, args=(logits, labels), xtol=1e-14, rtol=1e-13)
            largest = max(largest, abs(found * best - 1))

    compare()
    assert 0 < largest < 1e-6


def test_no_other_temperature_is_better() -> None:
    """Against a minimiser of the loss itself, which sees a minimum to the root of the rounding only."""
    for seed in range(5):
        logits, labels = drawn(500, 10, seed, true=2.5)

        def loss(log: float, logits: Tensor = logits, labels: Tensor = labels) -> float:
            return float(nll(logits.double() / math.exp(log), labels))

        best = optimize.minimize_scalar(loss, bounds=(math.log(1e-3), math.log(1e3)), options={"xatol": 1e-10})
        found = temperature(logits.double(), labels)
        assert float(found) == pytest.approx(math.exp(best.x), rel=1e-6)
        assert loss(math.log(float(found))) <= best.fun + 1e-15


def test_it_finds_the_temperature_that_was_there_and_makes_confidence_honest() -> None:
    logits, labels = drawn(20_000, 10, 0, true=3.0)
    found = temperature(3 * logits, labels)
    assert float(found) == pytest.approx(9.0, rel=0.03)
    assert ece(3 * logits / found, labels) < 0.02 < ece(3 * logits, labels)
    assert torch.equal(error(3 * logits / found, labels), error(logits, labels))


def test_twice_the_logits_have_twice_the_temperature() -> None:
    logits, labels = drawn(300, 5, 1)
    once = float(temperature(logits.double(), labels))
    for factor in (1e-2, 0.5, 2.0, 100.0):
        assert float(temperature(factor * logits.double(), labels)) == pytest.approx(factor * once, rel=1e-9)


def test_a_shift_of_a_row_and_the_order_of_rows_change_nothing() -> None:
    logits, labels = drawn(300, 5, 2)
    logits = logits.double()
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(temperature(logits + 1e3 * torch.randn(300, 1), labels), temperature(logits, labels))
    torch.testing.assert_close(temperature(logits[order], labels[order]), temperature(logits, labels))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_where_there_is_no_minimum_between_it_is_an_end(scale: float) -> None:
    logits, labels = scale * torch.randn(50, 4, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 4
    assert float(temperature(logits, logits.argmax(dim=1))) == pytest.approx(1e-3)  # never wrong
    assert float(temperature(logits, logits.argmin(dim=1))) == pytest.approx(1e3)  # never right
    assert float(temperature(torch.zeros(50, 4) + scale, labels)) == 1  # it makes no difference


def test_answers_that_are_hardly_ever_wrong_have_a_minimum_all_the_same() -> None:
    """One of a thousand, by a hair: the slope is nearly flat over decades."""
    logits = torch.tensor([[8.0, 0.0]]).repeat(1000, 1)
    logits[0] = torch.tensor([0.0, 1e-3])
    found = float(temperature(logits, torch.zeros(1000, dtype=torch.long)))
    best = 1 / optimize.brentq(slope, 1e-3, 1e3, args=(logits, torch.zeros(1000, dtype=torch.long)), rtol=1e-13)
    assert found == pytest.approx(best, rel=1e-6)


def test_it_takes_logits_that_need_gradients_and_gives_none() -> None:
    logits, labels = drawn(50, 3, 0)
    assert not temperature(logits.requires_grad_(), labels).requires_grad


def test_the_intervals_width_is_the_curvature_of_the_loss() -> None:
    logits, labels = drawn(200, 5, 3)
    found = temperature_interval(logits.double(), labels)
    torch.testing.assert_close(found.value, temperature(logits.double(), labels), rtol=0, atol=0)

    def total(log_beta: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.double() * log_beta.exp(), labels, reduction="sum")

    at = -found.value.log()
    curvature = torch.autograd.functional.hessian(total, at)
    width = 1.959964 / float(curvature) ** 0.5
    assert float(found.high.log()) == pytest.approx(float(found.value.log()) + width, rel=1e-6)
    assert float(found.low.log()) == pytest.approx(float(found.value.log()) - width, rel=1e-6)


@pytest.mark.parametrize(("count", "level"), [(48, 0.95), (48, 0.5), (500, 0.95)])
def test_the_interval_has_the_true_temperature_as_often_as_it_says(count: int, level: float) -> None:
    held = 0
    for seed in range(300):
        _, low, high = temperature_interval(*drawn(count, 4, seed, true=2.0), level=level)
        held += bool(low <= 2 <= high)
    assert held / 300 == pytest.approx(level, abs=4 * (level * (1 - level) / 300) ** 0.5)


def test_what_does_not_determine_the_temperature_leaves_the_whole_range() -> None:
    logits, labels = drawn(50, 4, 0)
    cases = [(logits, logits.argmax(dim=1)), (logits, logits.argmin(dim=1)), (torch.zeros(50, 4), labels)]
    for case in cases:
        _, low, high = temperature_interval(*case)
        assert (float(low), float(high)) == pytest.approx((1e-3, 1e3))


def test_a_level_is_a_share() -> None:
    with pytest.raises(ValueError, match="between 0 and 1, got 95"):
        temperature_interval(*drawn(5, 2, 0), level=95)
