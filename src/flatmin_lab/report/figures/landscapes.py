"""The loss around trained weights: along a line (figure 2), over a plane, and on the line between two models."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from flatmin_lab.report.figures.style import INK, LINE_STYLES, NAMES, DrawnFigure, line_style, shortened, styled

Lines = Mapping[str, Mapping[str, Sequence[float | None]]]  # split -> model -> losses


def lines(
    alphas: Sequence[float],
    losses: Lines,
    *,
    methods: Mapping[str, str | None] | None = None,
    count: str = "",
    top: float | None = None,
) -> DrawnFigure:
    """Figure 2: the loss along one direction, a line per model, a panel per split (training, test).

    A line has the style of its method: the model's name, or what `methods` gives for it. `count` is a caption such as
    "1,000 images".
    """
    with styled():
        figure = Figure(figsize=(3.6 * len(losses), 2.9), layout="constrained")
        panels = figure.subplots(1, len(losses), sharey=True, squeeze=False)[0]
        for axes, (split, models) in zip(panels, losses.items(), strict=True):
            for place, (name, values) in enumerate(models.items()):
                axes.plot(
                    alphas,
                    _floats(values),
                    **_model_line_style(name, place, methods),
                    label=shortened(NAMES.get(name, name)),
                )
            axes.set(xlabel="α", title=f"{split} loss at θ + α·δ", xlim=(alphas[0], alphas[-1]))
            axes.set_ylim(0, top or top_of([list(values) for values in models.values()]))
        panels[0].set_ylabel("loss")
        panels[-1].legend(loc="upper center")
        if count:
            figure.supxlabel(count, fontsize=9)
    data = {"alphas": list(alphas), "losses": {split: dict(models) for split, models in losses.items()}}
    return DrawnFigure(figure, data, "The loss along a random direction through the weights, a line for each method")


def contours(
    xs: Sequence[float],
    ys: Sequence[float],
    planes: Mapping[str, Any],
    *,
    levels: Sequence[float] | None = None,
) -> DrawnFigure:
    """Figure 10: lines of equal loss over a plane through the weights, a panel per plane, all at the same levels."""
    heights = {title: _floats(plane) for title, plane in planes.items()}
    levels = levels_of(planes.values()) if levels is None else levels
    with styled():
        figure = Figure(figsize=(3.1 * len(planes), 3.0), layout="constrained")
        panels = figure.subplots(1, len(planes), sharex=True, sharey=True, squeeze=False)[0]
        for axes, (title, plane) in zip(panels, heights.items(), strict=True):
            axes.contourf(xs, ys, plane, levels=levels, cmap="cividis", alpha=0.45, extend="both")
            drawn = axes.contour(xs, ys, plane, levels=levels, colors=INK, linewidths=0.7)
            axes.clabel(drawn, drawn.levels[1::2], fontsize=8, fmt="%.2g")
            axes.plot(0, 0, "+", color=LINE_STYLES["erm"][0], ms=9, mew=2)
            axes.set(
                title=shortened(title), xlabel="x", aspect="equal", xticks=[xs[0], 0, xs[-1]], yticks=[ys[0], 0, ys[-1]]
            )
        panels[0].set_ylabel("y")
    data = {"xs": list(xs), "ys": list(ys), "losses": dict(planes), "levels": list(levels)}
    return DrawnFigure(figure, data, f"Lines of equal loss around the weights: {', '.join(planes)}")


def surfaces(xs: Sequence[float], ys: Sequence[float], planes: Mapping[str, Any]) -> DrawnFigure:
    """Figure 11: the loss over a plane through the weights as a surface, a panel per plane, cut off at one height."""
    heights = {title: _floats(plane) for title, plane in planes.items()}
    top = max(top_of(list(plane)) for plane in heights.values())
    grid = np.meshgrid(np.asarray(xs), np.asarray(ys))
    with styled():
        figure = Figure(figsize=(3.3 * len(planes), 3.1), layout="constrained")
        for number, (title, plane) in enumerate(heights.items(), start=1):
            axes: Any = figure.add_subplot(1, len(planes), number, projection="3d")
            cut = np.where(np.isfinite(plane), np.minimum(plane, top), top)
            axes.plot_surface(*grid, cut, cmap="cividis", rcount=41, ccount=41, vmin=0, vmax=top, edgecolor="none")
            axes.set(title=shortened(title), zlim=(0, top), xticks=[xs[0], 0, xs[-1]], yticks=[ys[0], 0, ys[-1]])
            axes.tick_params(labelsize=7.5, pad=-2)
    data = {"xs": list(xs), "ys": list(ys), "losses": dict(planes), "cut_at": top}
    return DrawnFigure(figure, data, f"The loss around the weights as a surface: {', '.join(planes)}")


SPLIT_STYLES: tuple[dict[str, Any], ...] = (  # of the training set, and of the other one
    {"color": "#0072b2", "ls": "-", "lw": 2.2},
    {"color": "#d55e00", "ls": (0, (5, 2)), "lw": 2.2},
)


def between(
    measure: str, ts: Sequence[float], values: Mapping[str, Sequence[float | None]], *, ends: tuple[str, str]
) -> DrawnFigure:
    """The loss, or the error in per cent, at (1 − t)·A + t·B: a line per split, and a thin one between its two ends."""
    scale = 100.0 if measure.endswith("%") else 1.0
    heights = {split: scale * _floats(own) for split, own in values.items()}
    with styled():
        figure = Figure(figsize=(3.8, 3.0), layout="constrained")
        axes = figure.subplots()
        for (split, own), style in zip(heights.items(), SPLIT_STYLES, strict=False):
            axes.plot([0, 1], [own[0], own[-1]], color=style["color"], lw=0.8)
            axes.plot(ts, own, **style, label=split)
        axes.set(title=measure, xlim=(0, 1))
        axes.set_ylim(bottom=0)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
        axes.set_xlabel("t, from {} to {}".format(*(shortened(name, 22) for name in ends)), fontsize=9)
        axes.legend()
    data = {"ts": list(ts), "values": {split: list(own) for split, own in values.items()}, "ends": list(ends)}
    return DrawnFigure(figure, data, f"The {measure} on the line from {ends[0]} to {ends[1]}, a line for each split")


def _model_line_style(name: str, place: int, methods: Mapping[str, str | None] | None) -> dict[str, Any]:
    """The method's style; a second model of a method, or a model without one, gets the next free style."""
    if methods is None and name in LINE_STYLES:
        return line_style(name)
    known = [(methods or {}).get(other, other) for other in (methods or {name: name})]
    method = (methods or {}).get(name, name)
    taken = method is not None and known[:place].count(method) > 0
    if method in LINE_STYLES and not taken:
        return line_style(str(method))
    free = [style for style in LINE_STYLES if style not in known] or list(LINE_STYLES)
    return line_style(free[place % len(free)])


def _floats(values: Any) -> Any:
    """As an array; None stands for a value that is not finite and becomes nan."""
    return np.array(values, dtype=float)


def top_of(curves: Sequence[Sequence[float | None]]) -> float:
    """A height that shows the valley: 2.5 times the median, so that at least half of the points lie below it."""
    finite = np.array([value for curve in curves for value in curve if value is not None and np.isfinite(value)])
    return float(max(2.5 * np.median(finite), 1.2 * finite.min(), 1e-9)) if len(finite) else 1.0


def levels_of(planes: Iterable[Any]) -> list[float]:
    """Levels in equal ratios, from a little above the minimum to twice the median."""
    finite = np.concatenate([plane[np.isfinite(plane)] for plane in map(_floats, planes)])
    if not len(finite):
        return [0.5, 1.0]
    low, high = max(float(finite.min()), 1e-4), max(float(np.median(finite)) * 2, 2e-4)
    return sorted({float(f"{level:.2g}") for level in np.geomspace(1.2 * low, max(high, 3 * low), 9)})
