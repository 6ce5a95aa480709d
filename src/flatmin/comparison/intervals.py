"""How certain is a difference between two ways to train, both run with the same seeds?

Two things vary: the training (another seed) and the held-out data (other examples). With dₛ the difference for a seed,
and d̄ᵢ that for an example,

    over seeds       t(n−1) · √(var(dₛ) / n)                Student's t, because there are few seeds
    over examples    the quantiles of the mean d̄ᵢ when examples are resampled with replacement (paired bootstrap)

and each half of the interval is the root of the sum of both squares. A measure with only one number per run (the user's
own) has only the first part.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, variance
from typing import Any, NamedTuple

import torch

SAMPLES = 2000  # of the bootstrap
MOST_AT_ONCE = 4_000_000  # numbers drawn at once


class Difference(NamedTuple):
    """A mean difference, and the interval in which it probably lies: infinitely wide if it is not known."""

    mean: float
    low: float
    high: float
    seeds: int
    over_seeds: float  # the part of the half-width that more seeds would narrow
    over_examples: float  # the part that more held-out examples would narrow


def paired_difference(
    differences: Sequence[float], per_example: Sequence[Sequence[float]] = (), *, level: float = 0.95
) -> Difference:
    """The mean of the seeds' differences with its interval.

    per_example    for each seed, the differences of all examples, whose means are `differences`; empty if not known

    >>> difference = paired_difference([-1.0, -2.0, -3.0])
    >>> [round(end, 2) for end in difference[:3]]
    [-2.0, -4.48, 0.48]
    """
    if not differences:
        return Difference(math.nan, -math.inf, math.inf, 0, math.inf, math.inf)
    mean, count = fmean(differences), len(differences)
    over_seeds = math.inf
    if count > 1:
        over_seeds = student_quantile(level, count - 1) * math.sqrt(variance(differences) / count)
    low, high = _over_examples(per_example, level) if per_example else (0.0, 0.0)
    return Difference(
        mean,
        mean - math.hypot(low, over_seeds),
        mean + math.hypot(high, over_seeds),
        count,
        over_seeds,
        max(low, high),
    )


def _over_examples(per_example: Sequence[Sequence[float]], level: float) -> tuple[float, float]:
    """How far below and above its mean the difference lies when the examples are resampled."""
    exact: Any = {"dtype": torch.float64, "device": "cpu"}  # whatever torch's defaults are
    rows = torch.tensor([list(row) for row in per_example], **exact).mean(0)
    random = torch.Generator().manual_seed(0)
    at_once = max(MOST_AT_ONCE // len(rows), 1)
    sizes = [min(at_once, SAMPLES - done) for done in range(0, SAMPLES, at_once)]
    places = (torch.randint(len(rows), (n, len(rows)), generator=random, device="cpu") for n in sizes)
    drawn = torch.cat([rows[drawn_rows].mean(1) for drawn_rows in places])
    ends = drawn.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], **exact))
    return max(float(rows.mean() - ends[0]), 0.0), max(float(ends[1] - rows.mean()), 0.0)


def student_quantile(level: float, freedom: int) -> float:
    """The t with P(|T| < t) = level for Student's T with this many degrees of freedom.

    >>> [round(student_quantile(0.95, freedom), 3) for freedom in (1, 2, 9)]
    [12.706, 4.303, 2.262]
    """
    low, high = 0.0, NormalDist().inv_cdf((1 + level) / 2)
    while _student_within(high, freedom) < level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(middle, freedom) < level else (low, middle)
    return high


def _student_within(t: float, freedom: int) -> float:
    """P(|T| < t) for whole degrees of freedom: a finite sum of powers of cos θ, with tan θ = t / √freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    is_odd = freedom % 2
    term = cosine if is_odd else 1.0
    total = 0.0
    for k in range(is_odd, freedom - 1, 2):
        total += term
        term *= (k + 1) / (k + 2) * cosine**2
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
