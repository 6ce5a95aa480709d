"""The installed command as a process: signals, closed pipes, missing packages."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
LONG = ["train", "--data", "digits", "--method", "erm", "--epochs", "1000"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "flatmin_lab", *arguments]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_saves_and_stops_within_seconds(tmp_path: Path, number: signal.Signals, code: int) -> None:
    folder = tmp_path / "run"
    # no checkpoint but the one that the signal asks for
    arguments = command(*LONG, "--out", str(folder), "--checkpoint-epochs", "1000")
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stderr is not None
        while not re.match(r"epoch +[2-9]", process.stderr.readline()):
            assert process.poll() is None
        begin = time.monotonic()
        process.send_signal(number)
        rest = process.stderr.read()
        process.wait()
        took = time.monotonic() - begin
    assert process.returncode == code
    assert took < 5
    assert "saved after step" in rest
    assert f"flatmin train --out {folder} --resume" in rest
    assert "Traceback" not in rest
    step = json.loads((folder / "state.json").read_text())["step"]
    assert f"saved after step {step};" in rest


def test_where_packages_are_missing_it_names_the_extra_in_a_line() -> None:
    for package in ("typer", "safetensors", "rich"):
        hide = f"import sys; sys.modules[{package!r}] = None; from flatmin_lab.__main__ import main; main()"
        result = subprocess.run(
            [sys.executable, "-c", hide, "train"], capture_output=True, text=True, check=False, env=ENVIRONMENT
        )
        assert result.returncode == 1
        assert result.stderr.count("\n") == 1
        assert "pip install 'flatmin[lab]'" in result.stderr
        assert package in result.stderr


def test_the_entry_point_is_declared() -> None:
    assert 'flatmin = "flatmin_lab.__main__:main"' in (ROOT / "pyproject.toml").read_text()
    result = subprocess.run(command("--version"), capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert result.stdout.startswith("flatmin ")
