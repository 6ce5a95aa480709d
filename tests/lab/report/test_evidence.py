"""The report on the paper's tables: ours beside the paper's, claims, plans, failures, and what was done otherwise."""

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import page_parts
import results_table
from flatmin_lab.recipes.experiments import EXPERIMENTS
from flatmin_lab.recipes.experiments.experiment import cell
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.report.loader import load_results
from flatmin_lab.report.pages.report import report_page
from flatmin_lab.report.paper.deviations import COPIES
from flatmin_lab.report.paper.evidence import evidence
from flatmin_lab.report.paper.key_results import KeyResult, key_results
from flatmin_lab.report.paper.tables import runs_by_recipe
from flatmin_lab.runs.result_store import ResultStore
from tests import ROOT
from tests.support import pages
from tests.support.pages import text_of
from tests.support.report_files import evaluation, landscape, scaled, write_result

COST: dict[str, Any] = {
    "hardware": "a machine",
    "data": "cifar10",
    "epochs": 200,
    "precision": "bf16",
    "methods": {"erm": {"ms": 1.41, "hours": 0.08}, "amp": {"ms": 2.65, "hours": 0.15}},
    "ratio": 1.88,
}


def fill(results: Path) -> Path:
    """Three runs of ERM and AMP, two of Dropout, one of AMP with the other ball, one that failed."""
    errors = {"erm": [0.050, 0.0505, 0.0498], "amp": [0.0396, 0.0401, 0.0399], "dropout": [0.048, 0.0491]}
    for method, values in errors.items():
        recipe = cell("paper", "cifar10", "preactresnet18", method)
        for seed, error in enumerate(values):
            best = [0.1] * 150 + [error - 0.001] + [0.1] * 49
            curves = {"train_loss": [0.5] * 200, "nll": [0.4] * 150 + [0.2] + [0.4] * 49, "error": best}
            curves |= {"sharpness": [0.25] * 200} if method == "amp" else {}
            more = {"attack": evaluation(0.5)["attack"], "flatness": evaluation()["flatness"]}
            first = {"landscape": landscape()} if not seed and method != "dropout" else {}
            checksum = next(iter(COPIES))
            write_result(results, recipe, seed, error, curves=curves, data_sha256=checksum, **more, **first)
    (other,) = [recipe for recipe in EXPERIMENTS["ball"]("paper").recipes if recipe.name.endswith("global")]
    write_result(results, other, 0, 0.0418, data_sha256=next(iter(COPIES)))
    hundred = cell("short", "cifar100", "preactresnet18", "erm")
    write_result(results, hundred, 0, 0.25, test_repeated=10, test_error_without_repeated=0.2502)
    planned: list[dict[str, Any]] = [{"name": "paper/cifar10-preactresnet18-erm", "seed": seed} for seed in range(4)]
    planned.append({"name": "paper/cifar10-vgg16-erm", "seed": 0, "withdrawn": "it would take too long"})
    given_up = [{"name": "paper/cifar10-preactresnet18-amp", "seed": 9, "why": "in its first minute"}]
    (results / "planned.json").write_text(json.dumps({"runs": planned, "broken_off": given_up}))
    failed = {"name": "paper/cifar10-preactresnet18-erm", "seed": 3, "error": "the loss of step 9 is nan <b>"}
    (results / "paper" / "cifar10-preactresnet18-erm-3.failed.json").write_text(json.dumps(failed))
    (results / "paper" / "cost-a-machine-7763.json").write_text(json.dumps(COST))
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("evidence") / "results")


@pytest.fixture(scope="module")
def page(results: Path) -> str:
    return report_page(load_results([results]))


def test_a_comparison_is_shown_for_the_data_of_which_both_sides_are_trained(tmp_path: Path) -> None:
    def table() -> str:
        return (
            text_of(report_page(load_results([tmp_path])))
            .partition("Float32 and bfloat16")[2]
            .partition("How to read the tables Mean")[0]
        )

    recipes = EXPERIMENTS["precision"]("paper").recipes
    for recipe in recipes[:-1]:
        write_result(tmp_path, recipe, 0, 0.05)
    assert "CIFAR-10, PreActResNet18" in table()
    assert "AMP (fp32) 1 5.00" in table()
    assert "CIFAR-100" not in table()
    write_result(tmp_path, recipes[-1], 0, 0.05)
    assert "ERM (fp32) 1 5.00" in table().partition("CIFAR-100, PreActResNet18")[2]


