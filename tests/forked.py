"""A process that is forked from a test's program, where everything has been imported: it begins at once."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch


def forked(act: Callable[[], object], log: Path) -> int:
    """The number of a process that does it with one thread, and writes what it says into the log.

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
