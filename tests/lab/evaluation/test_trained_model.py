"""A trained model comes back: from its folder, without its data, as predictions and as files."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import flatmin_lab
from flatmin_lab.data.normalise import Normalisation
from flatmin_lab.evaluation import export as exporting
from flatmin_lab.evaluation.export import ExportError, description_of, export
from flatmin_lab.evaluation.prediction import Prediction, Unreadable, image_files, predict_files
from flatmin_lab.evaluation.trained_model import TrainedModel
from tests.support import own_networks
from tests.support.pipes import pipe
from tests.support.processes import flatmin, words
from tests.support.small_runs import after, run, tiny_data, tiny_recipe

FILE = str(Path(own_networks.__file__))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ResNet of the user's own, with an EMA."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    run(tiny_recipe(model=f"{FILE}:ResNet", model_settings={}, ema=0.5), folder)
    return folder


@pytest.fixture
def loaded(trained: Path) -> TrainedModel:
    return flatmin_lab.load_run(trained)


def test_a_run_gives_its_model_and_what_it_takes_and_returns(trained: Path, loaded: TrainedModel) -> None:
    data = tiny_data()
    normalise = Normalisation.of(data.train)
    assert torch.equal(loaded.normalise.mean, normalise.mean)
    assert torch.equal(loaded.normalise.std, normalise.std)
    assert loaded.classes == ["row", "column", "diagonal"]
    assert not loaded.model.training
    assert loaded.recipe.model == f"{FILE}:ResNet"
    assert "run" in str(loaded.checkpoint)
    assert "ema weights, images of 1 × 6 × 6 to 3 classes" in repr(loaded)


@pytest.mark.parametrize("weights", ["ema", "last"])
def test_its_metrics_are_those_of_its_weights(trained: Path, weights: Any) -> None:
    data, loaded = tiny_data(), flatmin_lab.load_run(trained, weights=weights)
    wrong = loaded.logits(data.test.x).argmax(dim=1) != data.test.y
    assert loaded.metrics["test_error"] == pytest.approx(wrong.float().mean().item())
    named = [data.names[label] for label in loaded.logits(data.test.x).argmax(dim=1).tolist()]
    assert loaded.predict(data.test.x) == named


def test_images_from_0_to_1_and_bytes_give_the_same(loaded: TrainedModel) -> None:
    x = tiny_data().test.x
    expected = loaded.logits(x)
    assert torch.equal(loaded.logits(x.float() / 255), expected)
    assert torch.equal(loaded.with_normalisation()(x.float() / 255), expected)
    torch.testing.assert_close(loaded.probabilities(x).sum(dim=1), torch.ones(len(x)))
    with pytest.raises(ValueError, match=r"takes images of 1 × 6 × 6, got a tensor of shape \(2, 3, 6, 6\)"):
        loaded.logits(torch.zeros(2, 3, 6, 6))
    with pytest.raises(ValueError, match=r"got a tensor of shape \(1, 6, 6\); for a single one, give x\[None\]"):
        loaded.predict(x[0])
    with pytest.raises(TypeError, match=r"must be a tensor, got ndarray; for an array, use torch\.from_numpy"):
        loaded.predict(x.numpy())  # type: ignore[arg-type]


def test_floats_from_0_to_255_are_refused_and_noise_is_not(loaded: TrainedModel) -> None:
    x = tiny_data().test.x
    with pytest.raises(ValueError, match=r"from 0 to 1, got 0 to 2\d\d; divide them by 255"):
        loaded.predict(x.float())
    assert len(loaded.predict(x / 255 + 0.5)) == len(x)
    assert loaded.predict(x[:0].float()) == []


def test_images_that_are_normalised_already_are_refused(loaded: TrainedModel) -> None:
    x = tiny_data().test.x
    for normalised in (loaded.normalise(x), loaded.normalise(x).clamp(max=2), x / 255 * 9 - 0.4, x / 127.5 - 1):
        with pytest.raises(ValueError, match=r"from 0 to 1, got -\S+ to \S+; give them without normalisation"):
            loaded.predict(normalised)
    with pytest.raises(ValueError, match=r"from 0 to 1, got -0\.5 to \d+\.5; divide them by 255"):
        loaded.predict(x - 0.5)
    assert len(loaded.predict(x / 255 - 0.5)) == len(x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool], ids=str)
def test_whole_numbers_that_are_not_bytes_are_refused(loaded: TrainedModel, dtype: torch.dtype) -> None:
    x = tiny_data().test.x.to(dtype)
    for use in (loaded.predict, loaded.with_normalisation(), loaded.normalise):
        with pytest.raises(TypeError, match=f"got {dtype}; for pixels from 0 to 255"):
            use(x)


def test_the_file_of_the_network_may_have_changed_or_gone(tmp_path: Path) -> None:
    mine = tmp_path / "mine_gone.py"
    mine.write_text(Path(FILE).read_text())
    run(tiny_recipe(model=f"{mine}:ResNet", model_settings={}, epochs=1), tmp_path / "run")
    expected = flatmin_lab.load_run(tmp_path / "run").logits(tiny_data().test.x)
    mine.write_text("def ResNet():\n    raise RuntimeError\n")
    assert torch.equal(flatmin_lab.load_run(tmp_path / "run").logits(tiny_data().test.x), expected)
    mine.unlink()
    moved = shutil.copytree(tmp_path / "run", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "run")
    assert torch.equal(flatmin_lab.load_run(moved).logits(tiny_data().test.x), expected)
    shutil.rmtree(moved / "code")
    with pytest.raises(FileNotFoundError, match=r"mine_gone.py no longer exists"):
        flatmin_lab.load_run(moved)


def test_only_the_file_of_the_network_is_asked_for(tmp_path: Path) -> None:
    mine = tmp_path / "mine_optimizer.py"
    mine.write_text(Path(FILE).read_text())
    recipe = tiny_recipe(model=f"{FILE}:ResNet", optimizer=f"{mine}:make_optimizer", model_settings={}, epochs=1)
    run(recipe, tmp_path / "run")
    mine.unlink()
    shutil.rmtree(tmp_path / "run" / "code" / "optimizer")
    assert flatmin_lab.load_run(tmp_path / "run").epoch == 1


def test_metrics_are_numbers_of_the_evaluated_split(tmp_path: Path) -> None:
    settings = {"epsilon": "auto", "release": 0.5}
    run(tiny_recipe(method="amp", settings=settings, label_noise=0.2, epochs=2, ema=0.9), tmp_path / "run")
    for weights in ("last", "ema"):
        metrics = flatmin_lab.load_run(tmp_path / "run", weights=weights).metrics
        assert metrics.keys() == {"test_error", "test_nll", "test_ece", "memorised"}
        assert all(isinstance(value, float) for value in metrics.values())


def test_a_run_of_an_earlier_version_takes_its_normalisation_from_the_data(tmp_path: Path) -> None:
    assert (
        flatmin("train", "--data", "digits", "--epochs", 1, "--batch-size", 300, "--out", tmp_path / "run").exit_code
        == 0
    )
    expected = flatmin_lab.load_run(tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    del config["inputs"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    found = flatmin_lab.load_run(tmp_path / "run")
    assert torch.equal(found.normalise.mean, expected.normalise.mean)
    assert (found.classes, found.input_shape) == (expected.classes, expected.input_shape)


def test_what_cannot_be_loaded_is_told_why(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown weights 'best'; choose from ema, last"):
        flatmin_lab.load_run(trained, weights="best")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="does not exist"):
        flatmin_lab.load_run(tmp_path / "nothing")
    run(tiny_recipe(epochs=1), tmp_path / "plain")
    assert flatmin_lab.load_run(tmp_path / "plain").weights == "last"
    with pytest.raises(ValueError, match="has no EMA of the weights"):
        flatmin_lab.load_run(tmp_path / "plain", weights="ema")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    del config["inputs"]["std"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is damaged: its inputs have no std"):
        flatmin_lab.load_run(tmp_path / "plain")


def test_a_file_in_no_runs_folder_is_told_what_the_command_takes(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"")
    rule = "is not in a run folder; give a run folder, or one of its checkpoints"
    for command, more, own in (("export", ["--to", tmp_path / "a.pt2"], False), ("evaluate", [], True)):
        result = flatmin(command, tmp_path / "w.safetensors", *more)
        assert result.exit_code == 2
        assert rule in words(result.stderr)
        assert ("add --model file.py:make_model and --data" in words(result.stderr)) is own


def test_weights_within_an_epoch_have_no_metrics(tmp_path: Path) -> None:
    run(tiny_recipe(), tmp_path / "run", stop=after(7))
    assert flatmin_lab.load_run(tmp_path / "run").metrics == {}


# ---- predictions


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """The test images as files, one of another size and in colour, and one that is no image."""
    folder = tmp_path / "pictures"
    (folder / "inside").mkdir(parents=True)
    for number, image in enumerate(tiny_data().test.x[:4, 0]):
        Image.fromarray(image.numpy()).save(folder / "inside" / f"{number}.png")
    Image.new("RGB", (20, 10)).save(folder / "wide.png")
    (folder / "torn.png").write_bytes(b"\x89PNG torn")
    (folder / "notes.txt").write_text("no image")
    return folder


def test_files_get_the_predictions_of_their_pixels(loaded: TrainedModel, pictures: Path) -> None:
    files = image_files([pictures, pictures / "inside" / "0.png"])
    assert [file.name for file in files] == ["0.png", "1.png", "2.png", "3.png", "torn.png", "wide.png"]
    found = list(predict_files(loaded, files))
    expected = loaded.probabilities(tiny_data().test.x[:4])
    for one, row in zip(found[:4], expected, strict=True):
        assert isinstance(one, Prediction)
        best = row.sort(descending=True)
        assert [one.label, one.runner_up] == [loaded.classes[number] for number in best.indices[:2].tolist()]
        assert [one.probability, one.runner_up_probability] == pytest.approx(best.values[:2].tolist(), rel=1e-5)
    assert isinstance(found[4], Unreadable)
    assert "is not an image that can be read" in found[4].why
    assert isinstance(found[5], Prediction)
    assert found[5].size == (10, 20)


def test_a_pipe_is_not_waited_for(loaded: TrainedModel, pictures: Path) -> None:
    with pipe(pictures / "pipe.png"):
        found = {one.file.name: one for one in predict_files(loaded, image_files([pictures]))}
    assert "must be a regular file" in found["pipe.png"].why  # type: ignore[union-attr]


def test_the_command_prints_a_table_writes_csv_and_fails_where_a_file_did(
    trained: Path, pictures: Path, tmp_path: Path
) -> None:
    result = flatmin("predict", trained, pictures, "--out", tmp_path / "new" / "found.csv", "--device", "cpu")
    assert result.exit_code == 1
    assert "runner-up" in result.stdout
    assert "the EMA of the weights (decay 0.5) after epoch 3" in words(result.stderr)
    assert "1 of 5 images were resized to 6 × 6" in words(result.stderr)
    assert "torn.png is not an image" in words(result.stderr)
    rows = list(csv.DictReader((tmp_path / "new" / "found.csv").read_text().splitlines()))
    assert list(rows[0]) == ["file", "class", "probability", "runner_up", "runner_up_probability"]
    assert [Path(row["file"]).name for row in rows] == ["0.png", "1.png", "2.png", "3.png", "wide.png"]
    (pictures / "torn.png").unlink()
    assert flatmin("predict", trained, pictures, "--weights", "last", "--device", "cpu").exit_code == 0


def test_predictions_that_make_no_sense_are_refused(trained: Path, tmp_path: Path) -> None:
    run_of_points = tmp_path / "spiral"
    assert flatmin("train", "--data", "spiral", "--epochs", 1, "--out", run_of_points).exit_code == 0
    (tmp_path / "empty").mkdir()
    Image.new("L", (6, 6)).save(tmp_path / "one.png")
    for arguments, text in (
        ([trained, tmp_path / "absent.png"], "does not exist; give image files, or folders of them"),
        ([trained, tmp_path / "empty"], "holds no images"),
        ([run_of_points, tmp_path / "one.png"], "takes points of 2, which are not grey or colour images"),
        ([trained, tmp_path / "one.png", "--out", tmp_path], "is a folder; name the file with --out"),
        ([trained, tmp_path / "one.png", "--weights", "best"], "unknown weights 'best'"),
    ):
        result = flatmin("predict", *arguments, "--device", "cpu")
        assert result.exit_code == 2, result.output
        assert text in words(result.stderr)


# ---- exports


def test_an_exported_state_dict_is_the_models(loaded: TrainedModel, tmp_path: Path) -> None:
    export(loaded, tmp_path / "new" / "model.safetensors")
    weights = load_file(tmp_path / "new" / "model.safetensors")
    assert weights.keys() == loaded.model.state_dict().keys()
    assert all(torch.equal(value, weights[key]) for key, value in loaded.model.state_dict().items())
    said = json.loads(description_of(tmp_path / "new" / "model.safetensors").read_text())
    assert said["classes"] == ["row", "column", "diagonal"]
    assert said["input"]["shape"] == ["batch", 1, 6, 6]
    assert said["input"]["normalisation"] == {
        "mean": loaded.normalise.mean.tolist(),
        "std": loaded.normalise.std.tolist(),
        "inside": False,
    }
    assert (said["weights"], said["metrics"]) == ("ema", dict(loaded.metrics))
    assert said["recipe"] == loaded.recipe.as_json()


@pytest.mark.parametrize("network", ["ResNet", "ViT", "TiedMLP"])
def test_an_exported_program_takes_any_number_of_images_and_gives_the_same_logits(tmp_path: Path, network: str) -> None:
    run(tiny_recipe(model=f"{FILE}:{network}", model_settings={}, epochs=1), tmp_path / "run")
    loaded = flatmin_lab.load_run(tmp_path / "run")
    said = export(loaded, tmp_path / "model.pt2")
    assert said["largest_difference"] < 1e-5
    assert said["input"]["normalisation"]["inside"]
    program = torch.export.load(tmp_path / "model.pt2").module()
    for count in (1, 2, 30):
        x = tiny_data().test.x[:count].float() / 255
        torch.testing.assert_close(program(x), loaded.logits(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="Expected: Float, Got: unsigned char"):
        program(tiny_data().test.x)


def test_a_program_with_other_logits_gets_no_name(
    loaded: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "TOLERANCE", -1.0)
    with pytest.raises(ExportError, match=r"logits differ from the model's by up to .*; nothing was written"):
        export(loaded, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_a_network_that_cannot_be_traced_is_told_the_other_way(tmp_path: Path) -> None:
    mine = tmp_path / "untraceable.py"
    mine.write_text(
        "from torch import nn\n"
        "class make_model(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.layer = nn.Linear(36, 3)\n"
        "    def forward(self, x):\n"
        "        x = self.layer(x.flatten(1))\n"
        "        return x + 1 if float(x.detach().sum()) > 0 else x\n"
    )
    run(tiny_recipe(model=str(mine), model_settings={}, epochs=1), tmp_path / "run")
    loaded = flatmin_lab.load_run(tmp_path / "run")
    with pytest.raises(ExportError, match=r"export its weights instead, with --to NAME.safetensors"):
        export(loaded, tmp_path / "model.pt2")
    export(loaded, tmp_path / "model.safetensors")


def test_a_network_that_needs_two_images_is_told_the_other_way(tmp_path: Path) -> None:
    run(tiny_recipe(model=f"{FILE}:norm_of_the_batch_alone", model_settings={}, epochs=1), tmp_path / "run")
    with pytest.raises(ExportError, match=r"more than 1 value .*; export its weights instead, with --to NAME"):
        export(flatmin_lab.load_run(tmp_path / "run"), tmp_path / "model.pt2")
    assert not (tmp_path / "model.pt2").exists()


def test_the_command_says_which_weights_and_overwrites_nothing(trained: Path, tmp_path: Path) -> None:
    result = flatmin("export", trained, "--to", tmp_path / "model.safetensors", "--weights", "last")
    assert result.exit_code == 0, result.output
    assert "the last weights after epoch 3 of 3" in words(result.stdout)
    for name, text in (("model.safetensors", "already exists"), ("model.onnx", "takes a .safetensors or a .pt2 file")):
        again = flatmin("export", trained, "--to", tmp_path / name)
        assert again.exit_code == 2
        assert text in words(again.stderr)
