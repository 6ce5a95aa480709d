"""A figure with its numbers, and the style of all figures: readable in black and white and by the colour-blind.

matplotlib is used without its global state. The colours are Okabe and Ito's, made for the colour-blind. Lines differ in
dash as well as colour, two stand out by width, bars differ in hatching. In a page, INK becomes the page's own text
colour, in light and dark.
"""

import hashlib
import io
import re
import textwrap
from collections.abc import Mapping
from contextlib import AbstractContextManager
from html import escape
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

INK = "#010203"  # replaced by the page's text colour
LINE_STYLES: dict[str, tuple[str, Any]] = {
    "erm": ("#d55e00", "-"),
    "amp": ("#0072b2", "-"),
    "label_smoothing": ("#009e73", (0, (6, 2))),
    "flooding": ("#56b4e9", (0, (1, 1.5))),
    "mixup": ("#cc79a7", (0, (6, 1.5, 1, 1.5))),
    "adversarial": ("#e69f00", (0, (3, 1.5))),
    "dropout": ("#8c7ae6", (0, (3, 1.5, 1, 1.5, 1, 1.5))),
    "rmp": ("#999999", (0, (2, 1))),
}
HATCHES = dict(zip(LINE_STYLES, ("", "", "//", "..", "xx", "\\\\", "++", "--"), strict=True))
BOLD = ("erm", "amp")
NAMES = {
    "erm": "ERM",
    "amp": "AMP",
    "label_smoothing": "label smoothing",
    "flooding": "flooding",
    "mixup": "MixUp",
    "adversarial": "adversarial",
    "dropout": "Dropout",
    "rmp": "RMP",
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a name may hold a $
    "svg.hashsalt": "flatmin",  # the same data give the same file
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
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "hatch.linewidth": 0.6,
    "hatch.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.labelcolor": INK,
}


class DrawnFigure(NamedTuple):
    """The figure, its numbers, and a description in words."""

    figure: Figure
    data: dict[str, Any]
    words: str


def styled() -> AbstractContextManager[None]:
    return mpl.rc_context(STYLE)


def line_style(method: str) -> dict[str, Any]:
    """The arguments that draw a method's line."""
    colour, dash = LINE_STYLES[method]
    return {"color": colour, "ls": dash, "lw": 2.4 if method in BOLD else 1.3}


def legend_sample(method: str) -> str:
    """A piece of a method's line as SVG, for a legend."""
    colour, dash = LINE_STYLES[method]
    dashes = "" if dash == "-" else f' stroke-dasharray="{" ".join(str(2 * part) for part in dash[1])}"'
    width = 4 if method in BOLD else 2.5
    line = f'<line x1="1" y1="5" x2="35" y2="5" stroke="{colour}" stroke-width="{width}"{dashes}/>'
    return f'<svg class="sample" viewBox="0 0 36 10" aria-hidden="true">{line}</svg>'


def svg(drawn: DrawnFigure) -> str:
    """The figure as SVG, scaled to the page's width, with its description for screen readers."""
    buffer = io.StringIO()
    with styled():
        drawn.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    words = escape(drawn.words)
    text = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>',
        lambda head: f'<svg viewBox="{head[1]}" role="img" aria-label="{words}">',
        text,
        count=1,
    )
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return _with_unique_ids(text)


def _with_unique_ids(text: str) -> str:
    """Make the ids in use unique to this figure and drop the others: a page has many figures."""
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    mark = hashlib.sha256(text.encode()).hexdigest()[:8]
    text = re.sub(r' id="([^"]*)"', lambda m: f' id="{mark}-{m[1]}"' if m[1] in used else "", text)
    return re.sub(r'(href="|url\()#', rf"\g<1>#{mark}-", text)


def shortened(name: str, most: int = 30) -> str:
    """A name short enough for a figure; it keeps the end, which says most in a path.

    >>> shortened("a/very/long/path/to/the/weights-of-a-model.pt")
    '…/to/the/weights-of-a-model.pt'
    """
    return name if len(name) <= most else f"…{name[1 - most :]}"


def wrapped(title: str, width: int) -> str:
    """A title in lines of at most that many characters: nothing of it is cut off."""
    lines = title.replace(" = ", "\u00a0=\u00a0").splitlines()  # a number stays with its name
    return "\n".join(part for line in lines for part in textwrap.wrap(line, width))


def with_count(title: str, counts: Mapping[str, int] | None) -> str:
    """A title with the number of runs of each method.

    >>> with_count("ECE", {"erm": 3, "amp": 5})
    'ECE (n = 3 to 5)'
    """
    if not counts:
        return title
    low, high = min(counts.values()), max(counts.values())
    return f"{title} (n = {low})" if low == high else f"{title} (n = {low} to {high})"
