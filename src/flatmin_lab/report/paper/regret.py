"""What share of the best fixed radius's gain over ERM a radius that adjusts itself loses.

    regret = (auto − best) / (ERM − best)          of error, NLL or ECE, means over the seeds

0 is as good as the best fixed radius, 1 no better than ERM; below 0 it is better than all of them. The best one is
chosen for each column, among those clearly better than ERM, by the very numbers that it is then compared with: by
chance alone, this makes the regret too high. It is too low if the best radius has not been tried, or only once, which
shows no clear gain: `Lost.remarks` says where that may be. Where no fixed radius is clearly better, there is no gain to
lose a share of.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import NamedTuple

import numpy as np

from flatmin_lab.methods import AUTO
from flatmin_lab.report.paper.frontier import kept_share, middle, resampled_shares
from flatmin_lab.report.paper.tables import FilledTable, Row
from flatmin_lab.report.stats import welch

CLEARLY = 2  # standard errors that a gain must have


class Lost(NamedTuple):
    """The share of the gain, its interval, which a single run does not have, and whose gain it is."""

    share: float
    low: float | None
    high: float | None
    best: Row
    remarks: tuple[str, ...] = ()  # why a better radius may have been missed


@dataclass(frozen=True)
class Regret:
    """One automatic radius on one data set, and what it loses in each column."""

    auto: Row
    erm: Row
    fixed: list[Row]
    columns: list[str]
    lost: list[Lost | None]


class MeanShare(NamedTuple):
    """Over so many sets with a gain; the interval, from resamples of each, is there if all of them have one."""

    share: float
    sets: int
    low: float | None
    high: float | None


class MeanRegret(NamedTuple):
    """An automatic radius over all data sets, in each column."""

    name: str
    columns: list[str]
    shares: list[MeanShare | None]


def mean_regrets(found: Sequence[Regret]) -> list[MeanRegret]:
    """One for each automatic radius that has lost, or won, something on two data sets or more."""
    means = []
    for name in dict.fromkeys(one.auto.name for one in found):
        same = [one for one in found if one.auto.name == name]
        shares = [_mean_share(same, number) for number in range(len(same[0].columns))]
        if any(shares):
            means.append(MeanRegret(name, same[0].columns, shares))
    return means


def _mean_share(found: Sequence[Regret], number: int) -> MeanShare | None:
    parts = [(one, lost) for one in found if (lost := one.lost[number]) is not None]
    if len(parts) < 2:
        return None
    low = high = None
    if all(lost.low is not None for _, lost in parts):
        draws = []
        for stream, (one, lost) in enumerate(parts):
            compared = (row.cells[number].compared for row in (one.erm, lost.best, one.auto))
            draws.append(1 - resampled_shares(*compared, stream=stream))
        low, high = middle(np.mean(draws, axis=0))
    return MeanShare(mean(lost.share for _, lost in parts), len(parts), low, high)


def regrets(table: FilledTable) -> list[Regret]:
    """One for each automatic radius beside ERM and a fixed one."""
    found = []
    labels = [column.label for column in table.columns]
    for place in dict.fromkeys(row.place for row in table.rows):
        rows = [row for row in table.rows if row.place == place and row.has_values]
        erm = next((row for row in rows if row.recipe.method == "erm"), None)
        radii = [row for row in rows if row.recipe.method == "amp"]
        fixed = [row for row in radii if row.recipe.settings["epsilon"] != AUTO]
        if erm is None or not fixed:
            continue
        for auto in (row for row in radii if row not in fixed):
            lost = [_lost(erm, fixed, auto, number) for number in range(len(labels))]
            found.append(Regret(auto, erm, fixed, labels, lost))
    return found


def _lost(erm: Row, fixed: Sequence[Row], auto: Row, number: int) -> Lost | None:
    base, own = erm.cells[number].compared, auto.cells[number].compared
    better = [row for row in fixed if is_clear(base, row.cells[number].compared)]
    if not better:
        return None
    best = min(better, key=lambda row: mean(row.cells[number].compared))
    kept = kept_share(base, best.cells[number].compared, own)
    if kept is None:
        return None
    low, high = (None if end is None else 1 - end for end in (kept.high, kept.low))
    several = [row for row in fixed if len(row.cells[number].compared) > 1]
    return Lost(1 - kept.share, low, high, best, _remarks(best, several))


def _remarks(best: Row, several: Sequence[Row]) -> tuple[str, ...]:
    """Of the best radius among those with several runs."""
    own, *others = (row.recipe.settings["epsilon"] for row in (best, *(row for row in several if row is not best)))
    if not others:
        return ("the only radius with several runs",)
    if own > max(others):
        return ("the largest radius with several runs",)
    return ("the smallest radius with several runs",) if own < min(others) else ()


def is_clear(base: Sequence[float], lower: Sequence[float]) -> bool:
    """Whether the second sample's mean is lower by more than two standard errors; no two runs, no standard error.

    >>> is_clear([6.0, 6.2], [5.0, 5.2]), is_clear([6.0, 6.2], [5.9, 6.1]), is_clear([6.0], [5.0])
    (True, False, False)
    """
    test = welch(base, lower)
    return test is not None and test.t > CLEARLY
