"""Files that are whole or not there: written beside under another name, then renamed.

A process may be killed between any two lines here, and a disk may fill up: what stood under the name before stands
there still. What is left beside it is known by its ending; in a run's folder the next process that holds it sweeps up.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

TEMPORARY_SUFFIX = ".beside"


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write into; it gets its name, in place of what had it, when the block ends without an exception."""
    beside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}{TEMPORARY_SUFFIX}")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
    fsync_folder(path.parent)


def nearest_existing(path: Path) -> Path:
    """The path, or the next folder above that is there: in it, what is missing will be made."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def fsync_folder(folder: Path) -> None:
    """The folder itself to the disk, so that the new name lasts; where folders cannot be opened there is no need."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_temporary_files(folder: Path) -> None:
    """Remove what killed writers left beside; whoever calls this holds the folder's lock."""
    for left in folder.glob(f".*{TEMPORARY_SUFFIX}"):
        left.unlink(missing_ok=True)


def lock(file: IO[bytes], otherwise: str) -> None:
    """Keep other processes away; the lock goes with the process, however it ends. `otherwise`: what they are told.

    Where the system or the file system cannot lock (Windows, some network disks), nobody is kept away.
    """
    try:
        import fcntl
    except ImportError:  # not there on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise BlockingIOError(otherwise) from error
