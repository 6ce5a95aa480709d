"""Charts as SVG that belongs to the page: its text and axes take the page's own colour, in light and dark.

Drawn by matplotlib without its global state. Two lines stand out by width, and all differ in dash as well as colour, so
that they can be told apart in black and white; the colours are Okabe and Ito's, made for the colour-blind.
"""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK = "#010203"  # stands for the page's text colour
STYLES: dict[str, tuple[str, Any]] = {
    "erm": ("#d55e00", "-"),
    "amp": ("#0072b2", "-"),
    "label_smoothing": ("#009e73", (0, (6, 2))),
    "flooding": ("#56b4e9", (0, (1, 1.5))),
    "mixup": ("#cc79a7", (0, (6, 1.5, 1, 1.5))),
    "adversarial": ("#e69f00", (0, (3, 1.5))),
    "dropout": ("#8c7ae6", (0, (3, 1.5, 1, 1.5, 1, 1.5))),
    "rmp": ("#999999", (0, (2, 1))),
}
BOLD = ("erm", "amp")
LOOK: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "flatmin",  # the same data gives the same file
    "font.family": "sans-serif",
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
}


def curves(title: str, lines: Mapping[str, Sequence[float]]) -> str:
    """A line a method, a point an epoch; those in BOLD over the others."""
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(3.5, 2.7), layout="constrained")
        axes = figure.subplots()
        for method, values in sorted(lines.items(), key=lambda line: line[0] in BOLD):
            colour, dash = STYLES[method]
            width = 2.4 if method in BOLD else 1.3
            mark = "o" if len(values) < 3 else None
            axes.plot(range(1, len(values) + 1), values, marker=mark, color=colour, ls=dash, lw=width, ms=4)
        axes.set_title(title, fontsize=11, loc="left")
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_ylim(bottom=0)
        return svg(figure, f"{title} over the epochs, a line for each method")


def sample(method: str) -> str:
    """A piece of a method's line, for a legend."""
    colour, dash = STYLES[method]
    dashes = "" if dash == "-" else f' stroke-dasharray="{" ".join(str(2 * part) for part in dash[1])}"'
    width = 4 if method in BOLD else 2.5
    line = f'<line x1="1" y1="5" x2="35" y2="5" stroke="{colour}" stroke-width="{width}"{dashes}/>'
    return f'<svg class="sample" viewBox="0 0 36 10" aria-hidden="true">{line}</svg>'


def reliability_diagram(title: str, parts: Mapping[str, Sequence[float]], *, method: str) -> str:
    """Accuracy over confidence, a bar a bin; on the diagonal, confidence is honest."""
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(2.3, 2.3), layout="constrained")
        axes = figure.subplots()
        _diagram(axes, parts, STYLES[method][0])
        axes.set_title(title, fontsize=11, loc="left")
        axes.set_xlabel("confidence", fontsize=9.5)
        axes.set_ylabel("share right", fontsize=9.5)
        return svg(figure, f"Reliability of {title}: the share of right answers over confidence")


def _diagram(axes: Axes, parts: Mapping[str, Sequence[float]], colour: str) -> None:
    count = len(parts["number"])
    total = max(sum(parts["number"]), 1)
    middles = [(i + 0.5) / count for i in range(count)]
    # a bin with few answers is drawn pale: its height says little
    for middle, number, accuracy in zip(middles, parts["number"], parts["accuracy"], strict=True):
        if number:
            strength = min(1.0, 0.4 + 5 * number / total)
            axes.bar(middle, accuracy, width=0.92 / count, color=colour, alpha=strength)
    axes.plot([0, 1], [0, 1], color=INK, lw=0.8, ls=(0, (4, 3)))
    axes.set(xlim=(0, 1), ylim=(0, 1), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])


def svg(figure: Figure, label: str) -> str:
    """The drawing alone, scaled to the page's width, with words for those who cannot see it."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawn = buffer.getvalue()
    drawn = drawn[drawn.index("<svg") :].replace(INK, "currentColor")
    drawn = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{label}">', drawn, count=1
    )
    return re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
