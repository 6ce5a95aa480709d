"""Files by name from a folder or a `.tar.gz`, read into memory: nothing from an archive is ever written to disk.

Only the members asked for are read, each at the one path it has in the official archive, and only if it is an ordinary
file: a link, a device, a path that climbs out of the folder cannot do anything.
"""

import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path

LIMIT = 2 << 30  # bytes; the largest official archive unpacks to 185 MB


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
    return {name: (source / name).read_bytes() for name in names if (source / name).is_file()}


def _from_archive(source: Path, folder: str, names: set[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(source, "r:gz") as archive:
            for member in archive:
                if member.offset_data + member.size > LIMIT:
                    raise ValueError(
                        f"{source} unpacks to more than {LIMIT >> 30} GiB, as no official archive does; fetch it again"
                    )
                top, _, name = member.name.removeprefix("./").partition("/")
                if top == folder and name in names and member.isreg():
                    content = archive.extractfile(member)
                    found[name] = content.read() if content else b""
                    if len(found) == len(names):
                        break  # the rest is not wanted
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{source} is not a whole .tar.gz archive ({error}); delete it and fetch it again") from error
    return found
