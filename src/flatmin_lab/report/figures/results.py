"""Figures that compare runs: training curves, bars of calibration and robustness, reliability, the sweep over ε."""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from flatmin_lab.report.figures.style import (
    BOLD,
    HATCHES,
    INK,
    LINE_STYLES,
    NAMES,
    DrawnFigure,
    line_style,
    styled,
    with_count,
    wrapped,
)

DIAGRAM_TITLE_WIDTH = 20  # characters, beside the axis
# where a mode's number may stand beside its mark, in points from it; the first place that is free is taken
NUMBER_PLACES = ((0, 9), (0, -9), (10, 0), (-10, 0), (9, 8), (-9, 8), (9, -8), (-9, -8), (0, 18), (0, -18))
SHORT_MINUTES = 2  # shorter training is shown in seconds
LATER_DASHES = ((0, (4, 2)), (0, (1, 1.5)))  # of a method's further modes
MODE_GAP = 0.025  # between modes of equal cost, which are drawn side by side around it


class FrontierPoint(NamedTuple):
    """A mode of training: its name, its method, its cost, and for each measure the share kept with its interval."""

    name: str
    method: str
    milliseconds: float | None  # over ERM's, captured, where all modes have been measured
    passes: float
    kept: Sequence[tuple[float, float | None, float | None] | None]

    @property
    def cost(self) -> float:
        return self.passes if self.milliseconds is None else self.milliseconds


Values = Mapping[str, Sequence[float]]  # method -> a number per run, or per epoch


class TimedPoint(NamedTuple):
    """Runs of one length: how long they took on average, and their errors in per cent."""

    method: str
    mode: str  # the method with its settings: a line
    epochs: int
    minutes: float
    errors: Sequence[float]


def curves(title: str, lines: Values, *, count: Mapping[str, int] | None = None) -> DrawnFigure:
    """A line per method, a point per epoch; the methods in BOLD are drawn over the others."""
    with styled():
        figure = Figure(figsize=(3.5, 2.7), layout="constrained")
        axes = figure.subplots()
        for method, values in sorted(lines.items(), key=lambda line: line[0] in BOLD):
            mark = "o" if len(values) < 3 else None
            axes.plot(range(1, len(values) + 1), values, marker=mark, ms=4, **line_style(method))
        axes.set_title(with_count(title, count))
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_ylim(bottom=0)
    data = {
        "epochs": max(map(len, lines.values())),
        "lines": {method: list(values) for method, values in lines.items()},
    }
    return DrawnFigure(figure, data, f"{title} over the epochs, a line for each method")


def bars(
    title: str,
    values: Values,
    *,
    paper: Mapping[str, float] | None = None,
    best_epoch: Mapping[str, float] | None = None,
) -> DrawnFigure:
    """Each method's mean and standard deviation; a diamond is the paper's value (figure 7: ECE).

    A filled diamond beside it is ours at the best test epoch, where that is what the paper's compares with.
    """
    theirs, ours = dict(paper or {}), dict(best_epoch or {})
    shown = {method: own for method, own in values.items() if own}
    with styled():
        figure = Figure(figsize=(3.8, 2.9), layout="constrained")
        axes = figure.subplots()
        for place, (method, own) in enumerate(shown.items()):
            spread = stdev(own) if len(own) > 1 else 0.0
            colour = LINE_STYLES[method][0]
            axes.bar(
                place,
                mean(own),
                yerr=spread or None,
                color=colour,
                alpha=0.75,
                hatch=HATCHES[method],
                ec=INK,
                lw=0.6,
                error_kw={"ecolor": INK, "capsize": 3, "lw": 1},
            )
            aside = 0.15 if method in ours else 0.0  # two diamonds may be of nearly the same height
            if method in theirs:
                axes.plot(place + aside, theirs[method], "D", color=INK, ms=5, mfc="none")
            if method in ours:
                axes.plot(place - aside, ours[method], "D", color=INK, ms=5)
        axes.set_xticks(range(len(shown)), [NAMES[method] for method in shown], rotation=30, ha="right", fontsize=9)
        axes.set_title(with_count(title, {method: len(own) for method, own in shown.items()}))
        axes.set(ylabel="%")
        axes.set_ylim(bottom=0, top=axes.get_ylim()[1] or 1.0)  # all may be 0
    data = {"values": {method: list(own) for method, own in shown.items()}, "paper": theirs, "best_epoch": ours}
    return DrawnFigure(figure, data, f"{title}: a bar for each method")