def test_the_two_versions_of_the_published_code_stand_in_one_table(tmp_path: Path) -> None:
    found = EXPERIMENTS["first_version"]("paper-v2")
    for recipe in (*found.recipes, *found.beside):
        if recipe.data == "cifar100":
            write_result(tmp_path, recipe, 0, 0.2431)
    text = text_of(report_page(load_results([tmp_path])))
    table = text.partition("The two versions of the published code")[2].partition("How to read the tables Mean")[0]
    assert "CIFAR-10, " not in table
    assert "CIFAR-100, PreActResNet18 ERM 1 24.31 24.31 ± 0.30 not contradicted" in table
    assert "ERM (no Nesterov) 1 24.31" in table
    assert "ERM (first version's crops) 1 24.31" in table
    assert "AMP (protocol paper) 1 24.31 21.51 ± 0.31 no" in table
    assert "paper-v2, but no Nesterov" in text  # of the setting, and not of a method


def test_ours_stand_beside_the_paper_s_with_their_agreement(page: str) -> None:
    text = text_of(page)
    assert "The paper's tables, protocol “paper”" in text
    assert "Table 1: test error and NLL of eight methods" in text
    assert "ERM 3 5.01 ± 0.04" in text
    assert "at the best test epoch 3 4.91 ± 0.04 5.02 ± 0.21 yes" in text
    assert "AMP 3 3.99 ± 0.03 ▼" in text
    assert "at the best test epoch 3 3.89 ± 0.03 3.97 ± 0.09 yes" in text
    assert "Dropout 2 4.80, 4.91" in text  # two are shown singly
    assert "AMP (ball global) 1 4.18" in text
    assert "protocol “short”" in text
    assert "24.31 ± 0.30" not in text  # of another length
    assert "The paper's numbers are not shown here, because they are all for 200 epochs." in text
    assert "VGG16" not in text.partition("The paper's tables, protocol")[2].replace("with VGG16 on", "").replace(
        "(VGG16: after", ""
    )  # nothing of it was trained, but the paper says something
    assert "method n error, % paper agree? NLL paper agree?" in text
    assert "method n ECE, % paper CIFAR-10" in text  # without a standard deviation agreement is unknown
    assert "the authors' slides" in text
    assert "Settings of PreActResNet18: Dropout (rate 0.1); AMP (ε 0.5, ζ 1, N 1, ball tensor, norm l2)." in text


def test_five_sentences_come_first_and_are_made_from_the_numbers(page: str) -> None:
    first = re.findall(r'<ul class="key">(.*?)</ul>', page, re.DOTALL)[0]
    assert page.index('<ul class="key">') < page.index("<nav") < page.index("<table")
    agrees, beside, differs, shorter, missing = (text_of(one) for one in re.findall(r"<li>(.*?)</li>", first))
    claims = "AMP has a lower error, a lower NLL and better calibration than ERM on CIFAR-10"
    holds = f"{claims} (error, %: 3.99 ± 0.03 and 5.01 ± 0.04, n = 3 and 3)"
    assert agrees.startswith("Agrees with the paper. At the paper's length of 200 epochs")
    assert holds in agrees
    assert "comparisons with the paper's means" in beside
    assert "No tested claim is contradicted" in differs
    assert "No claim has been tested with shorter runs." in shorter
    assert "including all on SVHN" in missing


def test_sentences_turn_with_the_numbers(tmp_path: Path) -> None:
    errors = {"erm": [0.0396, 0.0401, 0.0399], "amp": [0.050, 0.0505, 0.0498]}
    for method, values in errors.items():
        for seed, error in enumerate(values):
            write_result(tmp_path, cell("paper", "cifar10", "preactresnet18", method), seed, error)
    told = {result.topic: result.sentence for result in key_results_of(tmp_path)}
    assert "none of" in told["Agrees with the paper"]
    assert told["Contradicted or undecided"].startswith("Contradicted: AMP has a lower error, a lower NLL")
    assert "do not agree: ERM on CIFAR-10 under “paper”" in told["Compared with the paper's numbers"]


