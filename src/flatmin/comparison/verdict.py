"""Does AMP help? An answer in one sentence, from the outcomes of a comparison.

AMP must beat the plain optimizer, and the plain optimizer trained for as long, by more than chance, in seeds and in
held-out examples, can explain. Several radii are several chances to be lucky, so with k radii the intervals that decide
have the level 1 − 0.05/k (Bonferroni). A gain below `worth`, by default a tenth of the plain optimizer's measure, is
not worth twice the time.

    yes            the interval of at least one radius shows that it is better than both
    no             the intervals of all radii rule out that any is better than both by a gain worth having
    cannot tell    otherwise; the sentence says what would decide it

Seeds that all give the same run, because the training sets its own, are no sample of seeds, and decide nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from flatmin.comparison.contenders import LONGER, PLAIN, Contender
from flatmin.comparison.intervals import Difference, paired_difference, student_quantile
from flatmin.comparison.outcome import Outcome

Answer = Literal["yes", "no", "cannot tell"]
LEVEL = 0.95
WORTH = 0.1  # of the plain optimizer's measure
PERCENT = ("error", "ece")  # measures that are shares
FEWEST_SEEDS = 3  # for an answer
SMALLER_RADII = "; smaller ones may work (radii=, --radii)"
MOST_SEEDS = 200  # more than anyone would run


@dataclass(frozen=True)
class Row:
    """A contender in one measure: its mean, and its differences from the plain runs with 95 % intervals."""

    contender: Contender
    values: Sequence[float]  # one per seed
    failed: int  # seeds with which it diverged
    from_plain: Difference | None  # None for the plain one itself
    from_longer: Difference | None

    @property
    def mean(self) -> float:
        return fmean(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float:
        """The standard deviation over the seeds; nan for fewer than two."""
        return stdev(self.values) if len(self.values) > 1 else math.nan


@dataclass(frozen=True)
class Verdict:
    """The answer in one sentence, and what it is based on."""

    answer: Answer
    sentence: str
    measure: str
    best: str  # the key of AMP's best contender
    rows: Mapping[str, Sequence[Row]]  # by measure
    seeds: int


def judge(
    contenders: Sequence[Contender],
    outcomes: Sequence[Outcome],
    *,
    measure: str | None = None,
    worth: float = WORTH,
    new_examples: bool = False,
    seconds_a_seed: float | None = None,
) -> Verdict:
    """The verdict on these outcomes, by this measure, or by the first.

    new_examples      whether every seed has its own held-out examples, so that more seeds mean more examples
    seconds_a_seed    how long all runs of a seed take; by default the sum of their seconds
    """
    check_worth(worth)
    table = _Table(contenders, outcomes)
    names = table.measures()
    if not names:
        sentence = (
            "Cannot tell: every run diverged; lower the learning rate first."
            if outcomes
            else "Cannot tell: no run has finished yet; let it continue."
        )
        return Verdict("cannot tell", sentence, measure or "", "", {}, 0)
    measure = names[0] if measure is None else measure
    check_measure(measure, names)
    rows = {name: table.rows(name) for name in names}
    answer, sentence, best = _Decision(table, measure, worth, new_examples, seconds_a_seed).decide()
    return Verdict(answer, sentence, measure, best, rows, table.seeds())


def check_worth(worth: float) -> None:
    if not 0 <= worth < 1:
        raise ValueError(
            f"worth must be a share of the plain optimizer's measure, at least 0 and below 1, got {worth!r}"
        )


def check_measure(measure: str, known: Sequence[str]) -> None:
    if measure not in known:
        raise ValueError(f"unknown measure {measure!r}; choose from {', '.join(known)}")


@dataclass(frozen=True)
class _Table:
    contenders: Sequence[Contender]
    outcomes: Sequence[Outcome]

    def measures(self) -> list[str]:
        """Those that every run has, in the order of the first run."""
        ended = [outcome for outcome in self.outcomes if outcome.failed is None]
        return [name for name in ended[0].measures if all(name in other.measures for other in ended)] if ended else []

    def of(self, key: str) -> dict[int, Outcome]:
        """Its outcomes by seed, without those that failed."""
        return {one.seed: one for one in self.outcomes if one.contender == key and one.failed is None}

    def failed(self, key: str) -> int:
        return sum(one.contender == key and one.failed is not None for one in self.outcomes)

    def seeds(self) -> int:
        """How many seeds every contender was trained with."""
        counts = [sum(one.contender == contender.key for one in self.outcomes) for contender in self.contenders]
        return min(counts, default=0)

    def seeds_are_alike(self) -> bool:
        """Did the seeds of every contender give one and the same run, in each training loss and each measure?"""
        several = [own for own in (list(self.of(one.key).values()) for one in self.contenders) if len(own) > 1]
        return bool(several) and all(
            own[0].curve
            and all("training loss" in point for point in own[0].curve)  # a share may well be the same by chance
            and all((one.measures, one.curve) == (own[0].measures, own[0].curve) for one in own)
            for own in several
        )

    def is_constant(self, measure: str) -> bool:
        """Is it the same in every run? Shares may well be, as where every network predicts the largest class."""
        values = [one.measures[measure] for one in self.outcomes if one.failed is None]
        return measure not in PERCENT and len(values) > 3 and len(set(values)) == 1

    def seconds_a_seed(self) -> float:
        found = [[one.seconds for one in self.outcomes if one.contender == other.key] for other in self.contenders]
        return sum(fmean(seconds) for seconds in found if seconds)

    def rows(self, measure: str) -> list[Row]:
        return [
            Row(
                contender,
                [outcome.measures[measure] for _, outcome in sorted(self.of(contender.key).items())],
                self.failed(contender.key),
                None if contender.key == PLAIN else self.difference(contender.key, PLAIN, measure),
                None if contender.key in (PLAIN, LONGER) else self.difference(contender.key, LONGER, measure),
            )
            for contender in self.contenders
        ]

    def difference(self, key: str, base: str, measure: str, *, level: float = LEVEL) -> Difference:
        """One contender minus another, over the seeds that both have."""
        one, other = self.of(key), self.of(base)
        seeds = sorted(one.keys() & other.keys())
        pairs = [(one[seed], other[seed]) for seed in seeds]
        values = [a.measures[measure] - b.measures[measure] for a, b in pairs]
        examples = [(a.per_example.get(measure, ()), b.per_example.get(measure, ())) for a, b in pairs]
        lengths = {len(row) for pair in examples for row in pair}
        if len(lengths) != 1 or 0 in lengths:
            return paired_difference(values, level=level)
        rows = [[x - y for x, y in zip(*pair, strict=True)] for pair in examples]
        return paired_difference(values, rows, level=level)

    def examples(self, measure: str) -> int:
        """How many held-out examples the measure is a mean over; 0 if that is not known."""
        return max((len(one.per_example.get(measure, ())) for one in self.outcomes), default=0)


@dataclass(frozen=True)
class _Decision:
    table: _Table
    measure: str
    worth: float
    new_examples: bool
    seconds_a_seed: float | None

    def decide(self) -> tuple[Answer, str, str]:
        """The answer, the sentence, and the key of AMP's best contender."""
        table = self.table
        trained = [one for one in table.contenders if not one.is_plain and table.of(one.key)]
        bases = [key for key in (PLAIN, LONGER) if table.of(key)]
        if not trained or not bases:
            return self._unfinished(bases)
        amps = [one for one in trained if not table.failed(one.key)]  # one that diverges with some seeds helps nobody
        if not amps:
            return "no", f"No: AMP diverged with some seeds at every radius{SMALLER_RADII}.", ""
        by_mean = sorted(amps, key=lambda amp: self._mean(amp.key))
        if table.seeds_are_alike():
            return "cannot tell", self._alike(by_mean[0]), by_mean[0].key
        if table.is_constant(self.measure):
            return "cannot tell", self._constant(), by_mean[0].key
        return self._weigh(by_mean, bases)

    def _weigh(self, by_mean: Sequence[Contender], bases: Sequence[str]) -> tuple[Answer, str, str]:
        """What the intervals of these contenders, the best first, say."""
        table = self.table
        level = 1 - (1 - LEVEL) / len([one for one in table.contenders if not one.is_plain])
        gaps = {
            amp.key: {base: table.difference(amp.key, base, self.measure, level=level) for base in bases}
            for amp in by_mean
        }
        seeds = min(gap.seeds for own in gaps.values() for gap in own.values())
        enough = seeds >= FEWEST_SEEDS
        better = [amp for amp in by_mean if enough and all(gap.high < 0 for gap in gaps[amp.key].values())]
        best = (better or by_mean)[0]
        if better:
            return "yes", self._yes(best, gaps[best.key]), best.key
        if any(self._is_zero(base) for base in bases):
            return "no", self._nothing_to_gain(best), best.key
        margin = self.worth * abs(self._mean(PLAIN if PLAIN in bases else LONGER))
        if enough and all(max(gap.low for gap in gaps[amp.key].values()) > -margin for amp in by_mean):
            return "no", self._no(best, gaps, margin), best.key
        return "cannot tell", self._cannot_tell(best, gaps[best.key], margin, level), best.key

    def _unfinished(self, bases: Sequence[str]) -> tuple[Answer, str, str]:
        """There is no pair to compare: something has not finished yet, or has diverged."""
        needed = [one for one in self.table.contenders if one.is_plain != bool(bases)]
        if not all(self.table.failed(one.key) for one in needed):
            missing = "AMP" if bases else "the plain optimizer"
            return "cannot tell", f"Cannot tell: no run of {missing} has finished yet; let it continue.", ""
        if not bases:
            return "cannot tell", "Cannot tell: every plain run diverged; lower the learning rate first.", ""
        return "no", f"No: AMP diverged at every radius{SMALLER_RADII}.", ""

    def _seeds_of_all(self) -> set[int]:
        """The seeds that all compared contenders have: means over other seeds would not be paired."""
        keys = [one.key for one in self.table.contenders if self.table.of(one.key) and not self.table.failed(one.key)]
        return set.intersection(*(set(self.table.of(key)) for key in keys)) if keys else set()

    def _mean(self, key: str) -> float:
        own, shared = self.table.of(key), self._seeds_of_all()
        return fmean(own[seed].measures[self.measure] for seed in (shared & own.keys() or own.keys()))

    def _is_zero(self, key: str) -> bool:
        """Is the measure 0 with every seed, and are there enough seeds?"""
        return self.measure in PERCENT and len(self.table.of(key)) >= FEWEST_SEEDS and self._mean(key) == 0

    def _nothing_to_gain(self, best: Contender) -> str:
        return (
            f"No: the {self.measure} on the held-out data is already 0 without AMP ({self._others(best)}; "
            f"{self.table.seeds()} seeds); another measure may tell them apart (measure=, --measure)."
        )

    def _alike(self, best: Contender) -> str:
        return (
            f"Cannot tell: all {self.table.seeds()} seeds gave the same runs, so they say nothing about other seeds "
            f"({self._others(best)}). Does make_training set a seed itself? Leave that out: each run has its own. "
            "(A training that draws no random numbers has only one run.)"
        )

    def _constant(self) -> str:
        return (
            f"Cannot tell: the {self.measure} is the same in every run, to the last digit. Does evaluate() measure the "
            "model that make_training returns, and is that one trained? If so, the measure is too coarse here: let a "
            "loss decide (measure=, --measure)."
        )

    def _show(self, value: float) -> str:
        return show(self.measure, value)

    def _others(self, best: Contender) -> str:
        """The means of AMP's best contender and of the plain ones."""
        parts = [f"{best.name.replace('AMP,', 'AMP with')}: {self._show(self._mean(best.key))}"]
        parts += [
            f"{one.name}: {self._show(self._mean(one.key))}"
            for one in self.table.contenders
            if one.is_plain and self.table.of(one.key)
        ]
        diverged = [one.name for one in self.table.contenders if self.table.failed(one.key)]
        return "; ".join([*parts, *(f"diverged with some seeds: {name}" for name in diverged)])

    def _yes(self, best: Contender, gaps: Mapping[str, Difference]) -> str:
        closest = max(gaps.values(), key=lambda gap: gap.high)
        low, high = (show_gap(self.measure, -end) for end in (closest.high, closest.low))
        low = low.removesuffix(" points")  # said once
        below = "the better of the two plain runs" if len(gaps) > 1 else "the plain run"
        return (
            f"Yes: AMP's {self.measure} is {low} to {high} below that of {below} "
            f"({self._others(best)}; {closest.seeds} seeds)."
        )

    def _no(self, best: Contender, every: Mapping[str, Mapping[str, Difference]], margin: float) -> str:
        gaps = every[best.key]
        base, gap = max(gaps.items(), key=lambda item: item[1].low)
        seeds = f"{gap.seeds} seeds"
        if PLAIN in gaps and gaps[PLAIN].high < 0:
            return (
                f"No, not for its time: AMP lowers the {self.measure}, but so does the plain optimizer trained for as "
                f"long as AMP takes ({self._others(best)}; {seeds})."
            )
        whom = "the plain optimizer trained for as long" if base == LONGER else "the plain optimizer"
        above = [key for key in gaps if all(own[key].low > 0 for own in every.values())]
        if above:
            than = f" than that of {whom}" if PLAIN not in above else ""
            return f"No: AMP's {self.measure} is higher{than} at every radius tried ({self._others(best)}; {seeds})."
        share = "a tenth" if self.worth == WORTH else f"{100 * self.worth:g} %"
        return (
            f"No: no radius tried brings AMP's {self.measure} below that of {whom} by {share} of the plain one's "
            f"({show_gap(self.measure, margin)}) or more ({self._others(best)}; {seeds})."
        )

    def _cannot_tell(self, best: Contender, gaps: Mapping[str, Difference], margin: float, level: float) -> str:
        gap = max(gaps.values(), key=lambda one: one.high)
        after = f"Cannot tell after {gap.seeds} seed{'' if gap.seeds == 1 else 's'}"
        if math.isfinite(gap.low) and not _are_same(gap.low, gap.high):
            plain, low, high = self._mean(best.key) - gap.mean, gap.low, gap.high
            if self.measure in PERCENT:
                low, high = max(low, -plain), min(high, 1 - plain)  # no share is below 0 or above 1
            whom = "the better plain run" if len(gaps) > 1 else "the plain run"
            after += f": AMP's {self.measure} may be anywhere from {self._range(low, high)} that of {whom}"
        return f"{after} ({self._others(best)}). {self._what_it_takes(gap, margin, level)}"

    def _range(self, low: float, high: float) -> str:
        """As in: 2.00 points below to 1.00 points above."""
        ends = [(show_gap(self.measure, abs(end)), "above" if end > 0 else "below") for end in (low, high)]
        if ends[0][1] != ends[1][1]:
            return " to ".join(f"{size} {side}" for size, side in ends)
        (near, side), (far, _) = ends if low > 0 else ends[::-1]
        return f"{near.removesuffix(' points')} to {far} {side}"

    def _what_it_takes(self, gap: Difference, margin: float, level: float) -> str:
        """How many seeds, or held-out examples, would decide a difference of this size."""
        if gap.seeds < FEWEST_SEEDS:
            return f"Fewer than 3 seeds say little about other seeds: at least 3 are needed.{self._time(3 - gap.seeds)}"
        target = -gap.mean if gap.mean < -margin / 2 else margin + gap.mean
        if gap.over_examples >= target and not self.new_examples:
            known = self.table.examples(self.measure)
            needed = known * (gap.over_examples / target) ** 2 * 1.5 if target > 0 else math.inf
            about = f"about {_rounded(needed)} would be enough" if needed < 1e7 else "far more would be needed"
            return f"More seeds will not decide it: {known} held-out examples are too few; {about}."
        deviation = gap.over_seeds / student_quantile(level, gap.seeds - 1) * math.sqrt(gap.seeds)
        for count in range(gap.seeds + 1, MOST_SEEDS):
            width = student_quantile(level, count - 1) * deviation / math.sqrt(count)
            over_examples = gap.over_examples * (math.sqrt(gap.seeds / count) if self.new_examples else 1)
            if math.hypot(width, over_examples) < target:
                return f"About {count} seeds would decide a difference of this size.{self._time(count - gap.seeds)}"
        return f"Not even {MOST_SEEDS} seeds would decide a difference this small."

    def _time(self, more: int) -> str:
        seconds = (self.seconds_a_seed or self.table.seconds_a_seed()) * more
        return "" if not seconds else f" That is {duration(seconds)} more at the pace so far."


