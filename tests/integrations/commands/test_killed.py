"""Killed with SIGKILL at random moments, even while it writes a checkpoint, a run loses nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import PYTHONPATH

RUNS = {
    "mixup, averaged": ["--method", "mixup", "--epochs", "4", "--ema", "0.9"],
    "amp, augmented": ["--method", "amp", "--epochs", "2", "--augment", "vanilla", "--label-noise", "0.2"],
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("arguments", RUNS.values(), ids=RUNS)
def test_the_last_weights_are_those_of_an_uninterrupted_run(tmp_path: Path, arguments: list[str]) -> None:
    """8 kills at random moments each, and some 24 at chosen ones; compared to the bit, and line by line."""
    train = ["train", "--data", "digits", "--batch-size", "150", "--checkpoint-minutes", "0", *arguments]
    command = [sys.executable, "-m", "tests.programs.kill_training", str(tmp_path), "0", "8", *train]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["killed"] >= 8
    assert found["points"] >= 12
    assert found["finished"] >= 1
    assert found["apart"] == []
    assert found["left"] == []
