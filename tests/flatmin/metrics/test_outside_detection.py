"""AUROC and FPR at a TPR: all pairs by brute force, scikit-learn's curves, and the laws of an order."""

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor

from flatmin.metrics import auroc, fpr_at_tpr

MEASURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"auroc": auroc, "fpr_at_tpr": fpr_at_tpr}
every_measure = pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
LEVELS = (0.5, 0.8, 0.95, 1.0)


def scores(count: int, others: int, seed: int, *, values: int | None = None) -> tuple[Tensor, Tensor]:
    """Inside scores that lie higher on the whole; with `values` only so many different ones, so that many tie."""
    generator = torch.Generator().manual_seed(seed)
    inside = torch.randn(count, generator=generator, dtype=torch.float64) + 1
    outside = torch.randn(others, generator=generator, dtype=torch.float64)
    if values is None:
        return inside, outside
    return (inside * values / 4).round(), (outside * values / 4).round()


def auroc_by_hand(inside: Tensor, outside: Tensor) -> Fraction:
    points = sum(Fraction(2 if a > b else 1 if a == b else 0, 2) for a in inside.tolist() for b in outside.tolist())
    return Fraction(points) / (len(inside) * len(outside))


def fpr_by_hand(inside: Tensor, outside: Tensor, tpr: float) -> Fraction:
    """Over all thresholds: the highest that accepts enough of the inside."""
    enough = [t for t in inside.tolist() if sum(a >= t for a in inside.tolist()) / len(inside) >= tpr]
    return Fraction(sum(b >= max(enough) for b in outside.tolist()), len(outside))


@pytest.mark.parametrize("values", [None, 8, 2])
@pytest.mark.parametrize(("count", "others"), [(1, 1), (40, 33), (20, 60)])
def test_they_are_their_definitions_over_all_pairs_and_thresholds(count: int, others: int, values: int | None) -> None:
    inside, outside = scores(count, others, seed=count, values=values)
    assert auroc(inside, outside).item() == float(auroc_by_hand(inside, outside))
    for tpr in LEVELS:
        assert fpr_at_tpr(inside, outside, tpr=tpr).item() == float(fpr_by_hand(inside, outside, tpr)), tpr


def test_scikit_learn_agrees_on_any_scores() -> None:
    """Few different values and many, one score against sixty, several dtypes and levels."""
    largest = {"auroc": 0.0, "fpr": 0.0}

    @given(
        count=st.integers(1, 60),
        others=st.integers(1, 60),
        values=st.sampled_from([None, 1, 3, 20]),
        dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
        tpr=st.sampled_from([0.05, *LEVELS]),
        seed=st.integers(0, 10**6),
    )
    @settings(max_examples=200, deadline=None, derandomize=True)
    def compare(count: int, others: int, values: int | None, dtype: torch.dtype, tpr: float, seed: int) -> None:
        inside, outside = (part.to(dtype) for part in scores(count, others, seed, values=values))
        labels = [1] * count + [0] * others
        given_scores = torch.cat([inside, outside]).double().numpy()
        largest["auroc"] = max(
            largest["auroc"], abs(auroc(inside, outside).item() - roc_auc_score(labels, given_scores))
        )
        fpr, reached, _ = roc_curve(labels, given_scores, drop_intermediate=False)
        expected = fpr[(reached >= tpr).argmax()]
        found = fpr_at_tpr(inside, outside, tpr=tpr).item()
        largest["fpr"] = max(largest["fpr"], abs(found - expected))

    compare()
    assert max(largest.values()) < 1e-7, largest


@pytest.mark.parametrize("count", [20, 60, 100, 140, 1000, 10000])
def test_a_share_of_the_inside_that_is_a_whole_number_is_not_rounded_up(count: int) -> None:
    """0.95 · 140 is 133 exactly, and 0.07 · 100 is 7.000000000000001 in floating point."""
    inside = torch.arange(count, 0, -1, dtype=torch.float64)
    for tpr in (0.07, 0.55, 0.95):
        needed = Fraction(str(tpr)) * count
        if needed.denominator == 1:  # outside scores just above and just below the threshold
            threshold = count - int(needed) + 1
            outside = torch.tensor([threshold, threshold - 0.5], dtype=torch.float64)
            assert fpr_at_tpr(inside, outside, tpr=tpr).item() == 0.5


