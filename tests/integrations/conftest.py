"""These tests start clusters, trainers and processes, and pass on a used machine as on a fresh one.

What Ray, torchrun, Hugging Face's packages and killed workers keep between programs or leave behind is in a folder of
this process's own, removed at the end. So a cluster that is alive on this machine is not joined, and the files of one
that was killed are not found. What a cluster's job or torchrun has told the process that started the suite is
forgotten. A suite that was started in the background ignores Ctrl-C and the closing of a terminal, and so would all
that it starts: here they get the defaults. What was started here and still runs at the end is killed, also by a process
of the suite that has died itself: its folder lies in that of the process that started it, and says whose it was.
"""

import os
import re
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

FOLDER = "FLATMIN_TEST_FOLDER"  # an environment variable that all that is started here inherits
FOLDER_KEY = pytest.StashKey[str]()
OF_ANOTHER_JOB = re.compile("RAY_|SLURM_|TORCHELASTIC_|(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$")
# Others may deprecate a name on any day: that is listed, and fails no test, unless flatmin itself uses the name.
DEPRECATIONS = ("FutureWarning", "DeprecationWarning", "PendingDeprecationWarning")


def pytest_configure(config: pytest.Config) -> None:
    """Before a test file imports Ray or Hugging Face's packages, which read these variables once."""
    folder = config.stash[FOLDER_KEY] = _new_folder()
    for name in filter(OF_ANOTHER_JOB.match, [*os.environ]):
        del os.environ[name]
    (Path(folder) / "tmp").mkdir()
    os.environ.update({FOLDER: folder, "TMPDIR": f"{folder}/tmp", "HF_HOME": f"{folder}/huggingface"})
    # Ray keeps the first token that a process has seen: with another one its next cluster would not answer. Without one
    # it would write one into the home folder. It would put a function of its own in the place of print, and give its
    # workers a thirtieth of what a process gets that is not nice: beside busy loops they would hardly run.
    ray = {
        "TMPDIR": folder,
        "AUTH_MODE": "token",
        "AUTH_TOKEN": secrets.token_hex(32),
        "TQDM_PATCH_PRINT": "0",
        "USAGE_STATS_ENABLED": "0",
        "worker_niceness": "0",
    }
    os.environ.update({f"RAY_{name}": value for name, value in ray.items()})
    # A process that is started keeps what is ignored, and has the default for what is handled.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # still ignored in this process


def _new_folder() -> str:
    """In that of the process of the suite that started this one; its name is short, for it is in many paths."""
    if FOLDER in os.environ:
        return tempfile.mkdtemp(prefix="", dir=os.environ[FOLDER])
    tempfile.gettempdir()  # known from now on: pytest's own folder, which outlives the suite, is not in this one
    # not in $TMPDIR: Ray puts sockets here, whose paths have at most 107 characters
    return tempfile.mkdtemp(prefix="flatmin-", dir="/tmp" if Path("/tmp").is_dir() else None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for kind in DEPRECATIONS:
            item.add_marker(pytest.mark.filterwarnings(f"error::{kind}:flatmin"), append=False)
            item.add_marker(pytest.mark.filterwarnings(f"default::{kind}"), append=False)


def pytest_unconfigure(config: pytest.Config) -> None:
    for process in _started_here(config.stash[FOLDER_KEY]):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    shutil.rmtree(config.stash[FOLDER_KEY], ignore_errors=True)


def _started_here(folder: str) -> Iterator[int]:
    """All processes whose folder is this one or lies in it."""
    mark = f"{FOLDER}={folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            known = (process / "environ").read_bytes().split(b"\0")
            if int(process.name) != os.getpid() and any(variable.startswith(mark) for variable in known):
                yield int(process.name)
