"""The demo: all eight methods, a table, a page that says what is true, and the numbers behind it."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from flatmin_lab.cli.commands import demo
from flatmin_lab.data import load
from flatmin_lab.data.dataset import Dataset, Split
from flatmin_lab.evaluation import close_up
from flatmin_lab.evaluation.load_run import TrainedRun, find_run, subject_of
from flatmin_lab.execution.process_pool import train_in_pool
from flatmin_lab.methods import METHODS
from flatmin_lab.recipes.defaults import default_recipe
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.report.figures.style import NAMES
from flatmin_lab.report.html import pool_bins
from flatmin_lab.report.pages.demo import demo_page, row
from flatmin_lab.runs.events import Finished, RunError
from flatmin_lab.training.build import prepare_data
from flatmin_lab.training.loop import train
from tests.support import pages
from tests.support.pages import text_of


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    return demo.run_demo(out, seeds=2, noise=0.2, epochs=1, workers=2, console=Console(stderr=True))


def numbers(page: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((page.parent / "demo.json").read_text())
    return found


def test_every_method_is_in_the_page_with_its_numbers(page: Path) -> None:
    shown = text_of(page.read_text())
    runs = numbers(page)["runs"]
    assert len(runs) == 2 * len(METHODS)
    for method in METHODS:
        own = [run for run in runs if run["method"] == method]
        assert [run["seed"] for run in own] == [0, 1]
        assert NAMES[method] in shown
        assert ", ".join(f"{100 * run['test_error']:.1f}" for run in own) in shown  # two have no spread


def test_what_a_method_costs_is_passes_and_cpu_time_since_two_train_at_once(page: Path) -> None:
    shown, runs = text_of(page.read_text()), numbers(page)["runs"]
    passes = {method: row(method, [run for run in runs if run["method"] == method])["passes"] for method in METHODS}
    assert passes == {method: [2 if method in ("amp", "adversarial") else 1] for method in METHODS}
    assert all(run["cpu_seconds"] > 0 for run in runs)
    assert "passes per step CPU seconds" in shown


def test_the_page_says_plainly_what_was_done_to_the_labels(page: Path) -> None:
    shown = text_of(page.read_text())
    assert "20 % of the training labels were replaced at random with a wrong one" in shown
    assert "test digits are correct" in shown
    assert "The two runs of each, seeds 0 and 1, after" in shown  # two make no mean, and are listed
    assert "Mean ± standard deviation" not in shown
    assert "flatmin demo --noise 0" in shown


def test_the_page_is_one_file_without_scripts_and_well_formed(page: Path) -> None:
    text = page.read_text()
    assert re.findall(r"(?:src|href)=[\"'](?!#)([^\"']*)", text) == ["https://arxiv.org/abs/2010.04925"]
    assert "<script" not in text
    assert text.count("<svg") == 3 + 8 + 8 + 12 + 2  # curves, their legend, reliability, digits, lines
    assert "#010203" not in text

    class Balanced(HTMLParser):
        open: list[str]

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            if tag not in ("meta", "br", "path", "use", "rect", "line", "circle"):
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if tag in self.open:
                assert self.open.pop() == tag

    parser = Balanced()
    parser.open = []
    parser.feed(text)
    assert parser.open == []


def test_two_networks_answer_a_dozen_wrong_labels_that_were_not_chosen(page: Path) -> None:
    found = numbers(page)["networks"]
    recipe = default_recipe("digits", load("digits"), method="erm", label_noise=0.2, epochs=1, validation=True)
    ready = prepare_data(recipe, load("digits"), 0)
    given = ready.data.train.y[ready.wrong[:12]].tolist()
    assert list(found) == ["erm", "amp"]
    for network in found.values():
        assert [digit["given"] for digit in network["digits"]] == given
        assert all(digit["true"] != digit["given"] for digit in network["digits"])
        assert (network["train"], network["held_out"]) == (1294, 144)
        assert {split: len(own["line"]) for split, own in network["landscape"]["splits"].items()} == {
            "training": 41,
            "test": 41,
        }
    shown = text_of(page.read_text())
    assert f"label {given[0]}, truth {found['erm']['digits'][0]['true']}" in shown
    assert "They are the first 12 that the seed drew, not a selection." in shown


def test_the_temperature_never_sees_the_test_labels(tmp_path: Path) -> None:
    digits = load("digits")
    recipe = default_recipe("digits", digits, method="erm", label_noise=0.2, epochs=1, validation=True)
    assert list(train(recipe, digits, seed=0, folder=tmp_path / "run"))
    run = find_run(tmp_path / "run")
    other = replace(digits, test=Split(digits.test.x, digits.test.y.roll(1)))
    found = [_calibration_with(run, data, digits) for data in (digits, other)]
    assert found[0]["temperature"] == found[1]["temperature"]
    assert found[0]["plain"]["nll"] < found[1]["plain"]["nll"]


def _calibration_with(run: TrainedRun, data: Dataset, trained_on: Dataset) -> dict[str, Any]:
    held_out = subject_of(run, trained_on, use_ema=False, device=torch.device("cpu"))
    return close_up.calibration(replace(held_out, test=data.test), held_out.test)


def test_a_phone_never_scrolls_sideways(page: Path) -> None:
    said = "document.body.innerHTML = `<pre id=said>${document.documentElement.scrollWidth - innerWidth}</pre>`"
    visit = pages.visit(page, f"setTimeout(() => {{ {said} }}, 100)", width=390)
    (excess,) = re.findall(r'<pre id="said">(.*?)</pre>', visit.dom)
    assert int(excess) <= 0


def test_a_demo_training_is_the_training_alone(page: Path) -> None:
    """In a worker beside others or by itself: the same numbers."""
    digits = load("digits")
    recipe = default_recipe("digits", digits, method="mixup", label_noise=0.2, epochs=1)
    alone = list(train(recipe, digits, seed=1))[-1]
    assert isinstance(alone, Finished)
    (beside,) = [run for run in numbers(page)["runs"] if (run["method"], run["seed"]) == ("mixup", 1)]
    assert beside["test_error"] == pytest.approx(alone.result["test_error"], abs=0.01)
    assert beside["test_nll"] == pytest.approx(alone.result["test_nll"], rel=1e-3)  # here with more threads


def made_up(page: Path, **errors: float) -> dict[str, Any]:
    """The numbers of the page with other test errors, a little apart from seed to seed."""
    changed = numbers(page)
    for run in changed["runs"]:
        run["test_error"] = errors.get(run["method"], 0.05) + 0.002 * run["seed"]
    return changed


def test_the_sentences_follow_the_numbers(page: Path) -> None:
    alone = made_up(page, amp=0.01)
    assert "AMP 1.1 %. ERM has memorised" in text_of(demo_page(alone))
    assert "Not clearly different" not in text_of(demo_page(alone))
    assert "Not clearly different from AMP over these seeds: MixUp, Dropout." in text_of(
        demo_page(made_up(page, amp=0.01, mixup=0.0105, dropout=0.011))
    )
    clean = made_up(page, flooding=0.06, erm=0.01)
    clean["noise"] = 0.0
    assert "between 1.10 % (ERM) and 6.10 % (flooding)" in text_of(demo_page(clean))


def test_flooding_that_never_flooded_is_called_erm(page: Path) -> None:
    """Two epochs: the loss is far above its level."""
    assert "Flooding's curves coincide with ERM's" in text_of(page.read_text())
    changed = numbers(page)
    for run in changed["runs"]:
        if run["method"] == "flooding":
            run["lines"][-1]["train_loss"] *= 1.01
    assert "Flooding's curves" not in text_of(demo_page(changed))


def test_what_the_run_does_not_show_is_not_said(page: Path) -> None:
    """Two epochs: ERM has memorised hardly anything."""
    changed = numbers(page)
    for run in changed["runs"]:
        run["memorised"] = 0.1
    assert "too short, or too few labels were wrong" in text_of(demo_page(changed))
    for run in changed["runs"]:
        run["memorised"] = 0.7 if run["method"] == "erm" else 0.1
        run["lines"][-1]["train_loss"] = 0.3
        run["test_ece"] = 0.3 if run["method"] == "amp" else 0.1
        run["test_error"] = 0.02
    shown = text_of(demo_page(changed))
    assert "ends up repeating 70 % of them" in shown
    assert "Look closely at the ECE" in shown


def test_without_noise_the_page_says_so(page: Path) -> None:
    clean = {**numbers(page), "noise": 0.0}
    for run in clean["runs"]:
        run.pop("memorised")
    shown = text_of(demo_page(clean))
    assert "correct labels" in shown
    assert "memorised, %" not in shown


def test_bins_of_several_seeds_are_pooled_by_their_answers() -> None:
    one: dict[str, list[float]] = {"number": [1, 0], "accuracy": [1.0, 0.0], "confidence": [0.4, 0.0]}
    other: dict[str, list[float]] = {"number": [3, 2], "accuracy": [0.0, 0.5], "confidence": [0.2, 0.9]}
    both = pool_bins([one, other])
    assert both == {"number": [4.0, 2.0], "accuracy": [0.25, 0.5], "confidence": pytest.approx([0.25, 0.9])}


def test_a_worker_that_fails_ends_the_demo_with_its_reason() -> None:
    recipe = default_recipe("digits", load("digits"), batch_size=5000)
    with pytest.raises(RunError, match="the batch size must be"):
        list(train_in_pool([Job(recipe, 0), Job(recipe, 1)], workers=1))


@pytest.mark.parametrize("wrong", [{"seeds": 0}, {"epochs": 0}, {"workers": 0}, {"noise": 1.5}, {"noise": 1e-4}])
def test_a_wrong_argument_is_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    arguments = {"seeds": 1, "noise": 0.2, "epochs": 1, "workers": 1, **wrong}
    with pytest.raises(ValueError, match="must be"):
        demo.run_demo(tmp_path, console=Console(stderr=True), **arguments)
    assert not list(tmp_path.glob("*.html"))
