"""Error, NLL, Brier score and calibration errors: by brute force in float64, and against torchmetrics and torch."""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import nll_loss

import oracles
from flatmin import metrics

MEASURES = (metrics.error, metrics.nll, metrics.brier, metrics.ece, metrics.adaptive_ece)


def predictions(count: int, classes: int, seed: int, *, sharpness: float = 3.0) -> tuple[Tensor, Tensor]:
    """About half of them right."""
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(count, classes, generator=generator)
    labels = torch.randint(0, classes, (count,), generator=generator)
    return logits, torch.where(torch.rand(count, generator=generator) < 0.5, logits.argmax(dim=1), labels)


def pairs(logits: Tensor, labels: Tensor) -> list[tuple[float, int]]:
    """The confidence of each prediction, and 1 where it is right."""
    probability = logits.softmax(dim=1)
    return [(float(p.max()), int(p.argmax() == y)) for p, y in zip(probability, labels, strict=True)]


def ece_by_hand(logits: Tensor, labels: Tensor, bins: int) -> float:
    """The definition, one prediction at a time; the edges as float32 has them."""
    edges = [float(torch.tensor(m / bins)) for m in range(bins + 1)]
    total = 0.0
    for low, high in pairwise(edges):
        inside = [(sure, right) for sure, right in pairs(logits, labels) if low < sure <= high]
        total += abs(sum(right for _, right in inside) - sum(sure for sure, _ in inside))
    return total / len(labels)


def adaptive_ece_by_hand(logits: Tensor, labels: Tensor, bins: int) -> float:
    """The predictions in order, bin by bin; those of equal confidence count with their mean accuracy."""
    ordered = sorted(pairs(logits, labels))
    share = {}
    for sure, _ in ordered:
        alike = [right for other, right in ordered if other == sure]
        share[sure] = sum(alike) / len(alike)
    total = 0.0
    for m in range(bins):
        inside = [sure for rank, (sure, _) in enumerate(ordered) if rank * bins // len(ordered) == m]
        total += abs(sum(share[sure] - sure for sure in inside))
    return total / len(ordered)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("bins", [1, 7, 15, 300])
def test_ece_and_adaptive_ece_are_their_definitions(seed: int, bins: int) -> None:
    logits, labels = predictions(200, 5, seed)
    assert metrics.ece(logits, labels, bins=bins).item() == pytest.approx(ece_by_hand(logits, labels, bins), abs=1e-6)
    tied = torch.cat([logits, logits[:90]]), torch.cat([labels, (labels[:90] + 1) % 5])  # and the other way round
    for given_ in ((logits, labels), tied):
        found = metrics.adaptive_ece(*given_, bins=bins).item()
        assert found == pytest.approx(adaptive_ece_by_hand(*given_, bins), abs=1e-6)


def test_torchmetrics_and_torch_agree_on_any_logits() -> None:
    """Confident and unsure ones, ties, exact ones and zeros, one prediction, empty bins, every float dtype."""
    pytest.importorskip("torchmetrics", reason="an oracle, installed with flatmin[dev]")
    largest: dict[str, float] = {}
    theirs: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "error": oracles.their_error,
        "brier": oracles.their_brier,
        "ece": oracles.their_ece,
        "nll": torch.nn.functional.cross_entropy,
    }

    @given(
        count=st.integers(1, 80),
        classes=st.sampled_from([2, 3, 10, 1000]),
        sharpness=st.sampled_from([0.0, 0.1, 1.0, 5.0, 1000.0]),
        whole=st.booleans(),
        dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
        seed=st.integers(0, 10**6),
    )
    @settings(max_examples=150, deadline=None, derandomize=True)
    def compare(count: int, classes: int, sharpness: float, whole: bool, dtype: torch.dtype, seed: int) -> None:
        logits, labels = predictions(count, classes, seed, sharpness=sharpness)
        logits = (logits.round() if whole else logits).to(dtype)
        for name, oracle in theirs.items():
            expected = float(oracle(logits.to(torch.promote_types(dtype, torch.float32)), labels))
            found = float(getattr(metrics, name)(logits, labels))
            scale = max(expected, 1.0) if name == "nll" else 1.0
            largest[name] = max(largest.get(name, 0.0), abs(found - expected) / scale)

    compare()
    assert set(largest) == set(theirs)
    assert max(largest.values()) < 1e-6, largest