def show(measure: str, value: float) -> str:
    """A measured number: shares in per cent, others to four digits.

    >>> show("error", 0.0512), show("nll", 0.20419), show("perplexity", 12.3456)
    ('5.12 %', '0.2042', '12.35')
    """
    if not math.isfinite(value):
        return "—"
    text = f"{100 * value:.2f} %" if measure in PERCENT else f"{value:.4g}"
    return text.replace("-", "−") if float(text.removesuffix(" %")) else text.removeprefix("-")  # no minus before 0


def show_gap(measure: str, value: float) -> str:
    """A difference between two measured numbers: shares in percentage points.

    >>> show_gap("error", -0.0512), show_gap("nll", 0.20419)
    ('−5.12 points', '0.2042')
    """
    return show(measure, value).replace(" %", " points")


def show_interval(measure: str, mean: float, low: float | None, high: float | None) -> str:
    """A difference and its interval, in points without the word; a single seed has none, nor have equal differences.

    >>> show_interval("error", -0.01, -0.015, -0.005), show_interval("error", 0.0, 0.0, 0.0)
    ('−1.00 (−1.50 to −0.50)', '0.00 (no spread)')
    """
    shown = show_gap(measure, mean).removesuffix(" points")
    if low is None or high is None or not math.isfinite(high - low):
        return shown
    ends = [show_gap(measure, end).removesuffix(" points") for end in (low, high)]
    return f"{shown} (no spread)" if _are_same(low, high) else f"{shown} ({' to '.join(ends)})"


def _are_same(low: float, high: float) -> bool:
    """But for rounding."""
    return math.isclose(low, high, rel_tol=1e-9, abs_tol=1e-12)


def _rounded(number: float) -> str:
    digits = max(len(str(round(number))) - 2, 0)
    return f"{round(number, -digits):,.0f}"


def duration(seconds: float) -> str:
    """How long, in words.

    >>> duration(1), duration(40), duration(150), duration(1500), duration(20000)
    ('1 second', '40 seconds', '2.5 minutes', '25 minutes', '5.6 hours')
    """
    if seconds < 90:
        return "1 second" if seconds < 1.5 else f"{seconds:.0f} seconds"
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds < 600 else f"{seconds / 60:.0f} minutes"
