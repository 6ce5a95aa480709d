"""Tuning: trials that can be killed, repeated and trusted, on the validation split alone."""

import errno
import json
import os
import re
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from PIL import Image

from flatmin_lab.cli.commands import tune as tune_command
from flatmin_lab.data import Split, load
from flatmin_lab.execution.task_queue import Slot, TaskFailure
from flatmin_lab.methods import METHODS
from flatmin_lab.recipes.defaults import default_recipe
from flatmin_lab.report.loader import load_results
from flatmin_lab.report.pages.report import report_page
from flatmin_lab.report.pages.tuning import tuning_section
from flatmin_lab.runs.events import BusyError, Epoch, Event, Finished, RunError, Stopped
from flatmin_lab.tuning import result_file
from flatmin_lab.tuning.result import State, Trial, Tuning
from flatmin_lab.tuning.result_file import FILE
from flatmin_lab.tuning.search_space import HYPER_PARAMETERS, HyperParameter, SearchSpace, hyper_parameters_of
from flatmin_lab.tuning.study import DATABASE, MIN_FINISHED_TRIALS, Draw, open_study
from flatmin_lab.tuning.trial import Pruned, TrialTask
from flatmin_lab.tuning.trial_queue import TrialQueue
from flatmin_lab.tuning.tuner import tune
from tests import ROOT
from tests.support.processes import flatmin, words
from tests.support.report_files import result, write
from tests.support.small_runs import after, images

SRC = ROOT / "src"
WAITS = 120.0  # seconds for a process that should have come so far


def saved(path: Path, test: Split) -> Path:
    """A few images in a file: a tenth of the training set is twelve of them."""
    train = images(120, 0)
    arrays = {"x_train": train.x, "y_train": train.y, "x_test": test.x, "y_test": test.y}
    plain: dict[str, Any] = {name: tensor.numpy() for name, tensor in arrays.items()}
    np.savez(path, **plain)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("data") / "tiny.npz", images(30, 1))


def asked(data: Path, out: Path, *more: object) -> list[object]:
    flags: list[object] = ["--model", "mlp", "--epochs", 3, "--augment", "none", "--device", "cpu", "--out", out]
    return ["tune", "--data", data, *flags, *more]


def tuning_of(out: Path) -> Tuning:
    return result_file.read(out / FILE)


def without_times(found: Tuning) -> list[Any]:
    return [(t.number, dict(t.settings), t.state, t.value, t.error, t.nll, t.epochs, t.why) for t in found.trials]


def own_trials(found: Tuning) -> list[Trial]:
    """Those of the method, without ERM's."""
    return [trial for trial in found.trials if not trial.is_erm]


def study_of(out: Path) -> Any:
    """As anyone else opens it."""
    return optuna.load_study(study_name=None, storage=f"sqlite:///{out / DATABASE}")


def drawn_before(out: Path, draws: Iterable[dict[str, float]]) -> None:
    """A study whose first trials are enqueued, as Optuna's users do it."""
    out.mkdir(parents=True)
    study = optuna.create_study(storage=f"sqlite:///{out / DATABASE}", direction="minimize", study_name="mine")
    for draw in draws:
        study.enqueue_trial(draw)


