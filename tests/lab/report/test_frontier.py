"""The frontier: what cheaper trainings keep of AMP's gain, and what they cost."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from flatmin_lab.recipes.experiments import EXPERIMENTS
from flatmin_lab.report.figures import FrontierPoint, frontier
from flatmin_lab.report.loader import load_results
from flatmin_lab.report.pages.report import report_page
from flatmin_lab.report.paper.evidence import evidence
from flatmin_lab.report.paper.frontier import cost_of, frontiers, kept_share
from flatmin_lab.report.paper.key_results import key_results
from flatmin_lab.report.paper.tables import fill_table, runs_by_recipe
from tests.support.pages import text_of
from tests.support.report_files import write_result

RECIPES = {
    recipe.name.removeprefix("short/cifar10-preactresnet18-"): recipe
    for recipe in EXPERIMENTS["frontier"]("short").recipes
    if recipe.data == "cifar10"
}


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("erm", 1.0),
        ("amp", 2.0),
        ("amp-start-0.5", 1.5),
        ("amp-start-0.75", 1.25),
        ("amp-start-0.9", 1.1),
        ("amp-start-0.5-every-2", 1.25),
        ("amp-every-4", 1.25),
        ("amp-start-0.5-ascent-0.25", 1.125),
        ("amp-drop-0.9-start-0.75-ascent-0.25", 1.0625),
        ("erm-times-1.25", 1.25),
        ("erm-times-1.5", 1.5),
        ("erm-drop-0.9", 1.0),
        ("amp-drop-0.9-start-0.75", 1.25),
        ("amp-drop-0.97-start-0.9", 1.1),
    ],
)
def test_a_mode_costs_its_passes(name: str, passes: float) -> None:
    assert cost_of(RECIPES[name], RECIPES["erm"]) == pytest.approx(passes)


def test_every_mode_is_named_by_what_is_its_own() -> None:
    table = fill_table(EXPERIMENTS["frontier"]("short"), {})
    names = [row.name for row in table.rows if row.data == "cifar10"]
    assert len(set(names)) == len(names) == len(RECIPES)
    assert {"ERM", "AMP", "AMP (start 0.5, every 2)", "ERM (75 epochs)", "ERM (drops at 0.5 and 0.9)"} <= set(names)


def test_the_share_kept_is_the_way_from_erm_to_amp() -> None:
    kept = kept_share([6.0, 5.8, 6.2], [5.0, 5.2, 4.8], [5.2, 5.4, 5.0])
    assert kept is not None
    assert kept.low is not None
    assert kept.high is not None
    assert kept.share == pytest.approx(0.8)
    assert 0.4 < kept.low < 0.8 < kept.high < 1.3
    alone = kept_share([6.0], [5.0], [6.5])
    assert alone == (-0.5, None, None)
    assert kept_share([5.0], [5.0], [4.0]) is None  # AMP gains nothing
    assert kept_share([5.0], [], [4.0]) is None


def test_the_page_has_figure_and_table(tmp_path: Path) -> None:
    errors = {"erm": 0.06, "amp": 0.05, "amp-start-0.5-every-2": 0.052, "erm-times-1.25": 0.058}
    for name, error in errors.items():
        for seed in range(3 if name != "erm-times-1.25" else 1):
            write_result(tmp_path, RECIPES[name], seed, error + 1e-4 * seed, data_sha256="same")
    found = load_results([tmp_path])
    (frontier,) = frontiers(fill_table(EXPERIMENTS["frontier"]("short"), runs_by_recipe(found.runs, [])))
    assert [mode.row.name for mode in frontier.modes] == ["ERM", "ERM (75 epochs)", "AMP (start 0.5, every 2)", "AMP"]
    assert [mode.cost for mode in frontier.modes] == [1.0, 1.25, 1.25, 2.0]
    assert [mode.kept[0].low is None for mode in frontier.modes if mode.kept[0]] == [True, True, False, True]
    shares = [mode.kept[0].share for mode in frontier.modes if mode.kept[0]]
    assert shares == pytest.approx([0, 0.21, 0.8, 1], abs=0.005)
    page = report_page(found)
    said = text_of(page)
    assert "AMP's gain at lower cost: CIFAR-10, PreActResNet18" in said
    assert re.search(r"80 % \(7\d to 8\d\) kept", said)
    assert "The intervals are uncorrected: with so many modes" in said
    assert "frontier-short-cifar10.json" in page
    assert re.search(r'<figure class="panels"><svg [^>]*aria-label="CIFAR-10, PreActResNet18: the share', page)


def test_the_cheapest_mode_that_keeps_nearly_all_is_told_first(tmp_path: Path) -> None:
    """It needs three runs, and an error that is not significantly higher than AMP's."""
    errors = {
        "erm": [0.0600, 0.0604, 0.0602],
        "amp": [0.05018, 0.05022, 0.0502],
        "amp-drop-0.9-start-0.75": [0.0503, 0.0505, 0.0501],
        "amp-drop-0.97-start-0.9": [0.0498],  # better and cheaper, but a single run
        "amp-start-0.9": [0.0505, 0.0506, 0.0507],  # keeps enough, but its error is significantly higher
    }
    for name, values in errors.items():
        for seed, error in enumerate(values):
            write_result(tmp_path, RECIPES[name], seed, error, data_sha256="same")
    found = evidence(load_results([tmp_path]), [])
    assert found is not None
    told = {one.topic: one.sentence for one in key_results(found)}
    mode = "AMP (start 0.75, drops at 0.5 and 0.9) on CIFAR-10 (“short”)"
    kept = "keeps 99 % of AMP's gain in NLL, 99 % in ECE and 99 % in error, at 1.25 times ERM's passes"
    assert told["At lower cost"].startswith(f"{mode} {kept}")
    assert told["At lower cost"].endswith("higher than with AMP in all steps (uncorrected tests).")
    for file in tmp_path.rglob("*start-0.75*.json"):
        file.unlink()
    found = evidence(load_results([tmp_path]), [])
    assert found is not None
    assert "At lower cost" not in {one.topic for one in key_results(found)}


