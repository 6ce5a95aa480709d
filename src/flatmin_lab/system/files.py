"""Atomic writes: a file is written under a temporary name beside its target, then renamed, so it is complete or absent.

A process may be killed between any two lines here, and a disk may fill up: the old content stays under its name.
Temporary files that a killed writer left are known by their suffix; in a run's folder the next process that locks the
folder removes them.
"""

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

TEMPORARY_SUFFIX = ".beside"


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write into; it replaces `path` when the block ends without an exception."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)


def is_full_disk(error: object) -> bool:
    """Is this the error of a disk, or a quota, without room?"""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def check_regular(path: Path) -> None:
    """Raise if the path, or what it links to, is not a regular file: a pipe blocks its reader, a device has no end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} must be a regular file, not a pipe, a device or a folder; remove it")


def read_regular(path: Path, *, max_bytes: int | None = None) -> bytes:
    """The content of a regular file of at most that many bytes; a sparse file can claim any number."""
    check_regular(path)
    size = path.stat().st_size
    if max_bytes is not None and size > max_bytes:
        raise ValueError(f"{path} must have at most {max_bytes} bytes, got {size}; put the right file there")
    return path.read_bytes()


def nearest_existing(path: Path) -> Path:
    """The path, or its nearest parent that exists: missing folders will be created in it."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def fsync_folder(folder: Path) -> None:
    """Flush the folder itself, so that a new name survives a power cut; where folders cannot be opened, no need."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_temporary_files(folder: Path) -> None:
    """Remove what killed writers left; the caller holds the folder's lock, and an evaluation may be writing."""
    with locked(folder):
        for left in folder.glob(f".*{TEMPORARY_SUFFIX}"):
            left.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait until no other process or thread is in such a block: what is read in it can be changed and written back.

    The folder itself is locked, so no file is left in it. Where folders cannot be locked (Windows, NFS), nothing is.
    """
    try:
        import fcntl
    except ImportError:  # not there on Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # a process forked meanwhile may have the handle too
        os.close(handle)


def lock(file: IO[bytes], message: str) -> None:
    """Lock the file until this process ends, however it ends; `message` is the error where another process has it.

    Where the system or the file system cannot lock (Windows, some network disks), nothing is locked.
    """
    try:
        import fcntl
    except ImportError:  # not there on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise BlockingIOError(message) from error
