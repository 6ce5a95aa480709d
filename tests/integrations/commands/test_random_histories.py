"""Random runs that are really stopped and killed, in random order: what they leave at the end is the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import PYTHONPATH


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forty_random_histories_end_with_the_bits_of_runs_that_were_left_alone(tmp_path: Path) -> None:
    """All methods, several optimizers, networks and settings; the quick version is in tests/lab/training."""
    command = [sys.executable, "-m", "tests.programs.random_histories", str(tmp_path), "0", "40"]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["apart"] == []
    assert sum(found["happened"].values()) > 60
    assert len(found["happened"]) == 9
