"""ERM's trial: a tuning says what its method gains over ERM, and where it gains nothing."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatmin_lab.data import load
from flatmin_lab.recipes.defaults import default_recipe
from flatmin_lab.report.loader import load_results
from flatmin_lab.report.pages.report import report_page
from flatmin_lab.report.pages.tuning import tuning_section
from flatmin_lab.runs.events import Epoch, Finished
from flatmin_lab.runs.folder import VALIDATION
from flatmin_lab.training.loop import train
from flatmin_lab.tuning.result_file import FILE
from flatmin_lab.tuning.search_space import SearchSpace, hyper_parameters_of
from flatmin_lab.tuning.study import ERM, open_study
from flatmin_lab.tuning.tuner import tune
from tests.lab.tuning.test_tuning import asked, saved, study_of, tuning_of, without_times
from tests.support.processes import flatmin, words
from tests.support.small_runs import images


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("data") / "tiny.npz", images(30, 1))


def tuned(data: Path, out: Path, *more: object) -> str:
    done = flatmin(*asked(data, out, *more))
    assert done.exit_code == 0, done.output
    return words(done.stdout)


@pytest.fixture(scope="module")
def out(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tuning of three trials, for tests that only read it."""
    folder = tmp_path_factory.mktemp("tuning") / "amp"
    tuned(data, folder, "--trials", 3)
    return folder


