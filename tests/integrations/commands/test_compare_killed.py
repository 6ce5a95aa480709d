"""`flatmin compare` killed in the middle, in one process and in two: it resumes to the comparison it would have had."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.lab.tuning.test_tuning import waiting_until
from tests.support.comparisons import saved, without_times

FLAGS = ["--model", "mlp", "--augment", "none", "--radii", "0.1", "--device", "cpu", "--epochs", "12", "--seeds", "1"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def program(data: Path, out: Path, workers: int) -> list[str]:
    asked = ["--data", str(data), "--out", str(out), "--workers", str(workers)]
    return [sys.executable, "-m", "flatmin_lab", "compare", *FLAGS, *asked]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("data") / "tiny.npz")


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    subprocess.run(program(data, out, 1), env=ENVIRONMENT, check=True, capture_output=True)
    return out


@pytest.mark.parametrize(("how", "workers"), [(signal.SIGKILL, 1), (signal.SIGINT, 2)])
def test_killed_it_resumes_to_the_same_comparison(
    data: Path, whole: Path, tmp_path: Path, how: signal.Signals, workers: int
) -> None:
    out = tmp_path / "out"
    command = program(data, out, workers)
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    waiting_until(lambda: any((out / "plain-longer-seed-0").glob("checkpoint-*")))
    process.send_signal(how)
    _, said = process.communicate()
    assert process.returncode == (-how if how is signal.SIGKILL else 130)
    assert ("the same command resumes" in said) == (how is signal.SIGINT)
    ended = {path: path.stat().st_mtime_ns for path in out.glob("*-seed-*.json")}
    assert len(ended) < 4
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in ended} == ended
    assert without_times(out) == without_times(whole)
