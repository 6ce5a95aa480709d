"""The paper's tables as recipes, and filled: names that mean one training, the paper's settings, honest statistics."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from scipy import stats
from torch.nn.functional import cross_entropy

from flatmin.regularisers import label_smoothing
from flatmin_lab.methods import resolve_settings
from flatmin_lab.recipes.experiments import EXPERIMENTS
from flatmin_lab.recipes.experiments.experiment import SETS, cell
from flatmin_lab.recipes.experiments.paper_tables import table1, table2
from flatmin_lab.recipes.paper_numbers import METHODS, Value, reported
from flatmin_lab.recipes.protocols import NAMES as PROTOCOLS
from flatmin_lab.recipes.protocols import Protocol
from flatmin_lab.recipes.recipe import Job, Recipe
from flatmin_lab.report.columns import column_named
from flatmin_lab.report.comparison import groups_of
from flatmin_lab.report.loader import UnusableFile, read_result
from flatmin_lab.report.paper.claims import (
    NO_DATA,
    best_radius,
    check_claims,
    claimed_families,
    claims,
    families_with,
)
from flatmin_lab.report.paper.deviations import HELD_OUT, deviations
from flatmin_lab.report.paper.families import Family
from flatmin_lab.report.paper.tables import Cell, Place, cell_of, fill_table, read_all, runs_by_recipe
from flatmin_lab.report.stats import agrees, tolerance
from flatmin_lab.runs.result_store import ResultStore
from tests.support.report_files import evaluation, write_result


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_name_is_one_training_whoever_asks_for_it(protocol: Protocol) -> None:
    known: dict[str, Recipe] = {}
    for make in EXPERIMENTS.values():
        for recipe in (*make(protocol).recipes, *make(protocol).beside):
            assert known.setdefault(recipe.name, recipe) == recipe
            shared = protocol == "paper-v2" and recipe.name.startswith(
                "paper/"
            )  # what has no crops, and for comparison
            assert shared or recipe.name.startswith(f"{protocol}/")
    assert len(set(map(str, known.values()))) == len(known)


def test_what_has_no_crops_is_trained_once_for_both_versions() -> None:
    assert EXPERIMENTS["spiral"]("paper-v2").recipes == EXPERIMENTS["spiral"]("paper").recipes
    digits = {r.name for r in EXPERIMENTS["auto"]("paper-v2").recipes if r.data == "digits"}
    assert all(name.startswith("paper/") for name in digits)


@pytest.mark.parametrize("protocol", ["paper", "paper-v2", "short"])
def test_every_cell_of_the_tables_has_its_protocol_and_the_paper_s_number(protocol: Protocol) -> None:
    assert len(table1(protocol).recipes) == 3 * 2 * 8
    assert len(table2(protocol).recipes) == 3 * 2 * 3 * 2
    for experiment in (table1(protocol), table2(protocol)):
        for recipe in experiment.recipes:
            assert str(recipe.protocol) == protocol
            theirs = reported(recipe.data, recipe.model, recipe.method, recipe.augment)
            assert "error" in theirs
            assert ("nll" in theirs) == (experiment.name == "table1")


def test_amp_has_the_radius_of_its_table_and_length() -> None:
    def radius(recipe: Recipe) -> tuple[float, float]:
        return recipe.settings["epsilon"], recipe.settings["inner_lr"]

    assert radius(cell("paper", "svhn", "preactresnet18", "amp")) == (0.5, 1.0)
    assert radius(cell("paper", "svhn", "vgg16", "amp")) == (0.1, 0.2)
    assert radius(cell("paper", "svhn", "wideresnet28_10", "amp", augment="cutout")) == (0.3, 0.5)
    assert radius(cell("paper", "svhn", "pyramidnet164_270", "amp", augment="autoaugment")) == (0.1, 0.1)
    assert radius(cell("short", "svhn", "preactresnet18", "amp")) == (0.1, 1.0)
    sweep = [recipe for recipe in EXPERIMENTS["sweep"]("short").recipes if recipe.method == "amp"]
    assert {(recipe.settings["inner_lr"], recipe.settings["inner_iter"]) for recipe in sweep} == {(2.0, 2)}
    assert all(recipe.validation for recipe in EXPERIMENTS["sweep"]("short").recipes)


def test_other_methods_have_the_paper_s_settings() -> None:
    expected: dict[str, dict[str, Any]] = {
        "label_smoothing": {"smoothing": 0.2},
        "flooding": {"level": 0.02},
        "mixup": {"alpha": 1.0},
        "adversarial": {"epsilon": 1 / 255},
        "rmp": {"epsilon": 0.1},
        "dropout": {"rate": 0.1},
    }
    for method, settings in expected.items():
        recipe = cell("paper", "cifar10", "vgg16", method)
        assert settings.items() <= resolve_settings(method, recipe.settings).items()


def test_under_paper_table_1_is_the_published_code_s_first_version() -> None:
    for data in SETS:
        for model in ("preactresnet18", "vgg16"):
            for method in METHODS:
                recipe = cell("paper", data, model, method)
                assert (recipe.augment, recipe.nesterov, recipe.clip_norm) == ("vanilla_v1", False, 50.0)
                assert recipe.normalise == ((0.5, 0.5) if data == "svhn" else None)
                dropped_at = {"dropout_at": "block"} if (model, method) == ("preactresnet18", "dropout") else {}
                assert recipe.model_settings == dropped_at
    settings = {method: dict(cell("paper", "cifar10", "preactresnet18", method).settings) for method in METHODS}
    assert settings == {
        "erm": {},
        "dropout": {},
        "flooding": {},
        "mixup": {},
        "label_smoothing": {"over": "others"},
        "adversarial": {"units": "inputs", "random_start": True},
        "rmp": {"ball": "tensor", "noise": "cube"},
        "amp": {"epsilon": 0.5, "inner_lr": 1.0, "ball": "tensor"},
    }
    wide = cell("paper", "cifar10", "wideresnet28_10", "amp", augment="cutout")  # in the second version alone
    assert (wide.augment, wide.nesterov, wide.clip_norm, wide.settings["ball"]) == ("cutout", True, 50.0, "tensor")


@pytest.mark.parametrize("protocol", ["paper-v2", "short"])
def test_the_other_protocols_have_the_second_version_s_crops_and_the_text_s_settings(protocol: Protocol) -> None:
    for method in METHODS:
        recipe = cell(protocol, "svhn", "preactresnet18", method)
        assert (recipe.augment, recipe.nesterov, recipe.clip_norm, recipe.normalise) == ("vanilla", True, None, None)
        assert recipe.model_settings == {}
        assert recipe.settings.keys() <= ({"epsilon", "inner_lr"} if method == "amp" else set())


# ---- filled


def fill(results: Path, errors: dict[str, list[float]], **changes: Any) -> None:
    for method, values in errors.items():
        recipe = cell("paper", "cifar10", "preactresnet18", method)
        for seed, error in enumerate(values):
            write_result(results, recipe, seed, error, **changes)


ERRORS = {
    "erm": [0.0500, 0.0510, 0.0495],
    "amp": [0.0396, 0.0400, 0.0392],
    "mixup": [0.0405, 0.0412, 0.0409],
    "rmp": [0.0501, 0.0493, 0.0507],
    "dropout": [0.03, 0.031],
}


@pytest.fixture
def store(tmp_path: Path) -> ResultStore:
    found = ResultStore(tmp_path / "results", tmp_path / "runs")
    fill(found.results, ERRORS)
    return found


def test_cells_hold_all_seeds_the_paper_s_value_and_whether_they_agree(store: ResultStore) -> None:
    found = fill_table(table1("paper"), read_all(store))
    rows = {row.recipe.method: row for row in found.rows if row.place[:3] == ("cifar10", "preactresnet18", "vanilla")}
    assert all(row.name != "at the best test epoch" for row in found.rows)  # there are no curves
    error = rows["erm"].cells[0]
    assert error.values == pytest.approx([5.0, 5.1, 4.95])
    assert error.paper == Value(5.02, 0.212)
    assert error.agrees
    assert rows["mixup"].cells[0].agrees
    assert rows["dropout"].cells[0].agrees is False
    assert rows["flooding"].cells[0].values == []
    assert rows["flooding"].cells[0].agrees is None
    assert all(not row.runs for row in found.rows if row.place[0] != "cifar10")


def test_planned_comparisons_are_tested_against_erm_and_corrected_for_their_family(store: ResultStore) -> None:
    found = fill_table(table1("paper"), read_all(store))
    rows = {row.recipe.method: row.cells[0] for row in found.rows if row.runs}
    size = len(claimed_families("paper")["paper/cifar10-preactresnet18"].comparisons)
    for name in ("amp", "rmp"):
        p = float(stats.ttest_ind(ERRORS[name], ERRORS["erm"], equal_var=False).pvalue)
        assert rows[name].p == pytest.approx(min(1.0, size * p), rel=1e-6)
    assert rows["amp"].better
    assert rows["rmp"].better is None
    assert rows["mixup"].p is None  # in no family
    assert rows["dropout"].p is None  # of two runs
    assert rows["dropout"].better is None


def test_what_else_is_trained_changes_no_verdict(store: ResultStore) -> None:
    def said() -> dict[str, Any]:
        rows = fill_table(table1("paper"), read_all(store)).rows
        cells = {f"{row.recipe.name} {n}": cell.p for row in rows for n, cell in enumerate(row.cells) if cell.p}
        claimed = {claim.says: (claim.verdict, claim.p) for claim in check_claims(read_all(store), "paper")}
        return {**cells, **{says: one for says, one in claimed.items() if one[1] is not None}}

    before = said()
    assert len(before) > 4
    fill(store.results, {method: [0.045, 0.046, 0.0455] for method in ("flooding", "label_smoothing", "adversarial")})
    assert before.items() <= said().items()


def test_a_table_and_the_claims_use_one_p(store: ResultStore) -> None:
    (row,) = [row for row in fill_table(table1("paper"), read_all(store)).rows if row.runs and row.name == "AMP"]
    claimed = {claim.says: claim.p for claim in check_claims(read_all(store), "paper")}
    group, *_ = groups_of([run for own in read_all(store).values() for run in own], families_with({}))
    amp = group.row("amp")
    assert amp is not None
    assert row.cells[0].p == claimed["AMP has a lower error than ERM on CIFAR-10"] == amp.cells["error"].p


def test_a_plan_s_family_is_what_counts(store: ResultStore) -> None:
    name = "paper/cifar10-preactresnet18"
    alone = {name: Family(("error: amp < erm",), "2026-11-17")}
    runs = read_all(store)
    (row,) = [row for row in fill_table(table1("paper"), runs, alone).rows if row.runs and row.name == "AMP"]
    p = float(stats.ttest_ind(ERRORS["amp"], ERRORS["erm"], equal_var=False).pvalue)
    assert row.cells[0].p == pytest.approx(p, rel=1e-6)
    assert row.cells[1].p is None
    said = {claim.says: claim.verdict for claim in check_claims(runs, "paper", alone)}
    assert said["RMP is no better than ERM on CIFAR-10"] == "not among the planned comparisons, not tested"


# ---- the best test epoch, which the paper's numbers are of


def test_the_paper_s_number_stands_beside_ours_of_the_best_test_epoch(tmp_path: Path) -> None:
    recipe = cell("paper", "cifar100", "preactresnet18", "amp")
    for seed in range(2):
        curves = {"error": [0.5] * 200, "nll": [2.0] * 200, "ece": [0.2] * 200}
        for name, tied, lowest in (("error", 0.21, 0.21), ("nll", 0.79, 0.774), ("ece", 0.05, 0.04)):
            curves[name][120], curves[name][160] = tied, lowest  # of two epochs with one error, that with the lower NLL
        write_result(tmp_path, recipe, seed, 0.22, test_nll=0.8, curves=curves)
    found = fill_table(table1("paper"), read_all(ResultStore(tmp_path, tmp_path)))
    last, best = [row for row in found.rows if row.runs]
    assert (last.name, best.name) == ("AMP", "at the best test epoch")
    assert [each.values for each in last.cells] == [pytest.approx([22.0, 22.0]), pytest.approx([0.8, 0.8])]
    assert [each.values for each in best.cells] == [pytest.approx([21.0, 21.0]), pytest.approx([0.774, 0.774])]
    assert [each.paper for each in last.cells] == [None, None]
    assert [each.paper for each in best.cells] == [Value(21.51, 0.308), Value(0.774, 0.016)]
    assert [each.agreement for each in best.cells] == [
        "no" if abs(21.0 - 21.51) > tolerance(2, 0.308) else "yes",
        "yes",
    ]


def test_a_single_run_cannot_agree_but_only_not_contradict() -> None:
    assert Cell([5.0], Value(5.02, 0.2), True).agreement == "not contradicted"
    assert Cell([5.0, 5.1], Value(5.02, 0.2), True).agreement == "yes"
    assert Cell([9.0], Value(5.02, 0.2), False).agreement == "no"


def test_the_paper_has_no_numbers_of_another_length(tmp_path: Path) -> None:
    for protocol in PROTOCOLS:
        write_result(tmp_path, cell(protocol, "cifar10", "preactresnet18", "erm"), 0, 0.05)
    runs = read_all(ResultStore(tmp_path, tmp_path))
    beside = {p: any(c.paper for row in fill_table(table1(p), runs).rows for c in row.cells) for p in PROTOCOLS}
    assert beside == {"paper": True, "paper-v2": True, "short": False, "smoke": False}
    groups = groups_of([run for own in runs.values() for run in own])
    assert {group.protocol: group.beside_paper for group in groups} == beside


def test_a_result_from_before_the_renaming_is_read_as_what_it_is_called_now(tmp_path: Path) -> None:
    second, first = (cell(p, "cifar10", "preactresnet18", "erm") for p in ("paper-v2", "paper"))
    files = [
        write_result(tmp_path, replace(second, name="paper/cifar10-preactresnet18-erm"), 0, 0.05),
        write_result(tmp_path, replace(first, name="paper/cifar10-preactresnet18-erm-v1"), 0, 0.05),
    ]
    files[0].write_text(files[0].read_text().replace('"protocol": "paper-v2"', '"protocol": "paper"'))  # as it was then
    broken: list[UnusableFile] = []
    runs = [read_result(file) for file in files]
    assert runs_by_recipe(runs, broken).keys() == {second.name, first.name}
    assert [str(run.protocol) for run in runs] == ["paper-v2", "paper"]
    assert broken == []
    with pytest.raises(
        ValueError, match=r"of what is now paper-v2/.*, to .*paper-v2/cifar10-preactresnet18-erm-0.json"
    ):
        ResultStore(tmp_path, tmp_path).result(Job(first, 0))


def test_the_smoothed_loss_stands_beside_the_paper_s_nll_of_label_smoothing(store: ResultStore) -> None:
    recipe = cell("paper-v2", "cifar10", "preactresnet18", "label_smoothing")  # which is over all classes
    draw = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(50, 10, generator=draw, dtype=torch.float64), torch.randint(10, (50,), generator=draw)
    logits[range(50), labels] += 4.0
    ours, theirs = (label_smoothing(0.2, over=over).loss(logits, labels).item() for over in ("all", "others"))
    nll = cross_entropy(logits, labels).item()
    write_result(store.results, recipe, 0, 0.0485, test_smoothed_loss=ours, test_nll=nll)
    found = nll_of_label_smoothing(store)
    assert found.values == pytest.approx([theirs], rel=1e-12)  # over the other classes, as the published code has it
    assert found.compared == [nll]
    assert found.smoothed(3) == f"(smoothed: {theirs:.3f})"
    assert found.paper == Value(1.038, 0.003)


@pytest.mark.parametrize(("smoothed", "agree"), [(1.038, True), (1.047, False)])  # 2 · 0.003 · √1.1 is 0.0063
def test_the_smoothed_loss_is_what_agrees_or_not(store: ResultStore, smoothed: float, agree: bool) -> None:
    recipe = cell("paper", "cifar10", "preactresnet18", "label_smoothing")
    run = read_result(write_result(store.results, recipe, 0, 0.0485, test_smoothed_loss=smoothed, test_nll=0.33))
    found = cell_of(cell("paper", "cifar10", "preactresnet18", "label_smoothing"), [run], column_named("nll"))
    assert found.values == [smoothed]  # it is over the others already
    assert found.agrees is agree


def test_methods_are_compared_by_nll_and_not_by_the_smoothed_loss(store: ResultStore) -> None:
    recipe = cell("paper-v2", "cifar10", "preactresnet18", "label_smoothing")
    for seed in range(3):
        write_result(
            store.results, recipe, seed, 0.0485, test_smoothed_loss=1.03 + seed / 1000, test_nll=0.1 + seed / 1000
        )
    found = nll_of_label_smoothing(store)
    assert found.values == pytest.approx([0.08 + (9.5 - 0.02) / 9 + seed / 1000 for seed in range(3)])
    assert found.compared == pytest.approx([0.1, 0.101, 0.102])


def test_without_an_nll_the_smoothed_loss_over_the_other_classes_is_not_known(store: ResultStore) -> None:
    recipe = cell("paper-v2", "cifar10", "preactresnet18", "label_smoothing")
    write_result(store.results, recipe, 0, 0.0485, test_smoothed_loss=0.98, test_nll=None)
    found = nll_of_label_smoothing(store)
    assert (found.values, found.compared, found.smoothed(3), found.agrees) == ([], [], "", None)


def test_setting_by_setting_the_paper_s_numbers_stand_beside_its_own_settings_alone(tmp_path: Path) -> None:
    recipes = [*EXPERIMENTS["ball"]("paper-v2").recipes, *EXPERIMENTS["compute"]("paper-v2").recipes[1:]]
    recipes.append(cell("paper-v2", "cifar10", "preactresnet18", "label_smoothing"))
    files = []
    for recipe in recipes:  # the paper's are best epochs, so without curves nothing of ours stands beside them
        curves = {name: [value] * recipe.epochs for name, value in (("error", 0.05), ("nll", 0.2), ("ece", 0.01))}
        files.append(write_result(tmp_path, recipe, 0, 0.05, test_smoothed_loss=1.0, curves=curves))
    ours, twice = groups_of([read_result(file) for file in files])
    assert (ours.protocol, twice.protocol) == ("paper-v2", "paper-v2, but 400 epochs")
    beside = {row.name: {name for name, cell in row.cells.items() if cell.paper} for row in ours.rows}
    assert {"error", "nll", "ece"} <= beside["AMP (ball global)"]
    assert beside["AMP (ball tensor)"] == set()
    assert {"error", "ece"} <= beside["label smoothing"]
    assert "nll" not in beside["label smoothing"]  # there the paper has the smoothed loss
    assert not twice.beside_paper


def nll_of_label_smoothing(store: ResultStore) -> Cell:
    found = fill_table(table1("paper-v2"), read_all(store))
    (row,) = [row for row in found.rows if row.runs and row.recipe.method == "label_smoothing"]
    return row.cells[1]


def test_a_seed_counts_once_and_other_data_do_not_count(store: ResultStore) -> None:
    recipe = cell("paper", "cifar10", "preactresnet18", "erm")
    files = sorted(store.results.rglob("*-erm-*.json"))
    runs = [read_result(file) for file in files]
    assert len(runs_by_recipe([*runs, *runs], [])[recipe.name]) == 3
    broken: list[UnusableFile] = []
    other = read_result(write_result(store.results, recipe, 9, 0.01, data_sha256="f" * 64))
    assert len(runs_by_recipe([*runs, other], broken)[recipe.name]) == 3
    assert "another SHA-256" in broken[0].why


def test_a_file_that_is_not_what_its_name_says_is_left_out(store: ResultStore) -> None:
    recipe = cell("paper", "cifar10", "preactresnet18", "amp")
    path = write_result(store.results, recipe, 7, 0.01, epochs=400)
    broken: list[UnusableFile] = []
    assert runs_by_recipe([read_result(path)], broken) == {}
    assert "epochs is 400 there and 200 here" in broken[0].why


def test_rows_beside_come_where_they_belong_and_only_if_trained(store: ResultStore) -> None:
    assert all(row.name != "AMP (ball global)" for row in fill_table(table1("paper"), read_all(store)).rows)
    (other,) = [recipe for recipe in table1("paper").beside if recipe.name.endswith("-global")]
    write_result(store.results, other, 0, 0.041)
    rows = fill_table(table1("paper"), read_all(store)).rows
    place = next(number for number, row in enumerate(rows) if row.name == "AMP (ball global)")
    assert (
        rows[place].place
        == rows[place - 1].place
        == Place("cifar10", "preactresnet18", "vanilla", 0.0, validation=False)
    )
    assert rows[place].cells[0].paper is None
    (single,) = [recipe for recipe in table1("paper").beside if recipe.name.endswith("amp-fp32")]
    before = {row.recipe.method: row.cells[0].p for row in rows if row.main}
    for seed in range(3):
        write_result(store.results, single, seed, 0.041 + seed / 1000)
    rows = fill_table(table1("paper"), read_all(store)).rows
    assert sum(row.name == "AMP" and bool(row.runs) for row in rows) == 1
    assert sum(row.name == "AMP (fp32)" for row in rows) == 1
    assert {row.recipe.method: row.cells[0].p for row in rows if row.main} == before  # no part of Holm's family


def test_agreement_is_the_formula() -> None:
    paper = Value(4.0, 0.1)
    assert tolerance(3, 0.1) == pytest.approx(2 * 0.1 * (1 / 3 + 1 / 10) ** 0.5)
    edge = 4.0 + tolerance(2, 0.1)
    assert agrees([edge - 1e-9] * 2, paper)
    assert not agrees([edge + 1e-9] * 2, paper)
    assert agrees([], paper) is None
    assert agrees([4.0], Value(4.0)) is None
    assert agrees([4.0], None) is None


# ---- claims


def verdicts(store: ResultStore) -> dict[str, str]:
    return {claim.says: claim.verdict for claim in check_claims(read_all(store), "paper")}


def test_claims_are_judged_by_the_numbers(store: ResultStore) -> None:
    said = verdicts(store)
    assert said["AMP has a lower error than ERM on CIFAR-10"] == "holds"
    assert said["RMP is no better than ERM on CIFAR-10"] == "not contradicted"  # no test shows that two are the same
    assert said["AMP has the lowest error of the eight methods on CIFAR-10"] == "not trained or not measured yet"
    assert said["label smoothing worsens calibration on CIFAR-10"] == "not trained or not measured yet"
    assert said["AMP is more robust than ERM on CIFAR-10 (PGD)"] == "not trained or not measured yet"
    assert {verdict for says, verdict in said.items() if "SVHN" in says} == {"not trained or not measured yet"}
    ps = [claim.p for claim in check_claims(read_all(store), "paper") if claim.p is not None]
    assert len(ps) > 3
    assert max(ps) <= 1


@pytest.mark.parametrize(
    ("mixup", "verdict"),
    [
        ([0.0440, 0.0441, 0.0442], "holds"),
        ([0.0400, 0.0405, 0.0398], "not significantly different"),
        ([0.0300, 0.0301, 0.0302], "does not hold"),
        ([0.0300, 0.0301], "points the other way"),
    ],
)
def test_the_lowest_of_all_is_as_sure_as_against_the_hardest_other(
    tmp_path: Path, mixup: list[float], verdict: str
) -> None:
    others = {method: [0.0500, 0.0501, 0.0502] for method in METHODS if method not in ("amp", "mixup")}
    fill(tmp_path, {**others, "amp": [0.0396, 0.0397, 0.0398], "mixup": mixup})
    (found,) = [
        claim
        for claim in check_claims(read_all(ResultStore(tmp_path, tmp_path)), "paper")
        if claim.says == "AMP has the lowest error of the eight methods on CIFAR-10"
    ]
    assert found.verdict == verdict
    assert "the lowest of the others, MixUp" in found.numbers
    if verdict == "holds":
        size = len(claimed_families("paper")["paper/cifar10-preactresnet18"].comparisons)
        p = float(stats.ttest_ind([0.0396, 0.0397, 0.0398], mixup, equal_var=False).pvalue)
        assert found.p == pytest.approx(size * p, rel=1e-6)


def test_a_claim_that_the_numbers_contradict_does_not_hold(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, tmp_path)
    fill(tmp_path, {"erm": [0.040, 0.041, 0.042], "amp": [0.060, 0.061, 0.062], "rmp": [0.020, 0.021, 0.022]})
    said = verdicts(store)
    assert said["AMP has a lower error than ERM on CIFAR-10"] == "does not hold"
    assert said["RMP is no better than ERM on CIFAR-10"] == "does not hold"


def test_three_without_spread_are_not_too_few(tmp_path: Path) -> None:
    fill(tmp_path, {"erm": [0.04] * 3, "amp": [0.04] * 3})
    assert (
        verdicts(ResultStore(tmp_path, tmp_path))["AMP has a lower error than ERM on CIFAR-10"]
        == "no spread to judge by"
    )


def test_the_four_claims_of_the_paper_s_words_are_among_them() -> None:
    said = [claim.says for claim in claims("paper")]
    for data in ("SVHN", "CIFAR-10", "CIFAR-100"):
        assert f"RMP is no better than ERM on {data}" in said
        assert f"label smoothing worsens calibration on {data}" in said
    assert "flooding has the best calibration of the eight methods on CIFAR-10" in said
    assert "MixUp has a lower error than AMP with VGG16 on CIFAR-10" in said
    assert sum("AMP has a lower error than ERM with" in text for text in said) == 3 + 18  # VGG16, and table 2
    makes = (table1, table2, EXPERIMENTS["compute"], EXPERIMENTS["spiral"])
    known = {recipe.name for make in makes for recipe in make("paper").recipes}
    assert all({claim.lower, *claim.higher} <= known for claim in claims("paper"))
    assert all(len(family.comparisons) == len(set(family.comparisons)) for family in families_with({}).values())


def test_the_best_radius_is_told_when_all_were_tried(tmp_path: Path) -> None:
    recipes = [recipe for recipe in EXPERIMENTS["sweep"]("short").recipes if "cifar10-" in recipe.name]
    store = ResultStore(tmp_path, tmp_path)
    for place, recipe in enumerate(recipes):
        if place == len(recipes) - 1:
            assert best_radius(read_all(store), "short", "cifar10").verdict == NO_DATA
        changes = {"validation_error": 0.1, "validation_nll": 0.5 - 0.01 * (place == 2)}
        write_result(tmp_path, recipe, 0, 0.1, **changes, validation_ece=0.01)
    best = best_radius(read_all(store), "short", "cifar10")
    assert best.verdict == "lowest at 0.06"
    assert best_radius(read_all(store), "short", "svhn").verdict == NO_DATA


def test_the_sweep_shows_risk_error_and_calibration_and_is_said_to_be_held_out(tmp_path: Path) -> None:
    recipes = [recipe for recipe in EXPERIMENTS["sweep"]("short").recipes if "cifar10-" in recipe.name]
    for recipe in recipes:
        held_out = {"validation_error": 0.051, "validation_nll": 0.148, "validation_ece": 0.0045}
        write_result(tmp_path, recipe, 0, 0.1, **held_out, clean_train_nll=0.02)
    runs = read_all(ResultStore(tmp_path, tmp_path))
    rows = [row for row in fill_table(EXPERIMENTS["sweep"]("short"), runs).rows if row.runs]
    assert len(rows) == len(recipes)
    for row in rows:
        assert [mean(each.values) for each in row.cells] == pytest.approx([0.02, 0.148, 5.1, 0.45])
    told = deviations([run for own in runs.values() for run in own])
    assert HELD_OUT in told
    write_result(tmp_path, cell("short", "cifar10", "preactresnet18", "erm"), 0, 0.05)
    assert HELD_OUT not in deviations(read_all(ResultStore(tmp_path, tmp_path))["short/cifar10-preactresnet18-erm"])


def test_adversarial_trainings_are_compared_in_error_and_under_the_small_attacks(tmp_path: Path) -> None:
    attack = {**evaluation(0.9)["attack"], "fgsm_error": 0.14, "pgd_error": 0.145}
    for recipe in EXPERIMENTS["adversary"]("short").recipes:
        write_result(tmp_path, recipe, 0, 0.06, test_nll=0.25, attack_normalised=attack)
    rows = fill_table(EXPERIMENTS["adversary"]("short"), read_all(ResultStore(tmp_path, tmp_path))).rows
    for row in rows:
        assert [mean(each.values) for each in row.cells] == pytest.approx([6, 0.25, 14, 14.5])


def test_the_two_versions_are_compared_whole_and_one_change_at_a_time(tmp_path: Path) -> None:
    found = EXPERIMENTS["first_version"]("paper-v2")
    named = {recipe.name: recipe for recipe in found.recipes}
    for data in ("cifar10", "cifar100"):
        start = f"paper-v2/{data}-preactresnet18"
        erm, amp = (cell("paper-v2", data, "preactresnet18", method) for method in ("erm", "amp"))
        assert named.pop(erm.name) == erm
        assert named.pop(amp.name) == amp
        changed = {"crops": replace(erm, augment="vanilla_v1"), "momentum": replace(erm, nesterov=False)}
        for variant, expected in changed.items():
            assert named.pop(f"{start}-erm-v1-{variant}") == replace(expected, name=f"{start}-erm-v1-{variant}")
    assert named == {}
    for recipe in (*found.recipes, *found.beside):
        write_result(tmp_path, recipe, 0, 0.2)
    rows = fill_table(found, read_all(ResultStore(tmp_path, tmp_path))).rows
    assert [(row.name, row.cells[0].paper is not None) for row in rows if row.data == "cifar100"] == [
        ("ERM", True),
        ("AMP", True),
        ("ERM (first version's crops)", False),
        ("ERM (no Nesterov)", False),
        ("ERM (protocol paper)", True),
        ("AMP (protocol paper)", True),
    ]


def test_at_equal_compute_amp_is_tested_against_erm_at_twice_the_epochs(tmp_path: Path) -> None:
    amp, twice = EXPERIMENTS["compute"]("paper").recipes
    for seed in range(3):
        write_result(tmp_path, amp, seed, 0.050 + 0.0002 * seed)
        write_result(tmp_path, twice, seed, 0.058 + 0.0003 * seed)
    store = ResultStore(tmp_path, tmp_path)
    rows = {row.name: row for row in fill_table(EXPERIMENTS["compute"]("paper"), read_all(store)).rows}
    assert list(rows) == ["AMP", "ERM (400 epochs)"]
    assert rows["AMP"].cells[0].better is True
    assert rows["ERM (400 epochs)"].cells[0].p is None
    assert verdicts(store)["AMP has a lower error than ERM at twice the epochs on CIFAR-10"] == "holds"


def test_attacks_in_both_readings_are_in_table_3(tmp_path: Path) -> None:
    recipe = cell("short", "cifar10", "preactresnet18", "erm")
    attack = evaluation(0.9)["attack"]
    small = {**attack, "fgsm_error": 0.3, "pgd_error": 0.5}
    write_result(tmp_path, recipe, 0, 0.05, attack=attack, attack_normalised=small)
    found = fill_table(EXPERIMENTS["table3"]("short"), read_all(ResultStore(tmp_path, tmp_path)))
    (row,) = [row for row in found.rows if row.runs]
    assert [mean(each.values) for each in row.cells] == pytest.approx([30, 50, 45, 90])
    assert [each.paper for each in row.cells] == [None] * 4  # the paper's are of another length
    write_result(tmp_path, cell("paper", "cifar10", "preactresnet18", "erm"), 0, 0.05, attack_normalised=small)
    found = fill_table(EXPERIMENTS["table3"]("paper"), read_all(ResultStore(tmp_path, tmp_path)))
    (row,) = [row for row in found.rows if row.runs]
    assert [each.paper for each in row.cells] == [Value(36.06, 1.908), Value(58.88, 2.296), None, None]


def test_every_set_has_a_twin_that_is_made_on_the_spot() -> None:
    for data in SETS:
        paper, smoke = (cell(protocol, data, "vgg16", "amp") for protocol in ("paper", "smoke"))
        assert smoke.data == f"{data}-made"
        same = replace(smoke, data=data, model_settings={}, epochs=200, batch_size=50)
        speed: dict[str, Any] = {"precision": "bf16", "channels_last": True, "compile": True, "name": paper.name}
        assert replace(same, **speed) == paper
    assert json.dumps([recipe.as_json() for recipe in table1("smoke").recipes])


def test_a_row_with_averaged_weights_has_their_numbers(store: ResultStore) -> None:
    (recipe,) = [one for one in EXPERIMENTS["rivals"]("short").recipes if one.name.endswith("erm-ema")]
    write_result(store.results, recipe, 0, 0.1, average_test_error=0.05, average_test_nll=0.2, average_test_ece=0.01)
    rows = fill_table(EXPERIMENTS["rivals"]("short"), read_all(store)).rows
    (row,) = [row for row in rows if row.has_values]
    assert [cell.values for cell in row.cells] == [[pytest.approx(5.0)], [pytest.approx(0.2)], [pytest.approx(1.0)]]
