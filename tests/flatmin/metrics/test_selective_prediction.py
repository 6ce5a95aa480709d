"""Risk over coverage: all orders of ties by brute force, and an area that no order of the predictions changes."""

import math
from itertools import pairwise, permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flatmin import metrics
from flatmin.metrics import aurc, e_aurc, risk_coverage
from tests.support.host_sync import HostReads


def predictions(count: int, seed: int, *, values: int | None = None) -> tuple[Tensor, Tensor]:
    """Confidences and whether each prediction is wrong, more often where it is less confident."""
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.rand(count, generator=generator, dtype=torch.float64)
    wrong = torch.rand(count, generator=generator) > 0.3 + 0.6 * confidence
    return (confidence if values is None else (confidence * values).round() / values), wrong


def risks_in(order: list[int], wrong: list[bool]) -> list[float]:
    return [sum(wrong[place] for place in order[:i]) / i for i in range(1, len(order) + 1)]


def risks_by_hand(confidence: list[float], wrong: list[bool]) -> list[float]:
    """The mean over all orders in which no prediction comes after one that is less confident."""
    orders = [
        list(order)
        for order in permutations(range(len(wrong)))
        if all(confidence[a] >= confidence[b] for a, b in pairwise(order))
    ]
    all_risks = [risks_in(order, wrong) for order in orders]
    return [sum(column) / len(orders) for column in zip(*all_risks, strict=True)]


@given(st.lists(st.tuples(st.sampled_from([0.25, 0.5, 0.75, 1.0]), st.booleans()), min_size=1, max_size=6))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_the_risk_is_the_mean_over_all_orders_of_ties(rows: list[tuple[float, bool]]) -> None:
    confidence, wrong = (list(column) for column in zip(*rows, strict=True))
    found = risk_coverage(torch.tensor(confidence, dtype=torch.float64), torch.tensor(wrong))
    expected = risks_by_hand(confidence, wrong)
    assert found.risk.tolist() == pytest.approx(expected, abs=1e-12)
    assert found.coverage.tolist() == pytest.approx([i / len(rows) for i in range(1, len(rows) + 1)])
    assert found.threshold.tolist() == sorted(confidence, reverse=True)


@pytest.mark.parametrize("values", [None, 5])
@pytest.mark.parametrize("seed", range(3))
def test_a_threshold_has_the_risk_of_its_last_entry(seed: int, values: int | None) -> None:
    confidence, wrong = predictions(200, seed, values=values)
    curve = risk_coverage(confidence, wrong)
    last = {threshold: (coverage, risk) for coverage, risk, threshold in zip(*map(Tensor.tolist, curve), strict=True)}
    assert len(last) == (200 if values is None else 6)
    for threshold, (coverage, risk) in last.items():
        answered = confidence >= threshold
        assert coverage == pytest.approx(answered.double().mean().item(), abs=1e-12)
        assert risk == pytest.approx(wrong[answered].double().mean().item(), abs=1e-12)
    assert aurc(confidence, wrong).item() == pytest.approx(curve.risk.mean().item(), abs=1e-15)
    assert curve.risk[-1].item() == pytest.approx(wrong.double().mean().item(), abs=1e-12)


@pytest.mark.parametrize("values", [None, 20, 1])
def test_the_order_of_the_predictions_does_not_matter_to_the_last_bit(values: int | None) -> None:
    confidence, wrong = predictions(500, 0, values=values)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        order = torch.randperm(500, generator=generator)
        for dtype in (torch.float32, torch.float64):
            mixed = risk_coverage(confidence[order].to(dtype), wrong[order])
            plain = risk_coverage(confidence.to(dtype), wrong)
            assert all(torch.equal(one, other) for one, other in zip(mixed, plain, strict=True))


def test_only_the_order_of_the_confidences_counts() -> None:
    confidence, wrong = predictions(300, 1, values=30)
    assert torch.equal(aurc(confidence.exp() - 7, wrong), aurc(confidence, wrong))
    assert torch.equal(e_aurc(3 * confidence, wrong), e_aurc(confidence, wrong))


def test_the_best_order_has_no_excess_and_the_worst_the_most() -> None:
    confidence, wrong = predictions(300, 2)
    best, worst = (~wrong).double(), wrong.double()
    assert e_aurc(best, wrong).item() == 0
    assert 0 < e_aurc(confidence, wrong) < e_aurc(worst, wrong)
    right = int((~wrong).sum())
    expected = sum(max(0, i - right) / i for i in range(1, 301)) / 300
    assert aurc(best, wrong).item() == pytest.approx(expected, abs=1e-12)


def test_confidence_that_says_nothing_leaves_the_error() -> None:
    _, wrong = predictions(300, 3)
    assert aurc(torch.ones(300, dtype=torch.float64), wrong).item() == pytest.approx(wrong.double().mean().item())


@pytest.mark.parametrize("flag", [False, True])
def test_where_all_are_right_or_all_wrong_the_order_says_nothing(flag: bool) -> None:
    confidence, wrong = torch.rand(9), torch.full((9,), flag)
    assert aurc(confidence, wrong).item() == float(flag)
    assert e_aurc(confidence, wrong).item() == 0
    assert risk_coverage(confidence[:1], wrong[:1]).risk.tolist() == [float(flag)]


def test_the_confidence_of_a_classifier_has_an_area_with_an_interval() -> None:
    """As `bootstrap` takes measures: of logits and labels."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(400, 5, generator=generator)
    labels = logits.softmax(dim=1).multinomial(1, generator=generator).flatten()  # as likely as it says

    def measure(logits: Tensor, labels: Tensor) -> Tensor:
        return aurc(metrics.max_probability(logits), logits.argmax(dim=1) != labels)

    found = metrics.bootstrap(measure, logits, labels, samples=200)
    assert found.low < found.value < found.high < metrics.error(logits, labels)


def test_the_host_reads_one_number_the_check_for_nan() -> None:
    confidence, wrong = predictions(50, 0)
    with HostReads() as reads:
        risk_coverage(confidence, wrong)
    assert reads.count == 1
    with HostReads() as reads:
        metrics.auroc(confidence, confidence)
    assert reads.count == 2


@pytest.mark.parametrize(
    ("confidence", "wrong", "error", "text"),
    [
        (torch.zeros(3), torch.zeros(3), TypeError, r"wrong must be a bool .*got torch\.float32; logits\.argmax"),
        (torch.zeros(3), torch.zeros(2, dtype=torch.bool), ValueError, r"got shapes \(3,\) and \(2,\)"),
        (torch.zeros(0), torch.zeros(0, dtype=torch.bool), ValueError, r"N at least 1, got \(0,\)"),
        (torch.tensor([math.nan]), torch.tensor([True]), ValueError, "confidence must not be nan, got 1 of 1"),
    ],
)
def test_what_cannot_be_ordered_is_named(confidence: Tensor, wrong: Tensor, error: type[Exception], text: str) -> None:
    for measure in (risk_coverage, aurc, e_aurc):
        with pytest.raises(error, match=text):
            measure(confidence, wrong)
