"""A model that has diverged is measured too: what is no answer is wrong, and has no likelihood."""

import math

import pytest
import torch

from flatmin import metrics
from flatmin_lab.training.evaluation import bins_of, measured


def test_finite_logits_have_the_measures_of_the_library() -> None:
    logits, labels = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 4
    found = measured(logits, labels)
    assert found == {name: float(getattr(metrics, name)(logits, labels)) for name in ("error", "nll", "ece")}
    assert bins_of(logits, labels) == {k: v.tolist() for k, v in metrics.reliability(logits, labels)._asdict().items()}


@pytest.mark.parametrize("bad", [[math.nan, 0.0], [0.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf]], ids=str)
def test_a_row_without_probabilities_is_wrong(bad: list[float]) -> None:
    logits, labels = torch.tensor([bad, [1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 0, 1])
    assert measured(logits, labels) == {"error": pytest.approx(2 / 3), "nll": None, "ece": None}
    assert sum(bins_of(logits, labels)["number"]) == 2
    assert measured(logits[:1], labels[:1])["error"] == 1
    assert bins_of(logits[:1], labels[:1]) == {"number": [0] * 15, "confidence": [0.0] * 15, "accuracy": [0.0] * 15}


def test_a_likelihood_of_zero_is_none() -> None:
    found = measured(torch.tensor([[0.0, -math.inf]]), torch.tensor([1]))
    assert found == {"error": 1.0, "nll": None, "ece": 1.0}
