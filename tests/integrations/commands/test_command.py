"""The installed command as a process: signals, closed pipes, missing packages."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests import HANG_SECONDS, ROOT

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
LONG = ["train", "--data", "digits", "--method", "erm", "--epochs", "1000"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "flatmin_lab", *arguments]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_saves_and_stops(tmp_path: Path, number: signal.Signals, code: int) -> None:
    folder = tmp_path / "run"
    # no checkpoint but the one that the signal asks for
    arguments = command(*LONG, "--out", str(folder), "--checkpoint-epochs", "1000")
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stderr is not None
        while not re.match(r"epoch +[2-9]", process.stderr.readline()):
            assert process.poll() is None
        process.send_signal(number)
        _, rest = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == code
    assert "saved after step" in rest
    assert f"flatmin train --out {folder} --resume" in rest
    assert "Traceback" not in rest
    step = json.loads((folder / "state.json").read_text())["step"]
    assert f"saved after step {step};" in rest
    assert not (folder / "result.json").exists()  # far from the end of its 1000 epochs


def test_a_signal_saves_all_seeds(tmp_path: Path) -> None:
    arguments = command(*LONG, "--out", str(tmp_path / "runs"), "--checkpoint-epochs", "1000")
    arguments += ["--seeds", "3", "--together", "2"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stderr is not None
        while not re.match(r"seed 1 +epoch", process.stderr.readline()):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        process.wait()
    assert process.returncode == 143
    steps = [json.loads((tmp_path / "runs" / f"seed-{seed}" / "state.json").read_text())["step"] for seed in (0, 1)]
    far = f"seed 0 saved after step {steps[0]}, seed 1 saved after step {steps[1]}, seed 2 not started"
    assert f"{far}; resume with the same command and --resume" in rest
    assert not (tmp_path / "runs" / "seed-2").exists()
    assert "Traceback" not in rest


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for children in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_demo_takes_its_workers_with_it(tmp_path: Path, number: signal.Signals) -> None:
    """Whatever ends it, in the middle or while the workers still import."""
    arguments = command("demo", "--out", str(tmp_path), "--workers", "2", "--epochs", "1000")
    with subprocess.Popen(
        arguments, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True
    ) as demo:
        assert demo.stderr is not None
        until = time.monotonic() + HANG_SECONDS
        while len(workers := children_of(demo.pid)) < 2:
            assert time.monotonic() < until
            time.sleep(0.05)
        time.sleep(0.5)
        if number == signal.SIGINT:
            os.killpg(demo.pid, number)  # as a terminal does
        else:
            demo.send_signal(number)
        said = demo.stderr.read()  # until the last worker has closed it
        demo.wait()
    assert demo.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[number]
    assert "Traceback" not in said
    until = time.monotonic() + HANG_SECONDS
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() < until, "a worker is left behind"
        time.sleep(0.05)


def is_running(process: int) -> bool:
    """A zombie is not: it waits for someone to ask how it ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_a_training_that_nobody_watches_goes_on(tmp_path: Path) -> None:
    arguments = [
        *command("train", "--data", "digits", "--method", "erm", "--epochs", "3"),
        "--out",
        str(tmp_path / "run"),
    ]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stderr is not None
        assert "erm" in process.stderr.readline()
        process.stderr.close()
        process.wait()
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize("hung_up", [True, False])
def test_a_terminal_that_is_gone_costs_nothing(tmp_path: Path, hung_up: bool) -> None:
    """A closed terminal sends SIGHUP: the run saves and stops. A run that ignores it continues to its end."""
    folder = tmp_path / "run"
    epochs = "1000" if hung_up else "4"
    arguments = command("train", "--data", "digits", "--method", "erm", "--epochs", epochs, "--out", str(folder))
    if not hung_up:
        arguments = ["sh", "-c", f"trap '' HUP; exec {shlex.join(arguments)}"]
    master, terminal = os.openpty()
    os.set_blocking(master, False)
    with subprocess.Popen(arguments, stdin=terminal, stdout=terminal, stderr=terminal, env=ENVIRONMENT) as process:
        os.close(terminal)
        metrics = folder / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size):
            assert process.poll() is None
            with suppress(OSError):  # nothing to read, or not yet
                os.read(master, 1 << 16)  # a terminal that nobody reads fills up, and whoever writes to it waits
            time.sleep(0.02)
        os.close(master)
        if hung_up:
            process.send_signal(signal.SIGHUP)
        process.wait()
    if hung_up:
        assert process.returncode == 129
        assert json.loads((folder / "state.json").read_text())["step"] > 0
    else:
        assert (folder / "result.json").exists()


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
