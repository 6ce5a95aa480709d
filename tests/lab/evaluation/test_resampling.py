"""Intervals from counted resamples are those of the bootstrap that measures every resample by itself."""

import pytest
import torch
from torch import Tensor

from flatmin import metrics
from flatmin_lab.evaluation.resampling import aurc_interval, detection_interval

SAMPLES = 150  # more than a chunk, and not a multiple of one


def scores(count: int, seed: int, *, ties: bool) -> Tensor:
    drawn = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (8 * drawn).round() / 8 if ties else drawn


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("count", [1, 2, 37, 300])
def test_the_interval_of_aurc_is_the_bootstrap_s(count: int, ties: bool) -> None:
    confidence = 0.5 + scores(count, count, ties=ties) / 2
    wrong = torch.rand(count, generator=torch.Generator().manual_seed(1)) < 0.3
    logits = torch.stack([confidence.log(), (1 - confidence).log()], dim=1).nan_to_num(neginf=-1e3)
    labels = wrong.long()

    def area(rows: Tensor, own: Tensor) -> Tensor:
        return metrics.aurc(rows[:, 0].exp(), own == 1)

    plain = metrics.bootstrap(area, logits, labels, samples=SAMPLES, level=0.9)
    found = aurc_interval(logits[:, 0].exp(), wrong, samples=SAMPLES, level=0.9)
    assert torch.allclose(torch.stack(found), torch.stack(plain), rtol=0, atol=1e-12)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("tpr", [0.05, 0.5, 0.95, 1.0])
def test_the_intervals_of_a_detection_are_the_bootstrap_s(tpr: float, ties: bool) -> None:
    inside = torch.stack([scores(40, 1, ties=ties), scores(40, 2, ties=False)], dim=1) + 0.2
    outside = torch.stack([scores(55, 3, ties=ties), scores(55, 4, ties=True)], dim=1)

    def both(near: Tensor, far: Tensor) -> Tensor:
        pairs = list(zip(near.unbind(dim=1), far.unbind(dim=1), strict=True))
        areas, rates = [metrics.auroc(*pair) for pair in pairs], [metrics.fpr_at_tpr(*pair, tpr=tpr) for pair in pairs]
        return torch.stack([torch.stack(areas), torch.stack(rates)])

    plain = metrics.two_sample_bootstrap(both, inside, outside, samples=SAMPLES, level=0.9)
    found = detection_interval(inside, outside, tpr=tpr, samples=SAMPLES, level=0.9)
    assert torch.equal(torch.stack(found), torch.stack(plain))
