"""The spectral density of the Hessian: few eigenvalues are far from 0, so heights are logarithmic."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from flatmin_lab.report.figures.style import BOLD, NAMES, DrawnFigure, line_style, styled

BELOW_ONE = 30.0  # the axis ends this factor below the height of one eigenvalue alone
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def spectrum(grid: Sequence[float], densities: Mapping[str, Sequence[float]], *, one_eigenvalue: float) -> DrawnFigure:
    """A line for each method, all smoothed alike; `one_eigenvalue` is the height of a bell of weight 1/n."""
    with styled():
        figure = Figure(figsize=(4.8, 3.2), layout="constrained")
        axes = figure.subplots()
        for method, values in sorted(densities.items(), key=lambda line: line[0] in BOLD):
            axes.plot(grid, values, **line_style(method), label=NAMES[method])
        axes.axvline(0, color="#999999", lw=0.7, ls=(0, (4, 3)), zorder=0)
        axes.set(xlabel="eigenvalue", ylabel="density", title="eigenvalues of the Hessian", xlim=(grid[0], grid[-1]))
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power_of_ten(value)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(one_eigenvalue / BELOW_ONE, 2 * max(max(values) for values in densities.values()))
        axes.legend(loc="upper right")
    data = {"grid": list(grid), "densities": {method: list(values) for method, values in densities.items()}}
    return DrawnFigure(figure, data, "The density of the Hessian's eigenvalues, a line for each method")


def _power_of_ten(value: float) -> str:
    """A tick's label, without the markup that figures here do not read.

    >>> _power_of_ten(0.001)
    '10⁻³'
    """
    return f"10{str(round(math.log10(value))).translate(SUPERSCRIPTS)}"