def test_with_shorter_runs_alone_nothing_is_said_of_the_paper_s_length(tmp_path: Path) -> None:
    for method, error in (("erm", 0.06), ("amp", 0.05)):
        for seed in range(3):
            write_result(tmp_path, cell("short", "cifar10", "preactresnet18", method), seed, error + 0.0001 * seed)
    told = {result.topic: result.sentence for result in key_results_of(tmp_path)}
    assert "nothing can be tested yet" in told["Agrees with the paper"]
    assert "With 60 epochs (“short”)" in told["With shorter runs"]
    assert "claims hold: AMP has a lower error, a lower NLL" in told["With shorter runs"]


def test_what_temperature_scaling_leaves_is_a_table_of_those_that_have_it(tmp_path: Path) -> None:
    for method, error in (("erm", 0.06), ("amp", 0.05)):
        for seed in range(3):
            recipe = cell("short", "cifar10", "preactresnet18", method)
            write_result(tmp_path, recipe, seed, error, scaled=scaled(nll=3 * error + 0.001 * seed, ece=error / 10))
    write_result(tmp_path, cell("short", "cifar10", "preactresnet18", "mixup"), 0, 0.055)  # from before it was measured
    found = evidence(load_results([tmp_path]), [])
    assert found is not None
    (table,) = (one for one in found.protocols[0].tables if one.experiment.name == "temperature")
    assert [row.name for row in table.rows] == ["ERM", "AMP"]
    assert [column.label for column in table.columns] == ["NLL, scaled", "ECE, scaled,\u00a0%", "temperature"]
    erm, amp = ([cell.compared for cell in row.cells] for row in table.rows)
    assert erm == [pytest.approx([0.18, 0.181, 0.182]), pytest.approx([0.6] * 3), [1.5] * 3]
    assert amp[0] == pytest.approx([0.15, 0.151, 0.152])


def key_results_of(results: Path) -> list[KeyResult]:
    found = evidence(load_results([results]), [])
    assert found is not None
    return key_results(found)


def test_what_was_not_trained_and_single_settings_are_folded_away(page: str) -> None:
    folded = [text_of(part) for part in re.findall(r"<details.*?</details>", page, re.DOTALL)]
    (untrained,) = [part for part in folded if part.startswith("Not trained: label smoothing") and "NLL" in part]
    assert "MixUp 4.09 ± 0.12 0.198 ± 0.004" in untrained
    assert "4.09 ± 0.12" not in text_of(re.sub(r"<details.*?</details>", "", page, flags=re.DOTALL))
    for section in re.findall(r'(.{300})<section id="group-', page, re.DOTALL):
        assert '<details class="setting">' in section


def test_a_mark_names_its_family_and_links_to_it(page: str) -> None:
    marked = re.findall(r'▼</span><small>(.*?)<a href="#([^"]+)" title="([^"]+)">(.*?)</a>', page)
    assert {name for _, _, name, _ in marked} == {"paper/cifar10-preactresnet18"}
    assert {text for _, _, _, text in marked} == {"CIFAR-10, 14 tests"}
    for target in re.findall(r'href="#([^"]+)"', page):
        assert f'id="{target}"' in page


def test_too_few_runs_are_said_once_a_protocol(page: str) -> None:
    claims = text_of(page).partition("What the paper says")[2].partition("Table 1")[0]
    assert claims.count("oo few") <= 1


WIDTHS = """
document.querySelectorAll("details").forEach((part) => (part.open = true));
setTimeout(() => {
  const scrolls = [...document.querySelectorAll("body *")].filter((e) =>
    !e.closest("svg") && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX === "auto");
  const said = {page: document.documentElement.scrollWidth, window: window.innerWidth, scrolls: scrolls.length};
  said.drawn = [...document.querySelectorAll("figure.surface canvas")].map((c) => Boolean(c.dataset.drawn));
  document.body.innerHTML = "<pre id=said>" + JSON.stringify(said) + "</pre>";
}, 300);
"""


