"""The report: what it says is true of the files it is made of, whatever else lies among them."""

import base64
import html
import json
import math
import re
import shlex
import shutil
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from scipy import stats

from flatmin_lab.cli.process.signals import StopSignal
from flatmin_lab.data import load
from flatmin_lab.methods import METHODS
from flatmin_lab.recipes.defaults import default_recipe
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.report.comparison import Group, groups_of
from flatmin_lab.report.figures.style import DrawnFigure
from flatmin_lab.report.loader import load_results
from flatmin_lab.report.pages.report import report_page
from flatmin_lab.runs.events import Stopped
from flatmin_lab.runs.result import build_result
from tests.support import pages
from tests.support.comparisons import comparison_of, finish, saved
from tests.support.pages import text_of
from tests.support.pipes import pipe
from tests.support.processes import flatmin
from tests.support.report_files import BINS, ERRORS, evaluation, landscape, result, scaled, spectrum, write, write_all


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs that a test may change."""
    return write_all(tmp_path / "runs", landscapes=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of those runs as they are."""
    return report_page(load_results([write_all(tmp_path_factory.mktemp("whole") / "runs", landscapes=True)]))


def page_of(*paths: Path) -> str:
    """The page without what takes longest, drawing its figures: `whole` has them, and test_figures.py tests them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda _, file, **__: file.write('<svg viewBox="0 0 1 1"></svg>'))
        return report_page(load_results(paths))


def only_group(runs: Path) -> Group:
    (group,) = groups_of(load_results([runs]).runs)
    return group


# ---- what it says


def test_the_words_and_the_table_are_made_from_the_numbers(whole: str) -> None:
    shown = text_of(whole)
    assert "PreActResNet18 on CIFAR-10" in shown
    assert "Test error: AMP 4.00 %, ERM 5.05 %; significantly lower (n = 4 and 4, p < 0.001)." in shown
    assert "AMP took 2.00 times as much time as ERM." in shown
    assert "5.05 ± 0.13" in shown
    assert "Rise to the worst loss: AMP 0.300, ERM 0.300; the seeds do not differ, so there is no test" in shown
    assert "L∞, radius 4/255; PGD: 10 steps of 1/255, no random start; 100 test examples" in shown


def test_the_settings_are_said_where_all_rows_have_them(tmp_path: Path) -> None:
    for number, radius in enumerate((0.5, 0.1)):
        options = {"epsilon": radius, "inner_lr": 1.0}
        write(tmp_path / f"amp-{number}", result("amp", 0, 0.04, settings=options))
    write(tmp_path / "adversarial", result("adversarial", 0, 0.05, settings={"epsilon": 1 / 255}))
    shown = text_of(page_of(tmp_path))
    assert "Settings: AMP (ζ 1); adversarial (ε 0.00392157)." in shown
    assert "AMP (ε 0.5)" in shown  # the row's own name


def test_a_title_says_how_many_labels_are_wrong_even_if_it_is_the_only_one(tmp_path: Path) -> None:
    write(tmp_path / "vgg", result("erm", 0, 0.05, model="vgg16", label_noise=0.2))
    assert "VGG16 on CIFAR-10, 20\u00a0% of the labels wrong" in page_of(tmp_path)


def test_groups_of_one_network_are_told_apart_by_their_titles(tmp_path: Path) -> None:
    held_out = {"validation_error": 0.06, "validation_nll": 0.2, "validation_ece": 0.03, "validation": True}
    write(tmp_path / "short", result("erm", 0, 0.06))
    write(tmp_path / "long", result("erm", 0, 0.05, epochs=6))
    write(tmp_path / "tuned", result("erm", 0, 0.06, **held_out))
    write(tmp_path / "cut", result("erm", 0, 0.05, augment="cutout"))
    write(tmp_path / "vgg", result("erm", 0, 0.05, model="vgg16"))
    write(tmp_path / "clipped", result("erm", 0, 0.05, model="vgg16", clip_norm=1.5, batch_size=1024))
    own = {"model": "/home/me/nets/mine.py:Net", "files": {"model": "ab"}}
    write(tmp_path / "own", result("erm", 0, 0.05, **own))
    write(tmp_path / "adamw", result("erm", 0, 0.05, **own, optimizer="adamw"))
    write(tmp_path / "mine", result("erm", 0, 0.05, **own, optimizer="/home/me/opt.py:make_optimizer"))
    write(tmp_path / "changed", result("erm", 0, 0.05, **{**own, "files": {"model": "0123456789"}}))
    for checksum in ("aaaaaaaaaa", "bbbbbbbbbb"):
        write(tmp_path / checksum, result("erm", 0, 0.05, data="/my/pictures", data_sha256=checksum))
    titles = [html.unescape(title) for title in re.findall(r"<h2>(.*?)</h2>", page_of(tmp_path))]
    assert sorted(titles) == [
        "PreActResNet18 on CIFAR-10, 3 epochs, Cutout",
        "PreActResNet18 on CIFAR-10, 3 epochs, crops and flips",
        "PreActResNet18 on CIFAR-10, 3 epochs, on a held-out tenth, crops and flips",
        "PreActResNet18 on CIFAR-10, 6 epochs, crops and flips",
        "PreActResNet18 on pictures, data with SHA-256 aaaaaaa…",
        "PreActResNet18 on pictures, data with SHA-256 bbbbbbb…",
        "VGG16 on CIFAR-10, batch size 1024, clip norm 1.5",
        "VGG16 on CIFAR-10, batch size 50",
        "mine.py:Net on CIFAR-10, file of the model with SHA-256 0123456…",
        "mine.py:Net on CIFAR-10, file of the model with SHA-256 ab…",
        "mine.py:Net on CIFAR-10, optimizer adamw",
        "mine.py:Net on CIFAR-10, optimizer opt.py:make_optimizer",
    ]


def test_the_papers_values_stand_beside_ours(whole: str) -> None:
    shown = text_of(whole)
    assert "best epoch 4.00 ± 0.08, paper 3.97 ± 0.09" in shown  # AMP's error
    assert "best epoch 1.000 ± 0.000, paper 0.239 ± 0.009" in shown  # ERM's NLL
    assert "best epoch 3.00 ± 0.00, paper 1.25" in shown  # AMP's ECE
    assert "paper 49.7 ± 0.8" not in shown  # under PGD, of another radius
    assert "means over 10 runs of 200 epochs" in shown


def test_the_papers_best_epoch_is_never_beside_our_last_one(tmp_path: Path) -> None:
    """Without curves there is no such epoch; under attack the paper's is unknown; averages are not the paper's."""
    small = {"attack_normalised": evaluation(0.4)["attack"]}
    write(tmp_path / "erm-0", result("erm", 0, 0.05), evaluation=evaluation(0.5, **small))
    write(tmp_path / "erm-1", result("erm", 1, 0.05), evaluation=evaluation(0.5, **small))
    (tmp_path / "erm-1" / "metrics.jsonl").unlink()
    write(tmp_path / "amp", result("amp", 0, 0.04))
    (tmp_path / "amp" / "metrics.jsonl").unlink()
    write(tmp_path / "average", {**result("erm", 0, 0.05), **AVERAGED})
    erm, average, amp = only_group(tmp_path).rows
    assert [(row.name, row.cells["error"].best_epoch) for row in (erm, amp)] == [("ERM", [5.0]), ("AMP", [])]
    assert erm.cells["error"].paper is not None
    for row in (amp, average):
        assert all(cell.paper is None for name, cell in row.cells.items() if name in ("error", "nll", "ece"))
    pgd = erm.cells["pgd_normalised"]
    assert (pgd.best_epoch, pgd.paper is None) == ([], False)
    shown = text_of(page_of(tmp_path))
    assert "best epoch 5.00 (n = 1), paper 5.02 ± 0.21" in shown
    assert "40.0, 40.0paper 58.9 ± 2.3" in shown.replace(" paper", "paper")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a sweep: result files of a held-out part, nothing attacked, four radii of which the third is best."""
    folder = tmp_path_factory.mktemp("swept")
    for radius, error in {0.0: 0.061, 0.03: 0.059, 0.06: 0.055, 0.12: 0.051, 0.25: 0.056}.items():
        found = {"validation_error": error, "validation_nll": 4 * error, "validation_ece": 0.03, "validation": True}
        options = {"settings": {"epsilon": radius}} if radius else {}
        kept = {"clean_train_nll": radius, "at_once": 4, **found, **options}
        (folder / f"{radius}.json").write_text(json.dumps(result("amp" if radius else "erm", 0, 0.5, **kept)))
    return page_of(folder)