def test_torchmetrics_gives_a_confidence_of_one_a_bin_of_its_own() -> None:
    """Why its probabilities are lowered: sure and right and nearly sure and wrong are in one bin of the paper."""
    pytest.importorskip("torchmetrics", reason="an oracle, installed with flatmin[dev]")
    from torchmetrics.functional.classification import multiclass_calibration_error  # noqa: PLC0415

    logits, labels = torch.tensor([[1000.0, 0.0], [6.0, 0.0]]), torch.tensor([0, 1])
    theirs = multiclass_calibration_error(logits.softmax(dim=1), labels, num_classes=2, n_bins=15, norm="l1")
    assert theirs.item() == pytest.approx(0.4988, abs=1e-4)  # |1 − 1|/2 + |0 − 0.9975|/2
    assert metrics.ece(logits, labels).item() == pytest.approx(0.4988, abs=1e-4)
    labels = torch.tensor([1, 0])  # but the other way round: |0 − 1|/2 + |1 − 0.9975|/2
    theirs = multiclass_calibration_error(logits.softmax(dim=1), labels, num_classes=2, n_bins=15, norm="l1")
    assert theirs.item() == pytest.approx(0.5012, abs=1e-4)
    assert metrics.ece(logits, labels).item() == pytest.approx(0.4988, abs=1e-4)  # |½ − 0.9988|
    assert oracles.their_ece(logits, labels).item() == pytest.approx(0.4988, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_confidence_on_an_edge_belongs_to_the_bin_below(dtype: torch.dtype) -> None:
    """1/j is an edge m/M where M = j · m; both are rounded alike, so it is exactly one for the computer too."""
    for bins in range(1, 41):
        for classes in range(1, 31):
            number = metrics.reliability(torch.zeros(1, classes, dtype=dtype), torch.tensor([0]), bins=bins).number
            assert int(number.argmax()) == math.ceil(Fraction(bins, classes)) - 1
    sure = torch.tensor([[1000.0, 0.0]], dtype=dtype)  # exactly 1
    assert metrics.reliability(sure, torch.tensor([0]), bins=15).number.tolist() == [0] * 14 + [1]


def test_the_bins_hold_every_answer_once() -> None:
    logits, labels = predictions(500, 10, 0)
    parts = metrics.reliability(logits, labels, bins=15)
    assert parts.number.sum() == 500
    right = (logits.argmax(dim=1) == labels).sum().item()
    assert (parts.number * parts.accuracy).sum().item() == pytest.approx(right)
    assert (parts.number * parts.confidence).sum().item() == pytest.approx(
        logits.softmax(dim=1).amax(dim=1).sum().item(), rel=1e-5
    )


def orders(count: int) -> Iterator[Tensor]:
    for seed in range(5):
        yield torch.randperm(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("whole", [False, True])
def test_the_order_of_the_answers_plays_no_part(whole: bool) -> None:
    """To the bit in adaptive_ece, also where many predictions are equally confident and a bin cuts through them."""
    logits, labels = predictions(300, 3, 0, sharpness=2.0)
    logits = logits.round() if whole else logits
    for order in orders(300):
        assert torch.equal(metrics.adaptive_ece(logits[order], labels[order]), metrics.adaptive_ece(logits, labels))
        for measure in MEASURES:
            torch.testing.assert_close(measure(logits[order], labels[order]), measure(logits, labels))


def test_adaptive_bins_of_one_confidence_have_one_accuracy() -> None:
    """300 equally confident predictions: the gap is that of all, in however many bins."""
    logits = torch.tensor([[1.0, 0.0]]).repeat(300, 1)
    labels = (torch.arange(300) >= 120).long()
    gap = abs(1 / (1 + math.exp(-1)) - 120 / 300)
    for bins in (1, 7, 15, 300, 1000):
        assert metrics.adaptive_ece(logits, labels, bins=bins).item() == pytest.approx(gap, abs=1e-6)


def test_in_one_bin_both_are_the_gap_of_all_answers_and_with_few_answers_each_is_its_own_bin() -> None:
    logits, labels = predictions(7, 3, 4)
    torch.testing.assert_close(metrics.adaptive_ece(logits, labels, bins=1), metrics.ece(logits, labels, bins=1))
    gaps = [abs(right - sure) for sure, right in pairs(logits, labels)]
    assert metrics.adaptive_ece(logits, labels, bins=15).item() == pytest.approx(sum(gaps) / 7, abs=1e-6)
    alone = metrics.adaptive_ece(logits[:1], labels[:1], bins=15).item()
    assert alone == pytest.approx(gaps[0], abs=1e-6)


def test_error_nll_and_brier_are_their_definitions_in_float64() -> None:
    logits, labels = predictions(300, 4, 1)
    probability = logits.double().softmax(dim=1)
    assert metrics.error(logits, labels).item() == pytest.approx(
        sum(int(p.argmax()) != int(y) for p, y in zip(probability, labels, strict=True)) / 300
    )
    assert metrics.nll(logits, labels).item() == pytest.approx(nll_loss(probability.log(), labels).item(), rel=1e-6)
    targets = torch.eye(4, dtype=torch.float64)[labels]
    assert metrics.brier(logits, labels).item() == pytest.approx(
        (probability - targets).square().sum(dim=1).mean().item(), rel=1e-5
    )


@pytest.mark.parametrize("wrong", [0, 1, 513, 3999, 10_000])
def test_the_error_is_the_number_of_wrong_predictions_over_that_of_all_to_the_last_bit(wrong: int) -> None:
    logits = torch.tensor([[1.0, 0.0]]).expand(10_000, 2)
    labels = (torch.arange(10_000) < wrong).long()
    assert metrics.error(logits, labels).item() == torch.tensor(wrong / 10_000, dtype=torch.float32).item()


def test_half_precision_logits_are_measured_in_float32() -> None:
    logits, labels = predictions(100, 3, 2)
    rough = logits.bfloat16()
    for measure in (*MEASURES, metrics.temperature):
        assert measure(rough, labels).dtype == torch.float32
        assert torch.equal(measure(rough, labels), measure(rough.float(), labels))


def test_who_knows_nothing_has_the_logarithm_of_the_classes() -> None:
    assert metrics.nll(torch.zeros(7, 10), torch.arange(7)).item() == pytest.approx(math.log(10))


def test_there_is_at_least_one_bin() -> None:
    for measure in (metrics.ece, metrics.adaptive_ece, metrics.reliability):
        with pytest.raises(ValueError, match="got 0"):
            measure(torch.zeros(3, 2), torch.zeros(3, dtype=torch.long), bins=0)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_gpu_measures_the_same(dtype: torch.dtype) -> None:
    logits, labels = predictions(5000, 10, 0)
    logits = logits.to(dtype)
    for measure in (*MEASURES, metrics.temperature):
        found = measure(logits.cuda(), labels.cuda())
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), measure(logits, labels), rtol=1e-5, atol=1e-6)
