"""The regret: what a radius that adjusts itself loses of the best fixed one's gain."""

from dataclasses import replace
from pathlib import Path

import pytest

from flatmin_lab.recipes.experiments import EXPERIMENTS
from flatmin_lab.report.loader import load_results
from flatmin_lab.report.pages.report import report_page
from flatmin_lab.report.paper.regret import Regret, mean_regrets, regrets
from flatmin_lab.report.paper.tables import fill_table, runs_by_recipe
from tests.support.pages import text_of
from tests.support.report_files import write_result

HOME, SMALL = "short/cifar10-preactresnet18-", "short/digits-convnet-"  # of the small set there are two automatic ones
RECIPES = {recipe.name: recipe for recipe in EXPERIMENTS["auto"]("short").recipes}


def regrets_of(folder: Path, errors: dict[str, list[float]], home: str = HOME) -> list[Regret]:
    for name, values in errors.items():
        for seed, error in enumerate(values):
            write_result(folder, RECIPES[home + name], seed, error, data_sha256="same")
    runs = runs_by_recipe(load_results([folder]).runs, [])
    return regrets(fill_table(EXPERIMENTS["auto"]("short"), runs))


def test_it_is_the_way_from_the_best_fixed_radius_back_to_erm(tmp_path: Path) -> None:
    errors = {
        "erm": [0.059, 0.061],
        "amp-radius-0.12": [0.049, 0.051],
        "amp-radius-0.25": [0.054, 0.056],
        "amp-auto": [0.051, 0.053],
        "amp-auto-start-0.5": [0.048, 0.050],
    }
    always, late = regrets_of(tmp_path, errors, SMALL)
    assert [one.auto.name for one in (always, late)] == ["AMP (ε auto)", "AMP (ε auto, start 0.5)"]
    for one, share in ((always, 0.2), (late, -0.1)):
        for lost in one.lost:  # error, NLL and ECE, which are multiples of each other here
            assert lost is not None
            assert lost.share == pytest.approx(share)
            assert lost.best.name == "AMP (ε 0.12)"
            assert lost.low is not None
            assert lost.high is not None
            assert lost.low < share < lost.high
    said = text_of(report_page(load_results([tmp_path])))
    assert "What a radius that adjusts itself loses: protocol “short”" in said
    assert "of the gain of AMP (ε 0.12), n = 2" in said
    assert "Intervals and clear gains are uncorrected" in said


def test_two_networks_of_one_data_set_are_two_problems(tmp_path: Path) -> None:
    small, transformer = "short/digits-convnet-{}-noise-0.2", "short/digits-vit-{}-noise-0.2"
    for name, auto in ((small, 0.051), (transformer, 0.053)):
        for variant, error in (("erm", 0.06), ("amp-radius-0.12", 0.05), ("amp-auto", auto)):
            for seed in range(2):
                changed = error + 0.0002 * seed
                write_result(tmp_path, RECIPES[name.format(variant)], seed, changed, data_sha256="same")
    loaded = load_results([tmp_path])
    found = regrets(fill_table(EXPERIMENTS["auto"]("short"), runs_by_recipe(loaded.runs, [])))
    assert [one.auto.recipe.model for one in found] == ["convnet", "vit"]
    assert [one.lost[0].share for one in found if one.lost[0]] == pytest.approx([0.1, 0.3])
    (mean,) = mean_regrets(found)
    assert mean.shares[0] is not None
    assert mean.shares[0][:2] == pytest.approx((0.2, 2))
    said = text_of(report_page(loaded))
    assert "a small convolutional network" in said
    assert "a small vision transformer" in said


def test_the_mean_is_that_of_the_sets_with_a_gain(tmp_path: Path) -> None:
    gains = {"erm": [0.059, 0.061], "amp-radius-0.12": [0.049, 0.051], "amp-radius-0.25": [0.054, 0.056]}
    first, second = tmp_path / "first", tmp_path / "second"
    (one,) = regrets_of(first, {**gains, "amp-auto": [0.051, 0.053]})
    (other,) = regrets_of(second, {**gains, "amp-auto": [0.048, 0.050]})
    nothing = replace(one, lost=[None, None, None])
    (mean,) = mean_regrets([one, nothing, other])
    assert mean.name == "AMP (ε auto)"
    for found in mean.shares:
        assert found is not None
        assert found[0] == pytest.approx(0.05)
        assert found[1] == 2
    assert mean_regrets([one, nothing]) == []
    assert mean_regrets([]) == []


def test_without_a_clear_gain_there_is_nothing_to_lose(tmp_path: Path) -> None:
    errors = {
        "erm": [0.05, 0.07],
        "amp-radius-0.12": [0.049, 0.069],  # lower, by a tenth of its standard error
        "amp-radius-0.25": [0.06, 0.08],
        "amp-auto": [0.05, 0.06],
    }
    (only,) = regrets_of(tmp_path, errors)
    assert only.lost == [None, None, None]
    assert "no fixed radius gains clearly" in text_of(report_page(load_results([tmp_path])))


