"""Error, NLL, Brier score and ECE: by brute force in float64, and against torchmetrics."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import nll_loss
from torchmetrics.functional.classification import multiclass_calibration_error

from flatmin import metrics


def answers(count: int, classes: int, seed: int, *, sharpness: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(count, classes, generator=generator)
    return logits, torch.randint(0, classes, (count,), generator=generator)


def ece_by_hand(logits: Tensor, labels: Tensor, bins: int) -> float:
    """The definition, an answer at a time; the edges as float32 has them."""
    probability = logits.softmax(dim=1)
    edges = [float(torch.tensor(m / bins)) for m in range(bins + 1)]
    total = 0.0
    for low, high in pairwise(edges):
        inside = [
            (float(p.max()), int(p.argmax() == y))
            for p, y in zip(probability, labels, strict=True)
            if low < float(p.max()) <= high
        ]
        total += abs(sum(right for _, right in inside) - sum(sure for sure, _ in inside))
    return total / len(labels)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("bins", [1, 7, 15])
def test_ece_is_its_definition_and_torchmetrics_agrees(seed: int, bins: int) -> None:
    logits, labels = answers(200, 5, seed)
    ours = metrics.ece(logits, labels, bins=bins).item()
    assert ours == pytest.approx(ece_by_hand(logits, labels, bins), abs=1e-6)
    theirs = multiclass_calibration_error(logits.softmax(dim=1), labels, num_classes=5, n_bins=bins, norm="l1")
    assert ours == pytest.approx(theirs.item(), abs=1e-6)


def test_a_confidence_on_an_edge_belongs_to_the_bin_below() -> None:
    half = torch.zeros(3, 2)  # a confidence of exactly ½
    assert metrics.reliability(half, torch.zeros(3, dtype=torch.long), bins=2).number.tolist() == [3, 0]
    sure = torch.tensor([[1000.0, 0.0]])  # exactly 1
    assert metrics.reliability(sure, torch.tensor([0]), bins=15).number.tolist() == [0] * 14 + [1]


def test_the_bins_hold_every_answer_once() -> None:
    logits, labels = answers(500, 10, 0)
    parts = metrics.reliability(logits, labels, bins=15)
    assert parts.number.sum() == 500
    right = (logits.argmax(dim=1) == labels).sum().item()
    assert (parts.number * parts.accuracy).sum().item() == pytest.approx(right)
    assert (parts.number * parts.confidence).sum().item() == pytest.approx(
        logits.softmax(dim=1).amax(dim=1).sum().item(), rel=1e-5
    )


def test_error_nll_and_brier_are_their_definitions_in_float64() -> None:
    logits, labels = answers(300, 4, 1)
    probability = logits.double().softmax(dim=1)
    assert metrics.error(logits, labels).item() == pytest.approx(
        sum(int(p.argmax()) != int(y) for p, y in zip(probability, labels, strict=True)) / 300
    )
    assert metrics.nll(logits, labels).item() == pytest.approx(nll_loss(probability.log(), labels).item(), rel=1e-6)
    targets = torch.eye(4, dtype=torch.float64)[labels]
    assert metrics.brier(logits, labels).item() == pytest.approx(
        (probability - targets).square().sum(dim=1).mean().item(), rel=1e-5
    )


def test_half_precision_logits_are_measured_in_float32() -> None:
    logits, labels = answers(100, 3, 2)
    rough = logits.bfloat16()
    for measure in (metrics.nll, metrics.ece, metrics.brier):
        assert measure(rough, labels).dtype == torch.float32
        assert torch.equal(measure(rough, labels), measure(rough.float(), labels))


def test_an_answer_with_a_nan_is_wrong() -> None:
    logits = torch.tensor([[math.nan, 0.0], [0.0, math.nan], [1.0, 0.0]])
    assert metrics.error(logits, torch.tensor([0, 1, 0])).item() == pytest.approx(2 / 3)


def test_labels_may_be_whole_numbers_of_any_size() -> None:
    logits, labels = answers(50, 4, 3)
    for measure in (metrics.error, metrics.nll, metrics.brier, metrics.ece):
        for dtype in (torch.uint8, torch.int16, torch.int32):
            assert torch.equal(measure(logits, labels.to(dtype)), measure(logits, labels))


def test_who_knows_nothing_has_the_logarithm_of_the_classes() -> None:
    assert metrics.nll(torch.zeros(7, 10), torch.arange(7)).item() == pytest.approx(math.log(10))


@pytest.mark.parametrize(
    ("logits", "labels"), [((3,), (3,)), ((3, 2), (2,)), ((0, 2), (0,)), ((3, 2), (3, 1))], ids=str
)
def test_wrong_shapes_are_named(logits: tuple[int, ...], labels: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        metrics.error(torch.zeros(logits), torch.zeros(labels, dtype=torch.long))


def test_labels_must_be_whole_numbers_and_bins_at_least_one() -> None:
    with pytest.raises(TypeError, match=r"torch\.float32"):
        metrics.nll(torch.zeros(3, 2), torch.zeros(3))
    with pytest.raises(ValueError, match="got 0"):
        metrics.ece(torch.zeros(3, 2), torch.zeros(3, dtype=torch.long), bins=0)
