"""`flatmin reproduce`: the table is filled, a killed command resumes, and bad requests are refused with a reason."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from flatmin_lab.data import load
from flatmin_lab.recipes.experiments import EXPERIMENTS
from flatmin_lab.recipes.experiments.experiment import cell
from flatmin_lab.runs.open_folder import open_run_folder
from flatmin_lab.training.loop import config_of
from tests import ROOT
from tests.support import official_files
from tests.support.official_files import made
from tests.support.processes import flatmin, words
from tests.support.report_files import write_result

SOME = ["--protocol", "smoke", "--data", "cifar10", "--models", "vgg16"]


def places(folder: Path) -> list[str]:
    return ["--results", str(folder / "results"), "--runs", str(folder / "runs"), "--device", "cpu"]


def program(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "flatmin_lab", "reproduce", *arguments]


def test_the_list_says_what_is_there(tmp_path: Path) -> None:
    write_result(tmp_path / "results", cell("short", "cifar10", "preactresnet18", "erm"), 0, 0.05)
    shown = flatmin("reproduce", "--list", "--protocol", "short", *places(tmp_path))
    assert shown.exit_code == 0, shown.output
    lines = {line.split()[0]: line.split() for line in shown.stdout.splitlines()[1:]}
    assert lines.keys() == EXPERIMENTS.keys()
    assert lines["table1"][-3:] == ["144", "1", "143"]
    assert lines["ece"][-3:] == ["72", "1", "71"]
    assert "(figure 7)" in " ".join(lines["ece"])
    assert "flatmin theory" in words(shown.stderr)  # figures that no training is needed for
    assert lines["table3"][-2:] == ["72", "72"] or lines["table3"][-3:] == ["72", "0", "72"]  # it has no attack


def test_a_filled_table_says_what_was_chosen_and_what_is_smoothed(tmp_path: Path) -> None:
    def shown(experiment: str, *arguments: str) -> str:
        how = ["--protocol", "short", "--seeds", "0", "--models", "preactresnet18", *arguments, *places(tmp_path)]
        found = flatmin("reproduce", experiment, *how)
        assert found.exit_code == 0, found.output
        return words(found.stdout)

    ours = {"test_nll": 0.35, "test_smoothed_loss": 0.98}
    for data in ("cifar10", "cifar100"):
        write_result(tmp_path / "results", cell("short", data, "preactresnet18", "erm"), 0, 0.05)
    write_result(tmp_path / "results", cell("short", "cifar10", "preactresnet18", "label_smoothing"), 0, 0.05, **ours)
    text = shown("table1", "--data", "cifar10", "--methods", "erm,label_smoothing")
    assert "0.350 (smoothed: 1.050)" in text
    assert "smoothed: the loss smoothed over the other classes" in text
    assert "short: paper-v2 with fewer epochs and AMP's radius chosen for them" in text
    assert "smoothed:" not in shown("table1", "--data", "cifar100", "--methods", "erm")
    swept = [recipe for recipe in EXPERIMENTS["sweep"]("short").recipes if recipe.data == "cifar10"]
    for recipe in swept:
        risk = {"validation_nll": 0.2, "validation_error": 0.05, "validation_ece": 0.01}
        write_result(tmp_path / "results", recipe, 0, 0.05, **risk)
    assert "AMP's radius chosen for 60" not in shown("sweep", "--data", "cifar10")


@pytest.mark.parametrize("content", ['{"recipe": ', '{"a": 1}'], ids=["cut", "no result"])
def test_a_result_that_cannot_be_read_is_named_and_stays_and_the_others_are_run(tmp_path: Path, content: str) -> None:
    damaged = tmp_path / "results" / "smoke" / "cifar10-vgg16-erm-0.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text(content)
    some = [*SOME, "--methods", "erm,amp", "--seeds", "0", "--workers", "1"]
    shown = flatmin("reproduce", "table1", *some, *places(tmp_path))
    assert shown.exit_code == 1, shown.output
    assert "2 runs: 1 to be trained, 1 left alone, as their results cannot be read" in words(shown.stderr)
    assert "cifar10-vgg16-erm-0.json is " in words(shown.stderr)
    assert (damaged.parent / "cifar10-vgg16-amp-0.json").exists()
    assert damaged.read_text() == content
    assert not (tmp_path / "runs" / "smoke" / "cifar10-vgg16-erm-0").exists()
    listed = flatmin("reproduce", "--list", "--protocol", "smoke", *places(tmp_path))
    assert listed.exit_code == 0, listed.output
    assert "cifar10-vgg16-erm-0.json is " in words(listed.stderr)


def test_a_dry_run_lists_and_estimates_and_trains_nothing(tmp_path: Path) -> None:
    shown = flatmin("reproduce", "table1", *SOME, "--methods", "erm,amp", "--dry-run", *places(tmp_path))
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.count("missing") == 6
    assert "smoke/cifar10-vgg16-amp" in shown.stdout
    assert re.match(r"6 runs, about [\d.]+ (s|min|h) on .* with \d+ process", shown.stdout)
    assert "estimated from a few steps each" in words(shown.stderr)
    assert not (tmp_path / "results").exists()
    assert not (tmp_path / "runs").exists()


def test_within_a_time_limit_what_does_not_fit_is_named_and_not_started(tmp_path: Path) -> None:
    some = [*SOME, "--methods", "erm,amp", "--seeds", "0", "--workers", "1", *places(tmp_path)]
    shown = flatmin("reproduce", "table1", *some, "--minutes", "1e-6")
    assert shown.exit_code == 0, shown.output
    left = "2 runs do not fit into 1e-06 minutes: smoke/cifar10-vgg16-erm seed 0, smoke/cifar10-vgg16-amp seed 0"
    assert left in words(shown.stderr)
    assert not list((tmp_path / "runs").glob("*/*"))
    dry = flatmin("reproduce", "table1", *some, "--minutes", "1e-6", "--dry-run")
    assert left in words(dry.stderr)
    assert "0 runs" in dry.stdout
    shown = flatmin("reproduce", "table1", *some, "--minutes", "600")
    assert shown.exit_code == 0, shown.output
    assert "not fit" not in words(shown.stderr)
    assert len(list((tmp_path / "results" / "smoke").glob("*.json"))) == 2


@pytest.mark.parametrize("command", ["reproduce", "tune", "compare"])
def test_torchrun_is_refused_by_commands_that_train_many_models(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    what = ["table1", *SOME, *places(tmp_path)] if command == "reproduce" else ["--out", tmp_path / "out"]
    data = [] if command == "reproduce" else ["--data", "digits"]
    shown = flatmin(command, *what, *data)
    assert shown.exit_code == 2, shown.output
    assert "got 2 processes for a command that trains many models; leave out torchrun" in words(shown.stderr)
    assert not list(tmp_path.iterdir())


def test_a_plan_is_written_before_anything_runs(tmp_path: Path) -> None:
    shown = flatmin("reproduce", "table1", *SOME, "--seeds", "0,2", "--plan", *places(tmp_path))
    assert "16 of 16 runs are new" in shown.stdout
    runs = json.loads((tmp_path / "results" / "planned.json").read_text())["runs"]
    assert {run["seed"] for run in runs} == {0, 2}
    assert not (tmp_path / "runs").exists()


def test_a_plan_fixes_what_will_be_tested_and_a_withdrawn_run_is_not_run(tmp_path: Path) -> None:
    flatmin("reproduce", "table1", *SOME, "--methods", "erm,amp", "--seeds", "0", "--plan", *places(tmp_path))
    path = tmp_path / "results" / "planned.json"
    plan = json.loads(path.read_text())
    (family,) = plan["families"]
    assert family == "smoke/cifar10-vgg16"
    assert plan["families"][family]["comparisons"] == ["error: amp < erm", "error: mixup < amp"]
    plan["runs"][0]["withdrawn"] = "a test"
    path.write_text(json.dumps(plan))
    shown = flatmin("reproduce", "--planned", "--dry-run", *places(tmp_path))
    assert "smoke/cifar10-vgg16-amp" in shown.stdout
    assert "smoke/cifar10-vgg16-erm" not in shown.stdout


def test_a_plan_is_carried_out_in_its_order_and_no_further_than_asked(tmp_path: Path) -> None:
    for methods, seed in (("amp", 1), ("erm,mixup", 0)):
        arguments = [*SOME, "--methods", methods, "--seeds", seed, "--plan", *places(tmp_path)]
        assert flatmin("reproduce", "table1", *arguments).exit_code == 0
    shown = flatmin("reproduce", "--planned", "--limit", 2, "--workers", 1, *places(tmp_path))
    assert shown.exit_code == 0, shown.output
    assert "3 runs: 3 to be trained" in shown.stderr
    there = sorted(path.name for path in (tmp_path / "results" / "smoke").iterdir())
    assert there == ["cifar10-vgg16-amp-1.json", "cifar10-vgg16-erm-0.json"]
    assert "table1: test error and NLL of eight methods; protocol smoke" in shown.stdout
    rest = flatmin("reproduce", "--planned", "--dry-run", *places(tmp_path))
    assert "3 runs: 2 done, 1 to be trained" in rest.stderr
    assert "smoke/cifar10-vgg16-mixup" in rest.stdout


def test_planned_runs_train_their_common_beginning_once_also_in_a_later_call(tmp_path: Path) -> None:
    """Three epochs of 30 steps: the last quarter starts after two of them, the last tenth within the third."""
    names = [f"smoke/cifar10-preactresnet18-{name}" for name in ("erm", "amp-start-0.75", "amp-start-0.9")]
    plan = {"runs": [{"name": name, "seed": 0, "planned": "2026-01-01"} for name in names]}
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "planned.json").write_text(json.dumps(plan))
    planned = ["reproduce", "--planned", "--workers", 1, *places(tmp_path)]
    first = flatmin(*planned, "--limit", 1)
    assert first.exit_code == 0, first.output
    checkpoints = {name: tmp_path / "runs" / f"{name}-0" for name in names}
    assert len([*checkpoints[names[0]].glob("checkpoint-*")]) == 2
    second = flatmin(*planned, "--limit", 1)
    assert f"began at epoch 2 of 3, from {names[0]}-0" in words(second.stderr)
    third = flatmin(*planned, "--no-share")
    assert "began at" not in third.stderr
    results = [json.loads((tmp_path / "results" / f"{name}-0.json").read_text()) for name in names]
    assert [result.get("shared", {}).get("epochs") for result in results] == [None, 2, None]
    shown = flatmin("report", tmp_path / "results", "--out", tmp_path / "page")
    assert shown.exit_code == 0, shown.output


def test_a_command_for_a_part_keeps_the_beginnings_that_other_planned_runs_need(tmp_path: Path) -> None:
    """First of the plan only ERM, then of a table a run that shares nothing, then what the plan still lacks."""
    erm, late = "smoke/cifar10-vgg16-erm", "smoke/cifar10-preactresnet18-amp-start-0.75"
    base = "smoke/cifar10-preactresnet18-erm"
    plan = {"runs": [{"name": name, "seed": 0, "planned": "2026-01-01"} for name in (base, late)]}
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "planned.json").write_text(json.dumps(plan))
    of_erm = ["--methods", "erm", "--seeds", "0", "--workers", 1, *places(tmp_path)]
    table = ["table1", "--protocol", "smoke", "--data", "cifar10"]
    for arguments in (["--planned"], table):
        ended = flatmin("reproduce", *arguments, *of_erm)
        assert ended.exit_code == 0, ended.output
        assert len([*(tmp_path / "runs" / f"{base}-0").glob("checkpoint-*")]) == 2
    assert (tmp_path / "results" / f"{erm}-0.json").exists()
    last = flatmin("reproduce", "--planned", "--workers", 1, *places(tmp_path))
    assert f"began at epoch 2 of 3, from {base}-0" in words(last.stderr)
    assert len([*(tmp_path / "runs" / f"{base}-0").glob("checkpoint-*")]) == 1


def test_of_a_plan_one_experiment_or_protocol_can_be_carried_out(tmp_path: Path) -> None:
    for experiment, protocol in (("spiral", "smoke"), ("spiral", "paper"), ("frontier", "short")):
        arguments = [experiment, "--protocol", protocol, "--methods", "erm", "--seeds", "0", "--plan"]
        assert flatmin("reproduce", *arguments, *places(tmp_path)).exit_code == 0
    planned = [*places(tmp_path), "--planned", "--dry-run"]
    assert "1 run: 1 to be trained" in flatmin("reproduce", "spiral", "--protocol", "smoke", *planned).stderr
    both = flatmin("reproduce", "spiral", "frontier", "--protocol", "short", *planned)
    assert "short/cifar10-preactresnet18-erm-drop-0.9" in both.stdout
    assert "paper/spiral-mlp-erm" not in both.stdout
    assert "paper/spiral-mlp-erm" in flatmin("reproduce", "--protocol", "paper", *planned).stdout
    for arguments, message in (
        (["table2", "--protocol", "short"], "no run of table2 is planned under short; choose another --protocol"),
        (["cost", "--protocol", "short"], "no run of cost is planned under short"),  # it only times steps
        (["--protocol", "shrt"], "unknown protocol 'shrt'; choose from paper"),
    ):
        none = flatmin("reproduce", *arguments, *planned)
        assert none.exit_code == 2
        assert message in words(none.stderr)


def test_of_a_plan_an_experiment_carries_out_its_own_runs_and_not_those_it_shows_beside_them(tmp_path: Path) -> None:
    for experiment, protocol in (("table1", "paper"), ("first_version", "paper-v2")):
        arguments = [experiment, "--protocol", protocol, "--data", "cifar10", "--models", "preactresnet18"]
        assert flatmin("reproduce", *arguments, "--seeds", "0", "--plan", *places(tmp_path)).exit_code == 0
    arguments = ["first_version", "--protocol", "paper-v2", "--planned", "--dry-run", *places(tmp_path)]
    shown = flatmin("reproduce", *arguments).stdout
    assert "paper-v2/cifar10-preactresnet18-erm" in shown
    assert "paper/cifar10" not in shown


def test_what_an_experiment_measures_is_added_to_runs_that_another_planned(tmp_path: Path) -> None:
    some = ["--protocol", "smoke", "--data", "cifar10", "--methods", "erm", "--seeds", "0", "--plan", *places(tmp_path)]
    assert flatmin("reproduce", "table1", "--models", "preactresnet18", *some).exit_code == 0
    shown = flatmin("reproduce", "examine", *some)
    assert "0 of 1 runs are new" in shown.stdout
    assert "more is to be measured of 1" in shown.stdout
    (run,) = json.loads((tmp_path / "results" / "planned.json").read_text())["runs"]
    assert run["parts"] == ["spectrum", "selective", "outside"]


def test_outside_data_that_are_missing_are_named_before_anything_is_trained(tmp_path: Path) -> None:
    official_files.cifar10_python(tmp_path / "data", made(50, 10, seed=0), made(10, 10, seed=1))
    arguments = ["examine", "--data", "cifar10", "--methods", "erm", "--seeds", "0", "--data-dir", tmp_path / "data"]
    shown = flatmin("reproduce", *arguments, *places(tmp_path))
    assert shown.exit_code == 2
    assert "svhn was not found" in words(shown.stderr)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--planned"], "has no plan; record one with --plan"),
        (["table1", "--planned"], "has no plan; record one with --plan"),
        (["--planned", "--plan"], "--plan records runs and --planned executes the recorded ones; leave out one"),
        (["cost", "--methods", "erm"], "this trains nothing: leave out --seeds, --methods"),
        (["table1", "--measure", "boundary", "--protocol", "smoke"], "--measure boundary is for points of a plane"),
        (
            ["spiral", "--measure", "outside", "--protocol", "smoke"],
            "outside data are known for cifar10, cifar100, svhn",
        ),
        (["table1", "--runs", str(ROOT / "README.md" / "runs")], "choose other places with --results and --runs"),
        (["table1", "--plan", "--results", str(ROOT / "README.md")], "choose other places with --results and --runs"),
        ([], "name a table or a figure: table1"),
        (["table9"], "unknown table or figure 'table9'; choose from table1"),
        (["table1", "--protocol", "long"], "unknown protocol 'long'; choose from paper, paper-v2, short, smoke"),
        (["table1", "--methods", "sam"], "--methods takes adversarial, amp"),
        (["table1", "--data", "mnist"], "--data takes cifar10, cifar100, svhn, got mnist"),
        (
            ["table1", "--measure", "speed"],
            "--measure takes attack, batch_rise, boundary, flatness, landscape, outside, scaled, selective, spectrum",
        ),
        (["table1", "--seeds", "a"], "--seeds takes whole numbers, as in 0,1 or 0-9"),
        (["table1", "--seeds", "3-1"], "--seeds takes a range from its lowest to its highest, as in 0-9, got 3-1"),
        (["table1", "--device", "cpu,cpu"], "--device takes GPUs, each once, or cpu alone"),
        (["table1", "--minutes", "0"], "--minutes must be above 0, got 0; leave it out to train all runs"),
        (["table1", "--seeds", "0", "--data", "svhn"], "svhn was not found"),
    ],
    ids=str,
)
def test_a_request_that_makes_no_sense_says_why(tmp_path: Path, arguments: list[str], message: str) -> None:
    shown = flatmin("reproduce", "--results", tmp_path, "--runs", tmp_path, "--data-dir", tmp_path, *arguments)
    assert shown.exit_code == 2
    assert message in words(shown.stderr)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"runs": [{"name": "smoke/nonsense", "seed": 0}]},
            "planned.json names 'smoke/nonsense', but there is no such",
        ),
        (
            {"runs": [{"name": "smoke/cifar10-vgg16-amp", "seed": 3, "parts": ["atack"]}]},
            "wants 'atack' of smoke/cifar10-vgg16-amp with seed 3, but what can be measured is attack, flatness",
        ),
        ({"families": []}, "planned.json is damaged: families must be an object, got a list; put a good copy there"),
    ],
    ids=str,
)
def test_a_mistake_in_a_plan_is_named_and_nothing_is_run(tmp_path: Path, plan: dict[str, Any], message: str) -> None:
    (tmp_path / "planned.json").write_text(json.dumps(plan))
    shown = flatmin("reproduce", "--planned", "--results", tmp_path, "--runs", tmp_path / "runs")
    assert shown.exit_code == 2
    assert message in words(shown.stderr)
    assert not (tmp_path / "runs").exists()


def test_what_failed_is_told_and_tried_again_when_asked(tmp_path: Path) -> None:
    recipe = cell("smoke", "cifar10", "vgg16", "erm")
    failure = tmp_path / "results" / f"{recipe.name}-0.failed.json"
    failure.parent.mkdir(parents=True)
    failure.write_text(json.dumps({"name": recipe.name, "seed": 0, "error": "no memory"}))
    arguments = ["reproduce", "table1", *SOME, "--methods", "erm", "--seeds", "0", *places(tmp_path)]
    shown = flatmin(*arguments)
    assert "1 failed before (retry with --retry)" in shown.stderr
    assert failure.exists()
    again = flatmin(*arguments, "--retry", "--workers", "1")
    assert again.exit_code == 0, again.output
    assert not failure.exists()
    assert (tmp_path / "results" / f"{recipe.name}-0.json").exists()


def test_a_plan_keeps_what_is_to_be_measured(tmp_path: Path) -> None:
    arguments = ["spiral", "--protocol", "smoke", "--methods", "erm", "--seeds", "0", "--plan", *places(tmp_path)]
    assert flatmin("reproduce", *arguments).exit_code == 0
    shown = flatmin("reproduce", "--planned", "--workers", "1", *places(tmp_path))
    assert shown.exit_code == 0, shown.output
    stored = json.loads((tmp_path / "results" / "smoke" / "spiral-mlp-erm-0.json").read_text())
    assert len(stored["boundary"]["shares"]) == 21


def test_what_another_process_trains_is_left_to_it(tmp_path: Path) -> None:
    recipe = cell("smoke", "cifar10", "vgg16", "erm")
    held = open_run_folder(
        tmp_path / "runs" / f"{recipe.name}-0", config_of(recipe, load(recipe.data), 0), resume=False
    )
    try:
        arguments = ["table1", *SOME, "--methods", "erm", "--seeds", "0", "--workers", "1", *places(tmp_path)]
        shown = flatmin("reproduce", *arguments)
    finally:
        held.close()
    assert shown.exit_code == 0, shown.output
    assert "not now: another process is training it; repeat the command once that has ended" in words(shown.stderr)
    assert "--out" not in shown.stderr  # which this command has not
    assert not (tmp_path / "results").exists()