def test_the_papers_numbers_are_of_the_test_set_and_not_beside_others(swept: str, whole: str) -> None:
    shown = text_of(swept)
    assert re.findall(r"paper \d", shown) == []
    assert "200 epochs" not in shown
    assert "◇" not in shown
    assert "◇: the paper's value" in text_of(whole)


def test_of_result_files_only_what_was_measured_is_shown(swept: str, whole: str) -> None:
    shown, all_shown = text_of(swept), text_of(whole)
    assert "Robustness and flatness" not in shown
    assert "seconds" not in shown  # four at once: they say nothing about the method
    assert "Calibration error and robustness" not in shown
    assert "Calibration error and robustness" in all_shown
    assert "Robustness and flatness" in all_shown


def test_what_is_always_measured_is_shown_where_it_is_not_finite(tmp_path: Path) -> None:
    write(tmp_path / "erm", result("erm", 0, 0.9, test_nll=None, test_ece=None, data="digits"))
    shown = text_of(page_of(tmp_path))
    assert "error, % NLL ECE, %" in shown
    assert "90.00 not finite not finite" in shown


def test_the_best_radius_is_in_the_words_and_drawn(swept: str) -> None:
    assert "Validation error: AMP (ε 0.12) 5.10 %, ERM 6.10 %" in text_of(swept)
    assert "Reliability of AMP (ε 0.12), n = 1" in swept
    assert "Reliability of AMP (ε 0.03)" not in swept
    assert "What the radius does" in text_of(swept)
    assert re.search(r'<figure class="panels"><svg [^>]*aria-label="The loss over the radius', swept)
    assert "of several with as many, the one with the lowest mean validation error" in text_of(swept)


def test_of_several_settings_the_one_with_the_most_trainings_is_drawn(tmp_path: Path) -> None:
    for seed, (radius, error) in enumerate([(0.5, 0.05), (0.5, 0.05), (0.1, 0.03)]):
        write(tmp_path / f"{seed}", result("amp", seed, error, settings={"epsilon": radius}))
    page = page_of(tmp_path)
    assert "Reliability of AMP (ε 0.5), n = 2" in page
    assert "Reliability of AMP (ε 0.1)" not in page


def test_a_figure_shows_what_was_measured_and_plain_runs_rather_than_averaged_ones(tmp_path: Path) -> None:
    """Averaged weights have the lower error and were not attacked: every method has its bar all the same."""
    for seed in range(3):
        write(tmp_path / f"erm-{seed}", result("erm", seed, 0.06), evaluation=evaluation(0.6))
        write(tmp_path / f"average-{seed}", {**result("erm", seed, 0.06), **AVERAGED, "average_test_error": 0.01})
        write(tmp_path / f"amp-{seed}", result("amp", seed, 0.05), evaluation=evaluation(0.5))
        other = result("amp", seed, 0.04, settings={"epsilon": 0.1})
        write(tmp_path / f"other-{seed}", other)
    page = page_of(tmp_path)
    assert "Reliability of ERM, n = 3" in page
    links = re.findall(r'download="[^"]*-(ece|pgd_error)\.json" href="data:application/json;base64,([^"]*)"', page)
    bars = {name: json.loads(base64.b64decode(link))["values"] for name, link in links}
    assert bars["pgd_error"] == {"erm": [60.0] * 3, "amp": [50.0] * 3}
    assert bars["ece"] == {"erm": [3.0] * 3, "amp": [2.0] * 3}


def test_seconds_of_several_at_once_are_not_called_infinite(tmp_path: Path) -> None:
    write(tmp_path / "erm", result("erm", 0, 0.05))
    write(tmp_path / "amp", result("amp", 0, 0.04, at_once=4))
    assert "not finite" not in text_of(page_of(tmp_path))


