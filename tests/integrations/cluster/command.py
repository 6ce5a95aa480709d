"""The command beside a cluster, mostly as a process of its own: what it says, how it ends, and what it leaves."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import HANG_SECONDS, ROOT
from tests.support.processes import flatmin

SOURCE = f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"
SETTINGS = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "COLUMNS": "250"}
SMOKE = ["reproduce", "table1", "--protocol", "smoke", "--data", "cifar10", "--methods", "erm,amp", "--seeds", "0"]
TIMES = re.compile("seconds|at_once|epoch_s|resumed")  # what may differ between two machines


@contextmanager
def command(*arguments: str, at: Path) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "flatmin_lab", *arguments]
    environment = {**os.environ, **SETTINGS}
    with (at / "log").open("a") as log:
        process = subprocess.Popen(words, cwd=at, env=environment, stdout=log, stderr=log, text=True)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def said(at: Path) -> str:
    return (at / "log").read_text()


def ended(*arguments: str, at: Path) -> int:
    with command(*arguments, at=at) as process:
        return process.wait(HANG_SECONDS)


def ended_here(*arguments: str, at: Path) -> int:
    """The same in this process, which need not import all again."""
    with pytest.MonkeyPatch.context() as patch, (at / "log").open("a") as log:
        patch.chdir(at)
        done = flatmin(*arguments)
        log.write(done.output)
    return int(done.exit_code)


def until(condition: Callable[[], Any], process: subprocess.Popen[str], at: Path) -> Any:
    begun = time.monotonic()
    while not (found := condition()):
        assert process.poll() is None, said(at)
        assert time.monotonic() - begun < HANG_SECONDS, said(at)
        time.sleep(0.02)
    return found


def timeless(found: Any) -> Any:
    """Without what depends on the machine's moment."""
    if isinstance(found, dict):
        return {key: timeless(value) for key, value in found.items() if not TIMES.search(key)}
    return [timeless(value) for value in found] if isinstance(found, list) else found


def results(at: Path) -> dict[str, Any]:
    files = sorted((at / "out/smoke/results/smoke").glob("*.json"))
    return {path.name: timeless(json.loads(path.read_text())) for path in files}


def finishes(at: Path) -> list[str]:
    """The runs that said so, each as often as it did."""
    return sorted(re.findall(r"^(smoke/\S+ +seed \d+)  test error", said(at), re.MULTILINE))
