"""The command: what it does with good requests, and what bad ones get."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flatmin import __version__
from flatmin_lab.cli.commands.train_seeds import SeedRuns
from flatmin_lab.cli.process.signals import StopSignal
from flatmin_lab.cli.request import Request, read_run_data
from flatmin_lab.methods import METHODS
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.runs import checkpoint
from flatmin_lab.runs.events import Event, Failed, Finished, Progress, RunError, Started, Stopped
from tests.support.processes import flatmin, words
from tests.support.small_runs import TIMES

FAST = ["train", "--data", "digits", "--epochs", "1", "--batch-size", "300", "--device", "cpu"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert flatmin(*FAST, "--out", folder, "--ema", 0.5).exit_code == 0
    return folder


def test_training_on_digits_just_works(tmp_path: Path) -> None:
    result = flatmin("train", "--method", "amp", "--data", "digits", "--out", tmp_path / "run", "--epochs", 2)
    assert result.exit_code == 0, result.output
    assert "epoch 1/2" in result.stderr
    assert "sharpness" in result.stderr
    assert "‖Δ‖" in result.stderr
    assert "; 1 thread" in words(result.stderr)
    assert "2 epochs, batches of 50, sgd with lr 0.1 and weight decay 0.0001, seed 0" in words(result.stderr)
    assert "test, last epoch" in result.stdout
    assert "chosen using the test labels" in result.stdout
    config = json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]
    assert config["model"] == "convnet"
    assert config["settings"] == {"epsilon": 0.3, "inner_lr": 1.0}


def test_points_can_be_trained_too(tmp_path: Path) -> None:
    result = flatmin("train", "--data", "spiral", "--epochs", 2, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output


def test_a_run_on_synthetic_images_is_resumed_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["--data", "cifar10-made", "--model", "mlp", "--model-settings", "width=4", "--epochs", 1]
    assert flatmin("train", *asked, "--out", tmp_path / "run").exit_code == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]["data"] == "cifar10-made"
    monkeypatch.chdir(tmp_path)
    result = flatmin("train", "--out", tmp_path / "run", "--resume")
    assert result.exit_code == 0, result.output


def test_a_size_that_meant_nothing_when_a_run_was_begun_means_nothing_now(tmp_path: Path) -> None:
    """Only the images of a folder are resized, and only a flag that names a size for others is refused."""
    folder = tmp_path / "run"
    refused = flatmin(*FAST, "--size", 16, 16, "--out", folder)
    assert refused.exit_code == 2
    assert "a size is what the images of a folder are resized to, got (16, 16) for digits" in words(refused.stderr)
    earlier = Recipe(data="digits", model="convnet", method="erm", epochs=1, batch_size=300, lr=0.1, size=(16, 16))
    assert read_run_data(earlier, None, tmp_path, download=False).train.shape == (1, 8, 8)
    images = {"data": str(tmp_path), "size": [16, 16], "epochs": 1, "batch_size": 300}
    (tmp_path / "images.json").write_text(json.dumps(images))
    result = flatmin("train", "--config", tmp_path / "images.json", "--data", "digits", "--out", tmp_path / "other")
    assert result.exit_code == 0, result.output


def test_changed_data_are_named_before_what_does_not_fit_because_of_them(tmp_path: Path) -> None:
    """One image more would be alone in its batch."""
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(5):
            Image.new("L", (8, 8), number).save(tmp_path / "pets" / name / f"{number}.png")
    asked = ["--data", tmp_path / "pets", "--model", "convnet", "--epochs", 1, "--batch-size", 8]
    assert flatmin("train", *asked, "--out", tmp_path / "run").exit_code == 0
    Image.new("L", (8, 8), 9).save(tmp_path / "pets" / "cat" / "9.png")
    result = flatmin("train", "--out", tmp_path / "run", "--resume")
    assert result.exit_code == 2
    assert "the data set has different contents" in words(result.stderr)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_be_trained(tmp_path: Path, method: str) -> None:
    result = flatmin(*FAST, "--method", method, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    measured = json.loads((tmp_path / "run" / "result.json").read_text())
    assert measured["method"] == method
    again = json.loads(flatmin("evaluate", tmp_path / "run", "--json", "--device", "cpu").stdout)
    assert (again["error"], again["nll"]) == (measured["test_error"], measured["test_nll"])


def test_flags_change_the_recipe(tmp_path: Path) -> None:
    flags = "--lr 0.05 --momentum 0 --weight-decay 0 --schedule cosine --warmup 0.5 --augment cutout --epsilon 0.2"
    flags += " --inner-lr 2 --inner-iter 2 --ball tensor --norm l2 --clip-norm 5 --ema 0.9 --label-noise 0.1"
    flags += " --validation --seed 7 --precision bf16 --channels-last --model mlp --no-capture"
    result = flatmin(*FAST, *flags.split(), "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    recipe = config["recipe"]
    assert recipe["settings"] == {"epsilon": 0.2, "inner_lr": 2.0, "inner_iter": 2, "ball": "tensor", "norm": "l2"}
    expected = {"lr": 0.05, "momentum": 0.0, "nesterov": False, "schedule": "cosine", "augment": "cutout", "ema": 0.9}
    expected |= {"label_noise": 0.1, "validation": True, "precision": "bf16", "channels_last": True, "model": "mlp"}
    assert expected.items() <= recipe.items()
    assert config["seed"] == 7
    assert "validation, last epoch" in result.stdout


def test_the_published_code_s_recipe_is_flags(tmp_path: Path) -> None:
    flags = "--augment vanilla_v1 --no-nesterov --clip-norm 50 --ball tensor --normalise 0.5 0.25"
    assert flatmin(*FAST, *flags.split(), "--out", tmp_path / "run").exit_code == 0
    recipe = json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]
    expected = {"augment": "vanilla_v1", "nesterov": False, "momentum": 0.9, "clip_norm": 50, "normalise": [0.5, 0.25]}
    assert expected.items() <= recipe.items()
    assert recipe["settings"]["ball"] == "tensor"
    again = json.loads(flatmin("evaluate", tmp_path / "run", "--json").stdout)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert again["error"] == result["test_error"]  # normalised by the same two numbers


def test_other_settings_of_a_method_and_milestones(tmp_path: Path) -> None:
    more = ["--method", "label_smoothing", "--set", "smoothing=0.05", "--set", "over=others", "--milestones", "0.2,0.9"]
    result = flatmin(*FAST, *more, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    recipe = json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]
    assert recipe["settings"] == {"smoothing": 0.05, "over": "others"}
    assert recipe["milestones"] == [0.2, 0.9]


def test_without_out_the_folder_is_named_after_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert flatmin(*FAST, "--method", "erm", "--seed", 3).exit_code == 0
    assert (tmp_path / "runs" / "digits-convnet-erm-3" / "result.json").exists()
    again = flatmin(*FAST, "--method", "erm", "--seed", 3)
    assert again.exit_code == 2
    assert "--resume" in again.stderr
    # the folder's own recipe, which the flags that were given must agree with
    assert flatmin("train", "--data", "digits", "--method", "erm", "--seed", 3, "--resume").exit_code == 0
    other = flatmin("train", "--data", "digits", "--method", "erm", "--seed", 3, "--resume", "--lr", 0.5)
    assert "lr is 0.1 there and 0.5 here" in words(other.stderr)


def test_resume_needs_nothing_but_the_folder(trained: Path) -> None:
    before = (trained / "result.json").read_bytes()
    (trained / "result.json").unlink()
    result = flatmin("train", "--out", trained, "--resume", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "resumed after step 5 of 5" in result.stderr
    after = json.loads((trained / "result.json").read_text())
    apart = dict.fromkeys((*TIMES, "threads"))
    assert {**after, **apart} == {**json.loads(before), **apart}
    finished = flatmin("train", "--out", trained, "--resume", "--data", "digits", "--epochs", 1)
    assert finished.exit_code == 0


def test_many_seeds_each_get_the_folder_that_they_have_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = flatmin(*FAST, "--method", "erm", "--seed", 3, "--seeds", 2, "--together", 2)
    assert result.exit_code == 0, result.output
    assert "seeds 3 to 4" in words(result.stderr)
    assert "seed 4 epoch 1/1" in words(result.stderr)
    assert "mean of 2" in result.stdout
    assert flatmin(*FAST, "--method", "erm", "--seed", 4, "--out", tmp_path / "alone").exit_code == 0
    one, other = (
        json.loads((tmp_path / place / "result.json").read_text()) for place in ("runs/digits-convnet-erm-4", "alone")
    )
    assert {**one, **dict.fromkeys(TIMES)} == {**other, **dict.fromkeys(TIMES)}
    refused = flatmin(*FAST, "--method", "erm", "--seed", 4, "--seeds", 2)
    assert refused.exit_code == 2
    assert "--resume" in words(refused.stderr)
    again = flatmin(*FAST, "--method", "erm", "--seed", 4, "--seeds", 2, "--resume")
    assert again.exit_code == 0, again.output
    assert (tmp_path / "runs" / "digits-convnet-erm-5" / "result.json").exists()


def test_many_seeds_go_on_with_nothing_but_their_folder(tmp_path: Path) -> None:
    assert flatmin(*FAST, "--seeds", 2, "--out", tmp_path / "runs").exit_code == 0
    for seed in (0, 1):
        (tmp_path / "runs" / f"seed-{seed}" / "result.json").unlink()
    result = flatmin("train", "--out", tmp_path / "runs", "--seeds", 3, "--resume", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "seed 1 resumed after step 5 of 5" in words(result.stderr)
    assert (tmp_path / "runs" / "seed-2" / "result.json").exists()
    alone = flatmin("train", "--out", tmp_path / "runs", "--resume")
    assert alone.exit_code == 2
    assert "it holds seed-0, seed-1, seed-2; add --seeds 3" in words(alone.stderr)
    shutil.rmtree(tmp_path / "runs" / "seed-0")
    request = partial(Request, data=None, method=None, data_dir=Path("data"), download=False, changes={}, settings={})
    plans = request(seed=None, out=tmp_path / "runs", resume=True).plans(2)
    assert [(plan.seed, plan.folder.name) for plan in plans] == [(0, "seed-0"), (1, "seed-1")]
    assert plans[0].recipe.batch_size == 300
    with pytest.raises(ValueError, match="is a run itself; choose another folder, or leave --seeds out"):
        request(seed=None, out=tmp_path / "runs" / "seed-1", resume=True).plans(2)


def made_up(*ends: Event) -> Callable[..., Iterator[tuple[int, Event]]]:
    """In place of `together`: runs that end so."""

    def events(*_: object, **__: object) -> Iterator[tuple[int, Event]]:
        yield from enumerate(ends)
        if any(isinstance(end, Failed) for end in ends):
            raise RunError("failed") from OSError("failed")

    return events


def test_several_seeds_show_what_one_shows(tmp_path: Path) -> None:
    """Averaged weights and memorised labels too."""
    asked = [*FAST, "--method", "erm", "--ema", 0.9, "--label-noise", 0.2]
    alone = flatmin(*asked, "--seed", 1, "--out", tmp_path / "alone")
    beside = flatmin(*asked, "--seeds", 2, "--out", tmp_path / "runs")
    numbers = re.findall(r"\d+\.\d+(?: %)?", alone.stdout.partition("1 epoch in")[0])
    assert len(numbers) == 8
    in_rows = [line.split(maxsplit=2)[2] for line in beside.stdout.splitlines() if line.startswith("seed 1 ")]
    assert sorted(re.findall(r"\d+\.\d+(?: %)?", " ".join(in_rows))) == sorted(numbers)
    evaluated = flatmin("evaluate", tmp_path / "alone", "--averaged")
    assert "not saved for the report: it shows what was measured of the last weights" in words(evaluated.stderr)


def test_what_finished_is_shown_although_others_failed_or_were_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = Finished({"test_error": 0.25, "test_nll": 0.5, "test_ece": 0.125})
    asked = [*FAST, "--seed", 5, "--seeds", 3, "--out", tmp_path / "runs"]
    monkeypatch.setattr(
        "flatmin_lab.cli.commands.train_seeds.train_together",
        made_up(finished, Failed("the disk is full", 7), finished),
    )
    result = flatmin(*asked)
    assert result.exit_code == 1
    assert "mean of 2 of 3 25.00 %" in words(result.stdout)
    assert "seed 6 failed after step 7: the disk is full" in words(result.stderr)
    assert "flatmin: 1 of 3 runs failed (seed 6): the disk is full" in words(result.stderr)
    ends = (finished, Stopped(StopSignal.SIGTERM, 133), Failed("the disk is full"), Stopped(StopSignal.SIGTERM, 0))
    monkeypatch.setattr("flatmin_lab.cli.commands.train_seeds.train_together", made_up(*ends))
    stopped = flatmin(*asked, "--seeds", 4)
    assert stopped.exit_code == 143
    assert "mean of 1 of 4" in words(stopped.stdout)
    said = words(stopped.stderr)
    far = "seed 5 finished, seed 6 saved after step 133, seed 7 failed, seed 8 not started"
    assert f"{far}; resume with the same" in said
    assert said.index("resume with") < said.index("1 of 4 runs failed (seed 7): the disk is full")


def test_those_that_run_are_counted_and_finished_ones_count_whole() -> None:
    runs = SeedRuns([0, 1, 2])
    runs.update(0, Finished({}))  # before, so it was not started now
    assert (runs.running, runs.completed()) == (set(), 0)
    runs.update(1, Started(step=40, steps=100, epochs=2, parameters=1))
    runs.update(2, Started(step=0, steps=100, epochs=2, parameters=1))
    runs.update(2, Progress(epoch=1, step=7, numbers={}))
    assert (runs.running, runs.completed()) == ({1, 2}, 147)
    runs.update(1, Failed("no more", 40))
    runs.update(2, Stopped("Ctrl-C", 8))
    assert runs.running == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "sam"], "unknown method 'sam'; choose from erm"),
        (["--model", "resnet"], "unknown model 'resnet'"),
        (["--data", "mnist"], "unknown data set 'mnist'"),
        (["--data", "cifar10", "--data-dir", "nowhere"], "was not found"),
        (["--device", "tpu"], "device 'tpu'"),
        (["--device", "cuda:7"], "no device 'cuda:7' here"),
        (["--precision", "fp8"], "unknown precision 'fp8'"),
        (["--schedule", "warm"], "unknown schedule 'warm'"),
        (["--epochs", "0"], "epochs must be"),
        (["--epochs", "many"], "--epochs"),
        (["--batch-size", "100000"], "the batch size must be from 1 to the 1438"),
        (["--lr", "-1"], "lr must be above 0"),
        (
            ["--method", "erm", "--epsilon", "0.1"],
            "erm takes no settings, got epsilon; epsilon belongs to adversarial, rmp, amp",
        ),
        (["--method", "rmp", "--inner-iter", "2"], "got inner_iter"),
        (["--method", "amp", "--epsilon", "-1"], "epsilon must be a finite number of at least 0, got -1.0"),
        (["--method", "amp", "--ball", "cube"], "cube"),
        (["--schedule", "one_cycle", "--warmup", "0.5"], "warmup must be 0 with one_cycle"),
        (["--milestones", "half"], "'half'"),
        (["--set", "smoothing"], "KEY=VALUE"),
        (["--schedule", "cosine", "--milestones", "0.5"], "--milestones belongs to the schedule multi_step"),
        (["--optimizer", "adamw", "--momentum", "0.9"], "--momentum belongs to the optimizer sgd, got adamw"),
        (["--optimizer", "muon", "--nesterov"], "--nesterov belongs to the optimizer sgd, got muon; leave it out"),
        (["--model", "vgg16"], "32"),
        (["--data", "spiral", "--augment", "vanilla"], "images"),
        (["--data", "spiral", "--method", "adversarial"], "bounds"),
        (["--nonsense"], "nonsense"),
        (["--checkpoint-epochs", "0"], "checkpoint-epochs"),
        (["--seeds", "0"], "--seeds"),
        (["--together", "2"], "--together needs --seeds 2 or more"),
        (["--seeds", "2", "--together", "0"], "--together"),
        (["--seeds", "2", "--batch-size", "1437"], "BatchNorm needs at least two images"),
        (["--compile", "--no-capture"], "leave out --compile or --no-capture"),
    ],
    ids=str,
)
def test_a_request_that_makes_no_sense_gets_one_message_and_code_2(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    given = [argument for pair in zip(FAST[1::2], FAST[2::2], strict=True) for argument in pair]
    result = flatmin("train", *given, *arguments, "--out", tmp_path / "run")
    assert result.exit_code == 2, result.output
    assert message in words(result.stderr)
    assert "Traceback" not in result.output
    assert not (tmp_path / "run" / "checkpoint-00000005.safetensors").exists()


def test_a_recipe_that_differs_from_the_folder_s_is_refused(trained: Path) -> None:
    result = flatmin("train", "--out", trained, "--resume", "--lr", 0.3, "--seed", 5)
    assert result.exit_code == 2
    assert "lr is 0.1 there and 0.3 here" in words(result.stderr)
    assert "seed is 0 there and 5 here" in words(result.stderr)
    other = flatmin("train", "--out", trained, "--resume", "--method", "erm")
    assert other.exit_code == 2
    assert "method is 'amp' there and 'erm' here" in words(other.stderr)


def test_files_of_one_s_own_may_move(tmp_path: Path) -> None:
    """They are known by their content: the same files elsewhere will do, others will not."""
    generator = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "x_train": generator.integers(0, 256, (40, 8, 8), dtype=np.uint8),
        "y_train": np.arange(40) % 3,
    }
    arrays |= {"x_test": arrays["x_train"][:9], "y_test": arrays["y_train"][:9]}
    here, there = tmp_path / "here.npz", tmp_path / "there.npz"
    np.savez(here, allow_pickle=False, **arrays)
    run = ["--out", tmp_path / "run", "--device", "cpu"]
    begun = flatmin("train", "--data", here, "--epochs", 1, "--batch-size", 10, *run)
    assert begun.exit_code == 0, begun.output
    here.rename(there)
    lost = flatmin("evaluate", tmp_path / "run")
    assert lost.exit_code == 2
    assert "here.npz" in words(lost.stderr)
    assert flatmin("evaluate", tmp_path / "run", "--data", there).exit_code == 0
    assert flatmin("train", *run, "--resume", "--data", there).exit_code == 0
    np.savez(here, allow_pickle=False, **{**arrays, "y_test": arrays["y_test"][::-1]})
    for command in (["evaluate", tmp_path / "run"], ["train", *run, "--resume"]):
        other = flatmin(*command)
        assert other.exit_code == 2
        assert "SHA-256" in words(other.stderr)


def test_pictures_of_a_folder_keep_their_size(tmp_path: Path) -> None:
    for which in ("train", "test"):
        for label, grey in (("dark", 20), ("light", 200)):
            (tmp_path / which / label).mkdir(parents=True)
            for number in range(4):
                Image.new("L", (10 + number, 9), grey + number).save(tmp_path / which / label / f"{number}.png")
    result = flatmin(
        "train", "--data", tmp_path, "--size", 8, 8, "--epochs", 1, "--batch-size", 4, "--out", tmp_path / "run"
    )
    assert result.exit_code == 0, result.output
    assert flatmin("evaluate", tmp_path / "run").exit_code == 0
    assert flatmin("train", "--out", tmp_path / "run", "--resume").exit_code == 0


def test_resume_of_nothing_says_so(tmp_path: Path) -> None:
    result = flatmin("train", "--out", tmp_path / "none", "--resume")
    assert result.exit_code == 2
    assert "has no run to resume" in words(result.stderr)
    assert not (tmp_path / "none").exists()
    nameless = flatmin("train", "--resume")
    assert nameless.exit_code == 2
    assert "--out" in words(nameless.stderr)


def test_a_loss_that_is_not_finite_is_a_failed_run(tmp_path: Path) -> None:
    result = flatmin(*FAST, "--method", "erm", "--lr", "1e30", "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert re.search(r"the loss of step \d+ \(epoch 1\) is (nan|inf)", words(result.stderr))
    assert "Traceback" not in result.output


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = flatmin(*FAST, "--method", "sam", "--out", tmp_path / "run", "--debug")
    assert isinstance(result.exception, ValueError)


def test_an_error_nobody_thought_of_is_one_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("flatmin_lab.cli.commands.train.training", broken)
    result = flatmin(*FAST, "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "ZeroDivisionError: division by zero (run it again with --debug to see where)" in words(result.stderr)


def test_evaluate_gives_the_numbers_of_the_last_epoch(trained: Path) -> None:
    result = json.loads((trained / "result.json").read_text())
    for what in (trained, checkpoint.listed(trained)[0]):
        found = json.loads(flatmin("evaluate", what, "--json", "--device", "cpu").stdout)
        assert found["split"] == "test"
        assert found["pictures"] == 359
        assert (found["error"], found["nll"], found["ece"]) == tuple(
            result[f"test_{name}"] for name in ("error", "nll", "ece")
        )
    averaged = json.loads(flatmin("evaluate", trained, "--averaged", "--json", "--device", "cpu").stdout)
    assert averaged["nll"] == result["average_test_nll"]
    copy = trained.parent / "copy"
    shutil.copytree(trained, copy)
    newest = checkpoint.listed(copy)[0]
    shutil.copy(newest, copy / checkpoint.name_of(99))
    (copy / checkpoint.name_of(99)).write_bytes(newest.read_bytes()[:-1])
    noted = flatmin("evaluate", copy)
    assert noted.exit_code == 0
    assert "evaluating the checkpoint before it" in words(noted.stderr)
    table = flatmin("evaluate", trained)
    assert "ECE, 15 bins" in table.stdout


def test_evaluate_says_what_is_wrong(tmp_path: Path, trained: Path) -> None:
    missing = flatmin("evaluate", tmp_path / "none")
    assert missing.exit_code == 2
    assert "does not exist" in words(missing.stderr)
    empty = flatmin("evaluate", tmp_path)
    assert empty.exit_code == 2
    assert "no config.json" in words(empty.stderr)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_bytes((trained / "config.json").read_bytes())
    assert "no checkpoint yet" in words(flatmin("evaluate", copy).stderr)
    (copy / "result.json").write_bytes((trained / "result.json").read_bytes())
    assert "its checkpoints are gone; put them back" in words(flatmin("evaluate", copy).stderr)
    other = tmp_path / "other"
    flatmin(*FAST, "--seed", 1, "--out", other)
    newest = checkpoint.listed(trained)[0]
    (other / "checkpoint-00000099.safetensors").write_bytes(newest.read_bytes())
    foreign = flatmin("evaluate", other)
    assert foreign.exit_code == 2
    assert "seed is 0 there and 1 here" in words(foreign.stderr)
    (copy / newest.name).write_bytes(newest.read_bytes()[:-9])
    torn = flatmin("evaluate", copy)
    assert torn.exit_code == 1
    assert "not an intact checkpoint" in words(torn.stderr)


def test_evaluate_without_an_average_says_so(tmp_path: Path) -> None:
    flatmin(*FAST, "--out", tmp_path / "run")
    result = flatmin("evaluate", tmp_path / "run", "--averaged")
    assert result.exit_code == 2
    assert "without --ema" in words(result.stderr)


def test_doctor_finds_everything_and_the_law_holds(tmp_path: Path) -> None:
    result = flatmin("doctor", "--data-dir", tmp_path, "--device", "cpu")
    assert result.exit_code == 0, result.output
    text = words(result.stdout)
    assert torch.__version__ in text
    assert "3 steps with ε = 0 equal those of the plain optimizer, bit for bit" in text
    assert "no errors, no warnings" in text
    assert "cifar10 not in" in text
    assert "digits 1438 and 359 images of 1 × 8 × 8" in text


def test_doctor_examines_a_model_of_the_user_s_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch import nn\n"
        "def build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Dropout(0.5), nn.Linear(5, 3))\n"
        "def words():\n    return 'a model'\n"
        "class Noisy(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.layer = nn.Linear(12, 3)\n"
        "    def forward(self, x):\n        import time\n"
        "        return self.layer(x.flatten(1)) * (time.perf_counter_ns() % 1000)\n"
    )
    good = flatmin("doctor", "--model", f"{file}:build", "--shape", "3,2,2", "--data-dir", tmp_path, "--device", "cpu")
    assert good.exit_code == 0, good.output
    assert "those of the plain optimizer, bit for bit" in words(good.stdout)
    bad = flatmin("doctor", "--model", f"{file}:Noisy", "--shape", "3,2,2", "--data-dir", tmp_path, "--device", "cpu")
    assert bad.exit_code == 1
    assert "closure repeats error two calls at the same weights give losses of" in words(bad.stdout)
    for model, message in (
        (f"{file}:words", "must make a torch.nn.Module, got str"),
        (f"{file}:none", "no function or class 'none'"),
        (f"{tmp_path}/none.py:build", "does not exist"),
        ("resnet", "unknown model 'resnet'"),
        (f"{file}:build", "give its own with --shape"),
    ):
        wrong = flatmin("doctor", "--model", model, "--data-dir", tmp_path)
        assert wrong.exit_code == 2, wrong.output
        assert message in words(wrong.stderr)


def test_doctor_wants_a_shape_of_whole_numbers(tmp_path: Path) -> None:
    for shape in ("3,0,4", "3,x", "2.5"):
        result = flatmin("doctor", "--shape", shape, "--data-dir", tmp_path)
        assert result.exit_code == 2
        assert "3,32,32" in words(result.stderr)


def test_help_and_version() -> None:
    for command in ("demo", "train", "evaluate", "doctor"):
        assert flatmin(command, "--help").exit_code == 0
        assert command in flatmin("--help").stdout
    assert flatmin("--version").stdout.startswith(f"flatmin {__version__}, torch {torch.__version__}")
