"""`flatmin reproduce`, killed or asked to stop: the same command goes on, and repeats no finished run."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests import HANG_SECONDS, ROOT
from tests.lab.cli.test_reproduce import SOME, places, program
from tests.support.processes import flatmin


def test_killed_in_the_middle_it_finishes_without_repeating_a_finished_run(tmp_path: Path) -> None:
    command = program("table1", *SOME, "--seeds", "0", *places(tmp_path))
    environment: dict[str, Any] = {"env": {**os.environ, "PYTHONPATH": str(ROOT / "src")}}
    results = tmp_path / "results" / "smoke"
    with (tmp_path / "log").open("w") as log:
        first = subprocess.Popen(command, stdout=log, stderr=log, **environment)
        until = time.monotonic() + HANG_SECONDS
        while len(list(results.glob("*.json"))) < 2 and time.monotonic() < until:
            assert first.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL)
        first.wait()
    there = {path: path.stat().st_mtime_ns for path in results.glob("*.json")}
    assert 2 <= len(there) < 8
    second = subprocess.run(command, capture_output=True, text=True, check=False, **environment)
    assert second.returncode == 0, second.stderr
    assert len(list(results.glob("*.json"))) == 8
    assert {path: path.stat().st_mtime_ns for path in there} == there
    assert f"8 runs: {len(there)} done" in second.stderr
    for line in ("ERM", "Dropout", "label smoothing", "flooding", "MixUp", "adversarial", "RMP", "AMP"):
        (row,) = [row for row in second.stdout.splitlines() if row.strip().startswith(line)]
        count, error, *_ = row.strip().removeprefix(line).split()
        assert int(count) == 1
        assert 0 < float(error) < 100
    third = flatmin(*command[3:])
    assert "8 runs: 8 done" in third.stderr
    assert "label smoothing" in third.stdout


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_a_signal_to_all_processes_loses_nothing(tmp_path: Path) -> None:
    """As a scheduler sends it: the workers get it too, and no run counts as failed."""
    command = program("table1", *SOME, "--seeds", "0", *places(tmp_path))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    results = tmp_path / "results" / "smoke"
    with (tmp_path / "log").open("w") as log:
        started = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        until = time.monotonic() + HANG_SECONDS
        while not list(results.glob("*.json")) and time.monotonic() < until:
            time.sleep(0.05)
        os.killpg(started.pid, signal.SIGTERM)
        assert started.wait(HANG_SECONDS) == 143, (tmp_path / "log").read_text()
    assert not list(results.glob("*.failed.json"))
    assert "stopped by SIGTERM; the same command resumes" in (tmp_path / "log").read_text()
