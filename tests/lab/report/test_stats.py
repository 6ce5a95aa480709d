"""Welch's test against scipy, and Holm's rule against its definition."""

import pytest
import torch
from scipy import stats

from flatmin_lab.report.stats import holm, welch


def test_welch_is_scipys() -> None:
    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for _ in range(500):
        sizes = torch.randint(2, 12, (2,), generator=generator).tolist()
        scale, apart = 10 ** (6 * torch.rand(2, generator=generator).double() - 3)
        x = (scale * torch.randn(sizes[0], generator=generator).double()).tolist()
        y = (apart + torch.randn(sizes[1], generator=generator).double()).tolist()
        ours, theirs = welch(x, y), stats.ttest_ind(x, y, equal_var=False)
        assert ours is not None
        assert ours.t == pytest.approx(theirs.statistic, rel=1e-9)
        assert ours.freedom == pytest.approx(theirs.df, rel=1e-9)
        largest = max(largest, abs(ours.p - theirs.pvalue) / max(theirs.pvalue, 1e-300))
    assert largest < 1e-9


def test_one_value_and_values_without_spread_say_nothing() -> None:
    assert welch([1.0], [2.0, 3.0]) is None
    assert welch([], []) is None
    assert welch([1.0, 1.0], [2.0, 2.0]) is None


def test_holm_rejects_what_its_steps_reject() -> None:
    """The smallest p against α/m, the next against α/(m − 1), until one fails."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        ps = dict(enumerate((torch.rand(6, generator=generator).double() ** 3).tolist()))
        expected = set()
        for rank, key in enumerate(sorted(ps, key=ps.__getitem__)):
            if ps[key] * (len(ps) - rank) >= 0.05:
                break
            expected.add(key)
        adjusted = holm(ps)
        assert {key for key, p in adjusted.items() if p < 0.05} == expected
        assert all(adjusted[key] >= p for key, p in ps.items())
