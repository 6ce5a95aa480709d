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
    "legend.frameon": False,
}


def curves(panels: Mapping[str, Mapping[str, Sequence[float]]], *, names: Mapping[str, str], label: str) -> str:
    """A panel a measure, a line a method, an epoch a point."""
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(9.2, 3.7), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for panel, (title, lines) in zip(axes, panels.items(), strict=True):
            for method, values in sorted(lines.items(), key=lambda line: line[0] in BOLD):
                colour, dash = STYLES[method]
                wide = 2.4 if method in BOLD else 1.3
                epochs = range(1, len(values) + 1)
                panel.plot(epochs, values, color=colour, ls=dash, lw=wide, label=names[method])
            panel.set_title(title, fontsize=11, loc="left")
            panel.set_xlabel("epoch")
            panel.set_ylim(bottom=0)
        handles = {line.get_label(): line for line in axes[0].get_lines()}
        order = [names[method] for method in STYLES if names[method] in handles]
        figure.legend([handles[name] for name in order], order, loc="outside lower center", ncols=4, fontsize=9.5)
        return svg(figure, label)


def reliability_diagrams(bins: Mapping[str, Mapping[str, Sequence[float]]], *, names: Mapping[str, str]) -> str:
    """Small multiples: accuracy over confidence, a bar a bin; on the diagonal, confidence is honest."""
    with mpl.rc_context(LOOK):
        rows = -(-len(bins) // 4)
        figure = Figure(figsize=(9.2, 2.5 * rows + 0.2), layout="constrained")
        axes = figure.subplots(rows, 4, squeeze=False, sharex=True, sharey=True).flatten()
        for panel, (method, parts) in zip(axes, bins.items(), strict=False):
            _diagram(panel, parts, STYLES[method][0])
            panel.set_title(names[method], fontsize=10.5, loc="left")
        for panel in axes[len(bins) :]:
            panel.set_visible(False)
        figure.supxlabel("confidence", fontsize=10)
        figure.supylabel("share that is right", fontsize=10)
        return svg(figure, "Reliability diagrams: the share of right answers over confidence, for each method")


def _diagram(axes: Axes, parts: Mapping[str, Sequence[float]], colour: str) -> None:
    count = len(parts["number"])
    total = max(sum(parts["number"]), 1)
    middles = [(i + 0.5) / count for i in range(count)]
    # a bin with few answers is drawn pale: its height says little
    for middle, number, accuracy in zip(middles, parts["number"], parts["accuracy"], strict=True):
        if number:
            strength = min(1.0, 0.25 + 5 * number / total)
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