def epsilon_sweep(
    losses: Mapping[str, Mapping[float, Sequence[float]]], erm: Mapping[str, Sequence[float]]
) -> DrawnFigure:
    """Figure 8: the loss of models trained with AMP over ε, on training and on test data; ERM's as a level line."""
    with styled():
        figure = Figure(figsize=(3.6 * len(losses), 2.9), layout="constrained")
        panels = figure.subplots(1, len(losses), squeeze=False)[0]
        for axes, (split, sweep) in zip(panels, losses.items(), strict=True):
            radii = sorted(sweep)
            means = [mean(sweep[radius]) for radius in radii]
            spreads = [stdev(sweep[radius]) if len(sweep[radius]) > 1 else 0.0 for radius in radii]
            axes.errorbar(radii, means, yerr=spreads, marker="o", ms=4, capsize=3, label="AMP", **line_style("amp"))
            if erm.get(split):
                axes.axhline(mean(erm[split]), label="ERM", color=LINE_STYLES["erm"][0], ls=(0, (5, 2)), lw=1.8)
            counts = {f"{radius:g}": len(sweep[radius]) for radius in radii}
            axes.set(xlabel="ε", title=with_count(f"{split} loss", counts))
        panels[0].set_ylabel("loss")
        panels[-1].legend()
    data = {
        "amp": {split: {f"{radius:g}": list(own) for radius, own in sweep.items()} for split, sweep in losses.items()},
        "erm": {split: list(own) for split, own in erm.items()},
    }
    return DrawnFigure(figure, data, "The loss over the radius ε, on training and on test data")


def frontier(title: str, points: Sequence[FrontierPoint], measures: Sequence[str]) -> DrawnFigure:
    """The share of AMP's gain that is kept over the cost, a panel per measure; the numbers name the modes."""
    unit = "passes" if any(point.milliseconds is None for point in points) else "time"
    with styled():
        figure = Figure(figsize=(3.1 * len(measures), 3.6), layout="constrained")
        panels = figure.subplots(1, len(measures), squeeze=False, sharey=True)[0]
        marks: list[dict[int, tuple[float, float]]] = []
        for place, (axes, measure) in enumerate(zip(panels, measures, strict=True)):
            for level in (0, 100):
                axes.axhline(level, color=INK, lw=0.6, ls=(0, (4, 3)), alpha=0.6)
            drawn: dict[int, tuple[float, float]] = {}
            for number, point in enumerate(points, start=1):
                kept = point.kept[place]
                if kept is None:
                    continue
                alike = [n for n, other in enumerate(points, start=1) if other.cost == point.cost]
                x = point.cost + MODE_GAP * (alike.index(number) - (len(alike) - 1) / 2)
                share = 100 * kept[0]
                low, high = (None if value is None else 100 * value for value in kept[1:])
                colour = LINE_STYLES[point.method][0]
                if low is not None and high is not None:
                    axes.plot([x, x], [low, high], color=colour, lw=1.2, alpha=0.6)
                axes.plot(x, share, marker="o", ms=5, color=colour, ls="")
                drawn[number] = x, share
            axes.set(xlabel=f"{unit}, ERM = 1", title=measure)
            axes.margins(0.08, 0.08)
            marks.append(drawn)
        panels[0].set_ylabel("of AMP's gain kept, %")
        figure.draw_without_rendering()  # so that the panels have their sizes
        for axes, drawn in zip(panels, marks, strict=True):
            _number(axes, drawn)
    data = {"measures": list(measures), "modes": [point._asdict() for point in points]}
    return DrawnFigure(figure, data, f"{title}: the share of AMP's gain that each mode keeps, over its cost in {unit}")


