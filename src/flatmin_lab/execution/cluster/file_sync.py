"""Copies folders to another machine and their changes back, so that machines need not share a disk.

    there   content(path)                  all files of a path, a folder or a single file, as bytes
            put(copy, content)             the same files there
    back    WatchedFolder(copy).change()   what has changed since the last call
            put(path, change)              the same change here

Files are written whole or not at all, config.json first and result.json last: after a kill in between there is an
unfinished run, which can be resumed.
"""

from pathlib import Path
from typing import NamedTuple

from flatmin_lab.system.files import TEMPORARY_SUFFIX, atomic_write

LOCK = ".lock"  # not copied: the lock on this machine covers the copies
WRITTEN_FIRST, WRITTEN_LAST = "config.json", "result.json"
Stamp = tuple[int, int, int]


class Change(NamedTuple):
    """Files by their name within the path, and which are gone; a path that is a file itself has the name "."."""

    files: dict[str, bytes]
    gone: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.files or self.gone)


def content(path: Path) -> Change:
    """All its files; none if the path does not exist."""
    return Change({name: file.read_bytes() for name, file in _files(path).items()})


def put(path: Path, change: Change) -> None:
    for name in sorted(change.files, key=lambda name: (name == WRITTEN_LAST, name != WRITTEN_FIRST, name)):
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(target) as file:
            file.write(change.files[name])
    for name in change.gone:
        (path / name).unlink(missing_ok=True)


class WatchedFolder:
    """A folder or a file, and what it held at the last call of `change`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known = self._stamps()

    def change(self) -> Change:
        now, before = self._stamps(), self.known
        self.known = now
        fresh = [name for name, stamp in now.items() if before.get(name) != stamp]
        return Change(
            {name: (self.path / name).read_bytes() for name in fresh},
            tuple(name for name in before if name not in now),
        )

    def _stamps(self) -> dict[str, Stamp]:
        """A rewritten file has another inode, an appended one another size."""
        found = ((name, file.stat()) for name, file in _files(self.path).items())
        return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found}


def _files(path: Path) -> dict[str, Path]:
    if path.is_file():
        return {".": path}
    found = (file for file in sorted(path.rglob("*")) if file.is_file())
    return {
        str(file.relative_to(path)): file
        for file in found
        if file.name != LOCK and not file.name.endswith(TEMPORARY_SUFFIX)
    }
