"""Download of the official archives: resumed where it stopped, and accepted only if the checksum matches.

A file grows as `NAME.part` and gets its name once its SHA-256 is the published one, so a file under its own name is
complete. When the connection breaks, the next try (in the same call, or days later) asks for the rest only; received
bytes are never thrown away for fewer.
"""

import hashlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from flatmin_lab.system.files import lock

Progress = Callable[[str, int, int], None]  # file, bytes received, bytes in total
CHUNK_BYTES = 1 << 18
TIMEOUT_SECONDS = 30.0  # without a byte, before a try is given up
MAX_TRIES = 4  # in a row that bring less than a chunk


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
    """The file in that folder, downloaded if it is not there; `pause` seconds between tries."""
    target, part = folder / remote.name, folder / f"{remote.name}.part"
    if not target.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with part.open("ab") as file:
                lock(file, f"another process is downloading {part}; wait for it to end")  # until the file is renamed
                if not target.exists():  # another process may have fetched it since
                    _fetch_all(remote, file, progress or (lambda *_: None), pause)
                    _verify_and_rename(remote, part, target)
                    return target
                if not file.tell():
                    part.unlink()
        except (ConnectionError, BlockingIOError):
            raise
        except OSError as error:
            raise OSError(
                f"{part} could not be written ({error}); it needs {remote.size / 1e6:.0f} MB in a folder of your own. "
                "What was received is kept, and the next try resumes from it"
            ) from error
    _verify(target, remote, f"{target} exists but is not the official file; move it away to download that")
    return target


def _verify_and_rename(remote: Remote, part: Path, target: Path) -> None:
    try:
        _verify(
            part, remote, f"what was received from {remote.url} is not the official file and was deleted; try again"
        )
    except ValueError:
        part.unlink()
        raise
    part.replace(target)


def _fetch_all(remote: Remote, file: BinaryIO, progress: Progress, pause: float) -> None:
    """Fetch until the file is complete, as long as every few tries make progress."""
    tries, mark = 0, file.tell()
    while file.tell() < remote.size:
        try:
            _fetch_rest(remote, file, progress)
            lost: Exception = ConnectionError("the server closed the connection")
        except urllib.error.HTTPError as error:
            lost, tries = error, MAX_TRIES if 400 <= error.code < 500 else tries  # a refusal is final
            error.close()
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            lost = error
        if file.tell() >= remote.size:
            return
        tries, mark = (1, file.tell()) if file.tell() > mark + CHUNK_BYTES else (tries + 1, mark)
        if tries >= MAX_TRIES:
            there = file.tell()
            if not there:
                Path(file.name).unlink()
            kept = f"The {there} bytes received so far are kept, and the next try resumes from them. " if there else ""
            asked = "" if isinstance(lost, urllib.error.HTTPError) else "Is there a network connection? "
            raise ConnectionError(
                f"{remote.url} could not be downloaded ({lost}). {asked}{kept}"
                f"Try again, or get {remote.name} by other means and put it into {Path(file.name).parent}"
            ) from lost
        time.sleep(pause)


def _fetch_rest(remote: Remote, file: BinaryIO, progress: Progress) -> None:
    """Append the missing bytes. A server that cannot send a range sends all, and the known bytes are skipped."""
    there = file.tell()
    headers = {"User-Agent": "flatmin", **({"Range": f"bytes={there}-"} if there else {})}
    with urllib.request.urlopen(
        urllib.request.Request(remote.url, headers=headers), timeout=TIMEOUT_SECONDS
    ) as response:
        given = response.headers.get("Content-Range", "")
        if response.status == 206 and not given.startswith(f"bytes {there}-"):
            raise ConnectionError(f"the server answered with the wrong part, {given}")
        whole = response.headers.get("Content-Length")
        if response.status == 200 and whole is not None and whole != str(remote.size):
            raise ConnectionError(f"the server answered with {whole} bytes, but the file has {remote.size}")
        over = 0 if response.status == 206 else there
        while chunk := _read(response, min(CHUNK_BYTES, remote.size - there + over)):
            file.write(chunk[over:])
            file.flush()
            there += len(chunk[over:])
            over = max(0, over - len(chunk))
            progress(remote.name, there, remote.size)


def _read(response: http.client.HTTPResponse, size: int) -> bytes:
    try:
        return response.read1(size)  # what has arrived: waiting for more could lose it
    except OSError as error:  # a network error, told apart from disk errors
        raise ConnectionError(str(error)) from error


def _verify(path: Path, remote: Remote, otherwise: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != remote.sha256:
        raise ValueError(f"{otherwise} (SHA-256 must be {remote.sha256}, got {digest.hexdigest()})")
