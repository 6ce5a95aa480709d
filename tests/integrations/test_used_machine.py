"""What these tests start does not depend on how the suite was started, nor on what the machine ran before."""

import os
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests import HANG_SECONDS, PYTHONPATH, ROOT

ASKS_FOR_SIGNALS = """
import subprocess, sys

PROGRAM = "from signal import *; print('ignored:', [s.name for s in (SIGINT, SIGHUP) if getsignal(s) == SIG_IGN])"


def test_starts_a_process() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
"""
LEAVES_A_PROCESS = """
import subprocess, sys


def test_leaves_a_process() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)"])
"""


def run_suite(test: str, folder: Path) -> str:
    """A pytest of its own with the settings of these tests, started as `nohup` and the `&` of a script start one."""
    (folder / "test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"]
    command += ["-p", "tests.integrations.conftest", str(folder / "test_it.py")]
    command = ["sh", "-c", f"trap '' INT HUP; exec {shlex.join(command)}"]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=HANG_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_process_that_is_started_does_not_ignore_what_the_suite_ignores(tmp_path: Path) -> None:
    assert "ignored: []" in run_suite(ASKS_FOR_SIGNALS, tmp_path)


def test_a_process_that_is_left_is_ended(tmp_path: Path) -> None:
    """It has the suite's output: while it runs, that has no end, and waiting for it ends in an error."""
    assert "1 passed" in run_suite(LEAVES_A_PROCESS, tmp_path)


def test_ray_and_hugging_face_have_folders_of_this_process() -> None:
    folder = Path(os.environ["RAY_TMPDIR"])
    assert folder.is_dir()
    assert Path(os.environ["HF_HOME"]).parent == folder
    assert "RAY_ADDRESS" not in os.environ
    assert os.environ["RAY_AUTH_MODE"] == "token"  # so that nobody else's cluster lets it in, and nobody joins its own


def test_a_name_that_others_deprecate_fails_no_test_unless_flatmin_uses_it() -> None:
    warnings.warn_explicit("listed in the summary", FutureWarning, "there.py", 1, module="peft.model")
    for module in ("flatmin.integrations.transformers", "flatmin_lab.data"):
        with pytest.raises(FutureWarning):
            warnings.warn_explicit("used", FutureWarning, "here.py", 1, module=module)
