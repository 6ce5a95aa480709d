"""What these tests start does not depend on how the suite was started, nor on what the machine ran before."""

import os
import shlex
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tests import HANG_SECONDS, PYTHONPATH, ROOT
from tests.support.ports import reserved_port

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
DIES_AND_LEAVES_A_PROCESS = f"""{LEAVES_A_PROCESS}
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
"""
ASKS_FOR_VARIABLES = """
import os


def test_asks_for_variables() -> None:
    print("left:", [name for name in ("RAY_ADDRESS", "RAY_NAMESPACE", "SLURM_NTASKS", "RANK") if name in os.environ])
"""


def run_suite(
    test: str, folder: Path, *flags: str, code: int = 0, variables: Mapping[str, str] = MappingProxyType({})
) -> str:
    """A pytest of its own with the settings of these tests, started as `nohup` and the `&` of a script start one."""
    (folder / "test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *flags]
    command += ["-p", "tests.integrations.conftest", str(folder / "test_it.py")]
    command = ["sh", "-c", f"trap '' INT HUP; exec {shlex.join(command)}"]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, **variables}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=HANG_SECONDS
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_a_process_that_is_started_does_not_ignore_what_the_suite_ignores(tmp_path: Path) -> None:
    assert "ignored: []" in run_suite(ASKS_FOR_SIGNALS, tmp_path)


def test_a_process_that_is_left_is_ended(tmp_path: Path) -> None:
    """It has the suite's output: while it runs, that has no end, and waiting for it ends in an error."""
    assert "1 passed" in run_suite(LEAVES_A_PROCESS, tmp_path)


def test_a_process_that_is_left_by_one_that_died_is_ended(tmp_path: Path) -> None:
    """A process of the suite cannot clear up when it has been killed: the one that started it does."""
    said = run_suite(DIES_AND_LEAVES_A_PROCESS, tmp_path, "-n", "1", "--max-worker-restart", "0", code=1)
    assert "crashed" in said


def test_what_another_job_told_the_suite_is_forgotten(tmp_path: Path) -> None:
    told = {"RAY_ADDRESS": "auto", "RAY_NAMESPACE": "theirs", "SLURM_NTASKS": "2", "RANK": "1"}
    assert "left: []" in run_suite(ASKS_FOR_VARIABLES, tmp_path, variables=told)


def test_what_others_keep_or_leave_is_in_a_folder_of_this_process() -> None:
    folder = Path(os.environ["RAY_TMPDIR"])
    assert folder.is_dir()
    assert Path(os.environ["HF_HOME"]).parent == folder
    assert Path(os.environ["TMPDIR"]).parent == folder
    assert Path(os.environ["TMPDIR"]).is_dir()
    assert os.environ["RAY_AUTH_MODE"] == "token"  # so that nobody else's cluster lets it in, and nobody joins its own


def test_a_port_that_is_reserved_is_for_the_processes_that_are_told_of_it() -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    with reserved_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("met", "here")
        assert distributed.TCPStore("127.0.0.1", port, is_master=False).get("met") == b"here"


def test_a_name_that_others_deprecate_fails_no_test_unless_flatmin_uses_it() -> None:
    warnings.warn_explicit("listed in the summary", FutureWarning, "there.py", 1, module="peft.model")
    for module in ("flatmin.integrations.transformers", "flatmin_lab.data"):
        with pytest.raises(FutureWarning):
            warnings.warn_explicit("used", FutureWarning, "here.py", 1, module=module)
