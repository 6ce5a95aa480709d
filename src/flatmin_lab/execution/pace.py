"""What training takes, as measured while runs train, and when runs that take turns will have ended.

    pace.add(Timed(kind, 4, amount=2400.0, seconds=3.6))                       1.5 ms a pass, with four runs at once
    ends_in_time(late, beside, pace.costs(kind).most, seconds=900.0)

Work is counted in passes over a batch: a step of ERM is one pass, a step that perturbs 1 + N. Runs that take turns are
in step with each other, so a run waits for the passes of all of them, and its time depends on what trains beside it.
Runs of one kind share data, network and batch size, so that a pass takes the same time in all of them.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flatmin_lab import methods
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.runs.events import Timed

KIND = (  # fields of the recipe that change the time of a pass
    *("data", "model", "model_settings", "size", "augment", "label_noise", "validation", "batch_size"),
    *("optimizer", "ema", "precision", "channels_last", "compile", "deterministic"),
)
RESERVE = 1.05  # the factor of the estimated time that must be left: runs of one kind differ by a few per cent


def kind_of(recipe: Recipe) -> str:
    return json.dumps([getattr(recipe, name) for name in KIND])


class Stretch(NamedTuple):
    """Steps of a run that take the same number of passes, or do so in the mean."""

    steps: int
    passes: float


Work = Sequence[Stretch]  # what is left of a run, in its order


def work_of(recipe: Recipe, step: int, steps: int) -> list[Stretch]:
    """What is left of a run of so many steps after the first `step`: AMP may start late, and skip steps.

    >>> work_of(Recipe(data="digits", model="convnet", method="amp", settings={"start": 0.75}), 40, 100)
    [Stretch(steps=35, passes=1.0), Stretch(steps=25, passes=2.0)]
    """
    passes, start, every = methods.passes_per_step(recipe.method, recipe.settings), 0, 1
    if recipe.method == "amp":
        schedule = methods.build("amp", **recipe.settings).schedule
        start, every = schedule.first_step(steps), schedule.every
    start = max(start, step)
    found = [Stretch(start - step, 1.0), Stretch(steps - start, 1 + (passes - 1) / every)]
    return [stretch for stretch in found if stretch.steps > 0]


def passes_of(work: Work) -> float:
    return sum(stretch.steps * stretch.passes for stretch in work)


class Costs(NamedTuple):
    """Seconds of a pass with so many runs at once, and of the start and the end of a run, when the others wait."""

    per_pass: Callable[[int], float]  # with its share of the evaluation after each epoch
    start: float = 0.0
    end: float = 0.0


class Bounds(NamedTuple):
    """The least and the most that runs cost."""

    least: Costs
    most: Costs


def seconds_to_end(runs: Sequence[Work], costs: Costs) -> list[float]:
    """When each of these runs will have ended, if from now on each takes a step in turn.

    >>> seconds_to_end([[Stretch(10, 1.0)], [Stretch(20, 2.0)]], Costs(lambda together: 1.0))
    [30.0, 50.0]
    """
    left = [list(work) for work in runs]
    active, ends, now = set(range(len(runs))), [0.0] * len(runs), 0.0
    while active:
        for number in [number for number in active if not left[number]]:
            active.remove(number)
            now += costs.end
            ends[number] = now
        if active:
            rounds = min(left[number][0].steps for number in active)
            passes = sum(left[number][0].passes for number in active)
            now += rounds * passes * costs.per_pass(len(active))
        for number in active:
            stretch = left[number].pop(0)
            if stretch.steps > rounds:
                left[number].insert(0, stretch._replace(steps=stretch.steps - rounds))
    return ends


def ends_in_time(new: Work, beside: Sequence[Work], costs: Costs, seconds: float) -> bool:
    """Would a new run end within so many seconds, and those that it trains beside as well?"""
    return RESERVE * (costs.start + max(seconds_to_end([*beside, new], costs))) <= seconds


def started_in_time(needed: Sequence[float], workers: int, seconds: float) -> list[bool]:
    """Of runs that need so many seconds, each alone on one of the workers, in their order: which would be started?

    >>> started_in_time([50.0, 70.0, 40.0], 1, 100.0)
    [True, False, True]
    """
    free, found = [0.0] * workers, []
    for own in needed:
        first = min(range(workers), key=free.__getitem__)
        found.append(free[first] + RESERVE * own <= seconds)
        free[first] += own if found[-1] else 0.0
    return found


@dataclass
class Pace:
    """What has been measured so far: amounts and seconds, by the kind of run and the part of it."""

    sums: dict[tuple[str, Any, bool], tuple[float, float]] = field(default_factory=dict)

    def add(self, timed: Timed) -> None:
        key = (timed.kind, timed.part, timed.whole)
        amount, seconds = self.sums.get(key, (0.0, 0.0))
        self.sums[key] = amount + timed.amount, seconds + timed.seconds

    def knows(self, kind: str) -> bool:
        """Have whole epochs of that kind been measured? Steps alone say only that a run takes no less."""
        return any(own == kind and isinstance(part, int) and whole for own, part, whole in self.sums)

    def costs(self, kind: str) -> Bounds | None:
        """None until passes of that kind have been measured."""
        means = self._means(kind, whole=True)
        start, end = means.pop("start", 0.0), means.pop("end", 0.0)
        means = means or self._means(kind, whole=False)
        if not means:
            return None
        return Bounds(
            Costs(lambda together: _bound(means, together, max), 0.0, end),
            Costs(lambda together: _bound(means, together, min), start, end),
        )

    def _means(self, kind: str, *, whole: bool) -> dict[Any, float]:
        known = self.sums.items()
        return {part: seconds / amount for (own, part, how), (amount, seconds) in known if (own, how) == (kind, whole)}


def _bound(measured: Mapping[int, float], together: int, tightest: Callable[[Iterable[float]], float]) -> float:
    """Seconds of a pass with so many runs at once; if that was not measured, a lower bound (max) or an upper one (min).

    With more runs at once a pass takes no longer, and a round, a step of each, no less: c(n) falls, and n·c(n) rises.
    """
    if together in measured:
        return measured[together]
    clip = min if tightest is max else max
    return tightest(seconds * clip(count / together, 1.0) for count, seconds in measured.items())
