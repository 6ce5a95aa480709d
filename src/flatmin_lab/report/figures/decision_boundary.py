"""Figure 6: a network's decision boundary between the two arms of the spiral."""

from collections.abc import Mapping
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from flatmin_lab.data.sources.spiral import Spiral
from flatmin_lab.evaluation.post_training import PLANE_REACH, class_probabilities
from flatmin_lab.report.figures.style import INK, DrawnFigure, styled
from flatmin_lab.system.json_data import numbers

COLOURS = ["#2a6f97", "#e07a3f"]


class Panel(NamedTuple):
    """A network's probabilities on a grid, and its training points."""

    side: Tensor  # coordinates along a side of the grid
    shares: Tensor  # probabilities of the second class, a row per y
    data: Spiral


def boundaries(models: Mapping[str, tuple[nn.Module, Spiral]]) -> DrawnFigure:
    """A panel per model, under its title."""
    return draw_boundaries({title: Panel(*class_probabilities(model), data) for title, (model, data) in models.items()})


def draw_boundaries(panels: Mapping[str, Panel]) -> DrawnFigure:
    """The probability of the second class, the boundary, and the training points.

    The two classes differ in shape as well as colour; points with a wrong label are circled.
    """
    with styled():
        figure = Figure(figsize=(4.4 * len(panels), 4.9), layout="constrained")
        places = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (title, panel) in zip(places, panels.items(), strict=True):
            _draw(axes, *panel)
            axes.set_title(title)
        count = {len(panel.data.y) for panel in panels.values()}
        wrong = sum(int(panel.data.wrong.sum()) for panel in panels.values()) // len(panels)
        figure.supxlabel(
            f"{' or '.join(map(str, count))} training points; circled: {wrong} with a wrong label", fontsize=9
        )
    points = {title: {"x": numbers(own.data.x), "y": own.data.y.tolist()} for title, own in panels.items()}
    shown = {title: numbers(panel.shares) for title, panel in panels.items()}
    side = numbers(next(iter(panels.values())).side)
    return DrawnFigure(
        figure,
        {"side": side, "shares": shown, "points": points},
        "The boundary between two spiral arms, as each network draws it",
    )


def _draw(axes: Axes, side: Tensor, share: Tensor, data: Spiral) -> None:
    axes.contourf(side, side, share, levels=20, cmap=mpl.colormaps["RdBu_r"], alpha=0.45, vmin=0, vmax=1)
    axes.contour(side, side, share, levels=[0.5], colors=INK, linewidths=1.4)
    for label, shape in enumerate("o^"):
        x = data.x[data.y == label]
        axes.scatter(x[:, 0], x[:, 1], color=COLOURS[label], marker=shape, s=15, ec="white", lw=0.4)
    astray = data.x[data.wrong]
    axes.scatter(astray[:, 0], astray[:, 1], facecolors="none", edgecolors=INK, s=44, linewidths=0.8)
    axes.set(xticks=[], yticks=[], aspect="equal", xlim=(-PLANE_REACH, PLANE_REACH), ylim=(-PLANE_REACH, PLANE_REACH))