def test_runs_beside_others_on_a_cpu_have_cpu_seconds_and_passes_in_place_of_seconds(tmp_path: Path) -> None:
    late = {"epsilon": 0.5, "inner_iter": 1, "start": 0.5}
    for seed in range(3):
        write(tmp_path / f"erm-{seed}", result("erm", seed, 0.05, at_once=2, cpu_seconds=4.0))
        write(tmp_path / f"amp-{seed}", result("amp", seed, 0.04, at_once=2, cpu_seconds=6.0, settings=late))
    erm, amp = only_group(tmp_path).rows
    assert [(row.cells["seconds"].values, row.cells["passes"].values[0]) for row in (erm, amp)] == [([], 1), ([], 1.5)]
    shown = text_of(page_of(tmp_path))
    assert "CPU seconds passes a step" in shown
    assert "AMP took 1.50 times as much CPU time as ERM." in shown


def test_where_labels_were_wrong_it_says_how_many_were_memorised(tmp_path: Path) -> None:
    assert "memorised" not in text_of(page_of(write(tmp_path / "right", result("erm", 0, 0.05))))
    for seed, memorised in enumerate((0.5, 0.6)):
        write(tmp_path / f"wrong/{seed}", result("erm", seed, 0.05, label_noise=0.2, memorised=memorised))
    averaged = {"ema": 0.9, "average_test_error": 0.04, "average_memorised": 0.25}
    write(tmp_path / "wrong/average", result("erm", 0, 0.05, label_noise=0.2, memorised=0.5, **averaged))
    erm, average = only_group(tmp_path / "wrong").rows
    assert (erm.cells["memorised"].values, average.cells["memorised"].values) == ([50, 60], [25])
    assert "wrong labels memorised, %" in text_of(page_of(tmp_path / "wrong"))


def test_a_run_alone_has_its_seconds(whole: str) -> None:
    shown = text_of(whole)
    assert "CPU seconds" not in shown
    assert "passes a step" not in shown


@pytest.mark.parametrize(("seeds", "changes"), [(2, {}), (4, {"resumed": 1})])
def test_what_amp_costs_is_not_said_of_few_runs_nor_of_resumed_ones(
    tmp_path: Path, seeds: int, changes: dict[str, Any]
) -> None:
    for seed in range(seeds):
        write(tmp_path / f"erm-{seed}", result("erm", seed, 0.05))
        write(tmp_path / f"amp-{seed}", result("amp", seed, 0.04, **(changes if seed == 0 else {})))
    assert "AMP took" not in text_of(page_of(tmp_path))


@pytest.mark.parametrize("odd", [{"cpu_seconds": "long"}, {"resumed": -1}, {"memorised": 2}])
def test_times_that_are_no_numbers_are_refused(tmp_path: Path, odd: dict[str, Any]) -> None:
    write(tmp_path / "erm", result("erm", 0, 0.05, **odd))
    assert [unusable.path.name for unusable in load_results([tmp_path]).unusable] == ["erm"]


def test_only_a_significant_difference_is_marked_and_the_test_is_scipys(runs: Path, whole: str) -> None:
    group = only_group(runs)
    assert [row.method for row in group.rows] == ["erm", "amp", "mixup"]
    erm, amp, mixup = (row.cells["error"] for row in group.rows)
    raw = [stats.ttest_ind(ERRORS[method], ERRORS["erm"], equal_var=False).pvalue for method in ("amp", "mixup")]
    assert amp.p == pytest.approx(2 * min(raw), rel=1e-6)  # Holm: two comparisons, the smaller p is doubled
    assert mixup.p == pytest.approx(max(raw), rel=1e-6)
    assert (erm.better, amp.better, mixup.better) == (None, True, None)
    assert group.rows[2].cells["pgd_error"].better is False
    assert group.rows[1].cells["seconds"].better is None  # times are not compared by seeds
    marked = re.findall(r'<td class="(better|worse)"', whole)
    cells = [cell for row in group.rows for cell in row.cells.values()]
    assert len(marked) == sum(cell.better is not None for cell in cells)


def test_trainings_that_all_end_at_chance_are_not_called_the_same(tmp_path: Path) -> None:
    for method in ("erm", "amp"):
        write(tmp_path / method, result(method, 0, 0.9, test_nll=None, test_ece=None))
    assert "digit for digit" not in text_of(page_of(tmp_path))


def test_a_method_that_never_took_effect_is_said_to_be_erm(tmp_path: Path) -> None:
    for method in ("erm", "amp", "flooding"):
        write(tmp_path / method, result(method, 0, 0.04 if method == "amp" else 0.05))
    assert "ERM and flooding have exactly the same numbers" in text_of(page_of(tmp_path))


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ([0.05], "AMP alone, with a test error of 5.00 %."),
        ([0.05, 0.06], "AMP alone, with test errors of 5.00 and 6.00 %."),
        ([0.05, 0.06, 0.07], "AMP alone, with a mean test error of 6.00 ± 1.00 %."),
    ],
)
def test_a_method_alone_has_a_mean_where_there_are_enough_runs(tmp_path: Path, errors: list[float], said: str) -> None:
    for seed, error in enumerate(errors):
        write(tmp_path / str(seed), result("amp", seed, error))
    assert said in text_of(page_of(tmp_path))


def test_one_training_each_is_too_few_to_mark_anything(tmp_path: Path) -> None:
    for method in ("erm", "amp"):
        write(tmp_path / method, result(method, 0, 0.05 if method == "erm" else 0.01))
    page = page_of(tmp_path)
    assert "too few runs to tell (n = 1 and 1)" in text_of(page)
    assert 'class="better"' not in page


def test_runs_of_different_settings_are_never_averaged(runs: Path) -> None:
    write(runs / "longer", result("erm", 0, 0.01, epochs=100))
    write(runs / "noisy", result("erm", 0, 0.3, label_noise=0.2))
    groups = groups_of(load_results([runs]).runs)
    assert [len(group.rows) for group in groups] == [3, 1, 1]
    shown = text_of(page_of(runs))
    assert "20 % of the training labels replaced with wrong ones" in shown
    assert "For a comparison, train both erm and amp." in shown


def test_a_file_of_ones_own_may_lie_elsewhere(tmp_path: Path) -> None:
    """Runs from two machines, with the same network in two folders, are compared; with another network they are not."""
    for method, home, checksum in (("erm", "/home/me", "ab"), ("amp", "/Users/me", "ab"), ("mixup", "/home/me", "cd")):
        own = {"model": f"{home}/nets/mine.py:Net", "files": {"model": checksum}}
        write(tmp_path / method, result(method, 0, 0.05, **own))
    groups = groups_of(load_results([tmp_path]).runs)
    assert sorted([row.method for row in group.rows] for group in groups) == [["erm", "amp"], ["mixup"]]


