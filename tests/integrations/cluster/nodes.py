"""The processes of a node, and their end.

A node is killed as a machine that loses its power: its Ray processes and its workers, all at once, with SIGKILL.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any


def children(*parents: int) -> list[int]:
    found: list[int] = []
    for parent in parents:
        for thread in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, thread.read_text().split())
    return found


def processes(node: Any) -> list[int]:
    """A node's own, and its workers."""
    own = [info.process.pid for kind in node.all_processes.values() for info in kind]
    return [*own, *children(*own)]


def kill(numbers: list[int]) -> None:
    for number in numbers:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def workers(node: Any) -> list[int]:
    """Those of its processes that train."""
    return [pid for pid in processes(node) if b"ray::Worker" in words_of(pid)]


def words_of(pid: int) -> bytes:
    """The command of a process; nothing of one that has ended since it was listed, as one that was killed does."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
