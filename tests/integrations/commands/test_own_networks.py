"""Networks that nobody built this for: trained, killed, resumed, evaluated, exported, and used without flatmin."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flatmin_lab
from flatmin_lab.runs import checkpoint
from tests import PYTHONPATH, ROOT
from tests.support import own_networks
from tests.support.processes import flatmin
from tests.support.small_runs import lasting, same

FILE = str(Path(own_networks.__file__))
NETWORKS = {
    "ResNet": ["--ema", "0.9"],
    "ViT": ["--optimizer", "adamw", "--optimizer-settings", "betas=0.9,0.95", "--augment", "vanilla"],
    "TiedMLP": ["--optimizer", f"{FILE}:make_optimizer", "--schedule", "cosine"],
}
ENVIRONMENT = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each was killed three times at random moments and some at chosen ones, and resumed to its end."""
    place = tmp_path_factory.mktemp("own")
    for name, more in NETWORKS.items():
        (place / name).mkdir()
        train = ["train", "--data", "digits", "--batch-size", "150", "--epochs", "2", "--checkpoint-minutes", "0"]
        command = [sys.executable, "-m", "tests.programs.kill_training", str(place / name), "0", "3", *train]
        command += ["--model", f"{FILE}:{name}", *more]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
        assert result.returncode == 0, result.stderr
        found = json.loads(result.stdout)
        assert found["killed"] >= 3
        assert (found["apart"], found["left"]) == ([], [])
    return place


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_and_resumed_they_have_the_same_bits(killed: Path) -> None:
    for name in NETWORKS:
        assert same(lasting(killed / name / "whole"), lasting(killed / name / "victim-0"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_evaluated_again_they_have_the_numbers_of_the_training(killed: Path) -> None:
    for name in NETWORKS:
        result = json.loads((killed / name / "victim-0" / "result.json").read_text())
        again = json.loads(flatmin("evaluate", killed / name / "victim-0", "--json", "--device", "cpu").stdout)
        assert (again["error"], again["nll"]) == (result["test_error"], result["test_nll"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_exported_they_give_the_same_logits_in_a_process_without_flatmin(killed: Path, tmp_path: Path) -> None:
    images = torch.rand(7, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.save(images, tmp_path / "images.pt")
    for name in NETWORKS:
        for suffix in ("pt2", "safetensors"):
            done = flatmin("export", killed / name / "victim-0", "--to", tmp_path / f"{name}.{suffix}")
            assert done.exit_code == 0, done.output
            assert ("EMA" in done.stdout) == (name == "ResNet")
    program = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "programs" / "use_exported.py")]
    alone = {key: value for key, value in ENVIRONMENT.items() if key != "PYTHONPATH"}
    result = subprocess.run([*program, str(tmp_path), FILE], capture_output=True, text=True, check=False, env=alone)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["0 1 2 3 4 5 6 7 8 9"] * len(NETWORKS)
    for name in NETWORKS:
        expected = flatmin_lab.load_run(killed / name / "victim-0").logits(images)
        for suffix in ("pt2", "safetensors"):
            found = torch.load(tmp_path / f"{name}.{suffix}.logits", weights_only=True)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            assert found.argmax(dim=1).tolist() == expected.argmax(dim=1).tolist()


def test_two_processes_train_a_network_of_ones_own_and_resume_it(tmp_path: Path) -> None:
    """A run of two ranks that is set back to its first epoch and resumed ends with the same bits again."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "flatmin_lab", "train"]
    settings = ["--model", f"{FILE}:TiedMLP", "--optimizer", "adamw", "--batch-size", "150"]

    def train(*more: str) -> None:
        done = subprocess.run([*command, *more], capture_output=True, text=True, check=False, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr

    train("--data", "digits", "--epochs", "2", *settings, "--out", str(tmp_path / "whole"))
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for name in ("result.json", checkpoint.listed(tmp_path / "parts")[0].name):
        (tmp_path / "parts" / name).unlink()
    train("--out", str(tmp_path / "parts"), "--resume")
    assert same(lasting(tmp_path / "whole"), lasting(tmp_path / "parts"))
