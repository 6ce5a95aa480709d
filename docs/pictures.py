"""The drawn pictures of the pages, computed by the library: `python docs/pictures.py [folder]`.

    minima.png   a loss with a sharp and a flat minimum, and the worst loss within ε of each point (paper, figure 1)
    ball.png     Δ of AMP and of SAM at two points of a bowl, by flatmin.AMP itself
    packages.png the packages in their layers, as architecture.md says them

One panel each, with letters large enough for a phone. (spiral.png is examples/spiral.py's.)
"""

import re
import sys
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch
from torch import Tensor, nn

import flatmin
from flatmin import theory
from flatmin_lab.report.figures.style import INK, LINE_STYLES, line_style, styled

HERE = Path(__file__).parent
ERM, AMP, SAM = LINE_STYLES["erm"][0], LINE_STYLES["amp"][0], "#9a9a9a"
SIZE = (4.6, 3.2)  # inches; 10 points are then readable at the width of a phone


def minima(*, epsilon: float = 0.5) -> Figure:
    """The sharp minimum is the lower one, and its worst case the higher one."""
    theta = torch.linspace(-4, 4, 1601, dtype=torch.float64)
    risk = theory.two_minima(theta)
    worst = theory.max_pooled(risk, spacing=float(theta[1] - theta[0]), epsilon=epsilon)
    with styled():
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        axes.plot(theta, risk, **{**line_style("erm"), "label": "loss L(θ)", "zorder": 3})
        axes.plot(theta, worst, **{**line_style("amp"), "label": f"worst loss within ε = {epsilon:g}"})
        for curve, colour, text, place in (
            (risk, ERM, "lowest loss:\nsharp", (0, -24)),
            (worst, AMP, "lowest worst case:\nflat", (94, -12)),
        ):
            best = int(curve.argmin())
            at = (float(theta[best]), float(curve[best]))
            axes.plot(*at, "o", color=colour, ms=7)
            axes.annotate(text, at, place, textcoords="offset points", ha="center", va="center", color=colour)
        low = float(risk.min())
        axes.set(xlabel="θ", xlim=(-2.4, 3.6), yticks=[], ylim=(low - 0.45, float(worst.max()) + 0.75))
        axes.legend(loc="upper center", ncols=1)
    return figure


def bowl(theta: Tensor) -> Tensor:
    """J(θ) = (θ₁² + 3θ₂²)/2."""
    return (theta.square() @ torch.tensor([1.0, 3.0])) / 2


def delta(place: tuple[float, float], *, epsilon: float, inner_lr: float) -> tuple[float, float]:
    """Δ as AMP takes it, read inside the block where the weights are θ + Δ."""
    theta = nn.Parameter(torch.tensor(place))
    optimizer = flatmin.AMP(torch.optim.SGD([theta], lr=0.0), epsilon=epsilon, inner_lr=inner_lr)
    bowl(theta).backward()
    with optimizer.perturbed():
        moved = (theta.detach() - torch.tensor(place)).tolist()
        bowl(theta).backward()
    return moved[0], moved[1]


def ball(*, epsilon: float = 0.7, inner_lr: float = 0.6) -> Figure:
    """Far from the minimum ζ∇J leaves the ball, and both are at its edge; near it, AMP's Δ is shorter."""
    side = torch.linspace(-3.3, 2.1, 200)
    up = torch.linspace(-1.0, 1.9, 160)
    heights = bowl(torch.stack(torch.meshgrid(side, up, indexing="xy"), dim=-1))
    with styled():
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        axes.contour(side, up, heights, levels=8, colors=INK, linewidths=0.5, alpha=0.4)
        for place in ((-1.9, 0.55), (0.45, 0.15)):
            axes.add_patch(Circle(place, epsilon, fill=False, ec=INK, lw=1.2, ls=(0, (4, 2))))
            axes.plot(*place, "o", color=INK, ms=5)
            _arrow(axes, place, delta(place, epsilon=epsilon, inner_lr=1e6), SAM, 5.0)
            _arrow(axes, place, delta(place, epsilon=epsilon, inner_lr=inner_lr), AMP, 2.0)
        axes.plot(0, 0, "+", color=INK, ms=9, mew=1.5)
        axes.plot([], [], color=SAM, lw=5, label="SAM: always at the edge")
        axes.plot([], [], color=AMP, lw=2, label=f"AMP: ζ∇J, cut at the edge (ζ = {inner_lr:g})")
        axes.legend(loc="upper right", frameon=True, framealpha=1, edgecolor="none")
        axes.set(xticks=[], yticks=[], aspect="equal", xlabel="θ, its ball of radius ε, and the minimum (+)")
    return figure


def _arrow(axes: Axes, place: tuple[float, float], way: tuple[float, float], colour: str, width: float) -> None:
    end = (place[0] + way[0], place[1] + way[1])
    axes.annotate(
        "", end, place, arrowprops={"arrowstyle": "-|>", "color": colour, "lw": width, "shrinkA": 0, "shrinkB": 0}
    )


def layers(package: str) -> list[list[str]]:
    """Bottom up, those beside each other together: the package's line in architecture.md."""
    page = (HERE / "architecture.md").read_text(encoding="utf-8")
    found = re.search(rf"^ +{package}: +(.+(\n +→ .+)*)", page, re.MULTILINE)
    assert found is not None
    return [names.split(", ") for names in re.split(r"\s+→ ", found[1])]


def packages() -> Figure:
    """A row a layer: what is imported lies below."""
    with styled():
        figure = Figure(figsize=(SIZE[0], 4.6), layout="constrained")
        library, laboratory = figure.subplots(2, 1, height_ratios=[4, 12])
        for axes, package, colour in ((library, "flatmin", AMP), (laboratory, "flatmin_lab", ERM)):
            found = layers(package)
            for height, names in enumerate(found):
                wide = 1 / len(names)
                for place, name in enumerate(names):
                    at = (place * wide + 0.01, height + 0.08)
                    round_ = "round,pad=0,rounding_size=0.012"
                    box = FancyBboxPatch(at, wide - 0.02, 0.84, boxstyle=round_, mutation_aspect=len(found) * 1.1)
                    box.set(facecolor=colour, edgecolor="none", alpha=0.22)
                    axes.add_patch(box)
                    axes.text((place + 0.5) * wide, height + 0.5, name, ha="center", va="center", color=INK, fontsize=9)
            axes.set(xlim=(0, 1), ylim=(0, len(found)), xticks=[], yticks=[])
            axes.set_title(package, loc="left", fontsize=10)
            axes.spines[:].set_visible(False)
    return figure


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, figure in (("minima", minima()), ("ball", ball()), ("packages", packages())):
        figure.savefig(folder / f"{name}.png", dpi=150, bbox_inches="tight", metadata={"Software": None})


if __name__ == "__main__":
    main()