def test_a_seed_that_is_there_twice_counts_once(runs: Path) -> None:
    write(runs / "erm-again", result("erm", 0, 0.9))
    assert len(only_group(runs).rows[0].runs) == 4
    assert f"another run has the same method and seed: {runs / 'erm-again'}" in text_of(page_of(runs))
    assert len(load_results([runs, runs, runs / "erm-0"]).runs) == 13


def test_what_was_measured_otherwise_is_not_compared(runs: Path) -> None:
    stronger = evaluation(0.9)
    stronger["attack"]["radius"] = 8 / 255
    (runs / "amp-0" / "evaluation.json").write_text(json.dumps(stronger))
    row = only_group(runs).row("amp")
    assert row is not None
    assert len(row.cells["pgd_error"].values) == 3
    assert row.cells["pgd_error"].measured_differently
    assert row.cells["pgd_error"].missing == [f"flatmin evaluate {runs / 'amp-0'} --attack"]
    assert ">measured differently</a>" in page_of(runs)
    assert len(row.cells["rise"].values) == 4


def test_several_radii_have_rows_of_their_own_and_a_sweep(runs: Path) -> None:
    for number, epsilon in enumerate((0.1, 0.2)):
        for seed in range(2):
            changes: dict[str, Any] = {"settings": {"epsilon": epsilon, "inner_lr": 1.0}}
            write(runs / f"sweep-{number}-{seed}", result("amp", seed, 0.045, **changes))
    shown = text_of(page_of(runs))
    assert "AMP (ε 0.1)" in shown
    assert "Of AMP's 3 settings, it has the lowest test error, and was chosen for that." in shown
    assert "What the radius does" in shown


def test_a_sweep_is_of_runs_that_differ_in_the_radius_alone(runs: Path) -> None:
    """Another ζ, another ball, or averaged weights at the same radius are another sweep."""
    for number, epsilon in enumerate((0.1, 0.2)):
        write(runs / f"sweep-{number}", result("amp", 0, 0.045, settings={"epsilon": epsilon, "inner_lr": 1.0}))
    others: list[dict[str, Any]] = [
        {"settings": {"epsilon": 0.1, "inner_lr": 0.2}},
        {"settings": {"epsilon": 0.1, "inner_lr": 1.0, "ball": "tensor"}},
        {"settings": {"epsilon": 0.2, "inner_lr": 1.0, "regulariser": "mixup"}},
        {"settings": {"epsilon": 0.1, "inner_lr": 1.0}, "ema": 0.9, "average_test_nll": 8.0},
    ]
    for number, changes in enumerate(others):
        write(runs / f"other-{number}", result("amp", 0, 0.045, test_nll=9.0, **changes))
    (link,) = re.findall(r'download="[^"]*-epsilon.json" href="data:application/json;base64,([^"]*)"', page_of(runs))
    drawn = base64.b64decode(link).decode()
    assert not re.search(r"\b[89]\.0\b", drawn), drawn


def test_a_radius_that_is_moved_has_a_row_and_leaves_the_sweep_to_the_fixed_ones(runs: Path) -> None:
    moved: list[dict[str, Any]] = [{"epsilon": "auto"}, {"epsilon": 0.1, "start": 0.9}]
    for number, settings in enumerate(({"epsilon": 0.1}, {"epsilon": 0.2}, *moved)):
        write(runs / f"sweep-{number}", result("amp", 0, 0.045, settings={**settings, "inner_lr": 1.0}, test_nll=9.0))
    page = page_of(runs)
    assert "AMP (ε auto)" in text_of(page)
    (link,) = re.findall(r'download="[^"]*-epsilon.json" href="data:application/json;base64,([^"]*)"', page)
    assert json.loads(base64.b64decode(link))["amp"]["test"].keys() == {"0.1", "0.2", "0.5"}
    assert json.loads(base64.b64decode(link))["amp"]["test"]["0.1"] == [9.0]


def test_a_tuning_run_says_that_it_is_one(tmp_path: Path) -> None:
    for method in ("erm", "amp"):
        found = result(method, 0, 0.05, validation=True)
        for name in ("error", "nll", "ece"):
            found[f"validation_{name}"] = found[f"test_{name}"]
        write(tmp_path / method, found)
        path = tmp_path / method / "result.json"
        path.write_text(json.dumps({key: v for key, v in found.items() if not key.startswith("test_")}))
    shown = text_of(page_of(tmp_path))
    assert "Validation error: AMP" in shown
    assert "runs of a tuning or a comparison" in shown


def test_missing_cells_show_the_command_that_fills_them(tmp_path: Path) -> None:
    folder = write(tmp_path / "a run", result("erm", 0, 0.05))
    page = page_of(tmp_path)
    assert f"flatmin evaluate '{folder}' --attack --flatness" in text_of(page)
    assert f"flatmin landscape '{folder}'" in text_of(page)
    titles = re.findall(r'<a href="#missing-1" title="([^"]+)">not yet</a>', page)
    assert html.unescape(titles[0]) == f"flatmin evaluate '{folder}' --attack"
    assert 'id="missing-1"' in page


def test_the_command_measures_a_run_as_the_others_were_measured(runs: Path) -> None:
    for path in runs.glob("*/evaluation.json"):
        found = evaluation(0.5)
        found["attack"] |= {"radius": 0.5, "step_size": 0.125, "norm": "l2", "pictures": 64}
        path.write_text(json.dumps(found))
    (runs / "amp-0" / "evaluation.json").unlink()
    row = only_group(runs).row("amp")
    assert row is not None
    asked = f"flatmin evaluate {runs / 'amp-0'} --attack --norm l2 --radius 0.5 --images 64"
    assert row.cells["pgd_error"].missing == [asked]
    assert row.cells["rise"].missing == [f"flatmin evaluate {runs / 'amp-0'} --flatness --images 50"]
    shown = text_of(page_of(runs))
    assert (
        f"{asked} flatmin evaluate {runs / 'amp-0'} --flatness --images 50" in shown
    )  # two commands: on different numbers of images


