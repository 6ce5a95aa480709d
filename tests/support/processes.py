"""The command as a test calls it, and processes that are forked from a test."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from flatmin_lab.cli.app import app


def flatmin(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def words(text: str) -> str:
    return " ".join(text.split())


def forked(act: Callable[[], object], log: Path) -> int:
    """The id of a forked process that runs `act` with one thread, and writes its output into the log.

    Its exit code is that of the command inside, 0 where nothing was raised, and 99 after any other exception.
    """
    number = os.fork()
    if number:
        return number
    code = 99
    try:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        torch.set_num_threads(1)
        act()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
