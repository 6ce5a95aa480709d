"""The official archives over the network: resumed where they stopped, and believed only when their checksum is right.

A file grows as `NAME.part` and gets its name once its SHA-256 is the published one, so a file under its own name is
whole. When the line breaks, the next try (in the same call, or days later) asks for the rest only.
"""

import hashlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

Progress = Callable[[str, int, int], None]  # file, bytes there, bytes in all
CHUNK = 1 << 18
WAIT = 30.0  # seconds without a byte
TRIES = 4


class Remote(NamedTuple):
    """An official file: its name, address, length and checksum."""

    name: str
    url: str
    size: int
    sha256: str


REMOTE: dict[str, list[Remote]] = {
    "cifar10": [
        Remote(
            "cifar-10-python.tar.gz",
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            170498071,
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        )
    ],
    "cifar100": [
        Remote(
            "cifar-100-python.tar.gz",
            "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
            169001437,
            "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        )
    ],
    "svhn": [
        Remote(
            "train_32x32.mat",
            "http://ufldl.stanford.edu/housenumbers/train_32x32.mat",
            182040794,
            "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
        ),
        Remote(
            "test_32x32.mat",
            "http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
            64275384,
            "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
        ),
    ],
}


def fetch(remote: Remote, folder: Path, *, progress: Progress | None = None, pause: float = 1.0) -> Path:
    """The file in that folder, fetched if it is not there; `pause` seconds between tries."""
    target, part = folder / remote.name, folder / f"{remote.name}.part"
    if target.exists():
        _verify(target, remote, f"{target} is there but is not the official file; move it away to fetch that")
        return target
    folder.mkdir(parents=True, exist_ok=True)
    tries = 0
    while (there := _length(part)) < remote.size:
        try:
            _continue(remote, part, progress or (lambda *_: None))
            lost: Exception = ConnectionError("the server closed the line")
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            lost = error
        tries = 1 if _length(part) > there else tries + 1
        if _length(part) < remote.size and tries >= TRIES:
            raise ConnectionError(
                f"{remote.url} could not be fetched ({lost}). Is there a network here? What came is kept and the next "
                f"try goes on from it; or get {remote.name} by other means and put it into {folder}"
            ) from lost
        if _length(part) < remote.size:
            time.sleep(pause)
    try:
        _verify(part, remote, f"what came from {remote.url} is not the official file and was deleted; try again")
    except ValueError:
        part.unlink()
        raise
    part.replace(target)
    return target


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _continue(remote: Remote, part: Path, progress: Progress) -> None:
    """Append what is missing; from the beginning where the server cannot give a part."""
    there = _length(part)
    headers = {"User-Agent": "flatmin", **({"Range": f"bytes={there}-"} if there else {})}
    request = urllib.request.Request(remote.url, headers=headers)
    with urllib.request.urlopen(request, timeout=WAIT) as response:
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {there}-")
        if response.status == 206 and there and not resumed:
            raise ConnectionError(f"the server answered with the wrong part, {response.headers.get('Content-Range')}")
        there = there if resumed else 0
        with part.open("ab" if resumed else "wb") as file:
            while chunk := response.read(min(CHUNK, remote.size + 1 - there)):
                file.write(chunk)
                there += len(chunk)
                progress(remote.name, there, remote.size)
                if there > remote.size:  # a page that is longer than the file; the checksum says so
                    break


def _verify(path: Path, remote: Remote, otherwise: str) -> None:
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(path)
    if got != remote.sha256:
        raise ValueError(f"{otherwise} (SHA-256 must be {remote.sha256}, got {got})")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
