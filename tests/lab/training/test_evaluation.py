"""A model that has diverged is measured too: what is no answer is wrong, and has no likelihood."""

import math

import pytest
import torch

from flatmin import metrics
from flatmin_lab.training.evaluation import reliability_bins, score_logits


def test_finite_logits_have_the_measures_of_the_library() -> None:
    logits, labels = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 4
    found = score_logits(logits, labels)
    assert found == {name: float(getattr(metrics, name)(logits, labels)) for name in ("error", "nll", "ece")}
    assert reliability_bins(logits, labels) == {
        k: v.tolist() for k, v in metrics.reliability(logits, labels)._asdict().items()
    }


@pytest.mark.parametrize("bad", [[math.nan, 0.0], [0.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf]], ids=str)
def test_a_row_without_probabilities_is_wrong(bad: list[float]) -> None:
    logits, labels = torch.tensor([bad, [1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 0, 1])
    assert score_logits(logits, labels) == {"error": pytest.approx(2 / 3), "nll": None, "ece": None}
    assert sum(reliability_bins(logits, labels)["number"]) == 2
    assert score_logits(logits[:1], labels[:1])["error"] == 1
    assert reliability_bins(logits[:1], labels[:1]) == {
        "number": [0] * 15,
        "confidence": [0.0] * 15,
        "accuracy": [0.0] * 15,
    }


def test_a_likelihood_of_zero_is_none() -> None:
    found = score_logits(torch.tensor([[0.0, -math.inf]]), torch.tensor([1]))
    assert found == {"error": 1.0, "nll": None, "ece": 1.0}
