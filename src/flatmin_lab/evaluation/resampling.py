"""AURC, AUROC and FPR of many bootstrap resamples: `metrics.bootstrap`'s numbers without sorting every resample.

A resample has the rows of the original, each some number of times. So the values are ordered once, and a resample is
how often it has each distinct value, in that order; sums over all that come before do the rest. With c predictions of
one confidence, w of them wrong, after C others with E wrong, the risks at the coverages in between add up to

    Σⱼ₌₁..c (E + j w/c) / (C + j) = w + (E − C w/c) (H(C + c) − H(C)),        H(n) = 1 + ½ + … + 1/n
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from flatmin import metrics
from flatmin.core.tensors import widest_dtype
from flatmin.metrics.bootstrap_interval import Interval, drawn_rows, percentile_interval
from flatmin.metrics.outside_detection import accepted_of

CHUNK = 16  # resamples at a time


@torch.no_grad()
def aurc_interval(confidence: Tensor, wrong: Tensor, *, samples: int, level: float) -> Interval:
    """The interval that `metrics.bootstrap` has for AURC."""
    count = len(wrong)
    place = (-confidence).unique(return_inverse=True)[1]  # the most confident first
    number = int(place.max()) + 1
    steps = torch.arange(1, count + 1, device=wrong.device).to(widest_dtype(confidence))
    harmonic = torch.cat([steps.new_zeros(1), steps.reciprocal().cumsum(dim=0)])

    def draw(random: torch.Generator) -> Tensor:
        rows = drawn_rows(confidence, random)
        counts: Tensor = (2 * place[rows] + wrong[rows]).bincount(minlength=2 * number)
        return counts.view(number, 2)

    def areas(counts: Tensor) -> Tensor:
        own, own_wrong = counts.sum(dim=2), counts[..., 1]
        end, end_wrong = own.cumsum(dim=1), own_wrong.cumsum(dim=1)
        before = end - own
        share = own_wrong / own.clamp(min=1).to(harmonic.dtype)
        risks = own_wrong + ((end_wrong - own_wrong) - before * share) * (harmonic[end] - harmonic[before])
        return risks.sum(dim=1) / count

    found = torch.cat([areas(torch.stack(chunk)) for chunk in _chunks(draw, samples)])
    return percentile_interval(metrics.aurc(confidence, wrong), found, level)


@torch.no_grad()
def detection_interval(inside: Tensor, outside: Tensor, *, tpr: float, samples: int, level: float) -> Interval:
    """Those that `metrics.two_sample_bootstrap` has for AUROC and the FPR, (2, D), of D scores, (N, D) and (M, D)."""
    sizes, needed = (len(inside), len(outside)), accepted_of(tpr, len(inside))
    exact = widest_dtype(inside)
    places = [column.unique(return_inverse=True)[1] for column in torch.cat([inside, outside]).unbind(dim=1)]
    number = 1 + max(int(place.max()) for place in places)

    def draw(random: torch.Generator) -> Tensor:
        near, far = drawn_rows(inside, random), sizes[0] + drawn_rows(outside, random)
        return torch.stack([torch.stack([p[r].bincount(minlength=number) for r in (near, far)]) for p in places])

    def shares(counts: Tensor) -> Tensor:
        near, far = counts.unbind(dim=2)  # each (resamples, scores, distinct values), the lowest first
        pairs = (near * (2 * far.cumsum(dim=2) - far)).sum(dim=2)
        from_here = [side.flip(2).cumsum(dim=2).flip(2) for side in (near, far)]
        threshold = (from_here[0] >= needed).sum(dim=2, keepdim=True) - 1
        accepted = from_here[1].gather(2, threshold).squeeze(2)
        return torch.stack([pairs.to(exact) / (2 * sizes[0] * sizes[1]), accepted.to(exact) / sizes[1]], dim=1)

    scores = list(zip(inside.unbind(dim=1), outside.unbind(dim=1), strict=True))
    values = [[metrics.auroc(*pair) for pair in scores], [metrics.fpr_at_tpr(*pair, tpr=tpr) for pair in scores]]
    found = torch.cat([shares(torch.stack(chunk)) for chunk in _chunks(draw, samples)])
    return percentile_interval(torch.stack([torch.stack(row) for row in values]), found, level)


def _chunks(draw: Callable[[torch.Generator], Tensor], samples: int) -> Iterator[list[Tensor]]:
    random = torch.Generator().manual_seed(0)
    for start in range(0, samples, CHUNK):
        yield [draw(random) for _ in range(min(CHUNK, samples - start))]