def test_a_cheaper_mode_that_is_better_than_amp_is_told_too(tmp_path: Path) -> None:
    """In every column, with three runs."""
    errors = {
        "erm": [0.0600, 0.0604, 0.0602],
        "amp": [0.0502, 0.0505, 0.0508],
        "amp-drop-0.9-start-0.75-auto": [0.0480, 0.0481, 0.0482],
        "amp-drop-0.97-start-0.9-auto": [0.0470, 0.0471],  # cheaper, but two runs
        "amp-start-0.9": [0.0501, 0.0505, 0.0508],
        "amp-auto": [0.0400, 0.0401, 0.0402],  # not cheaper
    }
    for name, values in errors.items():
        for seed, error in enumerate(values):
            write_result(tmp_path, RECIPES[name], seed, error, data_sha256="same")
    found = evidence(load_results([tmp_path]), [])
    assert found is not None
    told = {one.topic: one.sentence for one in key_results(found)}["At lower cost"]
    better = "AMP (ε auto, start 0.75, drops at 0.5 and 0.9) on CIFAR-10 (“short”), at 1.25 times ERM's passes."
    assert told.endswith(f"in each of the three after Holm's correction for the modes: {better}")
    assert told.startswith("AMP (start 0.9)")


def benchmark(hardware: str, ms: dict[str, float]) -> dict[str, Any]:
    rows = [
        {"method": name, "form": form, "models": 1, "ms": ms[name]} for form in ("compiled", "eager") for name in ms
    ]
    rows.append({"method": "amp", "form": "at-once", "models": 4, "failed": "out of memory"})
    table = {"model": "preactresnet18", "batch_size": 50, "rows": rows}
    return {"hardware": hardware, "torch": "2.11.0", "commit": "abc1234", "precision": "bf16", "tables": [table]}


def test_the_cost_is_measured_where_the_machine_that_trained_was_timed(tmp_path: Path) -> None:
    for name, error in {"erm": 0.06, "amp": 0.05, "amp-start-0.5": 0.052}.items():
        write_result(tmp_path, RECIPES[name], 0, error, data_sha256="same")
    file = tmp_path / "bench-machine-200.json"
    steps = {"erm": 2.0, "amp-idle": 2.2, "amp": 3.8}
    for hardware, ms, costs in (
        ("a machine", steps, [1.0, 1.5, 1.9]),
        ("a machine", {"erm": 2.0, "amp": 3.8}, [1.0, None, 1.9]),
        ("another machine", steps, [None] * 3),
    ):
        file.write_text(json.dumps(benchmark(hardware, ms)))
        found = load_results([tmp_path])
        assert not found.unusable
        table = fill_table(EXPERIMENTS["frontier"]("short"), runs_by_recipe(found.runs, []))
        (frontier,) = frontiers(table, found.step_times)
        for form in (0, 1):
            assert [mode.measured[form] for mode in frontier.modes] == pytest.approx(costs)
        assert frontier.is_measured == (None not in costs)
        said = text_of(report_page(found))
        assert ("time, captured" in said) == (costs[0] is not None)
        assert ("measured in turn by flatmin bench (a machine, torch 2.11.0, commit abc1234)" in said) == bool(costs[0])
        assert ("not every mode was timed" in said) == (costs[1] is None and costs[0] is not None)
        assert ("has not been measured on the machine that trained these" in said) == (costs[0] is None)


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"hardware": "a", "precision": "bf16", "tables": [{"rows": 3}]}']
)
def test_a_damaged_benchmark_is_listed(tmp_path: Path, content: str) -> None:
    write_result(tmp_path, RECIPES["erm"], 0, 0.06)
    (tmp_path / "bench-machine.json").write_text(content)
    found = load_results([tmp_path])
    assert [one.path.name for one in found.unusable] == ["bench-machine.json"]
    assert not found.step_times


def test_no_number_of_the_figure_covers_another_or_a_mark() -> None:
    """Modes of the same cost with nearly the same gain, as many as the project has trained."""
    kept = [0.0, -0.05, 0.71, 0.07, 0.8, 0.7, 0.82, 0.9, 1.04, 0.94, 1.0, 1.0]
    costs = [1.0, 1.0, 1.16, 1.25, 1.23, 1.23, 1.23, 1.23, 1.23, 1.46, 1.46, 1.92]
    points = [
        FrontierPoint(f"mode {n}", "amp", cost, cost, [(share, None, None)] * 3)
        for n, (cost, share) in enumerate(zip(costs, kept, strict=True))
    ]
    figure = frontier("modes", points, ["error, %", "NLL", "ECE, %"]).figure
    figure.draw_without_rendering()
    for axes in figure.axes:
        numbers = [text.get_window_extent() for text in axes.texts]
        marks = [line.get_window_extent() for line in axes.lines if line.get_marker() == "o"]
        assert len(numbers) == len(marks) == len(points)
        assert not any(one.overlaps(other) for one, other in itertools.combinations(numbers, 2))
        assert not any(one.overlaps(mark) for one in numbers for mark in marks)
