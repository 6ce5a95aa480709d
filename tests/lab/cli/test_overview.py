"""`flatmin --help` and `--version` answer as the whole command does, and without torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatmin_lab.cli import overview
from tests import PYTHONPATH
from tests.support.processes import flatmin, words

PROGRAM = """
import sys
sys.modules["torch"] = None
sys.argv = ["flatmin", *{arguments}]
from flatmin_lab.__main__ import main
main()
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process that cannot import torch."""
    program = PROGRAM.format(arguments=arguments)
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "COLUMNS": "200"}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize(
    "arguments", [(), ("--help",), ("-h",), ("--version",)], ids=lambda words: " ".join(words) or "-"
)
def test_it_answers_without_torch_what_the_whole_command_answers(arguments: tuple[str, ...]) -> None:
    quick, whole = run(*arguments), flatmin(*arguments)
    assert words(quick.stdout + quick.stderr) == words(whole.output).replace("Usage: root", "Usage: flatmin")
    assert quick.returncode == whole.exit_code


def test_the_version_is_the_one_that_torch_says_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not overview.answer(["--version"])  # which the whole command answers then
    (tmp_path / "torch" / "version.py").write_text("__version__ = '9.8.7+cu130'\n")
    assert overview.answer(["--version"])
    assert capsys.readouterr().out.endswith(", torch 9.8.7+cu130\n")


def test_whatever_else_is_asked_goes_to_the_whole_command() -> None:
    refused = run("train", "--help")
    assert refused.returncode == 1
    assert "the command flatmin needs torch, which is not installed here" in refused.stderr