def test_either_side_may_be_called_the_inside() -> None:
    for values in (None, 3):
        inside, outside = scores(70, 50, seed=1, values=values)
        assert (auroc(inside, outside) + auroc(outside, inside)).item() == pytest.approx(1, abs=1e-15)
        assert auroc(inside, outside).item() == pytest.approx(auroc(-outside, -inside).item(), abs=1e-15)
        assert auroc(inside, inside).item() == 0.5


@every_measure
@pytest.mark.parametrize("values", [None, 5])
def test_only_the_order_of_the_scores_counts(measure: Callable[..., Tensor], values: int | None) -> None:
    inside, outside = scores(70, 50, seed=2, values=values)
    found = measure(inside, outside)
    for rises in (torch.exp, torch.atan, lambda x: 2 * x - 5, lambda x: x**3):
        assert torch.equal(measure(rises(inside), rises(outside)), found)


@every_measure
def test_the_order_of_the_inputs_does_not_matter_to_the_last_bit(measure: Callable[..., Tensor]) -> None:
    inside, outside = scores(700, 500, seed=3, values=40)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        mixed = (part[torch.randperm(len(part), generator=generator)] for part in (inside, outside))
        assert torch.equal(measure(*mixed), measure(inside, outside))


def test_the_ends_of_the_scale() -> None:
    high, low = torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0])
    assert (auroc(high, low).item(), auroc(low, high).item()) == (1, 0)
    assert (fpr_at_tpr(high, low).item(), fpr_at_tpr(low, high).item()) == (0, 1)
    assert (auroc(high[:1], high[:1]).item(), fpr_at_tpr(high[:1], high[:1]).item()) == (0.5, 1)


def test_an_infinite_score_has_its_place() -> None:
    inside, outside = torch.tensor([math.inf, 1.0]), torch.tensor([-math.inf, math.inf])
    assert auroc(inside, outside).item() == (0.5 + 0 + 1 + 1) / 4
    assert fpr_at_tpr(inside, outside).item() == 0.5


def test_many_scores_are_counted_exactly() -> None:
    """10⁵ by 10⁵ pairs, more than float32 can count; in order but for one."""
    count = 10**5
    inside = torch.arange(count, dtype=torch.float64) + count
    outside = torch.arange(count, dtype=torch.float64)
    outside[0] = 2 * count
    assert auroc(inside, outside).item() == 1 - 1 / count


@every_measure
def test_scores_of_two_types_are_compared_exactly(measure: Callable[..., Tensor]) -> None:
    half, double = torch.tensor([0.1, 0.5], dtype=torch.bfloat16), torch.tensor([0.1, 0.4], dtype=torch.float64)
    assert torch.equal(measure(half, double), measure(half.double(), double))
    assert measure(half, half).dtype == torch.float32
    assert measure(half, double).dtype == torch.float64


@every_measure
def test_views_of_every_second_score_and_scores_with_a_gradient_will_do(measure: Callable[..., Tensor]) -> None:
    inside, outside = scores(40, 30, seed=4)
    assert torch.equal(
        measure(inside[::2].requires_grad_(), outside[::2]), measure(inside[::2].clone(), outside[::2].clone())
    )


@every_measure
@pytest.mark.parametrize(
    ("inside", "outside", "error", "text"),
    [
        (torch.zeros(0), torch.zeros(2), ValueError, r"inside must be scores of shape \(N,\).*got \(0,\)"),
        (torch.zeros(2), torch.zeros(2, 1), ValueError, r"outside must be .*got \(2, 1\)"),
        (torch.tensor([0.0, math.nan, math.nan]), torch.zeros(2), ValueError, "got 2 of 3, the first in row 1"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64), TypeError, r"outside must be .*torch\.int64; call"),
    ],
)
def test_scores_that_have_no_order_are_named(
    measure: Callable[..., Tensor], inside: Tensor, outside: Tensor, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        measure(inside, outside)


@pytest.mark.parametrize("tpr", [0.0, 1.1, 95, math.nan])
def test_a_share_that_is_none_is_refused(tpr: float) -> None:
    with pytest.raises(ValueError, match=f"above 0 and at most 1, got {tpr}"):
        fpr_at_tpr(torch.zeros(2), torch.zeros(2), tpr=tpr)
