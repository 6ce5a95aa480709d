"""The figures of the paper's theory: 1 (risk and AMP risk), 3 (the Gaussian surface), 4 (the operational region),
9 (appendix C), and the penalty of Theorem 2.
"""

import math
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from flatmin import theory
from flatmin_lab.report.figures.style import INK, LINE_STYLES, DrawnFigure, line_style, styled
from flatmin_lab.system.json_data import numbers

ERM, AMP = LINE_STYLES["erm"][0], LINE_STYLES["amp"][0]
RATIOS = (0.25, 0.5, 1.0, 2.0)  # ε²/2σ₁²
DASHES = ("-", (0, (6, 2)), (0, (3, 1.5)), (0, (1, 1.5)))


def risk_and_amp_risk(*, epsilon: float = 0.5) -> DrawnFigure:
    """Figure 1: a risk with a sharp and a flat minimum, and its AMP risk, the maximum over a window of width 2ε."""
    theta = torch.linspace(-4, 4, 1601, dtype=torch.float64)
    risk = theory.two_minima(theta)
    worst = theory.max_pooled(risk, spacing=float(theta[1] - theta[0]), epsilon=epsilon)
    with styled():
        figure = Figure(figsize=(7.2, 3), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        left.plot(theta, risk, **line_style("erm"))
        right.plot(theta, risk, color=ERM, lw=1.2, ls=(0, (3, 1.5)), label="risk")
        right.plot(theta, worst, **line_style("amp"), label=f"AMP risk, ε = {epsilon:g}")
        for axes, curve in ((left, risk), (right, worst)):
            best = int(curve.argmin())
            axes.plot(theta[best], curve[best], "o", color=INK, ms=6)
            axes.set(xlabel="θ", xlim=(-4, 4))
        left.set(title="risk: the sharp minimum is lower", ylabel="loss")
        right.set_title("AMP risk: the flat one is")
        right.legend(loc="lower right")
    data = {"theta": numbers(theta), "risk": numbers(risk), "amp_risk": numbers(worst), "epsilon": epsilon}
    return DrawnFigure(
        figure, data, "A risk with a sharp and a flat minimum, and its AMP risk, whose lowest point is the flat one"
    )


def gaussian_surface(*, epsilon: float = 0.6, widths: tuple[float, float] = (0.6, 1.5)) -> DrawnFigure:
    """Figure 3: an inverted Gaussian surface, and the worst point of the ball around its minimum."""
    turn = torch.tensor(math.pi / 6, dtype=torch.float64)
    q = torch.tensor([[turn.cos(), -turn.sin()], [turn.sin(), turn.cos()]], dtype=torch.float64)
    kappa = q @ torch.diag(torch.tensor(widths, dtype=torch.float64) ** 2) @ q.T
    surface = theory.GaussianSurface(torch.zeros(2, dtype=torch.float64), kappa, 1.0, 1.0)
    side = torch.linspace(-2.5, 2.5, 121, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(side, side, indexing="xy"), dim=-1)
    heights = surface.value(grid)
    worst = surface.worst(torch.zeros(2, dtype=torch.float64), epsilon).tolist()
    with styled():
        figure = Figure(figsize=(7.2, 3.3), layout="constrained")
        left: Any = figure.add_subplot(1, 2, 1, projection="3d")
        left.plot_surface(
            grid[..., 0].numpy(), grid[..., 1].numpy(), heights.numpy(), cmap="cividis", rcount=40, ccount=40
        )
        left.set(xticks=[], yticks=[], zticks=[0, 0.5, 1], title="γ(θ)")
        right = figure.add_subplot(1, 2, 2)
        right.contourf(side, side, heights, levels=8, cmap="cividis", alpha=0.45)
        right.contour(side, side, heights, levels=8, colors=INK, linewidths=0.6)
        right.add_patch(Circle((0, 0), epsilon, fill=False, ec=INK, lw=1.4, ls=(0, (4, 2))))
        right.annotate(
            "", xy=(worst[0], worst[1]), xytext=(0, 0), arrowprops={"arrowstyle": "->", "color": AMP, "lw": 2}
        )
        right.plot(0, 0, "o", color=ERM, ms=6)
        right.plot(*worst, "s", color=AMP, ms=6)
        low, high = surface.minimum(), surface.amp_minimum(epsilon)
        right.set_title(f"min γ {low:.2f} (●), min γ_AMP {high:.2f} (■)")
        right.set(xlabel="θ₁", ylabel="θ₂", aspect="equal")
    data = {
        "theta": numbers(side),
        "gamma": numbers(heights),
        "kappa": numbers(kappa),
        "epsilon": epsilon,
        "worst": numbers(worst),
        "minimum": low,
        "amp_minimum": high,
    }
    return DrawnFigure(
        figure, data, "An inverted Gaussian surface; the worst point of the ball lies in its narrowest direction"
    )


def operational_region(*, ratio: float = 1.0) -> DrawnFigure:
    """Figure 4: the depths β and widths r of a second minimum for which AMP takes it and ERM does not."""
    beta = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    least = {value: theory.operational_boundary(beta, ratio=value) for value in (ratio, *RATIOS)}
    top = 8.0
    with styled():
        figure = Figure(figsize=(7.2, 3.1), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        edge = least[ratio].clamp(max=2 * top)
        left.fill_between(beta, edge, top, where=(edge < top).tolist(), color=AMP, alpha=0.3, hatch="//", lw=0)
        left.plot(beta, edge, **line_style("amp"))
        left.axvline(math.exp(-ratio), color=INK, lw=0.9, ls=(0, (2, 2)))
        left.annotate(
            "β = exp(−ε²/2σ₁²)",
            (math.exp(-ratio), 0.985 * top),
            (-4, 0),
            textcoords="offset points",
            rotation=90,
            va="top",
            ha="right",
            fontsize=9,
        )
        left.set(
            xlabel="β: depth of the second minimum",
            ylabel="r: its width",
            title=f"AMP takes the second, ε²/2σ₁² = {ratio:g}",
        )
        for value, dash in zip(RATIOS, DASHES, strict=True):
            right.plot(beta, least[value].clamp(max=2 * top), color=AMP, ls=dash, lw=1.8, label=f"{value:g}")
        right.set(xlabel="β", title="its edge for several ε²/2σ₁²")
        right.legend(loc="center left", bbox_to_anchor=(1, 0.5), title="ε²/2σ₁²")
        for axes in (left, right):
            axes.set(xlim=(0, 1), ylim=(1, top))
    data = {"beta": numbers(beta), "least_r": {f"{key:g}": numbers(value) for key, value in least.items()}}
    return DrawnFigure(
        figure, data, "The depths and widths of a second minimum for which AMP takes it and ERM does not"
    )


def kinked_losses(*, epsilon: float = 0.5) -> DrawnFigure:
    """Figure 9: appendix C's example, where AMP's minimum is ε/3 and that of adversarial training 0."""
    theta = torch.linspace(-1, 1, 1201, dtype=torch.float64)
    curves = {
        "ERM": theory.kinked(theta),
        "AMP": theory.kinked_amp_loss(theta, epsilon=epsilon),
        "adversarial": theory.kinked_adversarial_loss(theta, epsilon=epsilon),
    }
    best = theory.kinked_amp_minimiser(epsilon=epsilon)
    with styled():
        figure = Figure(figsize=(4.6, 3.2), layout="constrained")
        axes = figure.subplots()
        for name, curve in curves.items():
            axes.plot(theta, curve, **line_style(name.lower()), label=name)
        axes.plot(0, 0, "o", color=ERM, ms=6)
        axes.plot(best, 4 * epsilon / 3, "s", color=AMP, ms=6)
        axes.annotate("ε/3", (best, 4 * epsilon / 3), (0, -14), textcoords="offset points", ha="center")
        axes.set_xticks([-1, -0.5, 0, 0.5, 1])
        axes.set(xlabel="θ", ylabel="loss", title=f"One example, x = 1; ε = {epsilon:g}")
        axes.legend(loc="upper right")
    data = {"theta": numbers(theta), **{name: numbers(curve) for name, curve in curves.items()}, "epsilon": epsilon}
    return DrawnFigure(figure, data, "The losses of appendix C: AMP's lowest point is ε/3, that of the others 0")


def gradient_penalty(*, epsilon: float = 0.5, inner_lr: float = 1.0) -> DrawnFigure:
    """Theorem 2's penalty on the gradient's norm: the true one, a Huber function, and the printed one."""
    norm = torch.linspace(0, 2 * epsilon / inner_lr, 401, dtype=torch.float64)
    true, printed = (
        theory.gradient_norm_penalty(norm, epsilon=epsilon, inner_lr=inner_lr, as_printed=as_printed)
        for as_printed in (False, True)
    )
    with styled():
        figure = Figure(figsize=(4.6, 3), layout="constrained")
        axes = figure.subplots()
        axes.plot(norm, true, **line_style("amp"), label="true: a Huber function")
        axes.plot(norm, printed, color=ERM, lw=1.6, ls=(0, (5, 2)), label="as printed")
        axes.axvline(epsilon / inner_lr, color=INK, lw=0.9, ls=(0, (2, 2)))
        axes.set(xlabel="‖∇J‖", ylabel="Ω", title=f"Theorem 2's penalty, ε = {epsilon:g}, ζ = {inner_lr:g}")
        axes.legend(loc="upper left")
    data = {"gradient_norm": numbers(norm), "true": numbers(true), "as_printed": numbers(printed)}
    return DrawnFigure(figure, data, "The penalty on the gradient's norm that a step of AMP amounts to")
