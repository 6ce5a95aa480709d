"""`flatmin compare`: a table and one sentence, on the laboratory's data or in a training of one's own."""

import errno
import json
from pathlib import Path

import pytest

from flatmin_lab.runs.open_folder import folder_of_runs
from tests.support.comparisons import saved, without_times
from tests.support.processes import flatmin, words

QUICK = ["--model", "mlp", "--epochs", 1, "--augment", "none", "--radii", "0.1", "--device", "cpu", "--workers", 1]
OWN = """
import torch
from torch.nn.functional import cross_entropy

def make_training():
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 4, generator=random), torch.arange(40) % 2
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure(x, y):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    return {
        "model": model, "optimizer": optimizer, "closure": closure, "batches": [(x[:32], y[:32])],
        "held_out": [(x[32:], y[32:])], "epochs": 2,
    }
"""
BROKEN = """
def make_training():
    weight = [1, 2, 3]
    return weight[7]
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("data") / "tiny.npz")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return path


def test_it_ends_with_a_table_and_the_sentence_and_leaves_a_page(data: Path, tmp_path: Path) -> None:
    done = flatmin("compare", "--data", data, *QUICK, "--seeds", 2, "--out", tmp_path / "out", "--label-noise", 0.1)
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    *table, sentence = done.stdout.strip().splitlines()
    assert sentence == content["sentence"]
    assert sentence.startswith("Cannot tell after 2 seeds")
    assert words(table[0]) == "seeds passes error NLL ECE error vs. plain (95 %, points) vs. plain with as many passes"
    names = ["plain", "plain, 2 times as long", "AMP, ε = 0.1", "AMP, ε found while training"]
    assert all(line.startswith(name) for line, name in zip(table[1:], names, strict=True))
    said = words(done.stderr)
    assert "2 seeds of 4 training runs each" in said
    assert "measured on 12 of 120 training images, drawn anew for each seed and not trained on" in said
    assert said.count("seed 1 ") == 4
    assert " per seed, " in said
    assert sentence in (tmp_path / "out" / "comparison.html").read_text().replace("&#39;", "'")
    assert content["command"].startswith(f"flatmin compare --data {data} --model mlp")
    assert content["command"].endswith(f"--workers 1 --seeds 2 --radii 0.1 --out {tmp_path / 'out'}")

    again = flatmin("compare", "--data", data, *QUICK, "--seeds", 2, "--out", tmp_path / "out", "--label-noise", 0.1)
    assert again.stdout.splitlines()[:-1] == done.stdout.splitlines()[:-1]
    assert "seed 1 " not in again.stderr  # nothing is trained again
    measured = flatmin(
        *("compare", "--data", data, *QUICK, "--seeds", 2, "--out", tmp_path / "out", "--label-noise", 0.1),
        *("--measure", "nll"),
    )
    assert "NLL vs. plain (95 %)" in words(measured.stdout)


def test_too_few_minutes_are_explained_and_no_error(data: Path, tmp_path: Path) -> None:
    done = flatmin("compare", "--data", data, *QUICK, "--out", tmp_path / "out", "--minutes", 1e-9)
    assert done.exit_code == 0, done.output
    assert "Not even one seed fits into 1 second:" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Cannot tell: no run of AMP has finished yet; ")
    assert len(list((tmp_path / "out").glob("*-seed-*.json"))) == 1


def test_a_changed_file_of_ones_own_is_refused(data: Path, tmp_path: Path) -> None:
    network = tmp_path / "net.py"
    network.write_text(
        "from torch import nn\n\ndef make_model():\n    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))\n"
    )
    asked = ["compare", "--data", data, *QUICK[2:], "--model", f"{network}:make_model", "--seeds", 1]
    assert flatmin(*asked, "--out", tmp_path / "out").exit_code == 0
    before = without_times(tmp_path / "out")
    network.write_text(network.read_text() + "\n# another\n")
    done = flatmin(*asked, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "holds another comparison: SHA-256 of model is" in words(done.stderr)
    assert "choose another folder with --out" in words(done.stderr)
    assert without_times(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "compare needs --data with a data set"),
        (
            ["digits"],
            "compare takes mymodule:make_training or file.py:make_training, got 'digits'; a data set is named",
        ),
        (["--data", "digits", "--measure", "brier"], "--measure must be one of error, nll, ece, got 'brier'"),
        (["--data", "digits", "--minutes", 0], "--minutes must be above 0, got 0"),
        (["--data", "digits", "--radii", "0.1,0.1"], "the radii must differ"),
        (["--data", "digits", "--radii", "many"], "numbers must be separated by commas"),
        (["--data", "digits", "--set", "epsilon=0.1"], "name them with --radii"),
        (["mine.py:make_training", "--lr", 0.1], "has its own data, model and optimizer, got --lr as well as"),
    ],
    ids=str,
)
def test_requests_that_make_no_sense_are_refused(flags: list[object], message: str, tmp_path: Path) -> None:
    done = flatmin("compare", *flags, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert message in words(done.stderr)
    assert not (tmp_path / "out").exists()


# ---- a training of one's own


def test_a_training_of_ones_own_has_the_same_table_page_and_file(own: Path, tmp_path: Path) -> None:
    asked = ["compare", f"{own}:make_training", "--start", 0.5, "--seeds", 2, "--radii", 0.1, "--out", tmp_path / "out"]
    done = flatmin(*asked, "--measure", "nll")
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert done.stdout.splitlines()[-1] == content["sentence"]
    assert content["measure"] == "nll"
    assert [one["key"] for one in content["contenders"]] == ["plain", "plain-longer", "amp-0.1"]
    assert [one["passes"] for one in content["contenders"]] == [1, 1.5, 1.5]
    flags = f"--start 0.5 --seeds 2 --radii 0.1 --measure nll --out {tmp_path / 'out'}"
    assert content["command"] == f"flatmin compare {own}:make_training {flags}"
    assert "seed 1  AMP, ε = 0.1: error" in done.stderr
    assert (tmp_path / "out" / "comparison.html").exists()
    again = flatmin(*asked, "--measure", "nll")
    assert again.stderr.count(" (from an earlier call)") == 6
    assert without_times(tmp_path / "out")["rows"] == content["rows"]


def test_outcomes_of_other_code_are_not_taken_for_those_of_this(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another function of the file, or a changed file; also if the first call ended before its time."""

    def ended(*_: object) -> object:
        raise ValueError("ended before its time")

    own.write_text(f"{OWN}\n\ndef another():\n    return make_training()\n")
    asked = ["--seeds", 1, "--radii", "0.1", "--out", tmp_path / "out"]
    with monkeypatch.context() as patch:
        patch.setattr("flatmin_lab.cli.commands.compare.facts", ended)  # called when all is trained
        assert "ended before its time" in flatmin("compare", own, *asked).stderr
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert "plain-seed-0.json" in before
    done = flatmin("compare", f"{own}:another", *asked)
    assert done.exit_code == 2
    assert "training is 'mine.py:make_training' there and 'mine.py:another' here" in words(done.stderr)
    own.write_text(own.read_text() + "\n# another\n")
    done = flatmin("compare", own, *asked)
    assert done.exit_code == 2
    assert "holds another comparison: SHA-256 of training is" in words(done.stderr)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before


