"""The paper's tables as recipes, and filled: names that mean one training, the paper's settings, honest statistics."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, get_args

import pytest
import torch
from scipy import stats
from torch.nn.functional import cross_entropy

from flatmin.regularisers import label_smoothing
from flatmin_lab.methods import resolve_settings
from flatmin_lab.recipes.paper_numbers import METHODS, Value, reported
from flatmin_lab.recipes.paper_tables import EXPERIMENTS, SETS, Protocol, cell, table1, table2
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.report.columns import column_named
from flatmin_lab.report.comparison import groups_of
from flatmin_lab.report.loader import UnusableFile, read_result
from flatmin_lab.report.paper.claims import NO_DATA, best_radius, check_claims, claims
from flatmin_lab.report.paper.deviations import HELD_OUT, deviations
from flatmin_lab.report.paper.tables import Cell, cell_of, fill_table, read_all, runs_by_recipe
from flatmin_lab.report.stats import agrees, holm, tolerance
from flatmin_lab.runs.result_store import ResultStore
from tests.support.report_files import evaluation, write_result

PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_name_is_one_training_whoever_asks_for_it(protocol: Protocol) -> None:
    known: dict[str, Recipe] = {}
    for make in EXPERIMENTS.values():
        for recipe in (*make(protocol).recipes, *make(protocol).beside):
            assert known.setdefault(recipe.name, recipe) == recipe
            assert recipe.name.startswith(f"{protocol}/")
    assert len(set(map(str, known.values()))) == len(known)


@pytest.mark.parametrize("protocol", ["paper", "short"])
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
    error = rows["erm"].cells[0]
    assert error.values == pytest.approx([5.0, 5.1, 4.95])
    assert error.paper == Value(5.02, 0.212)
    assert error.agrees
    assert rows["mixup"].cells[0].agrees
    assert rows["dropout"].cells[0].agrees is False
    assert rows["flooding"].cells[0].values == []
    assert rows["flooding"].cells[0].agrees is None
    assert all(not row.runs for row in found.rows if row.place[0] != "cifar10")


def test_each_is_tested_against_erm_with_holm_and_two_are_not_tested(store: ResultStore) -> None:
    found = fill_table(table1("paper"), read_all(store))
    rows = {row.recipe.method: row.cells[0] for row in found.rows if row.runs}
    others = ("amp", "mixup", "rmp")
    ps = {name: float(stats.ttest_ind(ERRORS[name], ERRORS["erm"], equal_var=False).pvalue) for name in others}
    for name, p in holm(ps).items():
        assert rows[name].p == pytest.approx(p, rel=1e-6)
    assert rows["amp"].better
    assert rows["rmp"].better is None
    assert rows["dropout"].p is None  # of two runs
    assert rows["dropout"].better is None


def test_the_smoothed_loss_stands_beside_the_paper_s_nll_of_label_smoothing(store: ResultStore) -> None:
    recipe = cell("paper", "cifar10", "preactresnet18", "label_smoothing")
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
    recipe = replace(recipe, settings={**recipe.settings, "over": "others"})
    run = read_result(write_result(store.results, recipe, 0, 0.0485, test_smoothed_loss=smoothed, test_nll=0.33))
    found = cell_of(cell("paper", "cifar10", "preactresnet18", "label_smoothing"), [run], column_named("nll"))
    assert found.values == [smoothed]  # it is over the others already
    assert found.agrees is agree


def test_methods_are_compared_by_nll_and_not_by_the_smoothed_loss(store: ResultStore) -> None:
    recipe = cell("paper", "cifar10", "preactresnet18", "label_smoothing")
    for seed in range(3):
        write_result(
            store.results, recipe, seed, 0.0485, test_smoothed_loss=1.03 + seed / 1000, test_nll=0.1 + seed / 1000
        )
    found = nll_of_label_smoothing(store)
    assert found.values == pytest.approx([0.08 + (9.5 - 0.02) / 9 + seed / 1000 for seed in range(3)])
    assert found.compared == pytest.approx([0.1, 0.101, 0.102])
    assert found.better  # 0.1 against some 0.2


def test_without_an_nll_the_smoothed_loss_over_the_other_classes_is_not_known(store: ResultStore) -> None:
    recipe = cell("paper", "cifar10", "preactresnet18", "label_smoothing")
    write_result(store.results, recipe, 0, 0.0485, test_smoothed_loss=0.98, test_nll=None)
    found = nll_of_label_smoothing(store)
    assert (found.values, found.compared, found.smoothed(3), found.agrees) == ([], [], "", None)


def test_setting_by_setting_the_paper_s_numbers_stand_beside_its_own_settings_alone(tmp_path: Path) -> None:
    recipes = [*EXPERIMENTS["ball"]("paper").recipes, *EXPERIMENTS["compute"]("paper").recipes[1:]]
    recipes.append(cell("paper", "cifar10", "preactresnet18", "label_smoothing"))
    files = [write_result(tmp_path, recipe, 0, 0.05, test_smoothed_loss=1.0) for recipe in recipes]
    ours, twice = groups_of([read_result(file) for file in files])
    assert (ours.protocol, twice.protocol) == ("paper", "paper, but 400 epochs")
    beside = {row.name: {name for name, cell in row.cells.items() if cell.paper} for row in ours.rows}
    assert {"error", "nll", "ece"} <= beside["AMP (ball global)"]
    assert beside["AMP (ball tensor)"] == set()
    assert {"error", "ece"} <= beside["label smoothing"]
    assert "nll" not in beside["label smoothing"]  # there the paper has the smoothed loss
    assert not twice.beside_paper


def nll_of_label_smoothing(store: ResultStore) -> Cell:
    found = fill_table(table1("paper"), read_all(store))
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
    assert all(row.name != "AMP (ball tensor)" for row in fill_table(table1("paper"), read_all(store)).rows)
    (tensor,) = [recipe for recipe in table1("paper").beside if recipe.name.endswith("-tensor")]
    write_result(store.results, tensor, 0, 0.041)
    rows = fill_table(table1("paper"), read_all(store)).rows
    place = next(number for number, row in enumerate(rows) if row.name == "AMP (ball tensor)")
    assert rows[place].place == rows[place - 1].place == ("cifar10", "preactresnet18", "vanilla", 0.0)
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
    assert said["AMP has a lower error than Dropout on CIFAR-10"] == "points the other way, too few to test"
    assert said["label smoothing worsens calibration on CIFAR-10"] == "not trained or not measured yet"
    assert said["AMP is more robust than ERM on CIFAR-10 (PGD)"] == "not trained or not measured yet"
    assert {verdict for says, verdict in said.items() if "SVHN" in says} == {"not trained or not measured yet"}
    ps = [claim.p for claim in check_claims(read_all(store), "paper") if claim.p is not None]
    assert len(ps) > 3
    assert max(ps) <= 1


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
    assert sum("flooding is better calibrated than" in text for text in said) == len(METHODS) - 1
    assert "MixUp has a lower error than AMP with VGG16 on CIFAR-10" in said
    assert sum("AMP has a lower error than ERM with" in text for text in said) == 3 + 18  # VGG16, and table 2
    known = {recipe.name for make in (table1, table2, EXPERIMENTS["compute"]) for recipe in make("paper").recipes}
    assert all({claim.lower, claim.higher} <= known for claim in claims("paper"))


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


def test_the_first_version_is_tried_whole_and_one_change_at_a_time(tmp_path: Path) -> None:
    named = {recipe.name: recipe for recipe in EXPERIMENTS["first_version"]("paper").recipes}
    for data in ("cifar10", "cifar100"):
        start = f"paper/{data}-preactresnet18"
        erm, amp = (cell("paper", data, "preactresnet18", method) for method in ("erm", "amp"))
        whole: dict[str, Any] = {"augment": "vanilla_v1", "nesterov": False, "clip_norm": 50.0}
        assert named.pop(erm.name) == erm
        assert named.pop(amp.name) == amp
        tensor = {**amp.settings, "ball": "tensor"}
        for variant, expected in {
            "erm-v1": replace(erm, **whole),
            "erm-v1-crops": replace(erm, augment="vanilla_v1"),
            "erm-v1-momentum": replace(erm, nesterov=False),
            "amp-v1": replace(amp, **whole, settings=tensor),
        }.items():
            assert named.pop(f"{start}-{variant}") == replace(expected, name=f"{start}-{variant}")
    assert named == {}
    for recipe in EXPERIMENTS["first_version"]("paper").recipes:
        write_result(tmp_path, recipe, 0, 0.2)
    rows = fill_table(EXPERIMENTS["first_version"]("paper"), read_all(ResultStore(tmp_path, tmp_path))).rows
    assert [(row.name, row.cells[0].paper is not None) for row in rows if row.data == "cifar100"] == [
        ("ERM", True),
        ("AMP", True),
        ("ERM (no Nesterov)", False),
        ("ERM (first version's crops, no Nesterov, clipped to 50)", False),
        ("ERM (first version's crops)", False),
        ("AMP (ball tensor, first version's crops, no Nesterov, clipped to 50)", False),
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
    assert [each.paper for each in row.cells] == [Value(36.06, 1.908), Value(58.88, 2.296), None, None]
    assert [each.agrees for each in row.cells] == [None] * 4  # of another length


def test_every_set_has_a_twin_that_is_made_on_the_spot() -> None:
    for data in SETS:
        paper, smoke = (cell(protocol, data, "vgg16", "amp") for protocol in ("paper", "smoke"))
        assert smoke.data == f"{data}-made"
        same = replace(smoke, data=data, model_settings={}, epochs=200, batch_size=50)
        speed: dict[str, Any] = {"precision": "bf16", "channels_last": True, "compile": True, "name": paper.name}
        assert replace(same, **speed) == paper
    assert json.dumps([recipe.as_json() for recipe in table1("smoke").recipes])
