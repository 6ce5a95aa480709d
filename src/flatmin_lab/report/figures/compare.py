"""Figures of `flatmin compare`: the differences from the plain runs with their intervals, and the curves."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from flatmin_lab.report.figures.style import INK, DrawnFigure, styled, wrapped

Dash = str | tuple[int, tuple[float, ...]]
PLAIN_STYLES: dict[str, tuple[str, Dash]] = {"plain": ("#d55e00", "-"), "plain-longer": ("#d55e00", (0, (4, 2)))}
FOUND_STYLE: tuple[str, Dash] = ("#009e73", (0, (6, 1.5, 1, 1.5)))
RADIUS_STYLES: tuple[tuple[str, Dash], ...] = (
    ("#56b4e9", "-"),
    ("#0072b2", "-"),
    ("#8c7ae6", (0, (3, 1.5))),
    ("#cc79a7", (0, (1, 1))),
    ("#e69f00", (0, (3, 1.5, 1, 1.5))),
)  # of AMP's radii in their order, from the first again if there are more
TITLE_WIDTH = 34  # characters
SHOWN_FROM = 0.5  # the share of a run after which its curve must fit into the figure


class Gap(NamedTuple):
    """A contender's difference from the plain run, and from the one with as many passes: mean, low, high."""

    name: str
    from_plain: tuple[float, float | None, float | None] | None
    from_longer: tuple[float, float | None, float | None] | None


class Curve(NamedTuple):
    """A contender's measure over the passes, a sequence of points for each seed."""

    key: str
    seeds: Sequence[Sequence[tuple[float, float]]]


def styles_of(keys: Sequence[str]) -> dict[str, tuple[str, Dash]]:
    """The colour and the dash of each contender."""
    radii = [key for key in keys if key not in PLAIN_STYLES and key != "amp-auto"]
    found = {key: RADIUS_STYLES[place % len(RADIUS_STYLES)] for place, key in enumerate(radii)}
    return {key: PLAIN_STYLES.get(key) or found.get(key) or FOUND_STYLE for key in keys}


def sample_of(style: tuple[str, Dash]) -> str:
    """A piece of a contender's line as SVG, for a legend."""
    colour, dash = style
    dashes = "" if isinstance(dash, str) else f' stroke-dasharray="{" ".join(str(2 * part) for part in dash[1])}"'
    line = f'<line x1="1" y1="5" x2="35" y2="5" stroke="{colour}" stroke-width="4"{dashes}/>'
    return f'<svg class="sample" viewBox="0 0 36 10" aria-hidden="true">{line}</svg>'


def forest(title: str, gaps: Sequence[Gap]) -> DrawnFigure:
    """A row per contender: dots are differences from the plain run, squares from the one with as many passes."""
    with styled():
        figure = Figure(figsize=(3.6, 0.9 + 0.36 * len(gaps)), layout="constrained")
        axes = figure.subplots()
        axes.axvline(0, color=INK, lw=0.8, ls=(0, (4, 3)))
        for row, gap in enumerate(gaps):
            for shift, mark, colour, found in (
                (-0.13, "o", "#0072b2", gap.from_plain),
                (0.13, "s", "#d55e00", gap.from_longer),
            ):
                if found is None:
                    continue
                mean, low, high = found
                if low is not None and high is not None:
                    axes.plot([low, high], [row + shift] * 2, color=colour, lw=1.6)
                axes.plot(mean, row + shift, marker=mark, ms=5.5, color=colour, ls="")
        axes.set_yticks(range(len(gaps)), [gap.name for gap in gaps])
        axes.set_ylim(len(gaps) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.locator_params(axis="x", nbins=4)
        if not any(part for gap in gaps for found in gap[1:] if found is not None for part in found):
            axes.set_xticks([0])  # no difference at all: any other tick would be of no scale
        axes.set_title(wrapped(title, TITLE_WIDTH))
    data = {gap.name: {"from plain": gap.from_plain, "from as many passes": gap.from_longer} for gap in gaps}
    return DrawnFigure(figure, {"gaps": data}, f"{title}: the difference from the plain run, with 95 % intervals")


def seed_curves(title: str, curves: Sequence[Curve]) -> DrawnFigure:
    """The mean over the seeds as a line, single seeds faint behind it."""
    styles = styles_of([curve.key for curve in curves])
    with styled():
        figure = Figure(figsize=(3.6, 2.7), layout="constrained")
        axes = figure.subplots()
        for curve in curves:
            colour, dash = styles[curve.key]
            for points in curve.seeds if len(curve.seeds) > 1 else ():
                axes.plot(*_lines(points), color=colour, lw=0.7, alpha=0.3)
            average = mean_curve(curve.seeds)
            mark = "o" if len(average) < 3 else None
            axes.plot(*_lines(average), color=colour, ls=dash, lw=2, marker=mark, ms=4)
        axes.set_title(wrapped(title, TITLE_WIDTH))
        axes.set_xlabel("passes over the training set")
        axes.set_ylim(bottom=min(0.0, _extreme(curves, min)), top=1.1 * _extreme(curves, max) or None)
    data = {curve.key: [list(points) for points in curve.seeds] for curve in curves}
    return DrawnFigure(figure, {"curves": data}, f"{title} over the passes, a line for each contender")


def mean_curve(seeds: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The mean at each place that all seeds have.

    >>> mean_curve([[(1, 3.0), (2, 2.0)], [(1, 1.0)]])
    [(1, 2.0)]
    """
    values = [dict(points) for points in seeds]
    places = [x for x in (values[0] if values else {}) if all(x in one for one in values)]
    return [(x, fmean(one[x] for one in values)) for x in places]


def _lines(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _extreme(curves: Sequence[Curve], choose: Any) -> float:
    """The lowest or highest value after the first part of the runs, whose heights would hide the rest."""
    late = [
        y
        for curve in curves
        for points in curve.seeds
        for x, y in points
        if x >= SHOWN_FROM * max(place for place, _ in points)
    ]
    return float(choose(late, default=0.0))


def legend(names: Mapping[str, str]) -> list[tuple[str, str]]:
    """A sample and a name for each contender."""
    styles = styles_of(list(names))
    return [(sample_of(styles[key]), name) for key, name in names.items()]