def test_on_a_full_disk_the_answer_is_shown_and_a_way_out(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("flatmin_lab.cli.commands.compare.atomic_write", full)
    done = flatmin("compare", own, "--seeds", 1, "--out", tmp_path / "out")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1].startswith("Cannot tell after 1 seed")
    assert "(No space left on device); make room and repeat the command" in words(done.stderr)


def test_a_comparison_of_ones_own_code_has_its_folder_to_itself(own: Path, tmp_path: Path) -> None:
    with folder_of_runs(tmp_path / "out", "comparison", doing="comparing"):
        done = flatmin("compare", own, "--seeds", 1, "--out", tmp_path / "out")
    assert done.exit_code == 1
    assert "another process is comparing in" in words(done.stderr)
    assert flatmin("compare", own, "--seeds", 1, "--out", tmp_path / "out").exit_code == 0


def test_an_unknown_measure_of_ones_own_ends_it_before_the_first_training(own: Path, tmp_path: Path) -> None:
    done = flatmin("compare", f"{own}:make_training", "--measure", "f1", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "unknown measure 'f1'; choose from error, nll, ece" in words(done.stderr)
    assert not list((tmp_path / "out").glob("*-seed-*"))


def test_an_error_in_a_training_of_ones_own_shows_its_lines(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    done = flatmin("compare", f"{tmp_path / 'broken.py'}:make_training", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "make_training() raised an error:" in done.stderr
    assert "return weight[7]" in done.stderr
    assert "IndexError: list index out of range" in done.stderr
    assert "flatmin_lab" not in done.stderr