def test_a_phone_never_scrolls_sideways_and_what_is_unfolded_is_drawn(page: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8")
    visit = pages.visit(path, WIDTHS, width=390)
    said = json.loads(html.unescape(re.findall(r'<pre id="said">(.*?)</pre>', visit.dom, re.DOTALL)[0]))
    assert visit.console == []
    assert said["page"] <= said["window"]
    assert said["scrolls"] == 0
    assert said["drawn"]
    assert all(said["drawn"])


def test_figure_11_stands_beside_ours(page: str) -> None:
    told = text_of(page).partition("Figure 11: the training loss, CIFAR-10")[2].partition("Means over")[0]
    heads = "ERM, epochs 61 to 99 ERM, epochs 101 to 110 AMP at θ + Δ, epochs 181 to 200"
    ours = "ours 0.5000 ± 0.0000 0.5000 ± 0.0000 0.7500 ± 0.0000"
    assert told.split() == f"{heads} {ours} the paper 0.1772 0.0290 0.0400".split()


def test_figure_8_stands_beside_ours(tmp_path: Path) -> None:
    for recipe in EXPERIMENTS["sweep"]("short").recipes:
        if recipe.data == "cifar10":
            radius = recipe.settings.get("epsilon", 0.0)
            held_out = {"validation_error": 0.05, "validation_nll": 0.1 + radius, "validation_ece": 0.01}
            write_result(tmp_path, recipe, 0, 0.1, **held_out)
    text = text_of(report_page(load_results([tmp_path])))
    told = text.partition("Figure 8: the NLL over the radius, CIFAR-10")[2].partition("N = 2")[0]
    assert "ERM ε = 0.02 ε = 0.03 ε = 0.04 ε = 0.06" in told
    assert "ours, held-out images 0.100 0.130 0.160 0.220 0.350" in " ".join(told.split())
    assert "the paper, test images, 200 epochs 0.235 0.145 0.127 0.123 0.129" in " ".join(told.split())


def test_settings_are_told_by_network_and_augmentation(tmp_path: Path) -> None:
    for augment in ("vanilla", "cutout"):
        write_result(tmp_path, cell("paper", "cifar10", "wideresnet28_10", "amp", augment=augment), 0, 0.03)
    text = text_of(report_page(load_results([tmp_path])))
    rest = "N 1, ball tensor, norm l2"
    assert f"Settings of WideResNet-28-10: AMP (ε 0.5, ζ 1, {rest})." in text
    assert f"WideResNet-28-10 with Cutout: AMP (ε 0.3, ζ 0.5, {rest})." in text


def test_claims_plans_failures_and_costs_are_told(page: str) -> None:
    text = text_of(page)
    assert "AMP has a lower error than ERM on CIFAR-10 holds" in text
    assert "AMP has a lower error than ERM on CIFAR-10 (" not in text
    assert "Tested together: CIFAR-10 with PreActResNet18, 14 comparisons" in text
    assert "1 run was aborted, or trained by code that was wrong; its numbers are not used" in text
    assert "in its first minute" in text.partition("aborted")[2]
    assert "5 training runs were planned and recorded before they ran; 3 of them are done, 1 failed, 1 was with" in text
    assert "it would take too long" in text
    assert "are not done yet" not in text  # one failed, three are done
    assert "the loss of step 9 is nan <b>" in text
    assert "<b>" not in page
    assert "200 epochs of CIFAR-10, protocol “paper”, bf16 form not recorded 1.41 2.65 1.88 0.08 0.15 1.88" in text
    assert (
        "The paper, V100: training for 200 epochs of CIFAR-10, PreActResNet18 form of the step not stated 2.4" in text
    )
    assert "left out" not in text


def test_what_was_done_otherwise_follows_the_files(page: str, results: Path, tmp_path: Path) -> None:
    text = text_of(page)
    assert "Trials: 1 to 3 of each; the paper has 10." in text
    assert re.search(r"Not trained or not measured yet: \d+ more", text)
    assert "MixUp has a lower error than AMP with VGG16 on CIFAR-10" in text  # by name
    assert "86 training and 23 test images of CIFAR-10 are JPEG copies" in text
    assert "SVHN was cropped anew" not in text
    assert "Precision: bf16." in text
    assert "60 epochs instead of 200" in text
    assert "10 test images of CIFAR-100 are also in its training set" in text
    assert "at most 0.020 percentage points" in text
    assert "error, % without repeated images, % NLL" in text
    assert "ERM 1 25.00 25.02" in text
    only = tmp_path / "only"
    write_result(only, cell("paper", "cifar10", "preactresnet18", "erm"), 0, 0.05)
    alone = text_of(report_page(load_results([only])))
    assert "60 epochs instead of 200" not in alone
    assert "JPEG copies" not in alone


def test_p_values_of_no_family_are_said_to_be_uncorrected(page: str, tmp_path: Path) -> None:
    """Those of the paper's tables have a family; of the transformer's, only those with enough runs have any p."""
    said = "belong to no fixed family of comparisons"
    assert said not in text_of(page)
    recipes = [one for one in EXPERIMENTS["vit"]("short").recipes if one.method in ("erm", "amp")][:2]
    for seeds, is_said in ((1, False), (3, True)):
        for recipe, error in zip(recipes, (0.20, 0.18), strict=True):
            for seed in range(seeds):
                write_result(tmp_path, recipe, seed, error + 0.001 * seed, data_sha256="same")
        text = text_of(report_page(load_results([tmp_path])))
        assert (said in text) == is_said
        assert ("uncorrected for the number of measures and settings" in text) == is_said


def test_runs_of_one_s_own_have_no_such_part(tmp_path: Path) -> None:
    recipe = cell("paper", "cifar10", "preactresnet18", "erm")
    write_result(tmp_path, replace(recipe, name="mine"), 0, 0.05)
    text = text_of(report_page(load_results([tmp_path])))
    assert "The paper's tables" not in text
    assert "differ from the paper's" not in text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("planned.json", {"runs": [{"name": 3, "seed": 0}]}),
        ("planned.json", {"runs": "all"}),
        ("paper/x-0.failed.json", {"name": "x", "seed": "0", "error": "e"}),
        ("paper/cost-x.json", {**COST, "methods": {"erm": {}}}),
        ("paper/cost-x.json", {**COST, "ratio": "much"}),
        ("paper/cost-x.json", {**COST, "protocol": 7}),
        ("paper/cost-y.json", {**COST, "methods": {**COST["methods"], "erm": {"ms": 1.41, "hours": 0}}}),
        ("paper/cost-x.json", {key: value for key, value in COST.items() if key != "precision"}),
    ],
    ids=str,
)
def test_a_damaged_file_is_named_and_left_out(tmp_path: Path, name: str, content: dict[str, Any]) -> None:
    write_result(tmp_path, cell("paper", "cifar10", "preactresnet18", "erm"), 0, 0.05)
    (tmp_path / name).write_text(json.dumps(content))
    found = load_results([tmp_path])
    assert [broken.path.name for broken in found.unusable] == [Path(name).name]
    assert "Table 1" in text_of(report_page(found))


