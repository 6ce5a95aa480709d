"""Every figure: something is drawn, its numbers can be saved, its axes are named, and it reads without colour."""

import json
import re
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from matplotlib.text import Text
from torch import nn

from flatmin_lab.data.sources.spiral import Spiral
from flatmin_lab.methods import METHODS
from flatmin_lab.report import figures
from flatmin_lab.report.figures.style import BOLD, HATCHES, LINE_STYLES, DrawnFigure, svg

AXIS = [-1.0, -0.5, 0.0, 0.5, 1.0]


def plane(steepness: float) -> list[list[float | None]]:
    return [[None if x == y == 1 else steepness * (x * x + 2 * y * y) + 0.1 for x in AXIS] for y in AXIS]


def lines() -> DrawnFigure:
    losses = {split: {"erm": [3 * a * a for a in AXIS], "amp": [a * a for a in AXIS]} for split in ("training", "test")}
    return figures.lines(AXIS, losses, count="1 run each, 1,000 images")


def boundaries() -> DrawnFigure:
    data = Spiral.draw(50, wrong=0.2, generator=torch.Generator().manual_seed(0))
    return figures.boundaries({"ERM": (nn.Linear(2, 2), data), "AMP": (nn.Linear(2, 2), data)})


def sweep() -> DrawnFigure:
    values = {0.01: [0.2, 0.3], 0.06: [0.1, 0.2], 0.5: [0.5, 0.4]}
    return figures.epsilon_sweep({"training": values, "test": values}, {"training": [0.3], "test": []})


BINS = {"number": [0.0, 3.0, 9.0], "accuracy": [0.0, 0.3, 0.9], "confidence": [0.0, 0.4, 0.8]}


def spectrum() -> DrawnFigure:
    grid = [-1.0, 0.0, 1.0, 2.0]
    return figures.spectrum(grid, {"erm": [0.01, 1.0, 1e-4, 1e-3], "amp": [0.02, 1.1, 1e-5, 0.0]}, one_eigenvalue=1e-3)


def between() -> DrawnFigure:
    values: dict[str, list[float | None]] = {"training": [0.1, 0.9, None, 0.2], "test": [0.3, 1.0, 0.9, 0.3]}
    return figures.between("error, %", [0.0, 0.3, 0.6, 1.0], values, ends=("erm, seed 0", "a/long/path/" * 5))