def test_the_commands_train_the_missing_methods_alike(tmp_path: Path) -> None:
    """What they ask for, as the command itself would plan it, is the recipe of the runs that are there."""
    data = load("digits")
    changes: dict[str, Any] = {"epochs": 3, "lr": 0.05, "batch_size": 64, "label_noise": 0.2, "clip_norm": 5.0}
    for name, more in {"plain": {}, "cosine": {"schedule": "cosine", "warmup": 1.0, "weight_decay": 0.0}}.items():
        recipe = default_recipe("digits", data, method="erm", **changes, **more)
        lines = [{"epoch": 1, "test_error": 0.1, "test_nll": 1.0, "test_ece": 0.1, "seconds": 1.0}]
        found = {**build_result(recipe, 3, data.checksum, lines, {}), "reliability": None}
        write(tmp_path / name / "erm-3", found)
        (group,) = groups_of(load_results([tmp_path / name]).runs)
        assert len(group.untrained) == len(METHODS) - 1
        for command in group.untrained:
            options = dict(zip(*[iter(shlex.split(command)[2:])] * 2, strict=True))
            asked = planned(shlex.split(command)[2:])
            assert asked == default_recipe("digits", data, method=options["--method"], **changes, **more)
            assert options["--seed"] == "3"
            assert Path(options["--out"]).parent == tmp_path / name


def trained_and_asked(folder: Path, changes: dict[str, Any]) -> tuple[Recipe, Recipe]:
    """The recipe of a run of ERM with these changes, and what the report's command for MixUp then trains."""
    data = load("digits")
    recipe = default_recipe("digits", data, **changes)
    lines = [{"epoch": 1, "test_error": 0.1, "test_nll": 1.0, "test_ece": 0.1, "seconds": 1.0}]
    write(folder / "erm-0", {**build_result(recipe, 0, data.checksum, lines, {}), "reliability": None})
    command = next(command for command in only_group(folder).untrained if "--method mixup" in command)
    return recipe, planned(shlex.split(command)[2:])


@pytest.mark.parametrize(
    "changes",
    [{"model_settings": {"width": 4}}, {"model": "convnet"}, {"model": "mlp", "model_settings": {"width": 8}}],
    ids=str,
)
def test_the_commands_train_the_same_network(tmp_path: Path, changes: dict[str, Any]) -> None:
    recipe, asked = trained_and_asked(tmp_path, changes)
    assert (asked.model, asked.model_settings) == (recipe.model, recipe.model_settings)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "adamw", "optimizer_settings": {"betas": [0.9, 0.95]}},
        {"optimizer": "adamw", "exempt_norms": True, "schedule": "cosine"},
        {"optimizer": "rmsprop"},
        {"momentum": 0.5, "nesterov": False},
    ],
    ids=str,
)
def test_the_commands_train_with_the_same_optimizer(tmp_path: Path, changes: dict[str, Any]) -> None:
    recipe, asked = trained_and_asked(tmp_path, changes)
    assert (asked.optimizer, asked.optimizer_settings) == (recipe.optimizer, recipe.optimizer_settings)
    assert (asked.exempt_norms, asked.lr, asked.weight_decay) == (recipe.exempt_norms, recipe.lr, recipe.weight_decay)
    if recipe.optimizer == "sgd":
        assert (asked.momentum, asked.nesterov) == (recipe.momentum, recipe.nesterov)


def test_where_dropout_is_tells_rows_apart_and_not_groups(tmp_path: Path) -> None:
    at = {"model_settings": {"dropout_at": "block"}}
    write(tmp_path / "erm", result("erm", 0, 0.05, model_settings={}))
    write(tmp_path / "block", result("dropout", 0, 0.04, **at))
    group = only_group(tmp_path)
    assert [row.name for row in group.rows] == ["ERM", "Dropout"]
    write(tmp_path / "relu", result("dropout", 0, 0.06, model_settings={}))
    group = only_group(tmp_path)
    assert {row.name: row.cells["error"].values for row in group.rows if row.method == "dropout"} == {
        "Dropout": [6.0],
        "Dropout (dropout_at block)": [4.0],
    }
    own = {"model": "mine.py:Net", "files": {"model": "0"}}
    for name, settings in (("other", at), ("another", {"model_settings": {}})):
        write(tmp_path / "own" / name, result("erm", 0, 0.05, **own, **settings))
    assert len(groups_of(load_results([tmp_path / "own"]).runs)) == 2  # whatever a user's network means by it


def test_the_commands_train_without_nesterovs_and_with_a_given_normalisation(tmp_path: Path) -> None:
    for name, more, said in (("heavy ball", {"momentum": 0.9}, True), ("none", {"momentum": 0.0}, False)):
        changes = {"nesterov": False, "normalise": [0.5, 0.25], **more}
        write(tmp_path / name / "erm-0", result("erm", 0, 0.05, **changes))
        (group,) = groups_of(load_results([tmp_path / name]).runs)
        assert len(group.untrained) == len(METHODS) - 1
        assert all("--normalise 0.5 0.25" in command for command in group.untrained)
        assert all(("--no-nesterov" in command) is said for command in group.untrained)


