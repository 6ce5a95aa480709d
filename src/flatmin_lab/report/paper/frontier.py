"""What share of AMP's gain over ERM a cheaper training mode keeps, and what it costs.

    kept = (ERM − mode) / (ERM − AMP)          of error, NLL or ECE, means over the seeds

1 is all of the gain, 0 none of it. The interval is a bootstrap over the seeds of all three; with three seeds of each it
is narrower than the truth. The cost is counted in passes over the training set, ERM's being 1, and measured where
`flatmin bench` has timed these kinds of steps on the machine that trained (bench/mode_cost.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from flatmin_lab.bench.mode_cost import CAPTURED, EAGER, StepTimes
from flatmin_lab.methods import mean_passes
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.report.loader import Run
from flatmin_lab.report.paper.tables import FilledTable, Row
from flatmin_lab.report.stats import LEVEL, MIN_RUNS, Welch, holm, welch

RESAMPLES = 10_000
CONFIDENCE = 0.95  # of the intervals
NEARLY_ALL = 0.95  # of the gain
FORMS = (CAPTURED, EAGER)  # in which the cost is measured


class Kept(NamedTuple):
    """The share of the gain, and its interval, which a single run does not have."""

    share: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Mode:
    """A row of the frontier: its runs, what it costs over ERM, and what it keeps in each column."""

    row: Row
    cost: float  # in passes
    measured: list[float | None]  # in milliseconds, captured and eager
    kept: list[Kept | None]


@dataclass(frozen=True)
class Frontier:
    """One data set's: its modes from cheap to costly, ERM and AMP among them."""

    data: str
    model: str
    columns: list[str]
    modes: list[Mode]
    timed_on: str | None = None  # the machine and the commit of the measured costs

    @property
    def runs(self) -> list[Run]:
        return [run for mode in self.modes for run in mode.row.runs]

    @property
    def cheapest(self) -> Mode | None:
        """The mode with the fewest passes that keeps nearly all of the gain in NLL and ECE; None if there is none.

        Its error must not be significantly higher than AMP's, by an uncorrected test.
        """
        for mode, (error, *_) in self._tested:
            is_as_low = error is not None and (error.t <= 0 or error.p >= LEVEL)
            if is_as_low and all(kept and kept.share >= NEARLY_ALL for kept in mode.kept[1:]):
                return mode
        return None

    @property
    def better(self) -> Mode | None:
        """The mode with the fewest passes that is significantly lower than AMP in every column.

        Of many modes some would be so by chance: p is corrected for them in each column.
        """
        tested = list(self._tested)
        columns = [[tests[place] for _, tests in tested] for place in range(len(self.columns))]
        corrected = [holm({at: test.p for at, test in enumerate(column) if test}) for column in columns]
        for at, (mode, tests) in enumerate(tested):
            if all(test and test.t < 0 and ps[at] < LEVEL for test, ps in zip(tests, corrected, strict=True)):
                return mode
        return None

    @property
    def _tested(self) -> Iterator[tuple[Mode, list[Welch | None]]]:
        """The modes with fewer passes than AMP in all steps, each compared with it in every column."""
        is_amp = [mode.row.recipe.method == "amp" and not mode.row.recipe.protocol.exceptions for mode in self.modes]
        (amp,) = compress(self.modes, is_amp)
        for mode in (mode for mode in self.modes if mode.cost < amp.cost):
            pairs = [(own.compared, its.compared) for own, its in zip(mode.row.cells, amp.row.cells, strict=True)]
            yield mode, [welch(*pair) if min(map(len, pair)) >= MIN_RUNS else None for pair in pairs]

    @property
    def is_measured(self) -> bool:
        """Has every mode a measured cost of captured steps?"""
        return all(mode.measured[0] is not None for mode in self.modes)


def cost_of(recipe: Recipe, base: Recipe) -> float:
    """Passes over the training set, as a multiple of the base's."""
    return mean_passes(recipe.method, recipe.settings) * recipe.epochs / base.epochs


def kept_share(erm: Sequence[float], amp: Sequence[float], mode: Sequence[float]) -> Kept | None:
    """None if a side has no run, or AMP has no gain.

    >>> kept_share([2.0, 2.0], [1.0, 1.0], [1.25, 1.25])
    Kept(share=0.75, low=0.75, high=0.75)
    """
    if not (erm and amp and mode) or np.mean(erm) <= np.mean(amp):
        return None
    share = float((np.mean(erm) - np.mean(mode)) / (np.mean(erm) - np.mean(amp)))
    if min(map(len, (erm, amp, mode))) < 2:
        return Kept(share)
    return Kept(share, *middle(resampled_shares(erm, amp, mode)))


def resampled_shares(
    erm: Sequence[float], amp: Sequence[float], mode: Sequence[float], *, stream: int = 0
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The shares of so many resamples of the seeds; nan where AMP gains nothing. Each stream draws others."""
    draw = np.random.default_rng(stream)
    base, best, own = (draw.choice(values, (RESAMPLES, len(values))).mean(axis=1) for values in (erm, amp, mode))
    shares = np.full(RESAMPLES, np.nan)
    np.divide(base - own, base - best, out=shares, where=base > best)
    return shares


def middle(shares: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float]:
    """The ends of the interval that holds most of them."""
    low, high = np.nanquantile(shares, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def frontiers(table: FilledTable, times: Sequence[StepTimes] = ()) -> list[Frontier]:
    """One for each data set with runs of ERM, AMP and a mode; `times` of steps give the measured costs."""
    found = []
    for place in dict.fromkeys(row.place for row in table.rows):
        rows = [row for row in table.rows if row.place == place and row.has_values and not row.at_best_epoch]
        plain = {row.recipe.method: row for row in rows if not row.recipe.protocol.exceptions}
        if plain.keys() >= {"erm", "amp"} and len(rows) > 2:
            erm, amp = plain["erm"], plain["amp"]
            timed = _times_for(rows, erm.recipe, times)
            modes = [_mode(row, erm, amp, timed) for row in rows]
            modes.sort(key=lambda mode: mode.cost)
            labels = [column.label for column in table.columns]
            is_timed = timed is not None and any(cost is not None for mode in modes for cost in mode.measured)
            found.append(Frontier(place.data, place.model, labels, modes, timed.source if timed and is_timed else None))
    return found


def _times_for(rows: Sequence[Row], recipe: Recipe, times: Sequence[StepTimes]) -> StepTimes | None:
    """The times of this network on the machine that trained all of the rows."""
    machines = {str(run.result.get("hardware")) for row in rows for run in row.runs}
    fitting = [one for one in times if len(machines) == 1 and one.fits(recipe, *machines)]
    return fitting[0] if fitting else None


def _mode(row: Row, erm: Row, amp: Row, times: StepTimes | None) -> Mode:
    measured = [None if times is None else times.cost(row.recipe, erm.recipe, form) for form in FORMS]
    return Mode(row, cost_of(row.recipe, erm.recipe), measured, _kept(erm, amp, row))


def _kept(erm: Row, amp: Row, row: Row) -> list[Kept | None]:
    cells = zip(erm.cells, amp.cells, row.cells, strict=True)
    found = [kept_share(*(cell.compared for cell in three)) for three in cells]
    return [Kept(kept.share) if kept and row in (erm, amp) else kept for kept in found]  # 0 and 1 by definition