FIGURES: dict[str, Callable[[], DrawnFigure]] = {
    "1": figures.risk_and_amp_risk,
    "2": lines,
    "3": figures.gaussian_surface,
    "4": figures.operational_region,
    "6": boundaries,
    "9": figures.kinked_losses,
    "penalty": figures.gradient_penalty,
    "ece": lambda: figures.bars(
        "ECE", {method: [1.0, 2.0, 3.0] for method in METHODS}, paper={"amp": 1.25}, best_epoch={"amp": 1.3}
    ),
    "sweep": sweep,
    "curves": lambda: figures.curves("test NLL", {"erm": [1.0, 0.5], "amp": [0.9, 0.4]}, count={"erm": 3, "amp": 5}),
    "contours": lambda: figures.contours(AXIS, AXIS, {"ERM": plane(3), "AMP": plane(1)}),
    "surfaces": lambda: figures.surfaces(AXIS, AXIS, {"ERM": plane(3), "AMP": plane(1)}),
    "spectrum": spectrum,
    "between": between,
    "risk": lambda: figures.risk_over_coverage({m: figures.RiskCurve([0.5, 1.0], [0.0, 0.1]) for m in ("erm", "amp")}),
    "roc": lambda: figures.roc("SVHN", {"erm": [0.0, 0.7, 1.0], "amp": [0.1, 0.8, 1.0]}, count={"erm": 3, "amp": 5}),
    "reliability": lambda: figures.reliability_diagram("AMP", BINS, method="amp"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_drawn_with_numbers_names_and_words(name: str) -> None:
    drawn = FIGURES[name]()
    assert json.loads(json.dumps(drawn.data, allow_nan=False)) == drawn.data
    assert len(json.dumps(drawn.data)) > 30
    for axes in drawn.figure.axes:
        assert axes.get_title(loc="left") or axes.get_title() or axes.get_title(loc="right"), "an untitled panel"
        assert axes.has_data()
    text = svg(drawn)
    assert re.match(r'<svg viewBox="[\d. ]+" role="img" aria-label=".{20,}">', text)
    assert text.rstrip().endswith("</svg>")
    assert "<metadata" not in text
    assert "#010203" not in text


@pytest.mark.parametrize("name", ["2", "4", "9", "curves", "sweep", "1", "penalty", "spectrum", "roc"])
def test_the_axes_of_curves_are_named(name: str) -> None:
    drawn = FIGURES[name]()
    for axes in drawn.figure.axes:
        assert axes.get_xlabel()
    assert drawn.figure.axes[0].get_ylabel() or name == "curves"


def test_what_is_averaged_is_said() -> None:
    titles = {name: FIGURES[name]().figure.axes[0].get_title(loc="left") for name in ("ece", "sweep", "curves")}
    assert titles == {"ece": "ECE (n = 3)", "sweep": "training loss (n = 2)", "curves": "test NLL (n = 3 to 5)"}


def test_no_two_methods_look_alike_without_colour() -> None:
    """They differ in dash, or in width; bars in hatching, or in being one of the two that stand out."""
    assert LINE_STYLES.keys() == set(METHODS)
    for one, other in combinations(METHODS, 2):
        if {one, other} != set(BOLD):  # these two differ in lightness, and in their names
            assert LINE_STYLES[one][1] != LINE_STYLES[other][1] or (one in BOLD) != (other in BOLD)
            assert HATCHES[one] != HATCHES[other] or (one in BOLD) != (other in BOLD)
        assert LINE_STYLES[one][0] != LINE_STYLES[other][0]
    dark, light = (
        sum(int(LINE_STYLES[m][0][i : i + 2], 16) * w for i, w in ((1, 0.3), (3, 0.59), (5, 0.11))) for m in BOLD
    )
    assert abs(dark - light) > 20


def test_the_numbers_are_those_of_the_theory() -> None:
    data = figures.risk_and_amp_risk(epsilon=0.5).data
    risk, worst, theta = (torch.tensor(data[name]) for name in ("risk", "amp_risk", "theta"))
    assert theta[risk.argmin()] == pytest.approx(-1, abs=0.01)
    assert theta[worst.argmin()] == pytest.approx(1, abs=0.01)
    surface = figures.gaussian_surface(epsilon=0.6, widths=(0.6, 1.5)).data
    assert surface["amp_minimum"] == pytest.approx(1 - torch.exp(torch.tensor(-0.5)).item(), rel=1e-6)
    assert figures.kinked_losses(epsilon=0.3).data["epsilon"] == 0.3


def test_a_name_cannot_break_out_of_the_words() -> None:
    drawn = figures.contours(AXIS, AXIS, {'"><script>alert(1)</script>': plane(1)})
    assert "<script" not in svg(drawn)


def test_several_models_of_a_method_have_lines_of_their_own() -> None:
    curve = [abs(a) for a in AXIS]
    styles = {"AMP, ε 0.1": "amp", "AMP, ε 0.5": "amp", "own": None}
    drawn = figures.lines(AXIS, {"training": dict.fromkeys(styles, curve)}, methods=styles)
    looks: list[Any] = [(line.get_color(), line.get_linestyle()) for line in drawn.figure.axes[0].lines]
    assert len(set(looks)) == 3


def test_a_line_has_the_colour_of_its_method_where_names_are_methods() -> None:
    curve = [abs(a) for a in AXIS]
    drawn = figures.lines(AXIS, {"training": {"erm": curve, "amp": curve}})
    assert [line.get_color() for line in drawn.figure.axes[0].lines] == [
        LINE_STYLES[name][0] for name in ("erm", "amp")
    ]


def test_a_landscape_that_is_nowhere_finite_is_drawn_too() -> None:
    nothing: Any = [[None] * 5] * 5
    for drawn in (
        figures.contours(AXIS, AXIS, {"lost": nothing}),
        figures.surfaces(AXIS, AXIS, {"lost": nothing}),
        figures.lines(AXIS, {"training": {"erm": [None] * 5}}),
    ):
        assert svg(drawn).rstrip().endswith("</svg>")


def test_a_long_title_of_a_small_figure_is_whole() -> None:
    name = "AMP (ascent share 0.25, ε 0.2, start 0.75, EMA 0.9995), n = 10"
    figure = figures.reliability_diagram(name, BINS, method="amp").figure
    figure.draw_without_rendering()
    (axes,) = figure.axes
    (title,) = [text for text in axes.findobj(Text) if text.get_text() == axes.get_title(loc="left")]
    assert " ".join(title.get_text().split()) == name
    assert title.get_window_extent().x1 <= figure.bbox.x1
    assert title.get_window_extent().y1 <= figure.bbox.y1


def test_the_papers_diamond_stands_beside_ours_and_alone_where_we_have_none() -> None:
    values = {"erm": [3.0, 3.2], "amp": [1.4, 1.5]}
    drawn = figures.bars("ECE", values, paper={"erm": 3.36, "amp": 1.25}, best_epoch={"erm": 3.3})
    diamonds = [line for line in drawn.figure.axes[0].lines if line.get_marker() == "D"]
    marks = {(line.get_markerfacecolor() == "none", *line.get_xydata().tolist()[0]) for line in diamonds}  # type: ignore[union-attr]
    assert marks == {(True, 0.15, 3.36), (False, -0.15, 3.3), (True, 1.0, 1.25)}
    assert (drawn.data["paper"], drawn.data["best_epoch"]) == ({"erm": 3.36, "amp": 1.25}, {"erm": 3.3})


@pytest.mark.parametrize("value", [0.0, 5e-324])
def test_bars_of_nothing_are_drawn(value: float) -> None:
    (axes,) = figures.bars("error under FGSM", {"amp": [value]}).figure.axes
    low, high = axes.get_ylim()
    assert low == 0.0 < high
