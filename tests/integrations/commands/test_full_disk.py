"""A disk that is really full costs a run nothing that was there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import PYTHONPATH


def test_it_is_survived(tmp_path: Path) -> None:
    """On a file system of 200 KiB of its own, in a user namespace where the kernel lets us."""
    small = tmp_path / "small"
    small.mkdir()
    command = f"mount -t tmpfs -o size=200k none {small} && exec {sys.executable} -m tests.programs.full_disk {small}"
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-Urm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs user namespaces, which are switched off here")
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    program = [unshare, "-Urm", "sh", "-c", command]
    result = subprocess.run(program, capture_output=True, text=True, check=False, env=environment)
    if "mount:" in result.stderr:
        pytest.skip(f"cannot mount a small file system here: {result.stderr.strip()}")
    assert result.stdout.split() == ["full", "resumed"], result.stderr
