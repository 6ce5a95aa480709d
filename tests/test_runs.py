"""Recipe + seed → one result file: trained as ever, measured, written down; what fails is, and stops nobody."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from flatmin_lab import checkpoint
from flatmin_lab.data import load
from flatmin_lab.ledger import Ledger, curves_of
from flatmin_lab.recipe import Job
from flatmin_lab.recipes import cell
from flatmin_lab.records import Failed, Finished, Record, Stopped
from flatmin_lab.run_opening import open_
from flatmin_lab.runs import How, Task, _tasks, carry_out, work
from flatmin_lab.train import config_of, train

QUICK = replace(cell("smoke", "cifar10", "vgg16", "label_smoothing"), epochs=1)
DIVERGING = replace(QUICK, name="smoke/diverging", lr=1e30)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "results", tmp_path / "runs")


def here(jobs: Sequence[Job], how: How) -> dict[int, Record]:
    """What came of each, in this process."""
    return dict(work(Task(dict(enumerate(jobs)), "cpu", how), lambda: None))


def test_a_run_is_the_training_and_more(ledger: Ledger) -> None:
    ends = here([Job(QUICK, 3)], How(ledger, ("attack",)))
    assert isinstance(ends[0], Finished)
    stored = json.loads(ledger.file(Job(QUICK, 3)).read_text())
    alone = list(train(QUICK, load(QUICK.data), seed=3))[-1]
    assert isinstance(alone, Finished)
    for name in ("test_error", "test_nll", "test_ece", "train_loss", "reliability"):
        assert stored[name] == alone.result[name]
    assert stored["recipe"] == QUICK.name
    assert stored["test_smoothed_loss"] > 0
    assert stored["clean_train_nll"] > 0
    assert stored["test_repeated"] == 0
    assert 0 <= stored["attack"]["pgd_error"] <= 1
    assert stored["attack_normalised"]["fgsm_error"] <= stored["attack"]["fgsm_error"] + 0.2
    assert stored["curves"]["nll"] == [pytest.approx(alone.result["test_nll"], rel=1e-5)]
    assert len(checkpoint.listed(ledger.folder(Job(QUICK, 3)))) == 1  # the last weights are enough


def test_what_is_there_is_not_trained_again_and_what_lacks_is_measured(ledger: Ledger) -> None:
    job = Job(QUICK, 0)
    assert ledger.state(job) == "missing"
    here([job], How(ledger))
    assert ledger.state(job) == "done"
    assert ledger.state(job, ("attack",)) == "unmeasured"
    before = json.loads(ledger.file(job).read_text())
    here([job], How(ledger, ("attack",)))
    after = json.loads(ledger.file(job).read_text())
    assert ledger.state(job, ("attack",)) == "done"
    assert {key: value for key, value in after.items() if not key.startswith("attack")} == before
    for weights in checkpoint.listed(ledger.folder(job)):
        weights.unlink()
    assert ledger.state(job, ("flatness",)) == "without weights"


def test_one_that_fails_is_written_down_and_the_others_go_on(ledger: Ledger) -> None:
    jobs = [Job(DIVERGING, 0), Job(QUICK, 0)]
    ends = dict(carry_out(jobs, How(ledger), devices=["cpu"], workers=2))
    assert isinstance(ends[0], Failed)
    assert isinstance(ends[1], Finished)
    assert [ledger.state(job) for job in jobs] == ["failed", "done"]
    failure = json.loads(ledger.failure(jobs[0]).read_text())
    assert "training stops" in failure["error"]
    assert (failure["seed"], failure["method"], failure["data"]) == (0, "label_smoothing", "cifar10-made")
    ledger.write(jobs[0], {"anything": 1})
    assert not ledger.failure(jobs[0]).exists()  # it has succeeded since


def test_a_folder_of_another_recipe_fails_alone(ledger: Ledger) -> None:
    one, other = Job(QUICK, 0), Job(replace(QUICK, name="smoke/other"), 0)
    folder = ledger.folder(one)
    different = replace(QUICK, lr=0.2)
    open_(folder, config_of(different, load(QUICK.data), 0), resume=False).close()
    ends = here([one, other], How(ledger))
    assert isinstance(ends[0], Failed)
    assert "lr is 0.2 there" in ends[0].what
    assert isinstance(ends[1], Finished)


def test_a_folder_that_another_process_trains_in_is_left_alone(ledger: Ledger) -> None:
    job = Job(QUICK, 0)
    held = open_(ledger.folder(job), config_of(QUICK, load(QUICK.data), 0), resume=False)
    try:
        ends = here([job], How(ledger))
    finally:
        held.close()
    assert isinstance(ends[0], Failed)
    assert ends[0].busy
    assert not ledger.failure(job).exists()
    assert ledger.state(job) == "begun"


def test_asked_to_stop_what_was_not_begun_is_told(ledger: Ledger) -> None:
    jobs = [Job(QUICK, seed) for seed in (0, 1)]
    ends = dict(carry_out(jobs, How(ledger), devices=["cpu"], workers=1, stop=lambda: "SIGTERM"))
    assert ends == {0: Stopped("SIGTERM", 0), 1: Stopped("SIGTERM", 0)}


def test_a_result_of_another_training_is_not_taken_for_it(ledger: Ledger) -> None:
    job = Job(QUICK, 0)
    here([job], How(ledger))
    stored = json.loads(ledger.file(job).read_text())
    ledger.write(job, {**stored, "compile": True, "deterministic": True})  # how fast, and not what
    assert ledger.state(job) == "done"
    ledger.write(job, {**stored, "weight_decay": 0.0})
    with pytest.raises(ValueError, match=r"weight_decay is 0.0 there and 0.0001 here.*--results"):
        ledger.state(job)


def test_what_is_planned_is_written_once_and_in_order(ledger: Ledger) -> None:
    jobs = [Job(QUICK, seed) for seed in (0, 1)]
    assert ledger.plan(jobs[:1], date(2026, 1, 2)) == 1
    assert ledger.plan(jobs, date(2026, 1, 3)) == 1
    assert ledger.plan(jobs, date(2026, 1, 4)) == 0
    assert [(run["seed"], run["planned"]) for run in ledger.planned()] == [(0, "2026-01-02"), (1, "2026-01-03")]


def test_several_gpus_share_each_data_set() -> None:
    other = replace(QUICK, data="svhn-made")
    jobs = [Job(recipe, seed) for seed in range(3) for recipe in (QUICK, other)]
    tasks = _tasks(jobs, How(Ledger(Path("r"), Path("w"))), ["cuda:0", "cuda:1"])
    assert [task.device for task in tasks] == ["cuda:0", "cuda:1"]
    assert sorted(number for task in tasks for number in task.jobs) == list(range(6))
    for task in tasks:
        names = [job.recipe.data for job in task.jobs.values()]
        assert names == sorted(names)  # one set after the other
        assert len(set(names)) == 2


def test_curves_are_named_without_the_split_and_cut_to_six_digits() -> None:
    lines: list[dict[str, Any]] = [
        {"epoch": 1, "train_loss": 1 / 3, "validation_nll": 2 / 3},
        {"epoch": 2, "train_loss": None, "validation_nll": 1},
    ]
    assert curves_of(lines, "validation") == {"train_loss": [0.333333, None], "nll": [0.666667, 1.0]}


@pytest.mark.cuda
def test_on_a_gpu_they_run_together_and_are_measured_there(ledger: Ledger) -> None:
    jobs = [Job(replace(QUICK, name=f"smoke/{method}", method=method), 0) for method in ("erm", "amp", "dropout")]
    ends = dict(carry_out(jobs, How(ledger, ("attack", "flatness", "landscape"), at_once=2), devices=["cuda:0"]))
    assert all(isinstance(end, Finished) for end in ends.values())
    for job in jobs:
        stored = json.loads(ledger.file(job).read_text())
        assert stored["hardware"] == torch.cuda.get_device_name()
        assert stored["flatness"]["worst_case_loss"] >= stored["flatness"]["loss"]
        assert len(stored["landscape"]["splits"]["test"]["plane"]) == 5
