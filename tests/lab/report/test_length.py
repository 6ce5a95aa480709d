"""Error over the time of training: runs that shared their device have no time, and no point in the figure."""

import base64
import json
import re
from pathlib import Path

from flatmin_lab.recipes.experiments import EXPERIMENTS
from flatmin_lab.report import figures
from flatmin_lab.report.loader import load_results
from flatmin_lab.report.pages.report import report_page
from tests.support.pages import text_of
from tests.support.report_files import write_result

RECIPES = [recipe for recipe in EXPERIMENTS["length"]("paper").recipes if recipe.data == "cifar10"]


def page(results: Path) -> str:
    return report_page(load_results([results]))


def test_the_page_shows_the_lengths_with_their_times(tmp_path: Path) -> None:
    for recipe in RECIPES:
        for seed in (0, 1):
            time = recipe.epochs * (2.0 if recipe.method == "amp" else 1.0)
            write_result(tmp_path, recipe, seed, 0.05 + 1 / recipe.epochs + 0.001 * seed, seconds=time, at_once=1)
    shown = page(tmp_path)
    words = text_of(shown)
    assert "Error over the time of training" in words
    assert "ERM (10 epochs)" in words
    assert "AMP (25 epochs, ε 0.1)" in words
    assert 'download="length-paper-cifar10.json"' in shown
    assert "over the minutes of training; the numbers are epochs" in shown


def test_runs_that_shared_their_device_have_no_point(tmp_path: Path) -> None:
    for recipe in RECIPES:
        write_result(tmp_path, recipe, 0, 0.05, seconds=10.0, at_once=4)
    shown = page(tmp_path)
    assert "ERM (10 epochs)" in text_of(shown)
    assert "length-paper-cifar10.json" not in shown


def test_a_point_is_of_the_runs_whose_time_counts(tmp_path: Path) -> None:
    """Beside how many runs another one trained a beginning is not known."""
    recipe = RECIPES[0]
    write_result(tmp_path, recipe, 0, 0.05, seconds=60.0, at_once=1)
    write_result(tmp_path, recipe, 1, 0.09, seconds=20.0, at_once=4)
    begun = {"run": "paper/another-2", "epochs": 5, "seconds": 30.0}
    write_result(tmp_path, recipe, 2, 0.07, seconds=40.0, at_once=1, shared=begun)
    (content,) = re.findall(
        r'download="length-paper-cifar10.json" href="data:application/json;base64,([^"]*)"', page(tmp_path)
    )
    (point,) = json.loads(base64.b64decode(content))["points"]
    assert (point["minutes"], point["errors"]) == (1.0, [5.0])


def test_a_figure_has_the_numbers_it_shows() -> None:
    points = [figures.TimedPoint("erm", "ERM", 10, 0.5, [7.0, 7.5]), figures.TimedPoint("amp", "AMP", 10, 2.0, [6.0])]
    drawn = figures.over_time("CIFAR-10", points)
    assert json.loads(json.dumps(drawn.data))["points"][0] == {
        "method": "erm",
        "mode": "ERM",
        "epochs": 10,
        "minutes": 0.5,
        "errors": [7.0, 7.5],
    }
    (axes,) = drawn.figure.axes
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "minutes of training"


def test_the_time_on_a_cpu_is_what_a_run_computed_and_every_mode_has_its_line(tmp_path: Path) -> None:
    """However long it waited for a core, and also beside others."""
    recipes = [recipe for recipe in EXPERIMENTS["length"]("short").recipes if recipe.data == "digits"]
    for recipe in recipes:
        write_result(tmp_path, recipe, 0, 0.05, seconds=900.0, cpu_seconds=1.0 * recipe.epochs, at_once=2)
    shown = page(tmp_path)
    assert "over the seconds of training" in shown
    assert 'download="length-short-digits-noise-0.2.json"' in shown
    (content,) = re.findall(r'download="length-short-digits.json" href="data:application/json;base64,([^"]*)"', shown)
    points = json.loads(base64.b64decode(content))["points"]
    assert {round(60 * point["minutes"]) - point["epochs"] for point in points} == {0}
    assert {point["mode"] for point in points} == {"ERM", "AMP (ε auto)", "AMP (ε auto, start 0.75)"}