@pytest.mark.parametrize("content", [b"", b'{"data": "cif', b'{"a": 1}', b"[]"])
def test_a_result_that_cannot_be_read_does_not_vanish(tmp_path: Path, content: bytes) -> None:
    write_result(tmp_path, cell("paper", "cifar10", "preactresnet18", "erm"), 0, 0.05)
    (tmp_path / "paper" / "cifar10-preactresnet18-erm-1.json").write_bytes(content)
    found = load_results([tmp_path])
    assert [broken.path.name for broken in found.unusable] == ["cifar10-preactresnet18-erm-1.json"]
    assert "1 file was left out" in text_of(report_page(found))


def test_the_two_readings_of_the_ball_have_a_table_of_their_own(page: str) -> None:
    assert "The two readings of the ball" in text_of(page)
    assert "Float32 and bfloat16" not in text_of(page)  # one of two


@pytest.mark.parametrize(
    ("part", "content"),
    [
        ("curves", {"nll": [0.1]}),
        ("curves", {"nll": ["x"] * 200}),
        ("landscape", {"axis": [0]}),
        ("boundary", {"side": [0, 1, 2], "shares": [[0.5, 0.5]]}),
        ("boundary", {"side": [0, 1, 2], "shares": [[0.5, 2.0, 0.5]] * 3}),
        ("attack", {"fgsm_error": 3}),
    ],
    ids=str,
)
def test_a_part_of_a_result_that_makes_no_sense_is_left_out_alone(
    tmp_path: Path, part: str, content: dict[str, Any]
) -> None:
    recipe = cell("paper", "cifar10", "preactresnet18", "erm")
    write_result(tmp_path, recipe, 0, 0.05, **{part: content})
    found = load_results([tmp_path])
    assert len(found.runs) == 1
    assert len(found.unusable) == 1
    assert "is not used" in found.unusable[0].why


