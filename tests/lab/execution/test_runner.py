"""Recipe + seed → one result file: trained, evaluated, stored; a run that fails is stored too, and stops no other."""

import errno
import json
import os
import shutil
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from flatmin_lab.data import load
from flatmin_lab.evaluation import post_training
from flatmin_lab.execution.executor import run_tasks
from flatmin_lab.execution.local import LocalExecutor, ThisProcess
from flatmin_lab.execution.process_pool import local_executor
from flatmin_lab.execution.run_queue import RunQueue, run_all
from flatmin_lab.execution.runner import Run, RunOptions, RunTask, run_task_on_data
from flatmin_lab.execution.task_queue import Slot, TaskEnd, TaskFailure, TaskMessage
from flatmin_lab.recipes.experiments.experiment import cell
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.report.columns import column_named
from flatmin_lab.report.loader import read_result
from flatmin_lab.runs import checkpoint, result_store
from flatmin_lab.runs.events import Event, Failed, Finished, Started, Stopped
from flatmin_lab.runs.folder import RunFolder
from flatmin_lab.runs.open_folder import open_run_folder
from flatmin_lab.runs.result_store import ResultStore, curves_of
from flatmin_lab.training.loop import config_of, train

QUICK = replace(cell("smoke", "cifar10", "vgg16", "label_smoothing"), epochs=1)
DIVERGING = replace(QUICK, name="smoke/diverging", lr=1e30)


@pytest.fixture
def store(tmp_path: Path) -> ResultStore:
    return ResultStore(tmp_path / "results", tmp_path / "runs")


def here(jobs: Sequence[Job], store: ResultStore, *parts: str) -> dict[int, Event]:
    """What came of each, in this process."""
    task = RunTask({number: Run(job, parts) for number, job in enumerate(jobs)}, "cpu", RunOptions(store))
    return dict(run_task_on_data(task, task.load_data(), lambda: None))


def in_workers(jobs: Sequence[Job], store: ResultStore, *, workers: int, **more: Any) -> dict[int, Event]:
    executor = local_executor(["cpu"] * workers, single_thread=True)
    return dict(run_all([Run(job) for job in jobs], RunOptions(store), executor, **more))


def test_a_result_has_the_numbers_of_the_training_and_the_measurements(store: ResultStore) -> None:
    ends = here([Job(QUICK, 3)], store, "attack")
    assert isinstance(ends[0], Finished)
    stored = json.loads(store.file(Job(QUICK, 3)).read_text())
    alone = list(train(QUICK, load(QUICK.data), seed=3))[-1]
    assert isinstance(alone, Finished)
    for name in ("test_error", "test_nll", "test_ece", "train_loss", "reliability"):
        assert stored[name] == alone.result[name]
    assert stored["recipe"] == QUICK.name
    assert stored["test_smoothed_loss"] > 0
    assert stored["clean_train_nll"] > 0
    assert stored["test_repeated"] == 0
    assert 0 < stored["scaled"]["nll"] < stored["test_nll"] + 0.1  # after temperature scaling
    assert 0 <= stored["attack"]["pgd_error"] <= 1
    assert stored["attack_normalised"]["fgsm_error"] <= stored["attack"]["fgsm_error"] + 0.2
    assert stored["curves"]["nll"] == [pytest.approx(alone.result["test_nll"], rel=1e-5)]
    assert len(checkpoint.listed(store.folder(Job(QUICK, 3)))) == 1  # the last weights are enough


def test_what_is_there_is_not_trained_again_and_what_lacks_is_measured(store: ResultStore) -> None:
    job = Job(QUICK, 0)
    assert store.state(job) == "missing"
    here([job], store)
    assert store.state(job) == "done"
    assert store.state(job, ("attack",)) == "unmeasured"
    before = json.loads(store.file(job).read_text())
    here([job], store, "attack")
    after = json.loads(store.file(job).read_text())
    assert store.state(job, ("attack",)) == "done"
    assert {key: value for key, value in after.items() if not key.startswith("attack")} == before
    for weights in checkpoint.listed(store.folder(job)):
        weights.unlink()
    assert store.state(job, ("flatness",)) == "without weights"