def test_a_lucky_single_run_is_no_best_radius(tmp_path: Path) -> None:
    errors = {
        "erm": [0.0600, 0.0610, 0.0590],
        "amp-radius-0.06": [0.051],  # the lowest, but one run proves no gain
        "amp-radius-0.12": [0.0520, 0.0530, 0.0525],
        "amp-auto": [0.0530, 0.0535, 0.0530],
    }
    (only,) = regrets_of(tmp_path, errors)
    assert only.lost[0] is not None
    assert only.lost[0].best.name == "AMP (ε 0.12)"


def test_the_radius_of_the_protocol_is_one_of_the_fixed_ones(tmp_path: Path) -> None:
    (only,) = regrets_of(tmp_path, {"erm": [0.060, 0.061], "amp": [0.050, 0.051], "amp-auto": [0.051, 0.052]})
    assert only.lost[0] is not None
    assert only.lost[0].best.recipe.settings["epsilon"] == 0.1
    assert only.lost[0].share == pytest.approx(0.1)
    at_200 = {recipe.name: recipe.settings.get("epsilon") for recipe in EXPERIMENTS["auto"]("paper").recipes}
    assert at_200["paper/cifar10-preactresnet18-amp"] == 0.5
    assert "paper/cifar10-preactresnet18-amp-radius-0.5" not in at_200  # it would be trained twice


@pytest.mark.parametrize("missing", ["erm", "amp-radius-0.25", "amp-auto"])
def test_it_needs_erm_a_fixed_radius_and_the_automatic_one(tmp_path: Path, missing: str) -> None:
    names = {"erm", "amp-radius-0.25", "amp-auto"} - {missing}
    assert not regrets_of(tmp_path, {name: [0.05, 0.06] for name in names})
    assert "adjusts itself loses" not in text_of(report_page(load_results([tmp_path])))


def test_the_interval_of_single_runs_is_unknown(tmp_path: Path) -> None:
    errors = {
        "erm": [0.0600, 0.0602],
        "amp-radius-0.12": [0.050, 0.0502],
        "amp-radius-0.25": [0.055],
        "amp-auto": [0.0521],
    }
    (only,) = regrets_of(tmp_path, errors)
    assert only.lost[0] is not None
    assert only.lost[0].share == pytest.approx(0.2)
    assert only.lost[0].low is only.lost[0].high is None


def test_where_a_better_radius_may_have_been_missed_the_page_says_so(tmp_path: Path) -> None:
    errors = {
        "erm": [0.059, 0.061],
        "amp-radius-0.03": [0.058],
        "amp-radius-0.06": [0.052, 0.053],
        "amp-radius-0.12": [0.049, 0.051],
        "amp-auto": [0.051, 0.053],
    }
    remarks = []
    for number, more in enumerate(({}, {"amp-radius-0.25": [0.054, 0.056]}, {"amp-radius-0.06": [0.048, 0.049]})):
        (one,) = regrets_of(tmp_path / str(number), {**errors, **more})
        assert one.lost[0] is not None
        remarks.append(one.lost[0].remarks)
    assert remarks == [("the largest radius with several runs",), (), ("the smallest radius with several runs",)]
    alone = {"erm": [0.060, 0.061], "amp": [0.050, 0.051], "amp-radius-0.25": [0.049], "amp-auto": [0.051, 0.052]}
    (one,) = regrets_of(tmp_path / "alone", alone)
    assert one.lost[0] is not None
    assert one.lost[0].remarks == ("the only radius with several runs",)
    said = text_of(report_page(load_results([tmp_path / "alone"])))
    assert "of the gain of AMP, n = 2, the only radius with several runs" in said
    assert "it is too low if a better radius was not tried, or only once" in said


def test_the_mean_has_an_interval_that_is_narrower_than_that_of_one_set(tmp_path: Path) -> None:
    errors = {"erm": [0.058, 0.060, 0.062], "amp-radius-0.12": [0.049, 0.050, 0.051], "amp-radius-0.25": [0.055] * 3}
    (one,) = regrets_of(tmp_path / "1", {**errors, "amp-auto": [0.051, 0.052, 0.053]})
    (other,) = regrets_of(tmp_path / "2", {**errors, "amp-auto": [0.049, 0.050, 0.051]})
    (mean,) = mean_regrets([one, other])
    of_one, of_both = one.lost[0], mean.shares[0]
    assert of_one is not None
    assert of_one.low is not None
    assert of_one.high is not None
    assert of_both is not None
    assert of_both.low is not None
    assert of_both.high is not None
    assert of_both.low < of_both.share < of_both.high
    assert of_both.high - of_both.low < of_one.high - of_one.low
    (single,) = regrets_of(tmp_path / "3", {**errors, "amp-auto": [0.052]})
    (without,) = mean_regrets([one, single])
    assert without.shares[0] is not None
    assert (without.shares[0].low, without.shares[0].high) == (None, None)
