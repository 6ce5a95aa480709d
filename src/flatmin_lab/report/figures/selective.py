"""Figures of what confidence is worth: the error over the share that is answered, and data from outside noticed."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from flatmin_lab.report.figures.style import BOLD, INK, DrawnFigure, line_style, styled, with_count, wrapped

TITLE_WIDTH = 44  # characters, over the axes


class RiskCurve(NamedTuple):
    """Shares, not per cent: of the answers that are given, and of these the wrong ones."""

    coverage: Sequence[float]
    risk: Sequence[float]


def risk_over_coverage(curves: Mapping[str, RiskCurve], *, count: Mapping[str, int] | None = None) -> DrawnFigure:
    """A line per method; the lower, the better confidence tells which answers are wrong."""
    with styled():
        figure = Figure(figsize=(3.8, 2.9), layout="constrained")
        axes = figure.subplots()
        for method, curve in sorted(curves.items(), key=lambda item: item[0] in BOLD):
            coverage, risk = ([100 * share for share in shares] for shares in curve)
            axes.plot(coverage, risk, **line_style(method))
        axes.set_title(with_count("error over coverage", count))
        axes.set_xlabel("answered, the most confident first, %")
        axes.set_ylabel("wrong among them, %")
        axes.set_xlim(0, 100)
        axes.set_ylim(bottom=0)
    data = {method: {"coverage": list(curve.coverage), "risk": list(curve.risk)} for method, curve in curves.items()}
    return DrawnFigure(
        figure, data, "The error among the most confident answers, over their share; a line for each method"
    )


def roc(outside: str, curves: Mapping[str, Sequence[float]], *, count: Mapping[str, int] | None = None) -> DrawnFigure:
    """A line per method: the TPR over equal steps of the FPR, from 0 to 1; the dashed diagonal is chance."""
    with styled():
        figure = Figure(figsize=(3.8, 3.1), layout="constrained")
        axes = figure.subplots()
        axes.plot([0, 100], [0, 100], color=INK, lw=0.7, ls=(0, (4, 3)))
        for method, shares in sorted(curves.items(), key=lambda item: item[0] in BOLD):
            rates = [100 * place / (len(shares) - 1) for place in range(len(shares))]
            axes.plot(rates, [100 * share for share in shares], **line_style(method))
        axes.set_title(wrapped(with_count(f"told apart from {outside}", count), TITLE_WIDTH))
        axes.set_xlabel("accepted from outside, %")
        axes.set_ylabel("accepted from inside, %")
        axes.set(xlim=(0, 100), ylim=(0, 101))
    words = f"The share of the inside examples that is accepted over that of {outside}; a line for each method"
    return DrawnFigure(figure, {method: list(shares) for method, shares in curves.items()}, words)