@pytest.fixture(scope="module")
def out(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tuning of four trials, for tests that only read it."""
    folder = tmp_path_factory.mktemp("tuning") / "amp"
    done = flatmin(*asked(data, folder, "--trials", 4, "--measure", "nll"))
    assert done.exit_code == 0, done.output
    return folder


# ---- what comes out


def test_the_chosen_values_are_those_of_the_best_finished_trial(out: Path) -> None:
    found = tuning_of(out)
    assert [trial.state for trial in found.trials] == ["finished"] * 4
    assert found.chosen == min(own_trials(found), key=lambda trial: trial.value or 0.0)
    assert found.chosen is not None
    chosen = json.loads((out / FILE).read_text())["chosen"]
    assert chosen == {"trial": found.chosen.number, "settings": found.chosen.settings}
    for trial in found.trials:
        own = json.loads((out / f"trial-{trial.number}" / "result.json").read_text())
        assert own["validation_nll"] == trial.value
        assert trial.settings.items() <= own["settings"].items()


def test_the_first_trial_of_the_method_is_what_would_be_trained_without_tuning(out: Path, data: Path) -> None:
    usual = default_recipe(str(data), load(data), model="mlp", method="amp", epochs=3).settings
    assert tuning_of(out).trials[1].settings == usual


def test_the_file_says_with_what_and_how_it_was_measured(out: Path, data: Path) -> None:
    found = json.loads((out / FILE).read_text())
    expected = {"method": "amp", "data": str(data), "model": "mlp", "epochs": 3, "measure": "nll", "seed": 0}
    assert expected.items() <= found.items()
    assert found["space"]["epsilon"] == {"low": 0.01, "high": 2.0, "log": True}
    assert {"hardware", "threads", "torch", "commit"} <= found.keys()
    for trial in found["trials"]:
        assert {"number", "settings", "state", "value", "epochs", "seconds", "seed"} <= trial.keys()


def test_the_study_can_be_opened_by_others(out: Path) -> None:
    study, found = study_of(out), tuning_of(out)
    assert study.best_value == min(trial.value for trial in found.trials if trial.value is not None)
    assert study.study_name == found.study
    for trial, ours in zip(study.trials, found.trials, strict=True):
        assert list(trial.intermediate_values) == [1, 2, 3]
        assert trial.params == pytest.approx(ours.settings, rel=5e-3)  # three digits are trained with


def test_the_same_command_gives_the_same_trials_and_a_second_call_nothing_new(
    data: Path, tmp_path: Path, out: Path
) -> None:
    other = flatmin(*asked(data, tmp_path / "b", "--trials", 4, "--measure", "nll"))
    assert other.exit_code == 0, other.output
    assert without_times(tuning_of(tmp_path / "b")) == without_times(tuning_of(out))
    again = flatmin(*asked(data, tmp_path / "b", "--trials", 4, "--measure", "nll"))
    assert "of 3 trials of amp, each of 3 epochs, on a held-out tenth of the training set" in words(again.stdout)
    assert "trial 0  " not in again.stderr
    assert len(study_of(tmp_path / "b").trials) == 4
    assert flatmin(*asked(data, tmp_path / "b", "--trials", 5, "--measure", "nll")).exit_code == 0
    assert without_times(tuning_of(tmp_path / "b"))[:4] == without_times(tuning_of(out))
    assert len(tuning_of(tmp_path / "b").trials) == 5


def test_the_test_set_is_never_looked_at(tmp_path: Path, out: Path) -> None:
    """With another one nothing changes."""
    other = saved(tmp_path / "other.npz", images(9, 7))
    assert flatmin(*asked(other, tmp_path / "out", "--trials", 2, "--measure", "nll")).exit_code == 0
    assert without_times(tuning_of(tmp_path / "out")) == without_times(tuning_of(out))[:2]
    own = json.loads((tmp_path / "out" / "trial-0" / "result.json").read_text())
    assert not any(key.startswith(("test", "best_test")) for key in own)


def test_of_trials_with_the_same_error_the_lowest_nll_is_chosen(out: Path) -> None:
    found = tuning_of(out)
    states: list[State] = ["finished", "finished", "pruned", "finished"]
    numbers = [(0.1, 0.4), (0.1, 0.3), (0.0, 0.1), (0.2, 0.1)]
    trials = [
        replace(found.trials[place], state=state, value=error, error=error, nll=nll)
        for place, (state, (error, nll)) in enumerate(zip(states, numbers, strict=True))
    ]
    chosen = replace(found, measure="error", trials=trials).chosen
    assert chosen is not None
    assert chosen.number == 1


# ---- what every method has


@pytest.mark.parametrize("method", [method for method in METHODS if method != "erm"])
def test_every_method_can_be_tuned(data: Path, tmp_path: Path, method: str) -> None:
    done = flatmin(*asked(data, tmp_path / "out", "--method", method, "--trials", 2, "--epochs", 1))
    assert done.exit_code == 0, done.output
    found = tuning_of(tmp_path / "out")
    assert [trial.state for trial in found.trials] == ["finished"] * 2
    for parameter in HYPER_PARAMETERS[method]:
        for trial in own_trials(found):
            assert parameter.low <= trial.settings[parameter.name] <= parameter.high
    command = next(line for line in done.stdout.splitlines() if line.strip().startswith("flatmin train --data"))
    trained = flatmin(*command.split()[1:], "--out", tmp_path / "run")
    assert trained.exit_code == 0, trained.output


def test_erm_has_nothing_to_tune_but_what_every_recipe_has(data: Path, tmp_path: Path) -> None:
    done = flatmin(*asked(data, tmp_path / "out", "--method", "erm"))
    assert done.exit_code == 2
    assert "erm has no hyper-parameter of its own: there is nothing to tune" in words(done.stderr)
    assert "--knobs lr,weight_decay" in words(done.stderr)
    assert not (tmp_path / "out").exists()
    more = ["--method", "erm", "--knobs", "lr,weight-decay", "--trials", 2]
    done = flatmin(*asked(data, tmp_path / "out", *more))
    assert done.exit_code == 0, done.output
    found = tuning_of(tmp_path / "out")
    assert found.trials[0].settings == {"lr": 0.1, "weight_decay": 1e-4}
    assert flatmin("train", "--tuned", tmp_path / "out" / FILE, "--out", tmp_path / "run").exit_code == 0
    recipe = json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]
    assert found.chosen is not None
    assert {"method": "erm", "epochs": 3, "augment": "none", "validation": False, **found.chosen.settings}.items() <= (
        recipe.items()
    )


def test_every_flag_of_the_training_comes_back_in_the_command_that_trains_with_the_chosen_values(
    data: Path, tmp_path: Path
) -> None:
    own: list[object] = ["--momentum", 0.5, "--milestones", "0.25,0.5", "--warmup", 0.5, "--clip-norm", 1.5]
    own += ["--batch-size", 30, "--weight-decay", 0.01, "--label-noise", 0.1, "--deterministic"]
    done = flatmin(*asked(data, tmp_path / "out", "--trials", 2, *own))
    assert done.exit_code == 0, done.output
    tried = json.loads((tmp_path / "out" / "trial-1" / "config.json").read_text())["recipe"]
    assert (tried["momentum"], tried["milestones"], tried["warmup"]) == (0.5, [0.25, 0.5], 0.5)
    command = tuning_of(tmp_path / "out").command()
    assert command[0] == "flatmin"
    recipes = []
    for place, words_of in (("named", command[1:]), ("tuned", ["train", "--tuned", tmp_path / "out" / FILE])):
        trained = flatmin(*words_of, "--device", "cpu", "--out", tmp_path / place)
        assert trained.exit_code == 0, trained.output
        recipes.append(json.loads((tmp_path / place / "config.json").read_text())["recipe"])
    assert recipes == [{**tried, "validation": False}] * 2


def test_without_momentum_it_is_tuned_and_trained_without_nesterovs(data: Path, tmp_path: Path) -> None:
    done = flatmin(*asked(data, tmp_path / "out", "--trials", 2, "--epochs", 1, "--momentum", 0))
    assert done.exit_code == 0, done.output
    trained = flatmin(*tuning_of(tmp_path / "out").command()[1:], "--device", "cpu", "--out", tmp_path / "run")
    assert trained.exit_code == 0, trained.output
    recipe = json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]
    assert (recipe["momentum"], recipe["nesterov"]) == (0.0, False)


def test_a_tuning_that_names_the_default_optimizer_and_no_nesterov_comes_back(data: Path, tmp_path: Path) -> None:
    own: list[object] = ["--optimizer", "sgd", "--momentum", 0.5, "--no-nesterov", "--epochs", 1]
    done = flatmin(*asked(data, tmp_path / "out", "--trials", 2, *own))
    assert done.exit_code == 0, done.output
    command = tuning_of(tmp_path / "out").command()
    assert "--no-nesterov" in command
    trained = flatmin(*command[1:], "--device", "cpu", "--out", tmp_path / "run")
    assert trained.exit_code == 0, trained.output
    recipe = json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]
    assert (recipe["momentum"], recipe["nesterov"]) == (0.5, False)


def test_rate_and_weight_decay_are_searched_around_the_defaults_of_the_optimizer(tmp_path: Path) -> None:
    """One that has no decay by default adds it to the gradient, as SGD does, unless it is told not to."""
    own = tmp_path / "own.py"
    own.write_text("def make_optimizer(params, lr=0.002): ...")
    settings: dict[str, Any]
    for optimizer, settings, rates, decays in (
        ("sgd", {}, (0.005, 1.0), (1e-5, 1e-2)),
        ("adamw", {}, (5e-5, 0.01), (1e-3, 1.0)),
        ("adam", {}, (5e-5, 0.01), (1e-5, 1e-2)),
        ("nadam", {"decoupled_weight_decay": True}, (1e-4, 0.02), (1e-3, 1.0)),
        (f"{own}:make_optimizer", {}, (1e-4, 0.02), (1e-5, 1e-2)),
    ):
        names = ["lr", "weight_decay"]
        rate, decay = hyper_parameters_of("erm", names, optimizer=optimizer, optimizer_settings=settings)
        assert (rate.low, rate.high) == rates
        assert (decay.low, decay.high) == decays


def test_the_command_searches_a_decoupled_weight_decay_around_its_own_default(data: Path, tmp_path: Path) -> None:
    flags = ["--method", "erm", "--knobs", "weight_decay", "--trials", 1, "--epochs", 1]
    adam = ["--optimizer", "adam", "--optimizer-settings", "decoupled_weight_decay=true"]
    done = flatmin(*asked(data, tmp_path / "out", *flags, *adam))
    assert done.exit_code == 0, done.output
    assert tuning_of(tmp_path / "out").space["weight_decay"] == {"low": 1e-3, "high": 1.0, "log": True}


def test_a_run_with_a_matched_radius_can_begin_a_tuning_of_the_radius(data: Path, tmp_path: Path) -> None:
    settings = {"epsilon": "auto", "held_out": 0.2, "release": 0.5, "inner_lr": 0.7}
    config = tmp_path / "auto.json"
    config.write_text(json.dumps({"method": "amp", "optimizer": "adamw", "settings": settings}))
    flags = asked(data, tmp_path / "out", "--config", config, "--trials", 2, "--epochs", 1, "--knobs", "epsilon,lr")
    done = flatmin(*flags)
    assert done.exit_code == 0, done.output
    assert f"note: ε is tuned, so epsilon auto, held_out 0.2, release 0.5 of {config} is not used" in words(done.stderr)
    found = tuning_of(tmp_path / "out")
    assert found.trials[1].settings == {"epsilon": 0.1, "lr": 0.001}
    assert found.space["lr"] == {"low": 5e-5, "high": 0.01, "log": True}
    assert found.recipe.settings["inner_lr"] == 0.7
    with pytest.raises(ValueError, match="epsilon is either auto or tuned, got both"):
        SearchSpace(
            recipe=replace(found.recipe, settings=settings), hyper_parameters=hyper_parameters_of("amp", ["epsilon"])
        )


def test_a_tuning_takes_the_size_of_the_images_from_a_config(tmp_path: Path) -> None:
    for which in ("train", "test"):
        for label, grey in (("dark", 20), ("light", 200)):
            (tmp_path / which / label).mkdir(parents=True)
            for number in range(10):
                Image.new("L", (10 + number, 9), grey + number).save(tmp_path / which / label / f"{number}.png")
    config = tmp_path / "run.json"
    config.write_text(json.dumps({"size": [8, 8], "batch_size": 6}))
    done = flatmin(*asked(tmp_path, tmp_path / "out", "--config", config, "--trials", 2, "--epochs", 1))
    assert done.exit_code == 0, done.output
    assert tuning_of(tmp_path / "out").recipe.size == (8, 8)


def test_what_is_fixed_is_not_tuned() -> None:
    assert [parameter.name for parameter in hyper_parameters_of("amp", fixed=["inner_lr", "inner_iter"])] == ["epsilon"]
    with pytest.raises(ValueError, match="a number is either fixed or tuned, got epsilon as both"):
        hyper_parameters_of("amp", ["epsilon"], fixed=["epsilon"])
    with pytest.raises(ValueError, match="--knobs of rmp are epsilon, lr, weight_decay, got inner_lr"):
        hyper_parameters_of("rmp", ["inner_lr"])
    with pytest.raises(ValueError, match="unknown method 'sam'"):
        hyper_parameters_of("sam")


# ---- trials that do not finish


def test_pruning_stops_a_bad_trial_before_its_end(data: Path, tmp_path: Path) -> None:
    good, bad = {"epsilon": 0.02, "inner_lr": 1.0}, {"epsilon": 2.0, "inner_lr": 5.0}
    drawn_before(tmp_path / "out", [good] * MIN_FINISHED_TRIALS + [bad])
    done = flatmin(*asked(data, tmp_path / "out", "--epochs", 4, "--trials", 6, "--measure", "nll"))
    assert done.exit_code == 0, done.output
    *others, last = tuning_of(tmp_path / "out").trials
    assert [trial.state for trial in others] == ["finished"] * 5
    assert (last.state, last.epochs) == ("pruned", 3)
    folder = tmp_path / "out" / "trial-5"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3
    assert not (folder / "result.json").exists()
    assert "pruned after epoch 3 of 4" in words(done.stderr)
    assert study_of(tmp_path / "out").trials[5].state.name == "PRUNED"


@pytest.mark.parametrize("pruning", [True, False])
def test_nothing_is_pruned_in_the_first_half_nor_at_the_end_nor_before_five_have_finished(
    data: Path, tmp_path: Path, pruning: bool
) -> None:
    pictures_of = load(data)
    recipe = default_recipe(str(data), pictures_of, model="mlp", method="rmp", epochs=6, validation=True)
    search = SearchSpace(recipe=recipe, hyper_parameters=hyper_parameters_of("rmp"), pruning=pruning)
    with open_study(search, pictures_of, folder=tmp_path, storage=None) as study:
        for number in range(7):
            draw = study.draw(7)
            assert draw is not None
            value = 0.1 + 0.01 * number  # each one worse than all before
            bad = [study.should_prune(number, epoch, value) for epoch in range(1, 7)]
            pruned = pruning and number >= MIN_FINISHED_TRIALS
            assert bad == [False, False, False, pruned, pruned, False]
            last = {"epoch": 6, "seconds": 1.0, "validation_error": value, "validation_nll": value}
            study.end(number, "finished", last)
        assert study.draw(7) is None


def test_a_trial_that_diverges_has_failed_and_the_others_continue(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "flatmin_lab.tuning.search_space.RECIPE_FIELDS", (HyperParameter(name="lr", low=0.01, high=1e25),)
    )
    drawn_before(tmp_path / "out", [{"lr": 1e25}, {"lr": 0.1}])
    done = flatmin(*asked(data, tmp_path / "out", "--method", "mixup", "--knobs", "lr", "--trials", 2))
    assert done.exit_code == 0, done.output
    failed, good = tuning_of(tmp_path / "out").trials
    assert (failed.state, good.state) == ("failed", "finished")
    assert failed.why.startswith(("the loss of step", "a weight after step"))
    assert "1 failed" in words(done.stdout)
    (first, _) = study_of(tmp_path / "out").trials
    assert first.state.name == "FAIL"
    assert first.user_attrs["why"] == failed.why


def test_where_all_fail_nothing_is_chosen(data: Path, tmp_path: Path) -> None:
    done = flatmin(*asked(data, tmp_path / "out", "--lr", 1e30, "--trials", 2, "--seed", -1))
    assert done.exit_code == 1
    assert "Nothing is chosen: no trial of amp has finished" in words(done.stdout)
    trained = flatmin("train", "--tuned", tmp_path / "out" / FILE)
    assert trained.exit_code == 2
    assert "nothing is chosen" in words(trained.stderr)


# ---- killed and resumed


def waiting_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + WAITS
    while not holds():
        assert time.monotonic() < until, "it did not come so far"
        time.sleep(0.002)


def test_a_signal_stops_it_and_the_same_command_resumes(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def follow(events: Iterable[tuple[Any, Event]], *_: object) -> None:
        for draw, event in events:
            if isinstance(event, Epoch) and (draw.number, event.epoch) == (1, 2):
                signal.raise_signal(signal.SIGTERM)

    flags = asked(data, tmp_path / "out", "--trials", 3)
    with monkeypatch.context() as patched:
        patched.setattr(tune_command, "follow", follow)
        stopped = flatmin(*flags)
    assert stopped.exit_code == 143
    assert "stopped by SIGTERM; the same command resumes" in words(stopped.stderr)
    assert "There are 0 of 2 trials so far of amp" in words(stopped.stdout)
    assert [trial.state for trial in tuning_of(tmp_path / "out").trials] == ["finished", "running"]
    done = flatmin(*flags)
    assert done.exit_code == 0, done.output
    assert "trial 1  " in done.stderr
    assert "resumed after step" in done.stderr
    assert tuning_of(tmp_path / "out").count("finished") == 3
    monkeypatch.setattr(tune_command, "follow", follow)
    assert flatmin(*flags).exit_code == 0  # all of them have ended


def test_epochs_missing_in_the_study_are_reported_when_it_is_resumed(data: Path, tmp_path: Path) -> None:
    """Killed between a checkpoint and the study, no epoch is missing there."""
    pictures_of = load(data)
    recipe = default_recipe(
        str(data), pictures_of, model="mlp", method="erm", epochs=3, augment="none", validation=True
    )
    search = SearchSpace(recipe=recipe, hyper_parameters=hyper_parameters_of("erm", ["lr"]))
    steps = len(pictures_of.train) // recipe.batch_size + 1
    stopped = list(tune(search, pictures_of, folder=tmp_path / "out", trials=1, stop=after(2 * steps + 6)))
    assert isinstance(stopped[-1][1], Stopped)
    study = study_of(tmp_path / "out")
    known = dict(study.trials[0].intermediate_values)
    assert known
    for name in (DATABASE, FILE):
        (tmp_path / "out" / name).unlink()
    forgetful = optuna.create_study(storage=f"sqlite:///{tmp_path / 'out' / DATABASE}", study_name=study.study_name)
    forgetful.set_user_attr("tuning", study.user_attrs["tuning"])
    forgetful.enqueue_trial(study.trials[0].params)
    list(tune(search, pictures_of, folder=tmp_path / "out", trials=1))
    (again,) = study_of(tmp_path / "out").trials
    assert list(again.intermediate_values) == [1, 2, 3]
    assert known.items() <= again.intermediate_values.items()


def rmp_search(data: Path, **changes: Any) -> SearchSpace:
    recipe = default_recipe(str(data), load(data), model="mlp", method="rmp", epochs=6, validation=True)
    return SearchSpace(recipe=recipe, hyper_parameters=hyper_parameters_of("rmp", ["epsilon", "lr"]), **changes)


def measured(epoch: int, value: float) -> dict[str, float]:
    return {"epoch": epoch, "seconds": 1.0, "validation_error": value, "validation_nll": value}


def test_killed_between_two_values_of_a_trial_it_draws_the_second_that_it_would_have_drawn(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, pictures_of = rmp_search(data), load(data)

    def draw_all(folder: Path) -> list[Any]:
        folder.mkdir(exist_ok=True)
        with open_study(search, pictures_of, folder=folder, storage=None) as study:
            found = study.unfinished()
            while (draw := study.draw(15)) is not None:
                found.append(draw)
                study.end(draw.number, "finished", measured(6, draw.settings.get("lr", 1.0)))
        return found

    real = optuna.trial.Trial.suggest_float

    def killed(trial: Any, name: str, *more: Any, **settings: Any) -> float:
        if (trial.number, name) == (dies_in, "lr"):
            raise KeyboardInterrupt
        return real(trial, name, *more, **settings)

    whole = draw_all(tmp_path / "whole")
    for dies_in in (1, 5, 14):  # the values without tuning, random ones, TPE's
        with monkeypatch.context() as patched:
            patched.setattr(optuna.trial.Trial, "suggest_float", killed)
            with pytest.raises(KeyboardInterrupt):
                draw_all(tmp_path / str(dies_in))
        assert draw_all(tmp_path / str(dies_in))[0] == whole[dies_in]


def test_killed_before_it_is_pruned_a_trial_is_pruned_after_the_same_epoch(data: Path, tmp_path: Path) -> None:
    search, pictures_of = rmp_search(data), load(data)
    with open_study(search, pictures_of, folder=tmp_path, storage=None) as study:
        for number in range(MIN_FINISHED_TRIALS):
            study.draw(6)
            for epoch in range(1, 7):
                study.should_prune(number, epoch, 0.1)
            study.end(number, "finished", measured(6, 0.1))
        study.draw(6)
        judged = [study.should_prune(MIN_FINISHED_TRIALS, epoch, 0.5) for epoch in (1, 2, 3, 4)]
        assert judged == [False, False, False, True]
    with open_study(search, pictures_of, folder=tmp_path, storage=None) as study:  # which was not told
        (again,) = study.unfinished()
        assert [study.should_prune(again.number, epoch, 0.5) for epoch in (1, 2, 3, 4)] == judged


def test_a_pruned_trial_is_known_by_its_last_event(data: Path, tmp_path: Path) -> None:
    """From Python; with measures that do not tell, nothing is pruned."""
    pictures_of = load(data)
    recipe = default_recipe(
        str(data), pictures_of, model="mlp", method="dropout", epochs=1, augment="none", validation=True
    )
    search = SearchSpace(recipe=recipe, hyper_parameters=hyper_parameters_of("dropout"))
    ends = [event for _, event in tune(search, pictures_of, folder=tmp_path / "out", trials=2)]
    assert sum(isinstance(event, Finished) for event in ends) == 2
    assert not any(isinstance(event, Pruned) for event in ends)
    with pytest.raises(ValueError, match="must not use the test set"):
        SearchSpace(
            recipe=default_recipe(str(data), pictures_of, model="mlp", method="amp", epochs=1),
            hyper_parameters=hyper_parameters_of("amp"),
        )
    with pytest.raises(ValueError, match="unknown measure 'ece'; choose from error, nll"):
        SearchSpace(recipe=recipe, hyper_parameters=hyper_parameters_of("dropout"), measure="ece")  # type: ignore[arg-type]


# ---- requests that make no sense


def test_a_folder_belongs_to_one_tuning(data: Path, tmp_path: Path, out: Path) -> None:
    for flags, message in (
        (["--measure", "error"], "measure is 'nll' there and 'error' here"),
        (["--measure", "nll", "--epochs", 4], "epochs is 3 there and 4 here"),
        (["--measure", "nll", "--seed", 1], "seed is 0 there and 1 here"),
        (["--measure", "nll", "--no-pruning"], "pruning is True there and False here"),
        (["--measure", "nll", "--knobs", "epsilon"], "space is"),
    ):
        before = (out / FILE).read_bytes()
        done = flatmin(*asked(data, out, "--trials", 9, *flags))
        assert done.exit_code == 2, done.output
        assert message in words(done.stderr)
        assert (out / FILE).read_bytes() == before
    elsewhere = flatmin(*asked(data, out, "--measure", "nll", "--storage", f"sqlite:///{tmp_path / 'other.db'}"))
    assert elsewhere.exit_code == 2
    assert f"has 4 trials that its study {out.name} does not have" in words(elsewhere.stderr)
    run = flatmin(*asked(data, out / "trial-0"))
    assert run.exit_code == 2
    assert "is a run itself" in words(run.stderr)


DAMAGES = {
    "noise": None,
    "no column": "ALTER TABLE trials RENAME COLUMN state TO mood",
    "no JSON": "UPDATE study_user_attributes SET value_json = '{'",
    "a number in place of the recipe": """UPDATE study_user_attributes SET value_json = '{"recipe": 0}'""",
    "no such state": "UPDATE trials SET state = 'HAPPY'",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_study_is_named(data: Path, tmp_path: Path, out: Path, damage: str) -> None:
    database = tmp_path / "study.db"
    shutil.copy(out / "study.db", database)
    if (command := DAMAGES[damage]) is None:
        database.write_bytes(b"noise" * 1000)
    else:
        with closing(sqlite3.connect(database)) as connection, connection:
            connection.execute(command)
    done = flatmin(*asked(data, tmp_path, "--measure", "nll", "--trials", 9))
    assert done.exit_code == 2, done.output
    assert str(database) in words(done.stderr)


def test_a_study_that_cannot_be_written_any_more_is_no_damaged_one(data: Path, tmp_path: Path) -> None:
    flags = asked(data, tmp_path / "out", "--trials", 3)
    drawn_before(tmp_path / "out", [])
    stop = "BEFORE INSERT ON trial_intermediate_values WHEN NEW.trial_id = 2 AND NEW.step = 2"
    with closing(sqlite3.connect(tmp_path / "out" / DATABASE)) as connection, connection:
        connection.execute(f"CREATE TRIGGER full {stop} BEGIN INSERT INTO room VALUES (1); END")
    done = flatmin(*flags)
    assert done.exit_code == 1, done.output
    assert "study.db could not be written" in words(done.stderr)
    assert "no such table: main.room); once it can be, repeat the command" in words(done.stderr)
    with closing(sqlite3.connect(tmp_path / "out" / DATABASE)) as connection, connection:
        connection.execute("DROP TRIGGER full")
    done = flatmin(*flags)
    assert done.exit_code == 0, done.output
    assert flatmin(*asked(data, tmp_path / "whole", "--trials", 3)).exit_code == 0
    assert without_times(tuning_of(tmp_path / "out")) == without_times(tuning_of(tmp_path / "whole"))


def test_a_trial_whose_process_died_ends_the_tuning_and_says_what_to_do(data: Path, tmp_path: Path) -> None:
    draw, search = Draw(3, {"epsilon": 0.1, "lr": 0.1}), rmp_search(data)
    task = TrialTask(draw, search.trial_recipe(draw.settings), 0, tmp_path, "cpu", "data", 1)
    queue = TrialQueue(iter([draw]), 1, lambda *_: task, load(data), set(), lambda: None)
    assert queue.take(Slot("cpu")) is task
    with pytest.raises(RunError, match="trial 3 cannot be trained: signal 9; the same command resumes"):
        list(queue.receive(task, TaskFailure("signal 9"), ""))


def test_the_file_on_a_full_disk_is_written_when_there_is_room_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    flags = asked(data, tmp_path / "out", "--trials", 2)
    assert flatmin(*flags).exit_code == 0
    with monkeypatch.context() as patched:
        patched.setattr(result_file, "atomic_write", full)
        done = flatmin(*asked(data, tmp_path / "out", "--trials", 3))
    assert done.exit_code == 1
    assert "tuning.json could not be written (No space left on device); make room and repeat" in words(done.stderr)
    assert len(tuning_of(tmp_path / "out").trials) == 2
    assert flatmin(*asked(data, tmp_path / "out", "--trials", 3)).exit_code == 0
    assert len(tuning_of(tmp_path / "out").trials) == 3


def test_a_second_process_is_refused(data: Path, tmp_path: Path) -> None:
    pictures_of = load(data)
    recipe = default_recipe(
        str(data), pictures_of, model="mlp", method="rmp", epochs=1, augment="none", validation=True
    )
    search = SearchSpace(recipe=recipe, hyper_parameters=hyper_parameters_of("rmp"))
    first = tune(search, pictures_of, folder=tmp_path / "out", trials=2)
    next(first)
    with pytest.raises(BusyError, match="another process is tuning in"):
        next(tune(search, pictures_of, folder=tmp_path / "out", trials=2))
    list(first)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--measure", "ece"], "unknown measure 'ece'"),
        (["--method", "sam"], "unknown method 'sam'"),
        (["--trials", "0"], "--trials"),
        (["--trials", "1"], "a tuning of amp needs 2 or more trials, since one of them is ERM's, got 1"),
        (["--knobs", "colour"], "--knobs of amp are epsilon, inner_lr, lr, weight_decay, got colour"),
        (["--set", "colour=1"], "got colour"),
        (["--batch-size", "100000"], "the batch size must be"),
        (
            ["--schedule", "cosine", "--milestones", "0.5"],
            "--milestones belongs to the schedule multi_step, got cosine",
        ),
        (["--storage", "nonsense"], "--storage takes a database's address"),
        (["--set", "epsilon=0.1", "--set", "inner_lr=1"], "amp has all its hyper-parameters fixed"),
    ],
    ids=str,
)
def test_a_bad_request_is_refused_before_anything_starts(
    data: Path, tmp_path: Path, flags: list[str], message: str
) -> None:
    done = flatmin(*asked(data, tmp_path / "out", *flags))
    assert done.exit_code == 2, done.output
    assert message in words(done.stderr)
    assert not (tmp_path / "out" / FILE).exists()


def test_the_study_may_lie_elsewhere(data: Path, tmp_path: Path) -> None:
    place = f"sqlite:///{tmp_path / 'all.db'}"
    for name in ("one", "two"):
        done = flatmin(*asked(data, tmp_path / name, "--trials", 2, "--storage", place))
        assert done.exit_code == 0, done.output
    assert optuna.get_all_study_names(place) == ["one", "two"]
    assert not (tmp_path / "one" / DATABASE).exists()
    (tmp_path / "one").rename(tmp_path / "renamed")
    done = flatmin(*asked(data, tmp_path / "renamed", "--trials", 3, "--storage", place))
    assert done.exit_code == 2
    assert "give the --storage it was made with, and its folder the name one" in words(done.stderr)


def test_nothing_imports_optuna_before_it_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in SRC.rglob("*.py"):
        assert not re.search(r"^\s*(import|from) optuna", path.read_text(), re.MULTILINE), path
    monkeypatch.setitem(sys.modules, "optuna", None)
    done = flatmin("tune", "--data", "digits", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "flatmin tune needs optuna, which is not installed here: pip install 'flatmin[lab]'" in words(done.stderr)


def test_help_names_what_there_is() -> None:
    text = flatmin("tune", "--help").stdout
    for flag in ("--trials", "--measure", "--knobs", "--storage", "--no-pruning", "--workers"):
        assert flag in text
    assert "tune" in flatmin("--help").stdout
    assert flatmin("tune").exit_code == 2


# ---- what is done with it


def test_train_takes_the_chosen_values(out: Path, tmp_path: Path) -> None:
    found = tuning_of(out)
    done = flatmin("train", "--tuned", out / FILE, "--out", tmp_path / "run", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "were tuned" not in done.stderr
    recipe = json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]
    assert found.chosen is not None
    assert recipe["settings"] == found.chosen.settings
    expected = {"method": "amp", "model": "mlp", "epochs": 3, "augment": "none", "validation": False}
    assert expected.items() <= recipe.items()


def test_other_flags_win_over_the_tuning_and_another_length_is_said(out: Path, tmp_path: Path) -> None:
    flags = ["--tuned", out / FILE, "--epochs", 1, "--epsilon", 0.07, "--model", "convnet", "--device", "cpu"]
    done = flatmin("train", *flags, "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    said = words(done.stderr)
    assert "note: the values were tuned at 3 epochs, but this run has 1" in said
    assert "tuned for mlp, but this run trains convnet" in said
    recipe = json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]
    assert (recipe["epochs"], recipe["settings"]["epsilon"], recipe["model"]) == (1, 0.07, "convnet")


def test_another_optimizer_has_its_own_rate_and_not_the_tuned_one(out: Path, tmp_path: Path) -> None:
    found = tuning_of(out)
    tuned = {**found.asked, "optimizer": "adamw", "optimizer_settings": {"eps": 1e-6}, "lr": 0.003}
    other = replace(found, asked=tuned, recipe=replace(found.recipe, optimizer="adamw", lr=0.003))
    result_file.write(tmp_path, other)
    flags = ["--tuned", tmp_path / FILE, "--optimizer", "sgd", "--epochs", 1, "--device", "cpu"]
    done = flatmin("train", *flags, "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert "note: the values were tuned with adamw, but this run has sgd" in words(done.stderr)
    recipe = json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]
    assert (recipe["lr"], recipe["weight_decay"], "optimizer" in recipe) == (0.1, 1e-4, False)


def test_a_run_that_contradicts_its_tuning_is_refused(out: Path, tmp_path: Path) -> None:
    other = saved(tmp_path / "other.npz", images(9, 7))
    for flags, message in (
        (["--method", "erm"], "has --method amp, got erm"),
        (["--data", "digits"], "got digits; leave out one of the two flags"),
        (["--data", other], "was tuned on"),
    ):
        done = flatmin("train", "--tuned", out / FILE, "--out", tmp_path / "run", *flags)
        assert done.exit_code == 2
        assert message in words(done.stderr)
        assert not (tmp_path / "run").exists()
    missing = flatmin("train", "--tuned", tmp_path / FILE)
    assert missing.exit_code == 2
    assert "does not exist; give the tuning.json" in words(missing.stderr)


def test_a_file_that_is_not_a_tuning_is_not_believed(out: Path, tmp_path: Path) -> None:
    content = json.loads((out / FILE).read_text())
    wrong: list[Any] = [
        {**content, "measure": "luck"},
        {**content, "epochs": 7},
        {**content, "wanted": "many"},
        {**content, "space": {"colour": {"low": 1, "high": 2, "log": True}}},
        {**content, "space": {**content["space"], "epsilon": {"low": -1, "high": 2, "log": True}}},
        {**content, "asked": {"colour": "red"}},
        {**content, "trials": [{**content["trials"][0], "value": None}]},
        {**content, "trials": [{**content["trials"][0], "settings": {"epsilon": "large"}}]},
        {**content, "trials": [{"number": 0}]},
        {**content, "recipe": {}},
        {key: value for key, value in content.items() if key != "recipe"},
        [],
        {},
    ]
    for place, one in enumerate(wrong):
        path = tmp_path / str(place) / FILE
        path.parent.mkdir()
        path.write_text(json.dumps(one))
        with pytest.raises(ValueError, match=r"is not a tuning|is damaged"):
            result_file.read(path)
    assert [broken.path.name for broken in load_results([tmp_path]).unusable] == [FILE] * len(wrong)


@pytest.mark.parametrize("part", ["the file", "its recipe", "a trial", "ERM's trial", "the comparison", "a range"])
def test_a_field_of_the_wrong_type_is_named_with_the_file(out: Path, tmp_path: Path, part: str) -> None:
    """A tuning, or an error that names the file and the field; the report is made in either case."""
    whole = json.loads((out / FILE).read_text())
    parts = {
        "the file": lambda found: found,
        "its recipe": lambda found: found["recipe"],
        "a trial": lambda found: found["trials"][1],
        "ERM's trial": lambda found: found["trials"][0],
        "the comparison": lambda found: found["against_erm"],
        "a range": lambda found: found["space"]["epsilon"],
    }
    place = tmp_path / FILE
    for name in parts[part](whole):
        for value in (None, 10**400, "x", ["x"], {"x": 0}):
            found = json.loads(json.dumps(whole))
            parts[part](found)[name] = value
            place.write_text(json.dumps(found))
            try:
                tuning_section(place, result_file.read(place))
            except ValueError as error:
                said = str(error)
            else:
                continue
            assert str(place) in said
            assert (name if part != "a range" else "space") in said, value


# ---- what the report says


def test_the_report_has_a_section_for_a_tuning_and_no_run_of_its_trials(out: Path, tmp_path: Path) -> None:
    write(tmp_path / "runs" / "amp", result("amp", 0, 0.04))
    found = load_results([tmp_path / "runs", out.parent])
    assert [run.path.name for run in found.runs] == ["amp"]
    assert len(found.tunings) == 1
    page = report_page(found)
    assert "Tuning</h2>" in page
    assert page.count('<tr class="chosen">') == 1
    assert "of 3 trials of amp, each of 3 epochs, on a held-out tenth of the training set" in page
    assert "flatmin train --data" in page
    assert "validation NLL over ε and ζ" in page
    assert 'download="AMP--an-MLP-on-tiny-npz--3-epochs-tuning.json"' in page
    assert "of 1 training run and 1 tuning" in page
    assert "runs of a tuning" not in page


def test_a_tuning_alone_is_a_report_too(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for what in (out, out / FILE):
        done = flatmin("report", what, "--out", tmp_path / "page.html")
        assert done.exit_code == 0, done.output
        page = (tmp_path / "page.html").read_text()
        assert "<h1>Tuning</h1>" in page
        assert "No training run could be read" not in page
        assert "from the files of 1 tuning" in page
    assert [run.path.name for run in load_results([out / "trial-1"]).runs] == ["trial-1"]  # named itself
    (tmp_path / "tuning").symlink_to(out.parent)
    monkeypatch.chdir(tmp_path)
    assert flatmin("report").exit_code == 0


def test_what_was_pruned_and_what_failed_is_said_in_the_report(out: Path, tmp_path: Path) -> None:
    content = json.loads((out / FILE).read_text())
    trials = content["trials"]
    content["against_erm"] = None
    trials[1] |= {"state": "failed", "value": None, "error": None, "nll": None, "epochs": 0, "why": "its loss is <nan>"}
    trials[2] |= {"state": "pruned", "epochs": 2}
    (tmp_path / FILE).write_text(json.dumps({**content, "wanted": 9}))
    page = report_page(load_results([tmp_path]))
    assert "3 of 8 trials so far of amp" in page
    assert "Of these, 1 was pruned and 1 failed." in page
    assert "failed: its loss is &lt;nan&gt;" in page
    for one in trials:
        one |= {"state": "failed", "value": None, "error": None, "nll": None}
    (tmp_path / FILE).write_text(json.dumps(content))
    assert "Nothing is chosen: no trial of amp has finished" in report_page(load_results([tmp_path]))
