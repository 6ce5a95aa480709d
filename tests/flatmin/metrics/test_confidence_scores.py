"""Scores of familiarity: their definitions in float64, and what they say of logits that are large or excluded."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flatmin import metrics
from flatmin.metrics import CONFIDENCE_SCORES, max_probability, negative_energy, negative_entropy

every_score = pytest.mark.parametrize("score", CONFIDENCE_SCORES.values(), ids=CONFIDENCE_SCORES)
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


def by_hand(row: list[float]) -> dict[str, float]:
    """The definitions, a class at a time."""
    total = math.fsum(math.exp(z) for z in row)
    shares = [math.exp(z) / total for z in row]
    return {
        "max_probability": max(shares),
        "negative_energy": math.log(total),
        "negative_entropy": math.fsum(p * math.log(p) for p in shares if p > 0),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONFIDENCE_SCORES)
def test_a_score_is_its_definition(name: str, dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(50, 7, generator=torch.Generator().manual_seed(0))).to(dtype)
    found = CONFIDENCE_SCORES[name](logits)
    assert found.shape == (50,)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    expected = [by_hand(row)[name] for row in logits.tolist()]
    assert found.tolist() == pytest.approx(expected, rel=1e-12 if dtype == torch.float64 else 1e-5, abs=1e-7)


@every_score
def test_an_answer_that_is_surer_scores_higher(score: Callable[[Tensor], Tensor]) -> None:
    logits = torch.linspace(0, 12, 30)[:, None] * torch.tensor([[1.0, 0.0, 0.0]])
    assert bool((score(logits).diff() > 0).all())


def test_only_the_energy_depends_on_more_than_the_probabilities() -> None:
    logits = torch.randn(20, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for score in (max_probability, negative_entropy):
        torch.testing.assert_close(score(logits + 7), score(logits))
    torch.testing.assert_close(negative_energy(logits + 7), negative_energy(logits) + 7)


def test_rows_that_are_almost_certain_are_told_apart_by_their_entropy() -> None:
    """Their largest probability is 1 in float32; and p log p of p = 1 − δ would lose δ."""
    margins = torch.arange(18.0, 80.0)
    logits = torch.stack([margins, torch.zeros(len(margins))], dim=1)
    assert bool((max_probability(logits) == 1).all())
    found = negative_entropy(logits)
    assert bool((found.diff() > 0).all())
    exact = -(margins.double() + 1) * (-margins.double()).exp()  # to first order in exp(−margin)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)


@every_score
def test_a_class_may_be_excluded(score: Callable[[Tensor], Tensor]) -> None:
    logits = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    excluded = torch.cat([logits, torch.full((20, 2), -math.inf)], dim=1)
    torch.testing.assert_close(score(excluded), score(logits))


def test_who_has_no_choice_is_certain() -> None:
    logits = torch.tensor([[3.0]])
    assert [float(score(logits)) for score in CONFIDENCE_SCORES.values()] == [1.0, 3.0, 0.0]


@every_score
@every_device
def test_a_row_without_probabilities_is_named(score: Callable[[Tensor], Tensor], device: str) -> None:
    for row in ([1.0, math.nan], [math.inf, 1.0], [-math.inf, -math.inf]):
        logits = torch.tensor([[0.0, 1.0], row, [0.0, 1.0], row], device=device)
        with pytest.raises(ValueError, match="2 such rows of 4, the first being row 1"):
            score(logits)


@every_score
@pytest.mark.parametrize("shape", [(3,), (0, 2), (3, 0), (2, 3, 4)], ids=str)
def test_wrong_shapes_are_named(score: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"logits must be \(N, K\)"):
        score(torch.zeros(shape))


@pytest.mark.cuda
def test_a_gpu_scores_and_detects_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    near, far = 3 * torch.randn(3000, 10, generator=generator), torch.randn(2000, 10, generator=generator)
    wrong = torch.rand(3000, generator=generator) < 0.2
    for score in CONFIDENCE_SCORES.values():
        inside, outside = score(near), score(far)
        torch.testing.assert_close(score(near.cuda()).cpu(), inside)
        for measure in (metrics.auroc, metrics.fpr_at_tpr):
            found = measure(inside.cuda(), outside.cuda())
            assert found.is_cuda
            assert torch.equal(found.cpu(), measure(inside, outside))  # counted in whole numbers
        there, here = metrics.risk_coverage(inside.cuda(), wrong.cuda()), metrics.risk_coverage(inside, wrong)
        assert all(torch.equal(one.cpu(), other) for one, other in zip(there, here, strict=True))
