"""The interval of a paired difference: Student's over seeds, the bootstrap over examples; it covers what it says."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from flatmin.comparison.intervals import paired_difference, student_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30, 99])
@pytest.mark.parametrize("level", [0.5, 0.95, 1 - 0.05 / 3, 0.999])
def test_students_quantile_is_scipys(freedom: int, level: float) -> None:
    assert student_quantile(level, freedom) == pytest.approx(stats.t.ppf((1 + level) / 2, freedom), rel=1e-8)


def test_without_examples_it_is_the_paired_t_interval() -> None:
    one, other = [0.31, 0.28, 0.35, 0.30], [0.33, 0.33, 0.36, 0.31]
    ours = paired_difference([a - b for a, b in zip(one, other, strict=True)])
    theirs = stats.ttest_rel(one, other).confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))
    assert ours.over_examples == 0


def test_where_seeds_agree_it_is_the_paired_bootstrap() -> None:
    rows = torch.randn(400, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ours = paired_difference([float(rows.mean())] * 3, [rows.tolist()] * 3)
    drawn = stats.bootstrap((rows.numpy(),), np.mean, n_resamples=9999, method="percentile", rng=0)
    theirs = drawn.confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.01)
    assert ours.over_seeds == pytest.approx(0, abs=1e-12)


def test_both_parts_add_as_squares() -> None:
    rows = [[0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
    means = [sum(row) / 4 for row in rows]
    both, seeds = paired_difference(means, rows), paired_difference(means)
    assert both.high - both.mean == pytest.approx(math.hypot(seeds.high - seeds.mean, both.over_examples), rel=0.2)
    assert both.high - both.low > seeds.high - seeds.low


def test_torchs_default_device_plays_no_part() -> None:
    """With `torch.set_default_device("cuda")`, for example; on "meta" every use of it would raise."""
    rows = [[0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0]]
    found = paired_difference([0.5, 0.75], rows)
    with torch.device("meta"):
        assert paired_difference([0.5, 0.75], rows) == found


def test_one_seed_says_nothing() -> None:
    assert paired_difference([0.1])[:3] == (0.1, -math.inf, math.inf)
    assert math.isnan(paired_difference([]).mean)


def test_it_covers_the_truth_as_often_as_it_says() -> None:
    """A true difference of −1 with noise of the seed, of the example and of both: 300 comparisons of 4 seeds."""
    random = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    within = 0
    for _ in range(300):
        rows = -1 + 0.3 * noise(4, 1) + 2.0 * noise(1, 60) + noise(4, 60)
        found = paired_difference(rows.mean(1).tolist(), rows.tolist())
        within += found.low <= -1 <= found.high
    assert 0.93 <= within / 300 <= 1.0
