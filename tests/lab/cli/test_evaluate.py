"""The commands about trained models: evaluate, landscape, report and theory, from the flags to the files."""

import base64
import json
import re
import shutil
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flatmin_lab.data import load
from flatmin_lab.evaluation import landscapes, measurements
from flatmin_lab.report.pages.theory import theory_page
from flatmin_lab.runs import checkpoint, evaluation_files
from tests.support.processes import flatmin, words

FAST = ["train", "--data", "digits", "--epochs", "1", "--batch-size", "300", "--device", "cpu"]
MODULE = """
    import torch
    from torch import nn

    def make_model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))

    def needy(width):
        return nn.Linear(width, width)

    def wide():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Softmax(dim=1))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trained runs, each with two checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("erm", "amp"):
        assert flatmin(*FAST, "--method", method, "--epochs", 2, "--out", folder / method).exit_code == 0
    return folder


@pytest.fixture
def own(runs: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(runs, tmp_path / "runs"))


def evaluated(folder: Path, *arguments: object) -> dict[str, Any]:
    result = flatmin("evaluate", folder, "--json", "--device", "cpu", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_evaluate_keeps_what_it_finds_and_adds_to_it(own: Path) -> None:
    plain = evaluated(own / "erm")
    assert {"error", "nll", "ece", "adaptive_ece", "brier", "intervals", "scaled", "reliability"} <= plain.keys()
    assert not {"attack", "flatness"} & plain.keys()
    attacked = evaluated(own / "erm", "--attack", "--images", 50)
    assert attacked["attack"]["radius"] == 4 / 255
    assert attacked["attack"]["pictures"] == 50
    flat = evaluated(own / "erm", "--flatness", "--images", 50, "--epsilon", 0.05)
    assert flat["flatness"]["epsilon"] == 0.05
    kept = json.loads((own / "erm" / "evaluation.json").read_text())
    assert kept["attack"] == attacked["attack"]
    assert kept["flatness"] == flat["flatness"]
    assert kept["checkpoint"] == checkpoint.listed(own / "erm")[0].name
    assert kept["facts"]["torch"] == torch.__version__


@pytest.mark.parametrize("error", [RuntimeError("the derivative is not implemented"), KeyboardInterrupt()], ids=repr)
def test_what_was_measured_is_kept_even_if_a_later_measurement_fails(
    own: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(measurements, "flatness_of", fails)
    result = flatmin("evaluate", own / "erm", "--attack", "--flatness", "--images", 20, "--device", "cpu")
    assert result.exit_code != 0
    kept = json.loads((own / "erm" / "evaluation.json").read_text())
    assert kept["attack"]["pictures"] == 20
    assert "flatness" not in kept


def test_the_spectrum_is_kept_beside_the_flatness_and_drawn_in_the_report(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurements, "spectrum_of", partial(measurements.spectrum_of, steps=4, probes=2))
    flat = evaluated(own / "erm", "--flatness", "--images", 20)
    found = evaluated(own / "erm", "--spectrum", "--images", 20)
    assert "flatness" not in found
    kept = json.loads((own / "erm" / "evaluation.json").read_text())
    assert (kept["spectrum"], kept["flatness"]) == (found["spectrum"], flat["flatness"])
    assert kept["spectrum"]["products"] == 8
    shown = words(flatmin("evaluate", own / "erm", "--spectrum", "--images", 20, "--device", "cpu").stdout)
    for text in ("spectrum, 20 training images", "smallest and largest eigenvalue", "negative curvature", "8 products"):
        assert text in shown
    assert flatmin("report", own, "--out", tmp_path / "report.html").exit_code == 0
    assert "Spectrum of the Hessian" in (tmp_path / "report.html").read_text()


def test_the_line_between_two_runs_is_a_page_with_the_barrier_in_words(own: Path, tmp_path: Path) -> None:
    out = tmp_path / "between.html"
    asked = ["--between", "--points", 5, "--images", 40, "--device", "cpu", "--out", out]
    result = flatmin("landscape", own / "erm", own / "amp", *asked)
    assert result.exit_code == 0, result.output
    said = words(result.stdout)
    assert "On 40 training images: " in said
    assert "On 40 test images: " in said
    assert "barrier" in said
    page = out.read_text()
    found = json.loads(data_of(page))
    assert found["ts"] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert page.count("<svg") == 2
    assert "<strong>erm, seed 0</strong>" in page
    assert "BatchNorm&#39;s statistics were recomputed" in page
    assert not (own / "erm" / "landscape.json").exists()  # it is about two runs


def test_what_was_kept_of_another_checkpoint_is_not_mixed_in(own: Path) -> None:
    evaluated(own / "erm", "--attack", "--images", 20)
    newest, older = checkpoint.listed(own / "erm")
    before = (own / "erm" / "evaluation.json").read_bytes()
    evaluated(older)  # not the newest: nothing is kept
    assert (own / "erm" / "evaluation.json").read_bytes() == before
    newest.unlink()
    assert evaluated(own / "erm")["epoch"] == 1
    assert "attack" not in json.loads((own / "erm" / "evaluation.json").read_text())


def test_evaluate_shows_tables_that_can_be_read(own: Path) -> None:
    shown = words(flatmin("evaluate", own / "amp", "--attack", "--flatness", "--images", 30, "--device", "cpu").stdout)
    for text in ("95 % interval", "Brier score", "error, PGD, 10 steps", "largest eigenvalues", "from random points"):
        assert text in shown


def test_no_error_among_few_images_is_not_called_certain(tmp_path: Path) -> None:
    """Every resample of a bootstrap is the same: the interval would be a point."""
    (tmp_path / "sure.py").write_text(
        "import torch\n"
        "def make_model(input_shape):\n"
        "    layer = torch.nn.Linear(input_shape[0], 2)\n"
        "    torch.nn.init.zeros_(layer.weight)\n"
        "    layer.bias.data = torch.tensor([1.0, 0.0])\n"
        "    return layer\n"
    )
    x, y = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])
    np.savez(tmp_path / "few.npz", x_train=x, y_train=y, x_test=x[:3], y_test=np.zeros(3, dtype=np.int64))
    asked = ["--model", tmp_path / "sure.py", "--data", tmp_path / "few.npz", "--device", "cpu"]
    shown = words(flatmin("evaluate", *asked).stdout)
    assert "error 0.00 % none: no spread" in shown
    assert "AURC 0.00 % none: no spread" in shown
    assert "no error among 3 points: at a true error of 63.16 %, 1 in 20 such sets has none" in shown  # 0.3684³ = 0.05
    assert "most confident 33 %: 0.00 %, 67 %: 0.00 %, 100 %: 0.00 %;" in shown
    np.savez(tmp_path / "few.npz", x_train=x, y_train=y, x_test=x[:1], y_test=np.zeros(1, dtype=np.int64))
    assert "most confident 100 %: 0.00 %; AURC" in words(flatmin("evaluate", *asked).stdout)


def test_outside_data_are_compared_and_kept_beside_each_other(own: Path, tmp_path: Path) -> None:
    digits = load("digits")
    arrays = {"x_train": 255 - digits.test.x.numpy(), "x_test": 255 - digits.test.x.numpy()}
    labels = {"y_train": digits.test.y.numpy(), "y_test": digits.test.y.numpy()}
    np.savez(tmp_path / "inverted.npz", **arrays, **labels)  # type: ignore[arg-type]
    asked = ["evaluate", own / "erm", "--device", "cpu"]
    first = flatmin(*asked, "--outside", tmp_path / "inverted.npz")
    assert first.exit_code == 0, first.output
    shown = words(first.stdout)
    for text in (
        "AURC",
        "inverted AUROC 95 % interval FPR95",
        "largest probability",
        "the test set against 359 images",
    ):
        assert text in shown
    second = evaluated(own / "erm", "--outside", "svhn-made")
    assert list(second["outside"]) == ["svhn-made"]
    kept = json.loads((own / "erm" / "evaluation.json").read_text())
    assert list(kept["outside"]) == ["inverted", "svhn-made"]
    assert kept["outside"]["svhn-made"] == second["outside"]["svhn-made"]
    assert kept["selective"] == second["selective"]
    result = flatmin("report", own, "--out", tmp_path / "report.html")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "report.html").read_text()
    assert "Against inverted, 359 examples" in page
    assert "Against svhn-made, 100 examples" in page


def test_outside_data_that_cannot_be_read_are_named_before_anything_is_measured(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurements, "logits_on_test", lambda _: pytest.fail("measured"))
    result = flatmin("evaluate", runs / "erm", "--outside", "nowhere.npz", "--device", "cpu")
    assert result.exit_code == 2, result.output
    assert "nowhere.npz must be an .npz file or a folder of images, and is not there" in words(result.stderr)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--attack", "--norm", "l1"], "unknown norm 'l1'; choose from l2, linf"),
        (["--attack", "--steps", "0"], "steps must be at least 1, got 0"),
        (["--attack", "--step-size", "1/999"], "PGD must be able to reach the edge of its ball"),
        (["--attack", "--radius", "2"], "a radius is at most 1, got 2"),
        (["--attack", "--flatness", "--epsilon=-1"], "epsilon must be at least 0 and finite, got -1.0"),
    ],
)
def test_options_that_make_no_sense_are_named_before_anything_is_measured(
    runs: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], text: str
) -> None:
    measured: list[object] = []
    monkeypatch.setattr(measurements, "logits_on_test", measured.append)
    result = flatmin("evaluate", runs / "erm", *arguments)
    assert result.exit_code == 2
    assert text in words(result.output)
    assert not measured


@pytest.mark.parametrize("more", [[], ["--between"]], ids=" ".join)
def test_a_page_that_cannot_be_written_is_named_before_anything_is_measured(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    measured: list[object] = []
    for name in ("landscape", "line_between"):
        monkeypatch.setattr(landscapes, name, lambda *found, **_: measured.append(found))
    result = flatmin("landscape", runs / "erm", runs / "amp", "--out", tmp_path, *more)
    assert result.exit_code == 2
    assert "is a folder; name the file" in words(result.output)
    assert not measured


def test_a_name_in_brackets_is_shown_as_it_is(user: Path) -> None:
    Path("own.npz").rename("[red]own.npz")
    asked = ["--model", "mymodule:make_model", "--data", "digits", "--device", "cpu"]
    result = flatmin("evaluate", *asked, "--outside", "[red]own.npz")
    assert result.exit_code == 0, result.output
    assert "[red]own AUROC" in words(result.stdout)


def test_a_data_set_of_another_shape_is_converted_and_that_is_said(user: Path) -> None:
    asked = ["--model", "mymodule:make_model", "--data", "own.npz", "--device", "cpu"]
    result = flatmin("evaluate", *asked, "--outside", "svhn-made", "--json")
    assert result.exit_code == 0, result.output
    assert "note: svhn-made was converted from images of 3 × 32 × 32 to images of 1 × 8 × 8" in words(result.stderr)
    assert json.loads(result.stdout)["outside"]["svhn-made"]["pictures"] == 100


def test_what_two_evaluations_of_one_run_find_at_once_is_all_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = evaluation_files.read_evaluation

    def slow(folder: Path, name: str) -> dict[str, Any] | None:
        found = real(folder, name)
        time.sleep(0.02)  # the others read meanwhile
        return found

    def write(number: int) -> None:
        found = {"checkpoint": "the last", f"part {number}": number, "outside": {f"set {number}": number}}
        evaluation_files.write_evaluation(tmp_path, evaluation_files.EVALUATION, found)

    monkeypatch.setattr(evaluation_files, "read_evaluation", slow)
    with ThreadPoolExecutor(4) as processes:  # locks exclude threads too
        list(processes.map(write, range(8)))
    kept = json.loads((tmp_path / "evaluation.json").read_text())
    assert {f"part {number}" for number in range(8)} <= kept.keys()
    assert kept["outside"] == {f"set {number}": number for number in range(8)}
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation.json"]


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("flatmin_lab.runs.evaluation_files.write_evaluation", full)
    result = flatmin("evaluate", own / "erm", "--device", "cpu")
    assert result.exit_code == 0
    assert "not saved" in words(result.stderr)


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody with a model and a data set of their own, in their own folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mymodule.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "mymodule", raising=False)
    generator = np.random.default_rng(0)
    names = {"x_train": 60, "x_test": 40}
    arrays = {name: generator.integers(0, 256, (count, 8, 8, 1), dtype=np.uint8) for name, count in names.items()}
    labels = {name.replace("x", "y"): np.arange(count) % 10 for name, count in names.items()}
    np.savez(tmp_path / "own.npz", **arrays, **labels)  # type: ignore[arg-type]
    return tmp_path


@pytest.mark.parametrize("model", ["mymodule:make_model", "mymodule.py:make_model"])
def test_a_model_of_ones_own_is_evaluated_in_every_way(user: Path, model: str) -> None:
    asked = ["--model", model, "--data", "own.npz", "--attack", "--flatness", "--json", "--device", "cpu"]
    result = flatmin("evaluate", *asked)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["pictures"] == 40
    assert found["model"] == model
    assert found["attack"]["pgd_error"] >= found["error"]
    assert len(found["flatness"]["eigenvalues"]) == 3
    other = json.loads(flatmin("evaluate", *asked, "--normalised").stdout)
    assert other["nll"] != found["nll"]


def test_images_of_several_sizes_are_resized_for_a_model_of_ones_own(user: Path) -> None:
    for number in range(10):
        for side in (9, 12, 15):
            (folder := user / "pictures" / str(number)).mkdir(parents=True, exist_ok=True)
            Image.new("L", (side, 10), number).save(folder / f"{side}.png")
    asked = ["evaluate", "--model", "mymodule:make_model", "--data", "pictures", "--device", "cpu", "--json"]
    assert "--size HEIGHT WIDTH" in words(flatmin(*asked).stderr)
    assert json.loads(flatmin(*asked, "--size", 8, 8).stdout)["pictures"] == 10


def test_weights_of_ones_own_are_loaded_and_those_of_another_model_refused(user: Path) -> None:
    torch.manual_seed(1)
    layers = [torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten()]
    torch.save(torch.nn.Sequential(*layers, torch.nn.Linear(144, 10)).state_dict(), "good.pt")
    torch.save(torch.nn.Linear(2, 2).state_dict(), "other.pt")
    asked = ["--model", "mymodule:make_model", "--data", "own.npz", "--device", "cpu"]
    good = json.loads(flatmin("evaluate", "good.pt", *asked, "--json").stdout)
    assert good["weights"] == "good.pt"
    assert good["nll"] != json.loads(flatmin("evaluate", *asked, "--json").stdout)["nll"]
    other = flatmin("evaluate", "other.pt", *asked)
    assert other.exit_code == 2
    assert "holds the weights of another model: without 0.bias" in words(other.stderr)
    page = flatmin("landscape", "good.pt", *asked, "--points", 3, "--images", 20, "--out", "page.html")
    assert page.exit_code == 0, page.output
    assert "good.pt, training" in (user / "page.html").read_text()


def test_a_model_that_looks_odd_is_measured_and_what_is_odd_is_said(user: Path) -> None:
    result = flatmin("evaluate", "--model", "mymodule:wide", "--data", "own.npz", "--device", "cpu")
    assert result.exit_code == 0, result.output
    said = words(result.stderr)
    assert "note: the model has 12 outputs, but the data has 10 classes" in said
    assert "look like probabilities" in said
    assert "mymodule:wide on own, as built by its function, without a file of weights" in words(result.stdout)


def test_runs_that_would_have_one_name_are_told_apart_by_their_folders_or_epochs(own: Path, tmp_path: Path) -> None:
    shutil.copytree(own / "erm", own / "other")
    out = tmp_path / "page.html"
    asked = ["--points", 3, "--images", 10, "--device", "cpu", "--out", out, "--lines-only"]
    result = flatmin("landscape", own / "erm", own / "other", *asked)
    assert result.exit_code == 0, result.output
    assert '"other": [' in data_of(out.read_text())
    newest, older = checkpoint.listed(own / "erm")
    assert flatmin("landscape", newest, older, *asked).exit_code == 0
    assert '"erm, epoch 1": [' in data_of(out.read_text())


def data_of(page: str) -> str:
    """The numbers that can be saved from a page."""
    (content,) = re.findall(r'href="data:application/json;base64,([^"]+)"', page)
    return base64.b64decode(content).decode()


def test_landscapes_of_several_runs_lie_along_the_same_directions(own: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "landscape.html"
    asked = ["--points", 5, "--images", 40, "--device", "cpu", "--out", out]
    result = flatmin("landscape", own / "erm", own / "amp", *asked)
    assert result.exit_code == 0, result.output
    assert str(out) in words(result.stdout)
    kept = {name: json.loads((own / name / "landscape.json").read_text()) for name in ("erm", "amp")}
    assert kept["erm"]["axis"] == kept["amp"]["axis"]
    assert kept["erm"]["splits"]["test"]["plane"] != kept["amp"]["splits"]["test"]["plane"]
    page = out.read_text()
    assert page.count("<canvas") == 4
    assert "erm, seed 0, training" in page
    lines = flatmin("landscape", own / "erm", *asked, "--lines-only")
    assert lines.exit_code == 0
    assert "<canvas" not in out.read_text()


def test_the_report_is_made_from_what_was_kept(own: Path, tmp_path: Path) -> None:
    evaluated(own / "amp", "--attack", "--images", 20)
    result = flatmin("report", own, "--out", tmp_path / "report.html")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "report.html").read_text()
    assert f"flatmin evaluate {own / 'erm'} --attack" in page
    assert f"flatmin landscape {own / 'erm'} {own / 'amp'}" in page
    assert "too few runs to tell" in page


def test_the_theory_page_is_written(tmp_path: Path) -> None:
    result = flatmin("theory", "--out", tmp_path / "theory.html")
    assert result.exit_code == 0
    assert (tmp_path / "theory.html").read_text() == theory_page()


def test_images_may_still_be_called_pictures(own: Path) -> None:
    new, old = (evaluated(own / "erm", "--attack", flag, 30)["attack"] for flag in ("--images", "--pictures"))
    assert new == old
    assert new["pictures"] == 30
    for command in ("evaluate", "landscape"):
        help_text = flatmin(command, "--help").stdout
        assert "--images" in help_text
        assert "--pictures" not in help_text
    page = own / "page.html"
    asked = ["--points", 3, "--device", "cpu", "--out", page, "--lines-only"]
    assert flatmin("landscape", own / "erm", *asked, "--pictures", 10).exit_code == 0
    assert "10 training" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["evaluate"], "name a run folder or a checkpoint, or your own model"),
        (["landscape"], "name a run folder or a checkpoint, or your own model"),
        (["evaluate", "--model", "mymodule:make_model"], "--model needs --data"),
        (
            ["evaluate", "--model", "mymodule:make_model", "--data", "own.npz", "--averaged"],
            "--averaged belongs to a run",
        ),
        (["evaluate", "--model", "convnet", "--data", "own.npz"], "is named by its run's folder"),
        (["evaluate", "RUN", "--normalised"], "--normalised belongs to --model"),
        (["landscape", "RUN", "--size", 8, 8], "--size belongs to --model; a run knows the size of its images"),
        (["evaluate", "RUN", "--attack", "--images", 0], "--images must be at least 1, got 0"),
        (["evaluate", "RUN", "--images", 5], "--images belongs to --attack, --flatness and --spectrum"),
        (["landscape", "RUN", "--between"], "--between needs two run folders, checkpoints or files of weights, got 1"),
        (["landscape", "RUN", "RUN", "--between"], "--between needs two different models, got "),
        (["landscape", "RUN", "RUN", "--between", "--lines-only"], "--between has none"),
        (["landscape", "RUN", "RUN", "--between", "--reach", 2], "--between has none"),
        (["evaluate", "RUN", "--radius", "1/255"], "--radius belongs to --attack"),
        (["evaluate", "RUN", "--attack", "--epsilon", 0.1], "--epsilon belongs to --flatness"),
        (["evaluate", "RUN", "--attack", "--radius", "x"], "such as 4/255, got 'x'"),
        (["evaluate", "RUN", "--attack", "--radius", "1/0"], "such as 4/255"),
        (["evaluate", "RUN", "--attack", "--radius", "1e400"], "such as 4/255"),
        (["evaluate", "RUN", "--attack", "--radius=-1"], "at least 0"),
        (["evaluate", "RUN", "--attack", "--norm", "l3"], "unknown norm 'l3'; choose from l2, linf"),
        (["evaluate", "RUN", "--attack", "--steps", 0], "steps must be at least 1, got 0"),
        (["evaluate", "RUN", "--flatness", "--epsilon", -1], "epsilon must be at least 0"),
        (
            ["evaluate", "RUN", "--outside", "digits"],
            "must differ from the model's own, whose test images are among those of digits",
        ),
        (["evaluate", "RUN", "--outside", "spiral"], "takes images of 1 × 8 × 8, got points of 2 in spiral"),
        (["evaluate", "RUN", "--outside", "own.npz", "--outside", "own.npz"], "got own twice; rename one of them"),
        (["evaluate", "RUN", "--outside", "nowhere"], "unknown data set 'nowhere'"),
        (["evaluate", "RUNS"], "holds 2 runs; name one"),
        (["evaluate", "RUN", "--model", "mymodule:make_model", "--data", "own.npz"], "is a folder"),
        (
            ["evaluate", "--model", "mymodule:needy", "--data", "own.npz"],
            "asks for width, but can only be given num_classes",
        ),
        (["landscape", "RUN", "--points", 4], "--points must be odd"),
        (["landscape", "RUN", "--reach", 0], "--reach must be above 0"),
        (["landscape", "RUN", "nowhere"], "nowhere does not exist"),
        (["report", "nowhere"], "nowhere does not exist"),
        (["evaluate", "--model", "mymodule:absent", "--data", "own.npz"], "no function or class 'absent'"),
        (["evaluate", "--model", "absent:make_model", "--data", "own.npz"], "no module 'absent'"),
        (["theory", "--out", "taken/page.html"], "cannot be written (File exists)"),
        (["theory", "--out", "."], "is a folder; name the file"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_a_request_that_makes_no_sense_is_told_why(user: Path, runs: Path, arguments: list[Any], text: str) -> None:
    (user / "taken").write_text("a file")
    places = {"RUN": runs / "erm", "RUNS": runs}
    result = flatmin(*(places.get(word, word) for word in arguments))
    assert result.exit_code == 2, result.output
    assert text in words(result.stderr)


def test_a_training_that_diverged_is_a_result_of_its_method(tmp_path: Path) -> None:
    for method, rate in (("erm", 0.1), ("amp", 1e9)):
        flatmin(*FAST, "--method", method, "--epochs", 1, "--lr", rate, "--out", tmp_path / "runs" / method)
    result = flatmin("report", tmp_path / "runs", "--out", tmp_path / "report.html")
    assert "this run of amp diverged, and is left out of all means" in words(result.stderr)
    assert "diverged" in (tmp_path / "report.html").read_text()


def test_where_nothing_can_be_read_no_page_is_written_and_the_command_fails(own: Path, tmp_path: Path) -> None:
    for method in ("erm", "amp"):
        (own / method / "result.json").write_text("torn")
    result = flatmin("report", own, "--out", tmp_path / "report.html")
    assert result.exit_code == 1
    assert "nothing to report" in result.stderr
    assert not (tmp_path / "report.html").exists()


def test_an_empty_folder_has_no_runs_to_report(tmp_path: Path) -> None:
    result = flatmin("report", tmp_path)
    assert result.exit_code == 2
    assert "start one with `flatmin train --data digits`" in words(result.stderr)
