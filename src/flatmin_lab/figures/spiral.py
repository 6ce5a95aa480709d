"""Figure 6: the boundary that a network draws between the two arms of the spiral."""

from collections.abc import Mapping

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from flatmin_lab.data.spiral import Spiral
from flatmin_lab.figures.drawn import INK, Drawn, look
from flatmin_lab.json_numbers import numbers

COLOURS = ["#2a6f97", "#e07a3f"]
REACH, POINTS = 1.2, 241


def boundaries(models: Mapping[str, tuple[nn.Module, Spiral]]) -> Drawn:
    """A panel a model, under its title: the share of the second class, its boundary, and the training points.

    The two classes differ in shape as well as colour; points with a wrong label are circled.
    """
    side = torch.linspace(-REACH, REACH, POINTS)
    shares = {title: _shares(model, side) for title, (model, _) in models.items()}
    with look():
        figure = Figure(figsize=(4.4 * len(models), 4.9), layout="constrained")
        panels = figure.subplots(1, len(models), squeeze=False)[0]
        for axes, (title, (_, data)) in zip(panels, models.items(), strict=True):
            _draw(axes, side, shares[title], data)
            axes.set_title(title)
        count = {len(data.y) for _, data in models.values()}
        wrong = sum(int(data.wrong.sum()) for _, data in models.values()) // len(models)
        figure.supxlabel(
            f"{' or '.join(map(str, count))} training points; circled: {wrong} with a wrong label", fontsize=9
        )
    points = {title: {"x": numbers(own.x), "y": own.y.tolist()} for title, (_, own) in models.items()}
    shown = {title: numbers(share) for title, share in shares.items()}
    numbers_of = {"side": numbers(side), "shares": shown, "points": points}
    return Drawn(figure, numbers_of, "The boundary between two spiral arms, as each network draws it")


@torch.no_grad()
def _shares(model: nn.Module, side: Tensor) -> Tensor:
    grid = torch.cartesian_prod(side, side)
    share: Tensor = model(grid).softmax(dim=1)[:, 1].view(len(side), len(side)).T
    return share


def _draw(axes: Axes, side: Tensor, share: Tensor, data: Spiral) -> None:
    axes.contourf(side, side, share, levels=20, cmap=mpl.colormaps["RdBu_r"], alpha=0.45, vmin=0, vmax=1)
    axes.contour(side, side, share, levels=[0.5], colors=INK, linewidths=1.4)
    for label, shape in enumerate("o^"):
        x = data.x[data.y == label]
        axes.scatter(x[:, 0], x[:, 1], color=COLOURS[label], marker=shape, s=15, ec="white", lw=0.4)
    astray = data.x[data.wrong]
    axes.scatter(astray[:, 0], astray[:, 1], facecolors="none", edgecolors=INK, s=44, linewidths=0.8)
    axes.set(xticks=[], yticks=[], aspect="equal", xlim=(-REACH, REACH), ylim=(-REACH, REACH))