def planned(options: list[str]) -> Recipe:
    """The recipe that `flatmin train` would train with these options."""
    plans: list[Any] = []

    def training(recipe: Recipe, *_: object, **__: object) -> Any:
        plans.append(recipe)
        return iter([Stopped(StopSignal.SIGINT, 0)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flatmin_lab.cli.commands.train.training", training)
        assert flatmin("train", *options).exit_code == 130
    recipe: Recipe = plans[0]
    return recipe


def test_every_figure_has_its_data_beside_it(whole: str) -> None:
    links = re.findall(r'download="([^"]+)" href="data:application/json;base64,([^"]+)"', whole)
    names = [name for name, _ in links]
    assert len(names) == len(set(names)) >= 10
    contents = {name: json.loads(base64.b64decode(content)) for name, content in links}
    assert contents["cifar10-preactresnet18-ece.json"]["values"]["amp"] == pytest.approx([2.0, 2.05, 1.95, 2.0])
    assert contents["landscapes.json"]["planes"]["training"]["ERM"][1][1] == 0.1


def test_landscapes_that_were_computed_otherwise_are_not_shown_beside_one_another(runs: Path) -> None:
    for name, found in {"erm-0": landscape(), "amp-0": landscape(), "mixup-0": landscape(seed=7)}.items():
        (runs / name / "landscape.json").write_text(json.dumps(found))
    page = page_of(runs)
    assert "ERM, training" in page
    assert "MixUp, training" not in page
    assert "Computed with other settings, and not shown: MixUp." in text_of(page)


# ---- what is damaged

DAMAGES: dict[str, tuple[str, str, str]] = {
    "a result that ends early": ("result.json", '{"data": "cif', "damaged"),
    "a result that is a list": ("result.json", "[]", "must hold an object"),
    "an error that is a word": (
        "result.json",
        json.dumps(result("erm", 0, 0.1, test_error="abc")),
        "test_error is 'abc'",
    ),
    "an error that is nan": ("result.json", json.dumps(result("erm", 0, math.nan)), "test_error is nan"),
    "an error of 300 %": ("result.json", json.dumps(result("erm", 0, 3.0)), "not a share from 0 to 1"),
    "a method nobody knows": ("result.json", json.dumps(result("<script>alert(1)</script>", 0, 0.1)), "unknown method"),
    "no seed": ("result.json", json.dumps({**result("erm", 0, 0.1), "seed": None}), "seed is None"),
    "a config that is text": ("config.json", "hello", "damaged"),
    "curves that are noise": ("metrics.jsonl", "\x00\xff", "no curves of this run: line 1 is not JSON"),
    "curves of words": ("metrics.jsonl", '{"train_loss": "low"}', "line 1 does not hold numbers"),
    "an evaluation of words": ("evaluation.json", json.dumps(evaluation(attack={"pgd_error": "x"})), "not used"),
    "an evaluation of a list": ("evaluation.json", "[1]", "not used"),
    "an evaluation of another epoch": (
        "evaluation.json",
        json.dumps(evaluation(epoch=2)),
        "after epoch 2, but training ended after 3",
    ),
    "a landscape without an axis": ("landscape.json", '{"splits": {}}', "not used"),
    "a landscape of another size": ("landscape.json", json.dumps(landscape(points=5)), "must have 5 points"),
    "a result nested too deep": ("result.json", "[" * 100_000, "nested too deep"),
    "a ragged landscape": (
        "landscape.json",
        json.dumps(landscape(axis=[0.0, 1.0, 2.0, 3.0], points=4)),
        "must have 4 numbers",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_rest_of_the_report_is_made_and_what_is_damaged_is_named(runs: Path, damage: str) -> None:
    name, content, said = DAMAGES[damage]
    (runs / "erm-0" / name).write_text(content)
    found = load_results([runs])
    (broken,) = found.unusable
    assert said in broken.why
    assert "erm-0" in str(broken.path)
    if damage in ("a method nobody knows", "a result nested too deep"):  # the pages of the others are alike
        page = page_of(runs)
        assert "Test error: AMP 4.00 %" in text_of(page)
        assert "file was left out" in text_of(page)
        assert "<script>alert" not in page


def test_bins_that_hold_less_than_nothing_are_not_drawn(runs: Path) -> None:
    bins = {**BINS, "number": [-1000, *[0] * 13, 1000]}
    for path in runs.glob("*/result.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "reliability": bins}))
    assert "Test error: AMP 4.00 %" in text_of(page_of(runs))


def test_what_files_say_cannot_steer_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "runs" / "erm", result("erm", 0, 0.05))
    write(tmp_path / "runs" / "odd\x1b[2J", result("\x1b]0;title\x07\x9b31m\u202e", 0, 0.05))
    done = flatmin("report", tmp_path / "runs", "--out", tmp_path / "report.html")
    assert done.exit_code == 0
    assert not set("\x1b\x07\x9b\u202e") & set(done.stderr + done.stdout)
    assert "odd\\x1b[2J" in done.stderr


@pytest.mark.parametrize("name", ["x-1.json", "erm-0/config.json", "erm-0/result.json", "erm-0/metrics.jsonl"])
def test_a_pipe_among_the_files_does_not_stop_the_report(runs: Path, name: str) -> None:
    (runs / name).unlink(missing_ok=True)
    with pipe(runs / name):
        (broken,) = load_results([runs]).unusable
    assert f"{runs / name} must be a regular file, not a pipe" in broken.why


def test_a_run_that_is_not_finished_says_how_to_go_on(runs: Path) -> None:
    (runs / "erm-0" / "result.json").unlink()
    shown = text_of(page_of(runs))
    assert f"not finished, 3 of 3 epochs; resume with: flatmin train --out {runs / 'erm-0'} --resume" in shown


def test_where_nothing_can_be_read_there_is_still_a_page(runs: Path) -> None:
    for path in runs.rglob("result.json"):
        path.write_text("torn")
    shown = text_of(page_of(runs))
    assert "12 files were left out" in shown


def test_results_may_be_files_of_their_own(tmp_path: Path) -> None:
    for method in ("erm", "amp"):
        (tmp_path / f"{method}.json").write_text(json.dumps(result(method, 0, 0.05)))
    (tmp_path / "notes.json").write_text('{"not": "a result"}')
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    found = load_results([tmp_path])
    assert len(found.runs) == 2
    assert not found.unusable
    page = page_of(tmp_path)
    assert "PreActResNet18" in page
    assert "flatmin evaluate" not in page  # there is no folder to measure


WRONG: list[Any] = [None, "abc", ["q"], {}, -1, 1e308, math.nan, True, 10**400, [-1]]


def spoilt(content: dict[str, Any], path: tuple[str, ...]) -> list[dict[str, Any]]:
    """Copies of a file's content with one field gone, or wrong in every way."""
    copies = []
    for wrong in [KeyError, *WRONG]:
        copy = json.loads(json.dumps(content))
        place = copy
        for key in path[:-1]:
            place = place[key]
        if wrong is KeyError:
            del place[path[-1]]
        else:
            place[path[-1]] = wrong
        copies.append(copy)
    return copies


def paths_of(content: dict[str, Any]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for key, value in content.items():
        found.append((key,))
        if isinstance(value, dict):
            found += [(key, *path) for path in paths_of(value)]
    return found


AVERAGED = {"ema": 0.9, "average_test_error": 0.1, "average_test_nll": 0.4, "average_test_ece": 0.05}
WHOLE: dict[str, dict[str, Any]] = {
    "result": result("amp", 0, 0.1, data_sha256="0", clean_train_nll=0.1, test_error_without_repeated=0.1, **AVERAGED),
    "evaluation": evaluation(spectrum=spectrum(), scaled=scaled()),
    "landscape": landscape(),
    "config": {"recipe": {"epochs": 3, "method": "amp"}, "seed": 0, "data_sha256": "0"},
    "state": {"diverged": "at step 7"},
}


@pytest.mark.parametrize("name", WHOLE)
def test_no_single_field_of_a_file_can_stop_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Every field of every file gone, null, a word, a list, negative, huge or nan: there is a page all the same."""
    for module in ("report", "landscape"):  # drawing is not what is tested, and takes long
        monkeypatch.setattr(f"flatmin_lab.report.pages.{module}.svg", lambda drawn: f"<svg>{drawn.words}</svg>")
    for figure in ("curves", "bars", "reliability_diagram", "contours", "lines", "spectrum"):
        monkeypatch.setattr(f"flatmin_lab.report.figures.{figure}", partial(_only_numbers, figure))
    folder = write(tmp_path / "run", **{"found": WHOLE["result"], **{k: v for k, v in WHOLE.items() if k != "result"}})
    if name in ("config", "state"):  # what is read of a run that has not finished
        (folder / "result.json").unlink()
    for path in paths_of(WHOLE[name]):
        for content in spoilt(WHOLE[name], path):
            (folder / f"{name}.json").write_text(json.dumps(content))
            check_page(tmp_path, path)


def check_page(folder: Path, path: tuple[str, ...]) -> None:
    """The pages without what cannot be used are alike, and each takes a while: one is made where all is used."""
    found = load_results([folder])
    assert found.unusable or "</html>" in report_page(found), path


BESIDE: dict[str, dict[str, Any]] = {
    "planned": {"runs": [{"name": "short/cifar10-preactresnet18-amp", "seed": 0, "planned": "2026-01-01"}]},
    "short/x-0.failed": {"name": "short/x", "seed": 0, "error": "it diverged", "method": "amp", "step": 3},
    "short/cost-a": {
        "hardware": "a machine",
        "data": "cifar10",
        "precision": "bf16",
        "protocol": "short",
        "epochs": 60,
        "ratio": 2.0,
        "methods": {"erm": {"ms": 1.0, "hours": 1.0}, "amp": {"ms": 2.0, "hours": 2.0}},
    },
    "short/whole-0": {
        "curves": {"error": [0.3, 0.2, 0.1]},
        "boundary": {"side": [0, 1, 2], "shares": [[0.5] * 3] * 3},
        **result("amp", 0, 0.1),
    },
}


@pytest.mark.parametrize("name", BESIDE)
def test_no_single_field_of_the_files_beside_the_runs_can_stop_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in ("report", "landscape"):
        monkeypatch.setattr(f"flatmin_lab.report.pages.{module}.svg", lambda drawn: f"<svg>{drawn.words}</svg>")
    for figure in ("curves", "bars", "reliability_diagram", "contours", "lines", "boundaries"):
        monkeypatch.setattr(f"flatmin_lab.report.figures.{figure}", partial(_only_numbers, figure))
    write(tmp_path / "run", result("amp", 1, 0.1))
    (tmp_path / f"{name}.json").parent.mkdir(exist_ok=True)
    (tmp_path / f"{name}.json").write_text(json.dumps(BESIDE[name]))
    assert not load_results([tmp_path]).unusable
    seen = WHOLE["result"] if name == "short/whole-0" else {}  # above, as a file of its own
    for path in (path for path in paths_of(BESIDE[name]) if path[0] not in seen):
        for content in spoilt(BESIDE[name], path):
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
            check_page(tmp_path, path)


def _only_numbers(name: str, *given: Any, **options: Any) -> DrawnFigure:
    """In the place of a figure: everything that it would draw is a number, or is refused."""

    def check(value: Any) -> None:
        if isinstance(value, dict):
            list(map(check, value.values()))
        elif isinstance(value, list | tuple):
            list(map(check, value))
        else:
            assert value is None or isinstance(value, int | float | str), (name, value)

    numbers = [value for value in given if not isinstance(value, str)]
    check(numbers)
    return DrawnFigure(Figure(), {"numbers": numbers}, name)


NASTY = '<img src=x onerror="alert(1)">&{{ 7 * 7 }}</script>'


def test_text_from_run_folders_is_escaped(tmp_path: Path) -> None:
    changes = dict.fromkeys(("data", "model", "hardware", "commit", "torch", "augment"), NASTY)
    for seed, method in enumerate(("erm", "amp", "mixup")):
        found = result(method, 0, 0.05, **changes, settings={NASTY: 1.0})
        write(tmp_path / f"{method} <b>{seed}", found, landscape=landscape(), evaluation=evaluation())
    page = page_of(tmp_path)
    assert "<img" not in page
    assert "<b>" not in page
    assert "49" not in re.findall(r"<h1>(.*?)</h1>", page)[0]
    assert page.count("</script>") == page.count("<script")


# ---- in a browser

CHECK = """
const canvases = [...document.querySelectorAll("figure.surface canvas")];
const said = {before: canvases.map((c) => c.dataset.drawn)};
setTimeout(() => {
  said.drawn = canvases.map((c) => c.dataset.drawn);
  const inked = (c) => c.getContext("2d").getImageData(0, 0, c.width, c.height).data.some((v) => v > 0);
  said.inked = canvases.map(inked);
  const pointer = (name, x, y) =>
    canvases[0].dispatchEvent(new PointerEvent(name, {clientX: x, clientY: y, pointerId: 1, bubbles: true}));
  pointer("pointerdown", 10, 10); pointer("pointermove", 110, 30); pointer("pointerup", 110, 30);
  setTimeout(() => {
    said.turned = canvases.map((c) => c.dataset.drawn);
    canvases[0].dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowLeft", bubbles: true}));
    document.querySelector("input.logarithmic").click();
    setTimeout(() => {
      said.pressed = canvases.map((c) => c.dataset.drawn);
      said.wide = document.documentElement.scrollWidth > window.innerWidth;
      document.body.innerHTML = "<pre id=said>" + JSON.stringify(said) + "</pre>";
    }, 300);
  }, 300);
}, 300);
"""


@pytest.mark.parametrize("width", [1200, 500])
def test_the_page_opens_without_an_error_and_its_surfaces_turn_together(whole: str, tmp_path: Path, width: int) -> None:
    path = tmp_path / "report.html"
    path.write_text(whole, encoding="utf-8")
    visit = pages.visit(path, CHECK, width=width)
    assert visit.console == []
    said = json.loads(html.unescape(re.findall(r'<pre id="said">(.*?)</pre>', visit.dom, re.DOTALL)[0]))
    assert len(said["drawn"]) == 6
    assert all(said["inked"])
    assert len(set(said["drawn"])) == len(set(said["turned"])) == 1
    assert said["turned"][0] != said["drawn"][0]
    assert said["pressed"][0].endswith("false")
    assert said["pressed"][0].split()[0] != said["turned"][0].split()[0]
    assert not said["wide"]


def test_no_name_stands_twice_in_the_page(whole: str) -> None:
    names = re.findall(r'\sid="([^"]+)"', whole)
    repeated = {name for name in names if names.count(name) > 1}
    assert repeated <= {name for name in names if re.fullmatch(r"[0-9a-f]{8}-\w+", name)}  # the same drawing twice
    for target in re.findall(r'(?:href="|url\()#([^")]+)', whole):
        assert target in names


class Outside(HTMLParser):
    """Whatever a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("src", "srcset", "poster") or (tag == "link" and name == "href"):
                self.found.append(f"{tag} {name}={value}")


def test_the_page_needs_no_network(whole: str) -> None:
    parser = Outside()
    parser.feed(whole)
    assert parser.found == []
    assert not re.search(r"@import|url\((?!#)", whole)


def test_averaged_weights_have_a_row_of_their_own(tmp_path: Path) -> None:
    write(tmp_path / "plain", result("erm", 0, 0.10))
    averaged = {"ema": 0.9, "average_test_error": 0.05, "average_test_nll": 0.2, "average_test_ece": 0.01}
    write(tmp_path / "averaged", {**result("erm", 0, 0.11), **averaged})
    group = only_group(tmp_path)
    assert [row.name for row in group.rows] == ["ERM", "ERM (EMA 0.9)"]
    assert [row.cells["error"].values[0] for row in group.rows] == pytest.approx([10.0, 5.0])
    assert not group.duplicate_runs
    assert "EMA: numbers of the averaged weights, except where it says" in text_of(page_of(tmp_path))


def test_what_was_measured_of_the_last_weights_is_not_called_the_average_s(tmp_path: Path) -> None:
    """In the tables, the sentences and the titles of figures: attacks, flatness, AURC and reliability."""
    selective = {"aurc": 0.01, "e_aurc": 0.005, "coverage": [0.5, 1.0], "risk": [0.0, 0.1]}
    for method in ("erm", "amp"):
        write(tmp_path / method, {**result(method, 0, 0.11), **AVERAGED}, evaluation=evaluation(selective=selective))
    group = only_group(tmp_path)
    marked = {name for name, cell in group.rows[0].cells.items() if cell.of_last_weights and cell.values}
    measured = {name for name, cell in group.rows[0].cells.items() if cell.values}
    assert measured - marked == {"error", "nll", "ece", "seconds"}
    page = report_page(load_results([tmp_path]))
    shown = text_of(page)
    assert len(re.findall(r"last weights(?= )", shown.partition("Curves")[0])) >= 2 * len(marked)
    assert "Error under PGD, last weights: AMP (EMA 0.9)" in shown
    assert page.count(">last weights, n\u00a0=\u00a01</text>") == 2  # the reliability of both
    for method in ("erm", "amp"):
        (tmp_path / method / "result.json").write_text(json.dumps(result(method, 0, 0.11)))
    assert "last weights" not in text_of(page_of(tmp_path))


def test_the_runs_of_a_comparison_are_reported_and_its_outcomes_are_no_results(tmp_path: Path) -> None:
    folder = tmp_path / "comparison"
    finish(comparison_of(saved(tmp_path / "tiny.npz"), folder, seeds=1))
    found = load_results([folder])
    assert (len(found.runs), found.unusable) == (4, [])
    (folder / "comparison.json").unlink()
    assert load_results([folder]).unusable  # without it, they may be damaged results


def test_runs_with_averaged_weights_are_compared_with_averaged_weights(tmp_path: Path) -> None:
    """The commands for missing methods average too, and a sentence names whose average it is."""
    averaged = {"ema": 0.9, "average_test_error": 0.05, "average_test_nll": 0.2, "average_test_ece": 0.01}
    write(tmp_path / "amp", {**result("amp", 0, 0.11), **averaged})
    untrained = only_group(tmp_path).untrained
    assert untrained
    assert all("--ema 0.9" in command for command in untrained)
    write(tmp_path / "erm", {**result("erm", 0, 0.12), **averaged, "average_test_error": 0.06})
    assert "AMP (EMA 0.9) 5.00 %, ERM (EMA 0.9) 6.00 %" in text_of(page_of(tmp_path)).replace("\u00a0", " ")
    for seed in range(3):
        write(tmp_path / f"plain-{seed}", result("erm", seed, 0.20 + seed / 100))
        for method in ("erm", "amp"):
            known = {**averaged, "average_test_error": 0.06 + seed / 100}
            write(tmp_path / f"{method}-{seed}", {**result(method, seed, 0.2), **known})
    shutil.rmtree(tmp_path / "amp")
    shutil.rmtree(tmp_path / "erm")
    group = only_group(tmp_path)
    assert [(row.name, row.base) for row in group.rows] == [("ERM", 0), ("ERM (EMA 0.9)", 0), ("AMP (EMA 0.9)", 1)]
    assert [row.cells["error"].better for row in group.rows] == [
        None,
        True,
        None,
    ]  # the average helps, and AMP does not
    write(tmp_path / "plain", result("mixup", 0, 0.12))
    assert not any("--ema" in command for command in only_group(tmp_path).untrained)


def test_what_was_measured_of_one_setting_alone_is_shown(tmp_path: Path) -> None:
    """The other setting of the method has the lower error, and no spectrum."""
    write(tmp_path / "late", result("amp", 0, 0.04, settings={"epsilon": 0.1, "start": 0.5}))
    measured = evaluation(spectrum=spectrum())
    write(tmp_path / "amp", result("amp", 0, 0.05, settings={"epsilon": 0.1}), evaluation=measured)
    assert "AMP 1 8 -0.5 12 ± 1 25.00 %" in text_of(page_of(tmp_path))


def test_a_commit_with_changes_is_marked(tmp_path: Path) -> None:
    write(tmp_path / "run", result("erm", 0, 0.1, commit="0123456789abcdef-dirty"))
    assert "commit 0123456-dirty" in text_of(page_of(tmp_path))
