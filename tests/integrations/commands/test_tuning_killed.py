"""`flatmin tune` in several processes, and killed: it resumes to the trials it would have had."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.tuning.test_tuning import SRC, asked, saved, study_of, tuning_of, waiting_until, without_times
from tests.support.processes import flatmin
from tests.support.small_runs import images


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("data") / "tiny.npz", images(30, 1))


def test_killed_in_the_middle_it_resumes_to_the_trials_it_would_have_had(data: Path, tmp_path: Path) -> None:
    flags = asked(data, tmp_path / "killed", "--trials", 3, "--epochs", 16)
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "flatmin_lab", *map(str, flags)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    waiting_until(lambda: any((tmp_path / "killed" / "trial-1").glob("checkpoint-*")))
    process.kill()
    process.wait()
    *ended, running = study_of(tmp_path / "killed").trials
    assert running.state.name == "RUNNING"
    assert ended[0].state.name == "COMPLETE"
    first = (tmp_path / "killed" / "trial-0" / "result.json").stat().st_mtime_ns
    done = flatmin(*flags)
    assert done.exit_code == 0, done.output
    assert f"trial {running.number}  " in done.stderr
    assert "trial 0  " not in done.stderr
    assert (tmp_path / "killed" / "trial-0" / "result.json").stat().st_mtime_ns == first
    assert len(study_of(tmp_path / "killed").trials) == 3
    assert flatmin(*asked(data, tmp_path / "whole", "--trials", 3, "--epochs", 16)).exit_code == 0
    assert without_times(tuning_of(tmp_path / "killed")) == without_times(tuning_of(tmp_path / "whole"))


def test_two_workers_train_two_trials_at_once(data: Path, tmp_path: Path) -> None:
    done = flatmin(*asked(data, tmp_path / "out", "--trials", 4, "--workers", 2))
    assert done.exit_code == 0, done.output
    found = tuning_of(tmp_path / "out")
    assert [trial.state for trial in found.trials] == ["finished"] * 4
    assert found.facts["threads"] == 1
    assert len(study_of(tmp_path / "out").trials) == 4
