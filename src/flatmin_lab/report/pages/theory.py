"""The page of `flatmin theory`: the paper's theorems, with sliders. Its script computes what `flatmin.theory` does."""

from flatmin import __version__
from flatmin_lab.report.html import render


def theory_page() -> str:
    """One HTML file that draws itself from its sliders: it needs no numbers and no network."""
    return render("theory.html.jinja", version=__version__)
