"""The bootstrap: the binomial interval for an error rate, and the truth inside about as often as it says."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flatmin import metrics
from flatmin.metrics import bootstrap, error, two_sample_bootstrap

LOGITS = torch.tensor([[1.0, 0.0]])


def wrong(count: int, of: int) -> tuple[Tensor, Tensor]:
    return LOGITS.repeat(of, 1), (torch.arange(of) < count).long()


@pytest.mark.parametrize("level", [0.5, 0.95])
@pytest.mark.parametrize("count", [20, 300])
def test_an_error_rate_has_the_binomial_interval(count: int, level: float) -> None:
    """Rows drawn again are wrong as often as a coin of that bias falls."""
    stats = pytest.importorskip("scipy.stats", reason="an oracle, installed with flatmin[dev]")
    found = bootstrap(error, *wrong(count, 400), samples=4000, level=level)
    low, high = (q / 400 for q in stats.binom.interval(level, 400, count / 400))
    assert float(found.value) == pytest.approx(count / 400)
    assert float(found.low) == pytest.approx(low, abs=1.5 / 400)
    assert float(found.high) == pytest.approx(high, abs=1.5 / 400)


def test_the_truth_lies_inside_as_often_as_it_says() -> None:
    """200 data sets of 200 predictions, each wrong with a probability of a fifth."""
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(200):
        labels = (torch.rand(200, generator=generator) < 0.2).long()
        found = bootstrap(error, LOGITS.expand(200, 2), labels, samples=150, generator=generator)
        inside += bool(found.low <= 0.2 + 1e-6 and found.high >= 0.2 - 1e-6)
    assert 0.90 <= inside / 200 <= 0.98


@pytest.mark.parametrize("measure", [error, metrics.nll, metrics.brier, metrics.ece, metrics.adaptive_ece])
def test_any_measure_has_an_interval_that_narrows_with_more_answers(
    measure: Callable[[Tensor, Tensor], Tensor],
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(1600, 5, generator=generator)
    labels = torch.randint(0, 5, (1600,), generator=generator)
    few, many = (
        bootstrap(measure, logits[:100], labels[:100], samples=100),
        bootstrap(measure, logits, labels, samples=100),
    )
    assert torch.equal(many.value, measure(logits, labels))
    assert 2 < float((few.high - few.low) / (many.high - many.low)) < 8  # about √16


def test_it_is_the_same_every_time_and_leaves_torchs_random_numbers_alone() -> None:
    logits, labels = wrong(30, 100)
    before = torch.get_rng_state()
    once, twice = (bootstrap(error, logits, labels, samples=50) for _ in range(2))
    assert once == twice
    assert torch.equal(torch.get_rng_state(), before)
    seeded = [
        bootstrap(error, logits, labels, samples=50, generator=torch.Generator().manual_seed(n)) for n in (0, 0, 1)
    ]
    assert seeded[0] == seeded[1] == once
    assert seeded[2] != once
    generator = torch.Generator().manual_seed(0)
    assert bootstrap(error, logits, labels, samples=50, generator=generator) == once
    assert bootstrap(error, logits, labels, samples=50, generator=generator) != once  # the generator has moved


def test_a_narrower_level_lies_within_and_the_ends_are_values_that_were_found() -> None:
    logits, labels = wrong(30, 100)
    ends = [bootstrap(error, logits, labels, samples=200, level=level) for level in (0.5, 0.8, 0.99)]
    assert ends[2].low <= ends[1].low <= ends[0].low <= ends[0].high <= ends[1].high <= ends[2].high
    assert all(float(100 * end) == pytest.approx(round(float(100 * end)), abs=1e-3) for end in ends[0])
    alone = bootstrap(error, logits, labels, samples=1)
    assert alone.low == alone.high


def test_an_infinite_loss_has_an_infinite_end_and_not_a_nan() -> None:
    logits = torch.zeros(50, 2)
    logits[0, 1] = -math.inf
    found = bootstrap(metrics.nll, logits, torch.ones(50, dtype=torch.long), samples=100)
    assert float(found.low) == pytest.approx(math.log(2))  # the rows without it
    assert found.value == found.high == math.inf


@pytest.mark.parametrize("level", [0.0, 1.0, 95, math.nan])
def test_impossible_settings_are_refused(level: float) -> None:
    with pytest.raises(ValueError, match=f"between 0 and 1, got {level}"):
        bootstrap(error, *wrong(1, 3), level=level)
    with pytest.raises(ValueError, match="at least one sample, got 0"):
        bootstrap(error, *wrong(1, 3), samples=0)


@pytest.mark.cuda
def test_a_gpu_draws_the_same_rows() -> None:
    logits, labels = torch.randn(500, 5, generator=torch.Generator().manual_seed(0)), torch.arange(500) % 5
    here = bootstrap(metrics.nll, logits, labels, samples=50)
    there = bootstrap(metrics.nll, logits.cuda(), labels.cuda(), samples=50)
    for one, two in zip(here, there, strict=True):
        assert two.is_cuda
        torch.testing.assert_close(two.cpu(), one)
    generator = torch.Generator("cuda").manual_seed(0)
    bootstrap(metrics.nll, logits.cuda(), labels.cuda(), samples=5, generator=generator)


# ---- two samples


def two_samples(count: int, others: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, generator=generator) + 1, torch.randn(others, generator=generator)


def test_a_measure_that_returns_no_tensor_is_named_before_it_is_resampled() -> None:
    calls = []

    def number(*_: Tensor) -> Any:
        calls.append(1)
        return 0.5

    with pytest.raises(TypeError, match=r"must return a tensor, got float; wrap it"):
        bootstrap(number, torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"must return a tensor, got float; wrap it"):
        two_sample_bootstrap(number, torch.zeros(4), torch.zeros(4))
    assert len(calls) == 2


def test_an_auroc_has_the_interval_of_its_known_variance() -> None:
    """Against the variance of Hanley and McNeil (1982), which needs only the share of triples in order."""
    inside, outside = two_samples(300, 200)
    found = metrics.two_sample_bootstrap(metrics.auroc, inside, outside, samples=2000)
    area = metrics.auroc(inside, outside).item()
    above = (inside[:, None] > outside).double()
    both_inside, both_outside = above.mean(dim=0).square().mean().item(), above.mean(dim=1).square().mean().item()
    variance = area * (1 - area) + 299 * (both_inside - area**2) + 199 * (both_outside - area**2)
    width = 2 * 1.96 * math.sqrt(variance / (300 * 200))
    assert found.value.item() == area
    assert float(found.high - found.low) == pytest.approx(width, rel=0.1)


def test_each_sample_is_resampled_by_itself_and_to_its_own_size() -> None:
    inside, outside = torch.arange(5.0), torch.arange(100.0, 107.0)
    seen = []

    def measure(one: Tensor, other: Tensor) -> Tensor:
        seen.append((one, other))
        return one.mean() - other.mean()

    metrics.two_sample_bootstrap(measure, inside, outside, samples=50)
    assert {(len(one), len(other)) for one, other in seen} == {(5, 7)}
    assert all(one.max() < 5 and other.min() >= 100 for one, other in seen)
    assert len({tuple(one.tolist()) for one, _ in seen}) > 40
    torch.testing.assert_close(seen[0][0], inside)  # the value itself


def test_several_numbers_have_an_interval_each_as_they_would_alone() -> None:
    inside, outside = two_samples(60, 50)

    def both(one: Tensor, other: Tensor) -> Tensor:
        return torch.stack([metrics.auroc(one, other), metrics.fpr_at_tpr(one, other)])

    found = metrics.two_sample_bootstrap(both, inside, outside, samples=100)
    for place, measure in enumerate((metrics.auroc, metrics.fpr_at_tpr)):
        alone = metrics.two_sample_bootstrap(measure, inside, outside, samples=100)
        assert all(torch.equal(many[place], one) for many, one in zip(found, alone, strict=True))


def test_two_samples_are_drawn_the_same_every_time_and_refused_where_empty() -> None:
    inside, outside = two_samples(30, 20)
    before = torch.get_rng_state()
    once, twice = (metrics.two_sample_bootstrap(metrics.auroc, inside, outside, samples=20) for _ in range(2))
    assert once == twice
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match="outside must have at least one row"):
        metrics.two_sample_bootstrap(metrics.auroc, inside, outside[:0])
    with pytest.raises(ValueError, match="level must be between 0 and 1"):
        metrics.two_sample_bootstrap(metrics.auroc, inside, outside, level=2.0)
    with pytest.raises(ValueError, match="at least one sample"):
        metrics.two_sample_bootstrap(metrics.auroc, inside, outside, samples=0)
