"""Folders on their way to another machine and back, so that machines need not share a disk.

    there   content(place)           all files of a place, a folder or a single file, as bytes
            put(other, content)      the same place, there
    back    Watched(other).change()  what has changed since it was last looked at
            put(place, change)       the same change, here

Files are written whole or not at all, what says which run it is before all else, and a result after it: who is killed
in between finds a run that is not finished, and goes on with it.
"""

from pathlib import Path
from typing import NamedTuple

from flatmin_lab.system.files import TEMPORARY_SUFFIX, atomic_write

LOCK = ".lock"  # whoever holds a folder here holds it for all others
FIRST, LAST = "config.json", "result.json"
Stamp = tuple[int, int, int]


class Change(NamedTuple):
    """Files by their name within the place; a place that is a file itself has the name "."."""

    files: dict[str, bytes]
    gone: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.files or self.gone)


def content(place: Path) -> Change:
    """All of it; nothing where nothing is."""
    return Change({name: path.read_bytes() for name, path in _inside(place).items()})


def put(place: Path, change: Change) -> None:
    for name in sorted(change.files, key=lambda name: (name == LAST, name != FIRST, name)):
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(change.files[name])
    for name in change.gone:
        (place / name).unlink(missing_ok=True)


class Watched:
    """A place, and what was there when it was last looked at."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.known = self._stamps()

    def change(self) -> Change:
        now, before = self._stamps(), self.known
        self.known = now
        fresh = [name for name, stamp in now.items() if before.get(name) != stamp]
        return Change(
            {name: (self.place / name).read_bytes() for name in fresh},
            tuple(name for name in before if name not in now),
        )

    def _stamps(self) -> dict[str, Stamp]:
        """A file that was written anew has another inode, one that was added to another size."""
        found = ((name, path.stat()) for name, path in _inside(self.place).items())
        return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found}


def _inside(place: Path) -> dict[str, Path]:
    if place.is_file():
        return {".": place}
    found = (path for path in sorted(place.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(place)): path
        for path in found
        if path.name != LOCK and not path.name.endswith(TEMPORARY_SUFFIX)
    }
