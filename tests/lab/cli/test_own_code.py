"""`flatmin train` and `tune` with a network, an optimizer and a recipe of the user's own, and what bad ones get."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.support import own_networks
from tests.support.processes import flatmin, words

FILE = str(Path(own_networks.__file__))
FAST = ["train", "--data", "digits", "--epochs", "1", "--batch-size", "300", "--device", "cpu"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, with the file in it."""
    (tmp_path / "own.py").write_text(Path(FILE).read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return tmp_path


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["recipe"]
    return found


def test_a_network_and_an_optimizer_are_named_by_file_and_function(here: Path) -> None:
    more = ["--model", "own.py:ViT", "--model-settings", "width=4", "--optimizer", "own.py:make_optimizer"]
    result = flatmin(*FAST, *more, "--optimizer-settings", "betas=0.9,0.95", "--optimizer-settings", "eps=1e-6")
    assert result.exit_code == 0, result.output
    recipe = config_of(here / "runs" / "digits-own-ViT-amp-0")
    assert recipe["model"] == f"{here}/own.py:ViT"
    assert recipe["optimizer"] == f"{here}/own.py:make_optimizer"
    assert recipe["model_settings"] == {"width": 4}
    assert recipe["optimizer_settings"] == {"betas": [0.9, 0.95], "eps": 1e-6}
    assert (recipe["lr"], recipe["weight_decay"]) == (0.002, 0.05)
    assert recipe["files"].keys() == {"model", "optimizer"}
    assert "own.py:make_optimizer" in result.stderr


def test_a_run_is_resumed_from_another_folder_and_with_its_file_elsewhere(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert flatmin(*FAST, "--model", "own.py:ResNet", "--out", "run").exit_code == 0
    (here / "run" / "result.json").unlink()
    (here / "other").mkdir()
    monkeypatch.chdir(here / "other")
    assert flatmin("train", "--out", "../run", "--resume").exit_code == 0
    (here / "run" / "result.json").unlink()
    (here / "own.py").rename(here / "other" / "renamed.py")
    gone = flatmin("train", "--out", "../run", "--resume")
    assert gone.exit_code == 2
    assert "own.py no longer exists" in words(gone.stderr)
    assert flatmin("train", "--out", "../run", "--resume", "--model", "renamed.py:ResNet").exit_code == 0
    (here / "run" / "result.json").unlink()
    other = flatmin("train", "--out", "../run", "--resume", "--model", "renamed.py:ViT")
    assert "model is 'ResNet' there and 'ViT' here" in words(other.stderr)


def test_a_module_is_recorded_as_its_file(here: Path) -> None:
    (here / "my_own_module.py").write_text(Path(FILE).read_text())
    assert flatmin(*FAST, "--model", "my_own_module:ResNet", "--out", "run").exit_code == 0
    assert config_of(here / "run")["model"] == f"{here}/my_own_module.py:ResNet"
    refused = flatmin(*FAST, "--model", "absent_module:ResNet", "--out", "other")
    assert "there is no module 'absent_module' here" in words(refused.stderr)


def test_a_changed_file_is_told_with_the_command_that_resumes(here: Path) -> None:
    assert flatmin(*FAST, "--model", "own.py:ResNet", "--out", "run").exit_code == 0
    (here / "run" / "result.json").unlink()
    with (here / "own.py").open("a") as file:
        file.write("# more\n")
    refused = flatmin("train", "--out", "run", "--resume")
    assert refused.exit_code == 2
    assert "resume with --model run/code/model/own.py:ResNet" in words(refused.stderr)
    assert flatmin("train", "--out", "run", "--resume", "--model", "run/code/model/own.py:ResNet").exit_code == 0
    assert flatmin("evaluate", "run", "--device", "cpu").exit_code == 0


def test_seeds_share_the_network(here: Path) -> None:
    result = flatmin(*FAST, "--model", "own.py:TiedMLP", "--optimizer", "adamw", "--seeds", 2, "--out", "two")
    assert result.exit_code == 0, result.output
    assert config_of(here / "two" / "seed-0") == config_of(here / "two" / "seed-1")


def test_a_recipe_comes_from_a_file_or_from_another_run(here: Path) -> None:
    start = {"data": "digits", "model": "own.py:ViT", "model_settings": {"width": 4}, "optimizer": "adamw", "epochs": 1}
    (here / "run.json").write_text(json.dumps({**start, "batch_size": 300, "settings": {"epsilon": 0.2}}))
    assert flatmin("train", "--config", "run.json", "--out", "first", "--device", "cpu").exit_code == 0
    first = config_of(here / "first")
    assert {key: first[key] for key in start} == {**start, "model": f"{here}/own.py:ViT"}
    assert first["settings"] == {"epsilon": 0.2, "inner_lr": 1.0}
    assert first["lr"] == 1e-3
    for place in ("first", "first/config.json"):
        out = place.replace("/", "-") + "-again"
        again = flatmin("train", "--config", place, "--lr", 0.01, "--model-settings", "width=8", "--out", out)
        assert again.exit_code == 0, again.output
        assert config_of(here / out) == {**first, "lr": 0.01, "model_settings": {"width": 8}}
    other = flatmin(
        "train", "--config", "first", "--method", "erm", "--optimizer", "sgd", "--model", "mlp", "--out", "sgd"
    )
    assert other.exit_code == 0, other.output
    found = config_of(here / "sgd")
    assert (found["settings"], found["model_settings"], found["lr"]) == ({}, {"side": 8}, 0.1)
    assert "optimizer" not in found


def test_initial_weights_are_named_and_fit(here: Path) -> None:
    model = own_networks.ResNet(10, 1)
    save_file(model.state_dict(), here / "good.safetensors")
    save_file(own_networks.ResNet(7, 1).state_dict(), here / "head.safetensors")
    result = flatmin(*FAST, "--model", "own.py:ResNet", "--init", "good.safetensors", "--out", "run")
    assert result.exit_code == 0, result.output
    assert config_of(here / "run")["init"] == f"{here}/good.safetensors"
    head = ["--model", "own.py:ResNet", "--init", "head.safetensors"]
    assert "--init-except fc" in words(flatmin(*FAST, *head, "--out", "head").stderr)
    assert flatmin(*FAST, *head, "--init-except", "fc", "--out", "head").exit_code == 0


def test_a_tuning_takes_a_network_and_a_recipe(here: Path) -> None:
    pytest.importorskip("optuna", reason="installed with flatmin[lab]")
    values = {"data": "digits", "model": "own.py:TiedMLP", "optimizer": "adamw", "epochs": 1, "batch_size": 300}
    (here / "run.json").write_text(json.dumps({**values, "model_settings": {"width": 8}, "settings": {"epsilon": 0.2}}))
    result = flatmin("tune", "--config", "run.json", "--trials", 2, "--out", "tuned", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "--model-settings width=8 " in words(result.stdout)
    assert " null" not in result.stdout
    assert flatmin("train", "--tuned", "tuned/tuning.json", "--out", "run", "--device", "cpu").exit_code == 0
    found = config_of(here / "run")
    assert (found["model"], found["optimizer"]) == (f"{here}/own.py:TiedMLP", "adamw")
    assert found["settings"]["epsilon"] == 0.2  # of AMP's first trial


REFUSED = [
    (["--model", "Res_Net"], "unknown model 'Res_Net'; choose from preactresnet18"),
    (["--model", "own.py:absent"], "own.py has no function or class 'absent'; it has Residual, ResNet"),
    (["--model", "absent.py"], "absent.py does not exist; name your own function as file.py:make_model"),
    (["--model", "own.py:ViT", "--model-settings", "depth=3"], "own.py:ViT takes width, got depth"),
    (["--model", "own.py:ViT", "--model-settings", "depth"], "--model-settings takes KEY=VALUE, got 'depth'"),
    (["--model", "own.py:ViT", "--method", "dropout"], "the method dropout needs a network with dropout"),
    (["--model", "own.py:too_few_outputs"], "K = 10 classes, got (2, 2)"),
    (["--optimizer", "lion"], "optimizer must be sgd, adamw, adam"),
    (["--optimizer", "own.py:make_optimizer", "--clip-norm", "1"], "--clip-norm works only with torch's optimizers"),
    (["--init", "absent.pt"], "absent.pt does not exist"),
    (["--init", "folder"], "got the folder"),
    (["--init-except", "fc"], "init_except must be given with init"),
    (["--config", "absent.json"], "absent.json does not exist"),
    (["--config", "own.py"], "own.py cannot be read: Extra data: line 1"),
    (["--config", "list.json"], "list.json cannot be read: it holds no object"),
    (["--config", "twice.json"], "twice.json cannot be read: the key 'lr' is there twice"),
    (["--config", "deep.json"], "deep.json cannot be read: maximum recursion depth exceeded"),
    (["--config", "beside.json"], "beside.json: epochs, lr must be inside its recipe, not beside it"),
    (["--config", "odd.json"], "odd.json: a recipe has no colour; it has data, model"),
    (["--config", "wrong.json"], "wrong.json: lr must be a number, got a str"),
    (["--config", "odd.json", "--tuned", "tuning.json"], "leave one of them out"),
]


@pytest.mark.parametrize(("arguments", "text"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_what_makes_no_sense_is_told_and_leaves_no_folder(here: Path, arguments: list[str], text: str) -> None:
    (here / "folder").mkdir()
    (here / "odd.json").write_text('{"colour": "red"}')
    (here / "wrong.json").write_text('{"lr": "fast"}')
    (here / "list.json").write_text("[]")
    (here / "deep.json").write_text("[" * 100_000)
    (here / "beside.json").write_text('{"recipe": {"data": "digits"}, "lr": 0.2, "epochs": 2}')
    (here / "twice.json").write_text('{"lr": 0.1, "epochs": 1, "lr": 0.2}')
    result = flatmin(*FAST, *arguments, "--out", "run")
    assert result.exit_code == 2, result.output
    assert text in words(result.stderr)
    assert "Traceback" not in result.output
    assert not (here / "run").exists()


def test_an_error_in_the_users_file_shows_their_line(here: Path) -> None:
    (here / "broken.py").write_text("from torch import nn\n\ndef make_model():\n    return nn.Linear(width, 10)\n")
    result = flatmin(*FAST, "--model", "broken.py", "--out", "run")
    assert result.exit_code == 2
    assert "broken.py, line 4, in make_model\n    return nn.Linear(width, 10)\nNameError: name 'width'" in result.stderr
    assert "flatmin_lab" not in result.stderr


def test_weights_of_ones_own_are_told_what_they_need(here: Path) -> None:
    save_file(own_networks.ResNet(10, 1).state_dict(), here / "w.safetensors")
    told = flatmin("evaluate", "w.safetensors")
    assert told.exit_code == 2
    assert "for weights of your own, add --model file.py:make_model and --data" in words(told.stderr)
    done = flatmin("evaluate", "w.safetensors", "--model", "own.py:ResNet", "--data", "digits", "--device", "cpu")
    assert done.exit_code == 0, done.output
    page = flatmin("report", "w.safetensors", "--out", "page.html")
    assert page.exit_code == 1
    assert not (here / "page.html").exists()


def test_a_folder_with_another_run_names_the_differences(here: Path) -> None:
    assert flatmin(*FAST, "--out", "run").exit_code == 0
    other = flatmin(*FAST, "--out", "run", "--lr", "0.01")
    assert other.exit_code == 2
    assert "already holds another run (finished): lr is 0.1 there and 0.01 here; choose another folder" in words(
        other.stderr
    )
    assert "already holds this run, finished" in words(flatmin(*FAST, "--out", "run").stderr)


def test_a_diverged_run_names_the_rate_that_was_given(here: Path) -> None:
    result = flatmin(*FAST, "--lr", 1e6, "--warmup", 0.9, "--method", "erm", "--out", "run")
    assert result.exit_code == 1
    assert "Try a smaller --lr (it was 1e+06)" in words(result.stderr)
