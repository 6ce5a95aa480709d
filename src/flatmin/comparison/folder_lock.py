"""One comparison at a time in a folder: two would train the same runs, and write over each other's files."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".comparison.lock"  # not the command's own, which it holds around `flatmin.compare`


@contextmanager
def only_comparison_in(folder: Path) -> Iterator[None]:
    """Raises if another process is in such a block for the same folder; a killed one is not.

    Where the system or the file system cannot lock (Windows, some network disks), nothing is locked.
    """
    try:
        import fcntl
    except ImportError:  # not there on Windows
        yield
        return
    with (folder / LOCK).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise BlockingIOError(
                    f"another process is comparing in {folder}; wait for it to end, or choose another folder"
                ) from error
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # a loader's process, forked meanwhile, has the file too
