"""These tests start clusters, trainers and processes, and pass on a used machine as on a fresh one.

What Ray and Hugging Face's packages keep between programs is in a folder of this process's own, removed at the end. So
a cluster that is alive on this machine is not joined, and the files of one that was killed are not found. A suite that
was started in the background ignores Ctrl-C and the closing of a terminal, and so would all that it starts: here they
get the defaults. What was started here and still runs at the end is killed.
"""

import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

MARK = "FLATMIN_TEST_PROCESS"  # an environment variable that all that is started here inherits
FOLDER = pytest.StashKey[str]()
# Others may deprecate a name on any day: that is listed, and fails no test, unless flatmin itself uses the name.
DEPRECATIONS = ("FutureWarning", "DeprecationWarning", "PendingDeprecationWarning")


def pytest_configure(config: pytest.Config) -> None:
    """Before a test file imports Ray or Hugging Face's packages, which read these variables once."""
    # not in $TMPDIR: Ray puts sockets there, whose paths have at most 107 characters
    folder = config.stash[FOLDER] = tempfile.mkdtemp(prefix="flatmin-", dir="/tmp" if Path("/tmp").is_dir() else None)
    os.environ.update({MARK: secrets.token_hex(8), "RAY_TMPDIR": folder, "HF_HOME": f"{folder}/huggingface"})
    # Ray keeps the first token that a process has seen: with another one its next cluster would not answer. Without one
    # it would write one into the home folder. And it would put a function of its own in the place of print.
    ray = {
        "AUTH_MODE": "token",
        "AUTH_TOKEN": secrets.token_hex(32),
        "TQDM_PATCH_PRINT": "0",
        "USAGE_STATS_ENABLED": "0",
    }
    os.environ.update({f"RAY_{name}": value for name, value in ray.items()})
    for name in ("RAY_ADDRESS", "RAY_NAMESPACE"):
        os.environ.pop(name, None)
    # A process that is started keeps what is ignored, and has the default for what is handled.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # still ignored in this process


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for kind in DEPRECATIONS:
            item.add_marker(pytest.mark.filterwarnings(f"error::{kind}:flatmin"), append=False)
            item.add_marker(pytest.mark.filterwarnings(f"default::{kind}"), append=False)


def pytest_unconfigure(config: pytest.Config) -> None:
    for process in _started_here():
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    shutil.rmtree(config.stash[FOLDER], ignore_errors=True)


def _started_here() -> Iterator[int]:
    mark = f"{MARK}={os.environ[MARK]}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