@pytest.fixture
def old(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tuning of two trials from before there was one of ERM."""
    folder = tmp_path / "old"
    with monkeypatch.context() as patched:
        patched.setattr(SearchSpace, "has_erm_trial", False)
        tuned(data, folder, "--trials", 2)
    content = json.loads((folder / FILE).read_text())
    del content["against_erm"]
    for number, trial in enumerate(content["trials"]):
        del trial["is_erm"]
        (folder / f"trial-{number}" / VALIDATION).unlink()
    (folder / FILE).write_text(json.dumps(content))
    return folder


# ---- the trial


def test_the_first_trial_is_erms_and_differs_from_the_others_in_the_method_alone(out: Path) -> None:
    configs = [json.loads((out / f"trial-{number}" / "config.json").read_text()) for number in range(2)]
    erm, amp = (config.pop("recipe") for config in configs)
    assert configs[0] == configs[1]
    assert (erm.pop("method"), erm.pop("settings")) == ("erm", {})
    assert amp.pop("method") == "amp"
    del amp["settings"]
    assert erm == amp
    first, *others = tuning_of(out).trials
    assert (first.is_erm, dict(first.settings), first.epochs) == (True, {}, 3)
    assert not any(trial.is_erm for trial in others)


def test_it_is_the_training_with_a_radius_of_zero(out: Path, data: Path) -> None:
    recipe = default_recipe(
        str(data),
        load(data),
        model="mlp",
        method="amp",
        epochs=3,
        augment="none",
        validation=True,
        settings={"epsilon": 0.0},
    )
    *_, last = train(recipe, load(data))
    assert isinstance(last, Finished)
    assert last.result["validation_nll"] == tuning_of(out).trials[0].nll


def test_it_is_never_pruned(data: Path, tmp_path: Path) -> None:
    """In a study that was begun without it, it comes late, and would be worse than the median."""
    recipe = default_recipe(str(data), load(data), model="mlp", method="rmp", epochs=6, validation=True)
    search = SearchSpace(recipe=recipe, hyper_parameters=hyper_parameters_of("rmp"))
    with open_study(search, load(data), folder=tmp_path, storage=None) as study:
        for number in range(8):
            study.study.enqueue_trial(
                search.default_settings() if number != 6 else {}, {ERM: True} if number == 6 else {}
            )
        for number in range(8):
            draw = study.draw(8)
            assert draw is not None
            assert draw.is_erm == (number == 6)
            value = 0.5 if number >= 6 else 0.1
            pruned = [study.should_prune(number, epoch, value) for epoch in range(1, 7)]
            assert any(pruned) == (number == 7)
            last = {"epoch": 6, "seconds": 1.0, "validation_error": value, "validation_nll": value}
            study.end(number, "finished", last)


def test_a_tuning_of_erm_has_no_such_trial(data: Path, tmp_path: Path) -> None:
    said = tuned(data, tmp_path / "out", "--method", "erm", "--knobs", "lr", "--trials", 1)
    assert "ERM" not in said
    assert tuning_of(tmp_path / "out").erm is None


def test_where_the_rate_is_tuned_too_it_is_said_that_erms_is_not(data: Path, tmp_path: Path) -> None:
    said = tuned(data, tmp_path / "out", "--knobs", "epsilon,lr", "--trials", 2)
    assert "ERM was trained with the default lr, not a tuned one." in said


def test_it_is_never_chosen(out: Path) -> None:
    found = tuning_of(out)
    erm, *others = found.trials
    best = replace(found, trials=[replace(erm, value=0.0, error=0.0), *others], against_erm=None)
    assert best.ranked()[0].is_erm
    assert best.chosen == found.chosen
    assert best.is_better_than_erm is False


# ---- what is said of it


@pytest.mark.parametrize(("noise", "better"), [(0.5, True), (0.0, False)], ids=["wrong labels", "right labels"])
def test_amp_is_better_on_digits_with_wrong_labels_and_no_better_on_clean_ones(
    tmp_path: Path, noise: float, better: bool
) -> None:
    flags = ["--model", "mlp", "--batch-size", 100, "--label-noise", noise, "--epochs", 24 if noise else 8]
    said = tuned(Path("digits"), tmp_path / "out", *flags, "--trials", 3)
    found = tuning_of(tmp_path / "out")
    assert found.erm is not None
    assert found.chosen is not None
    assert found.is_better_than_erm is better
    compared = json.loads((tmp_path / "out" / FILE).read_text())["against_erm"]
    assert (compared["trial"], compared["images"], compared["trials"]) == (found.chosen.number, 144, 2)
    assert compared["is_better"] is better
    assert compared["gain"] == pytest.approx((found.erm.error or 0) - (found.chosen.error or 0), abs=1e-6)
    assert f"Trial {found.chosen.number} is {'' if better else 'not significantly '}better than ERM (trial 0, " in said
    assert ("since it was chosen on these" in said) is better
    page = report_page(load_results([tmp_path / "out"]))
    assert f"is {'' if better else 'not significantly '}better than ERM (trial 0, " in page
    trained = flatmin("train", "--tuned", tmp_path / "out" / FILE, "--epochs", 1, "--out", tmp_path / "run")
    assert trained.exit_code == 0, trained.output
    assert ("the tuned amp was no better than ERM" in words(trained.stderr)) is not better


def test_the_table_and_the_page_show_which_trial_is_erms(out: Path, data: Path) -> None:
    said = tuned(data, out, "--trials", 3)
    assert " ERM " in said
    section = tuning_section(out / FILE, tuning_of(out))
    (row,) = [cells for cells, _ in section.rows if cells[0] == "0"]
    assert (row[1:3], row[-1]) == (["", ""], "ERM")
    assert section.figure is not None
    drawn: Any = section.figure.data["trials"]
    assert [trial["is_erm"] for trial in drawn] == [True, False, False]
    (legend,) = section.figure.figure.legends
    assert "ERM" in [text.get_text() for text in legend.get_texts()]


def test_where_erm_fails_it_is_said_and_the_others_are_chosen_from(out: Path, tmp_path: Path) -> None:
    content = json.loads((out / FILE).read_text())
    content["trials"][0] |= {"state": "failed", "value": None, "error": None, "nll": None, "why": "its loss is nan"}
    content["against_erm"] = None
    (tmp_path / FILE).write_text(json.dumps(content))
    assert tuning_of(tmp_path).is_better_than_erm is None
    page = report_page(load_results([tmp_path]))
    assert "ERM&#39;s trial has failed (its loss is nan), so there is nothing to compare with." in page


# ---- resumed, and from before


def test_stopped_in_erms_trial_it_resumes_to_the_same_comparison(data: Path, tmp_path: Path, out: Path) -> None:
    images_of = load(data)
    recipe = default_recipe(str(data), images_of, model="mlp", method="amp", epochs=3, augment="none", validation=True)
    search = SearchSpace(recipe=recipe, hyper_parameters=hyper_parameters_of("amp"))
    reasons: list[str] = []
    stopped = tune(search, images_of, folder=tmp_path, trials=3, stop=lambda: reasons[0] if reasons else None)
    for draw, event in stopped:
        assert draw.is_erm
        if isinstance(event, Epoch):
            reasons.append("enough")
    (only,) = tuning_of(tmp_path).trials
    assert (only.is_erm, only.state) == (True, "running")
    list(tune(search, images_of, folder=tmp_path, trials=3))
    assert without_times(tuning_of(tmp_path)) == without_times(tuning_of(out))
    assert tuning_of(tmp_path).against_erm == tuning_of(out).against_erm is not None


def test_the_comparison_stays_where_the_folders_of_the_trials_are_gone(data: Path, tmp_path: Path, out: Path) -> None:
    shutil.copytree(out, tmp_path / "out")
    before = tuning_of(out).against_erm
    assert before is not None
    for folder in (tmp_path / "out").glob("trial-*"):
        shutil.rmtree(folder)
    tuned(data, tmp_path / "out", "--trials", 3)
    assert tuning_of(tmp_path / "out").against_erm == before


def test_a_tuning_from_before_is_read_and_says_that_erm_is_missing(old: Path) -> None:
    found = tuning_of(old)
    assert (found.erm, found.against_erm, found.is_better_than_erm) == (None, None, None)
    assert found.chosen is not None
    assert "This tuning has no trial of ERM to compare with" in report_page(load_results([old]))


def test_a_study_from_before_resumes_and_its_next_trial_is_erms(data: Path, old: Path) -> None:
    before = without_times(tuning_of(old))
    said = tuned(data, old, "--trials", 2)
    assert "This tuning has no trial of ERM to compare with" in said
    assert without_times(tuning_of(old)) == before
    assert len(study_of(old).trials) == 2
    said = tuned(data, old, "--trials", 4)
    found = tuning_of(old)
    assert without_times(found)[:2] == before
    assert [trial.is_erm for trial in found.trials] == [False, False, True, False]
    assert "ERM (trial 2, " in said


def test_without_the_scores_of_the_chosen_trial_the_gain_is_said_and_no_more(data: Path, old: Path) -> None:
    tuned(data, old, "--trials", 3)
    content = json.loads((old / FILE).read_text())
    content["trials"][2] |= {"value": 1.0, "error": 1.0}
    (old / FILE).write_text(json.dumps(content))
    found = tuning_of(old)
    assert (found.against_erm, found.is_better_than_erm) == (None, None)
    page = report_page(load_results([old]))
    assert "Whether that is more than chance is not known" in page