def test_the_page_says_that_the_spiral_was_chosen_where_there_is_one(page: str, tmp_path: Path) -> None:
    write_result(tmp_path, EXPERIMENTS["spiral"]("paper").recipes[0], 0, 0.05)
    chosen = "The problem and AMP's radius were chosen because the two methods differ there"
    assert chosen in text_of(report_page(load_results([tmp_path])))
    assert chosen not in text_of(page)


def test_a_boundary_is_drawn_for_the_spiral(tmp_path: Path) -> None:
    for recipe in EXPERIMENTS["spiral"]("short").recipes:
        side = [-1.2, -0.4, 0.4, 1.2]
        shares = [[abs(x) / 2 for x in side] for _ in side]
        write_result(tmp_path, recipe, 0, 0.05, boundary={"side": side, "shares": shares})
    page = report_page(load_results([tmp_path]))
    assert "Boundaries" in page
    assert "AMP: 5.0 % test error" in page


def test_the_page_fits_a_window_and_a_phone(page: str, tmp_path: Path) -> None:
    """Two frames of these widths, in a page of the test's own."""
    inside = html.escape(page)
    frames = "".join(f'<iframe width="{width}" height="900" srcdoc="{inside}"></iframe>' for width in (1100, 380))
    holder = tmp_path / "holder.html"
    holder.write_text(f"<html><head></head><body>{frames}</body></html>", encoding="utf-8")
    script = """setTimeout(() => {
      const inside = [...document.querySelectorAll("iframe")].map((frame) => frame.contentDocument.documentElement);
      const apart = inside.map((root) => root.scrollWidth - root.clientWidth);
      document.body.innerHTML = "<pre id=said>" + JSON.stringify(apart) + "</pre>";
    }, 1000);"""
    said = re.search(r'<pre id="said">(.*?)</pre>', pages.visit(holder, script).dom)
    assert said is not None
    assert json.loads(said[1]) == [0, 0]


# ---- the results that are kept here


KEPT = ROOT / "results"


def test_every_kept_result_is_what_it_says_and_was_planned() -> None:
    found = load_results([KEPT])
    assert found.unusable == []
    broken: list[Any] = []
    runs = runs_by_recipe(found.runs, broken)
    assert broken == []
    assert sum(map(len, runs.values())) == len(found.runs) > 0
    planned = set(found.planned)
    for name, own in runs.items():
        for run in own:
            assert (name, run.result["seed"]) in planned
            assert run.path == ResultStore(KEPT, KEPT).file(Job(_recipe(name), run.result["seed"]))
            assert run.result["commit"]
            assert run.result["hardware"]
            assert "smoke" not in name


def _recipe(name: str) -> Any:
    protocol: Any = name.partition("/")[0]
    experiments = (make(protocol) for make in EXPERIMENTS.values())
    return next(recipe for experiment in experiments for recipe in experiment.recipes if recipe.name == name)


@pytest.mark.parametrize("part", results_table.MAKERS)
def test_the_pages_have_the_tables_of_these_results(part: str) -> None:
    make = results_table.MAKERS[part]
    text = page_parts.PAGES[part].read_text()
    assert page_parts.put_into(text, part, make(KEPT)) == text, "run python benchmarks/results_table.py"


def test_the_table_needs_results(tmp_path: Path) -> None:
    for make in results_table.MAKERS.values():
        with pytest.raises((ValueError, FileNotFoundError), match="there is no "):
            make(tmp_path)
