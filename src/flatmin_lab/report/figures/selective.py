"""The figure of selective prediction: the error among the most confident answers over their share."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from flatmin_lab.report.figures.style import BOLD, DrawnFigure, line_style, styled, with_count


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