def _number(axes: Axes, marks: Mapping[int, tuple[float, float]]) -> None:
    """Write each mark's number beside it, where it covers neither another mark nor another number."""
    points = 72 / axes.figure.dpi
    places = {number: tuple(points * part for part in axes.transData.transform(at)) for number, at in marks.items()}
    taken = [(x, y, 3.0, 3.0) for x, y in places.values()]  # middles, and half of width and height
    for number, (x, y) in places.items():
        size = 3.2 * len(str(number)), 4.5
        boxes = [(x + right, y + up, *size) for right, up in NUMBER_PLACES]
        free = next((box for box in boxes if not any(_overlap(box, other) for other in taken)), boxes[0])
        taken.append(free)
        offset = free[0] - x, free[1] - y
        how: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": 9}
        axes.annotate(str(number), marks[number], xytext=offset, **how)


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(abs(one[side] - other[side]) < one[2 + side] + other[2 + side] for side in (0, 1))


def over_time(title: str, points: Sequence[TimedPoint]) -> DrawnFigure:
    """The error over the time of training, a line per mode; means, with the lowest and the highest run."""
    unit, per_minute = ("seconds", 60) if max(point.minutes for point in points) < SHORT_MINUTES else ("minutes", 1)
    with styled():
        figure = Figure(figsize=(4.4, 3.1), layout="constrained")
        axes = figure.subplots()
        modes = {point.mode: point.method for point in sorted(points, key=lambda point: len(point.mode))}
        for mode, method in modes.items():
            alike = [name for name, own in modes.items() if own == method]
            dashes = (LINE_STYLES[method][1], *LATER_DASHES)[alike.index(mode) % (1 + len(LATER_DASHES))]
            _timed_line(axes, [point for point in points if point.mode == mode], dashes, per_minute)
        axes.set(xscale="log", xlabel=f"{unit} of training", ylabel="test error, %", title=title)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.margins(0.08, 0.12)
        axes.legend()
    data = {"points": [point._asdict() for point in points]}
    return DrawnFigure(figure, data, f"{title}: test error over the {unit} of training; the numbers are epochs")


def _timed_line(axes: Axes, points: Sequence[TimedPoint], dashes: Any, per_minute: int) -> None:
    """Its epochs stand above it for ERM, and below it for others."""
    method, mode, *_ = points[0]
    colour = LINE_STYLES[method][0]
    own = sorted((per_minute * point.minutes, mean(point.errors), point) for point in points)
    axes.plot([x for x, _, _ in own], [y for _, y, _ in own], marker="o", ms=4, c=colour, ls=dashes, label=mode)
    for x, y, point in own:
        axes.plot([x, x], [min(point.errors), max(point.errors)], color=colour, lw=1.2, alpha=0.6)
        above = method == "erm"
        place: dict[str, Any] = {"xytext": (0, 5 if above else -5), "va": "bottom" if above else "top"}
        axes.annotate(str(point.epochs), (x, y), textcoords="offset points", c=colour, fontsize=9, ha="center", **place)


def reliability_diagram(title: str, parts: Mapping[str, Sequence[float]], *, method: str) -> DrawnFigure:
    """Accuracy over confidence, a bar per bin; a calibrated model lies on the diagonal."""
    with styled():
        figure = Figure(figsize=(2.3, 2.3), layout="constrained")
        axes = figure.subplots()
        _diagram(axes, parts, LINE_STYLES[method][0])
        axes.set_title(wrapped(title, DIAGRAM_TITLE_WIDTH))
        axes.set_xlabel("confidence", fontsize=9.5)
        axes.set_ylabel("accuracy", fontsize=9.5)
    data = {name: list(values) for name, values in parts.items()}
    return DrawnFigure(figure, data, f"Reliability of {title}: accuracy over confidence")


def _diagram(axes: Axes, parts: Mapping[str, Sequence[float]], colour: str) -> None:
    count = len(parts["number"])
    total = max(sum(parts["number"]), 1)
    middles = [(i + 0.5) / count for i in range(count)]
    # a bin with few predictions is drawn faint: its height says little
    for middle, number, accuracy in zip(middles, parts["number"], parts["accuracy"], strict=True):
        if number:
            strength = min(1.0, 0.4 + 5 * number / total)
            axes.bar(middle, accuracy, width=0.92 / count, color=colour, alpha=strength)
    axes.plot([0, 1], [0, 1], color=INK, lw=0.8, ls=(0, (4, 3)))
    axes.set(xlim=(0, 1), ylim=(0, 1), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