def test_a_folder_of_another_recipe_fails_alone(store: ResultStore) -> None:
    one, other = Job(QUICK, 0), Job(replace(QUICK, name="smoke/other"), 0)
    folder = store.folder(one)
    different = replace(QUICK, lr=0.2)
    open_run_folder(folder, config_of(different, load(QUICK.data), 0), resume=False).close()
    ends = here([one, other], store)
    assert isinstance(ends[0], Failed)
    assert "lr is 0.2 there" in ends[0].what
    assert f"0.1 here. Move {folder} away, or choose another --runs" in ends[0].what
    assert not store.failure(one).exists()  # nothing is wrong with it
    assert isinstance(ends[1], Finished)


def test_a_folder_that_another_process_trains_in_is_left_alone(store: ResultStore) -> None:
    job = Job(QUICK, 0)
    held = open_run_folder(store.folder(job), config_of(QUICK, load(QUICK.data), 0), resume=False)
    try:
        ends = here([job], store)
    finally:
        held.close()
    assert isinstance(ends[0], Failed)
    assert ends[0].busy
    assert "wait for it to end, or choose another folder" in ends[0].what
    assert "--out" not in ends[0].what  # a flag of `train`
    assert not store.failure(job).exists()
    assert store.state(job) == "begun"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_fails_is_no_failure_of_the_run(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    jobs = [Job(QUICK, 0), Job(QUICK, 1)]
    real, left = os.fsync, [4]  # config.json is written, metrics.jsonl is not

    def failing(handle: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(number, os.strerror(number))
        real(handle)

    queue = RunQueue([Run(job) for job in jobs], RunOptions(store), dict, {}, lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing)
        ends = dict(run_tasks(ThisProcess(), run_task_on_data, queue))
    assert isinstance(ends[0], Failed)
    assert ends[0].later
    assert not store.failure(jobs[0]).exists()
    assert isinstance(ends[1], Finished)
    assert isinstance(here(jobs, store)[0], Finished)


def test_a_result_that_cannot_be_written_is_named_and_made_later_without_training_again(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    job = Job(QUICK, 0)
    with monkeypatch.context() as patched:
        patched.setattr(result_store, "atomic_write", full)
        (end,) = here([job], store).values()
    assert isinstance(end, Failed)
    assert end.later
    assert f"{store.file(job)} could not be written: the disk is full; make room, and repeat the command" in end.what
    monkeypatch.setattr(RunFolder, "save", None)  # it takes no step
    assert isinstance(here([job], store)[0], Finished)


def test_damaged_last_weights_are_not_measured_and_trained_again(store: ResultStore) -> None:
    """The weights of an epoch before must not be taken for the last ones, nor be lost."""
    recipe = replace(QUICK, epochs=2, method="erm", settings={})
    job = Job(recipe, 0)
    for _ in train(recipe, load(recipe.data), folder=store.folder(job)):
        pass
    newest, before = checkpoint.listed(store.folder(job))
    newest.write_bytes(newest.read_bytes()[:-10] + b"0123456789")
    expected = json.loads((store.folder(job) / "result.json").read_text())
    (end,) = here([job], store).values()
    assert isinstance(end, Failed)
    assert end.later
    assert before.exists()
    assert not store.file(job).exists()
    assert isinstance(here([job], store)[0], Finished)
    stored = json.loads(store.file(job).read_text())
    assert stored["test_nll"] == expected["test_nll"]
    assert stored["clean_train_nll"] < 10


def test_a_finished_run_without_its_checkpoints_says_what_to_do_and_is_trained_again_once_it_is_deleted(
    store: ResultStore,
) -> None:
    job = Job(QUICK, 0)
    here([job], store)
    before = store.file(job).read_text()
    store.file(job).unlink()
    for path in checkpoint.listed(store.folder(job)):
        path.unlink()
    (end,) = here([job], store).values()
    assert isinstance(end, Failed)
    assert end.later
    assert "its checkpoints are gone" in end.what
    assert "delete the folder, and the same command trains it again" in end.what
    assert "--resume" not in end.what  # a flag of `train`
    shutil.rmtree(store.folder(job))
    assert isinstance(here([job], store)[0], Finished)
    assert json.loads(store.file(job).read_text())["test_nll"] == json.loads(before)["test_nll"]


def test_the_spectrum_confidence_and_outside_data_are_stored_as_the_report_reads_them(store: ResultStore) -> None:
    ends = here([Job(QUICK, 3)], store, "spectrum", "selective", "outside")
    assert isinstance(ends[0], Finished)
    stored = json.loads(store.file(Job(QUICK, 3)).read_text())
    run = read_result(store.file(Job(QUICK, 3)))
    assert run.evaluation.keys() == {"spectrum", "scaled", "selective", "outside"}
    assert run.evaluation["outside"].keys() == {"svhn-made", "cifar100-made"}
    assert stored["spectrum"]["smallest"] <= stored["spectrum"]["largest"]
    assert column_named("nll_scaled").value(run) == stored["scaled"]["nll"]
    for name in (
        "aurc",
        "temperature",
        "ece_scaled",
        "fpr95_svhn",
        "fpr95_cifar",
        "spectrum_largest",
        "spectrum_trace",
        "negative_curvature",
    ):
        assert column_named(name).value(run) is not None


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text('{"epoch": 1')], ids=["gone", "cut"])
def test_a_result_is_made_again_with_its_curves_whatever_became_of_the_lines(store: ResultStore, damage: Any) -> None:
    job = Job(QUICK, 0)
    here([job], store)
    before = store.file(job).read_text()
    store.file(job).unlink()
    damage(store.folder(job) / "metrics.jsonl")
    assert isinstance(here([job], store)[0], Finished)
    assert store.file(job).read_text() == before


def test_the_weights_of_another_run_are_not_measured_for_a_result(store: ResultStore) -> None:
    """A result that came from elsewhere, and a folder of the same name that was trained here."""
    job = Job(QUICK, 0)
    here([job], store)
    stored = json.loads(store.file(job).read_text())
    assert store.state(job, ("attack",)) == "unmeasured"
    store.write(job, {**stored, "hardware": "another machine", "seconds": 1.5})
    assert store.state(job, ("attack",)) == "without weights"


def test_what_two_processes_measure_of_one_run_is_all_kept(store: ResultStore, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(QUICK, 0)
    here([job], store)
    real = post_training.measure

    def meanwhile(subject: Any, part: str, how: Any) -> dict[str, Any]:
        store.write(job, {**(store.result(job) or {}), "flatness": {"by": "another process"}})
        return real(subject, part, how)

    monkeypatch.setattr(post_training, "measure", meanwhile)
    here([job], store, "attack")
    assert {"attack", "flatness"} <= json.loads(store.file(job).read_text()).keys()


class Mortal(LocalExecutor):
    """Two GPUs, whose processes start so many runs of a task and then die; in their second life they do not."""

    lives = (2, 2)
    dies_for_ever = False

    def facts(self) -> dict[str, Any]:
        return {}

    def run(self, function: Any, queue: Any) -> Generator[tuple[Any, TaskMessage, str], None, None]:
        lives = list(self.lives)
        while (task := queue.take(Slot("cuda:0", workers=2))) is not None:
            last = lives.pop(0) if lives else self.lives[0] if self.dies_for_ever else None
            for place, number in enumerate(task.numbers):
                if place == last:
                    break
                yield task, (number, Started(step=0, steps=1, epochs=1, parameters=1)), ""
                if last is None or place + 1 < last:
                    yield task, (number, Finished({})), ""
            yield task, TaskEnd() if last is None else TaskFailure("signal 9"), ""


def test_the_rest_of_a_task_goes_to_another_process_when_one_dies(store: ResultStore) -> None:
    """The runs it was training have failed; those it had not started are done."""
    jobs = [Run(Job(QUICK, seed)) for seed in range(8)]
    ends = dict(run_all(jobs, RunOptions(store), Mortal(["cuda:0", "cuda:1"])))
    assert sorted(number for number, end in ends.items() if isinstance(end, Failed)) == [1, 3]
    assert sum(isinstance(end, Finished) for end in ends.values()) == 6
    assert len(list(store.results.rglob("*.failed.json"))) == 2


def test_processes_that_cannot_start_are_not_started_for_ever(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mortal, "lives", (0,))
    monkeypatch.setattr(Mortal, "dies_for_ever", True)
    ends = dict(run_all([Run(Job(QUICK, 0))], RunOptions(store), Mortal(["cuda:0", "cuda:1"])))
    assert isinstance(ends[0], Failed)
    assert ends[0].later
    assert not list(store.results.rglob("*.json"))


def test_when_asked_to_stop_runs_that_were_not_started_say_so(store: ResultStore) -> None:
    jobs = [Job(QUICK, seed) for seed in (0, 1)]
    ends = in_workers(jobs, store, workers=1, stop=lambda: "SIGTERM")
    assert ends == {0: Stopped("SIGTERM", 0), 1: Stopped("SIGTERM", 0)}


def test_a_result_of_another_run_is_not_taken_for_it(store: ResultStore) -> None:
    job = Job(QUICK, 0)
    here([job], store)
    stored = json.loads(store.file(job).read_text())
    store.write(job, {**stored, "compile": True, "deterministic": True})  # how fast, and not what
    assert store.state(job) == "done"
    store.write(job, {**stored, "weight_decay": 0.0})
    with pytest.raises(ValueError, match=r"weight_decay is 0.0 there and 0.0001 here.*--results"):
        store.state(job)


def test_what_is_planned_is_written_once_and_in_order(store: ResultStore) -> None:
    jobs = [Job(QUICK, seed) for seed in (0, 1)]
    runs = [(job, ("attack",)) for job in jobs]
    assert store.plan(runs[:1], date(2026, 1, 2)) == (1, 0)
    assert store.plan(runs, date(2026, 1, 3)) == (1, 0)
    assert store.plan(runs, date(2026, 1, 4)) == (0, 0)
    assert [(run["seed"], run["planned"]) for run in store.planned()] == [(0, "2026-01-02"), (1, "2026-01-03")]
    assert store.planned()[0]["parts"] == ["attack"]


def test_what_several_processes_measure_of_one_run_is_all_kept(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, real = Job(QUICK, 0), ResultStore.result
    here([job], store)
    known = json.loads(store.file(job).read_text())

    def slow(self: ResultStore, job: Job) -> dict[str, Any] | None:
        found = real(self, job)
        time.sleep(0.02)  # the others read meanwhile
        return found

    monkeypatch.setattr(ResultStore, "result", slow)
    with ThreadPoolExecutor(4) as processes:
        list(processes.map(lambda part: store.extend(job, known, {f"part {part}": part}), range(8)))
    stored = json.loads(store.file(job).read_text())
    assert stored == {**known, **{f"part {part}": part for part in range(8)}}


def test_what_several_processes_plan_at_once_is_all_planned(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ResultStore.planned

    def slow(self: ResultStore) -> list[dict[str, Any]]:
        found = real(self)
        time.sleep(0.02)  # the others read meanwhile
        return found

    monkeypatch.setattr(ResultStore, "planned", slow)
    with ThreadPoolExecutor(4) as processes:  # locks exclude threads too
        list(processes.map(lambda seed: store.plan([(Job(QUICK, seed), ())], date(2026, 1, 2)), range(8)))
    assert sorted(run["seed"] for run in store.planned()) == list(range(8))


def test_a_plan_keeps_its_families_and_what_else_it_holds(store: ResultStore) -> None:
    runs = [(Job(QUICK, seed), ()) for seed in range(3)]
    store.plan(runs[:1], date(2026, 1, 2), {"smoke/cifar10-vgg16": ["error: amp < erm"]})
    path = store.results / "planned.json"
    given_up = [{"name": QUICK.name, "seed": 0, "why": "a test"}]
    path.write_text(json.dumps({**json.loads(path.read_text()), "broken_off": given_up}))
    store.plan(runs, date(2026, 1, 3), {"smoke/cifar10-vgg16": ["nll: amp < erm"], "smoke/svhn-vgg16": []})
    plan = json.loads(path.read_text())
    assert plan["families"] == {
        "smoke/cifar10-vgg16": {"fixed": "2026-01-02", "comparisons": ["error: amp < erm"]},  # as it was fixed
        "smoke/svhn-vgg16": {"fixed": "2026-01-03", "comparisons": []},
    }
    assert plan["broken_off"] == given_up
    assert [run["seed"] for run in plan["runs"]] == [0, 1, 2]


def test_what_has_been_begun_cannot_be_planned_any_more(store: ResultStore) -> None:
    here([Job(QUICK, 0)], store)
    with pytest.raises(ValueError, match="1 of these have started: smoke/cifar10-vgg16-label_smoothing with seed 0"):
        store.plan([(Job(QUICK, seed), ()) for seed in (0, 1)], date(2026, 1, 2))
    assert store.planned() == []


def test_several_gpus_share_each_data_set() -> None:
    other = replace(QUICK, data="svhn-made")
    runs = [Run(Job(recipe, seed)) for seed in range(3) for recipe in (QUICK, other)]
    options = RunOptions(ResultStore(Path("r"), Path("w")))
    queue = RunQueue(runs, options, dict, {}, lambda: None)
    slots = [Slot(device, workers=2) for device in ("cuda:0", "cuda:1")]
    tasks = [queue.take(slot) for slot in slots * 2]
    assert [(task.device, sorted(task.numbers)) for task in tasks if task] == [
        ("cuda:0", [0, 2]),
        ("cuda:1", [1, 3]),
        ("cuda:0", [4]),
        ("cuda:1", [5]),
    ]
    assert queue.take(slots[0]) is None


def test_curves_are_named_without_the_split_and_cut_to_six_digits() -> None:
    lines: list[dict[str, Any]] = [
        {"epoch": 1, "train_loss": 1 / 3, "validation_nll": 2 / 3},
        {"epoch": 2, "train_loss": None, "validation_nll": 1},
    ]
    assert curves_of(lines, "validation") == {"train_loss": [0.333333, None], "nll": [0.666667, 1.0]}


@pytest.mark.cuda
def test_on_a_gpu_they_run_together_and_are_measured_there(store: ResultStore) -> None:
    recipes = [cell("smoke", "cifar10", "vgg16", method) for method in ("erm", "amp", "dropout")]
    jobs = [Job(replace(recipe, epochs=1), 0) for recipe in recipes]
    runs = [Run(job, ("attack", "flatness", "landscape")) for job in jobs]
    ends = dict(run_all(runs, RunOptions(store, at_once=2), ThisProcess(["cuda:0"])))
    assert [type(end) for end in ends.values()] == [Finished] * 3, ends
    for job in jobs:
        stored = json.loads(store.file(job).read_text())
        assert stored["hardware"] == torch.cuda.get_device_name()
        assert stored["flatness"]["worst_case_loss"] >= stored["flatness"]["loss"]
        assert len(stored["landscape"]["splits"]["test"]["plane"]) == 5
