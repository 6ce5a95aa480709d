"""Files by name from a folder or a `.tar.gz`, read into memory: nothing from an archive is ever written to disk.

Only the members asked for are read, each at the one path it has in the official archive, and only if it is an ordinary
file: a link, a device or a path that climbs out of the folder has no effect. An archive is read to its end, where
gzip's checksum is, so that a single altered byte is noticed.
"""

import gzip
import tarfile
from collections.abc import Iterable
from pathlib import Path

from flatmin_lab.system.files import read_regular

MAX_BYTES = 1 << 30  # bytes; the largest official archive unpacks to 185 MB
MAX_FILE_BYTES = 1 << 28  # bytes of one file; the largest official one has 155 MB
MAX_MEMBERS = 1000  # and none has more than a dozen
MAX_HEADER_BYTES = 4096  # bytes of a long name, or of a file's further properties


def read(source: Path, folder: str, names: Iterable[str], *, optional: Iterable[str] = ()) -> dict[str, bytes]:
    """The contents of `names`, from the folder `source` itself or from `folder` inside the archive `source`."""
    wanted, also = list(names), list(optional)
    found = _from_archive(source, folder, {*wanted, *also}) if source.is_file() else _from_folder(source, wanted + also)
    missing = [name for name in wanted if name not in found]
    if missing:
        where = f"{source} (inside it: {folder}/)" if source.is_file() else str(source)
        raise FileNotFoundError(
            f"{where} must hold {', '.join(wanted)}; missing: {', '.join(missing)}. "
            "Fetch the official archive again, or unpack it again"
        )
    return found


def _from_folder(source: Path, names: list[str]) -> dict[str, bytes]:
    there = [name for name in names if (source / name).is_file()]
    return {name: read_regular(source / name, max_bytes=MAX_FILE_BYTES) for name in there}


class _Stream:
    """The decompressed archive, of which at most MAX_BYTES are read."""

    def __init__(self, content: gzip.GzipFile) -> None:
        self.content, self.left = content, MAX_BYTES

    def check_left(self, size: int) -> None:
        if size > self.left:
            raise tarfile.ReadError(f"it unpacks to more than {MAX_BYTES >> 30} GiB, as no official archive does")

    def read(self, size: int) -> bytes:
        self.check_left(size)
        part = self.content.read(size)
        self.left -= len(part)
        return part


class _Member(tarfile.TarInfo):
    """Limits headers that describe another header: Python's time grows with the square of their size."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE) and self.size > MAX_HEADER_BYTES:
            raise tarfile.ReadError("it has a header larger than any official archive's")
        return super()._proc_member(archive)  # type: ignore[misc, no-any-return]  # tarfile's own hook for this


def _from_archive(source: Path, folder: str, names: set[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        with gzip.open(source) as content:
            stream = _Stream(content)
            with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as archive:  # type: ignore[call-overload]
                for number, member in enumerate(archive):
                    if number >= MAX_MEMBERS:
                        raise tarfile.ReadError(f"it has more than {MAX_MEMBERS} members")
                    top, _, name = member.name.removeprefix("./").partition("/")
                    if top != folder or name not in names or not member.isreg() or member.issparse():
                        continue
                    if name in found:
                        raise tarfile.ReadError(f"it holds {name} twice")
                    stream.check_left(member.size)
                    if member.size > MAX_FILE_BYTES:
                        raise tarfile.ReadError(
                            f"{name} has {member.size} bytes, more than {MAX_FILE_BYTES}, as no official file has"
                        )
                    file = archive.extractfile(member)
                    found[name] = file.read() if file else b""
            while stream.read(1 << 20):  # to the checksum at the end
                pass
    except Exception as error:  # a damaged archive can raise anything
        raise ValueError(
            f"{source} is not an intact .tar.gz archive ({error}); delete it and fetch it again"
        ) from error
    return found
