"""Downloads from a real server: whole, broken off, resumed, wrong; and no network at all."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from flatmin_lab.data import load
from flatmin_lab.data.formats import download
from flatmin_lab.data.formats.download import REMOTE, Remote, fetch
from flatmin_lab.data.formats.download_progress import download_bar
from tests import HANG_SECONDS
from tests.support.official_files import cifar10_python, made, packed, svhn

CONTENT = os.urandom(3_000_000)


class Handler(BaseHTTPRequestHandler):
    """Serves CONTENT, also from the middle; misbehaves as told."""

    asked: ClassVar[list[str | None]] = []
    breaks_after: ClassVar[list[int]] = []  # bytes after which the line is cut, one for each request
    ranges = True
    slow = False
    status = 0  # other than 0: the answer to everything
    delay = 0.0  # seconds before an answer
    stall = 0.0  # seconds after a part of it, in place of cutting the line
    shift = 0  # by how much an answer is beside what was asked for
    content = CONTENT

    def do_GET(self) -> None:
        time.sleep(self.delay)
        wanted = self.headers.get("Range")
        type(self).asked.append(wanted)
        if self.status:
            self.send_error(self.status)
            return
        start = self.shift + int(re.findall(r"bytes=(\d+)-", wanted)[0]) if wanted and self.ranges else 0
        body = self.content[start:]
        self.send_response(206 if wanted and self.ranges else 200)
        if wanted and self.ranges:
            self.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        stalls = self.stall if type(self).breaks_after else 0.0
        body = body[: type(self).breaks_after.pop(0)] if type(self).breaks_after else body
        try:
            for place in range(0, len(body), 100_000):
                self.wfile.write(body[place : place + 100_000])
                if self.slow:
                    time.sleep(0.1)
            self.wfile.flush()
            time.sleep(stalls)
        except OSError:
            pass  # the client went away

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    Handler.asked, Handler.breaks_after, Handler.ranges, Handler.slow, Handler.content = [], [], True, False, CONTENT
    Handler.status = Handler.shift = 0
    Handler.delay = Handler.stall = 0.0
    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}/file.bin"
    running.shutdown()
    running.server_close()
    thread.join()


def remote(url: str, content: bytes = CONTENT) -> Remote:
    return Remote("file.bin", url, len(content), hashlib.sha256(content).hexdigest())


def test_a_file_comes_whole_and_once(tmp_path: Path, server: str) -> None:
    seen: list[int] = []
    path = fetch(remote(server), tmp_path, progress=lambda name, there, size: seen.append(there))
    assert path.read_bytes() == CONTENT
    assert seen == sorted(seen)
    assert seen[-1] == len(CONTENT)
    assert fetch(remote(server), tmp_path) == path
    assert Handler.asked == [None]
    assert [file.name for file in tmp_path.iterdir()] == ["file.bin"]


def test_a_broken_line_is_taken_up_where_it_broke(tmp_path: Path, server: str) -> None:
    Handler.breaks_after = [1_000_000, 700_000]
    assert fetch(remote(server), tmp_path, pause=0).read_bytes() == CONTENT
    assert Handler.asked == [None, "bytes=1000000-", "bytes=1700000-"]


def test_a_server_that_cannot_resume_is_asked_for_all(tmp_path: Path, server: str) -> None:
    Handler.breaks_after, Handler.ranges = [1_000_000], False
    assert fetch(remote(server), tmp_path, pause=0).read_bytes() == CONTENT


def test_a_killed_process_has_lost_nothing(tmp_path: Path, server: str) -> None:
    """Killed for real in the middle of the file; the next call asks for the rest only."""
    Handler.slow = True
    code = (
        "import sys; from pathlib import Path; from flatmin_lab.data.formats.download import Remote, fetch;"
        "fetch(Remote('file.bin', sys.argv[1], int(sys.argv[2]), sys.argv[3]), Path(sys.argv[4]))"
    )
    source = remote(server)
    line = [sys.executable, "-c", code, source.url, str(source.size), source.sha256, str(tmp_path)]
    process = subprocess.Popen(line)
    part = tmp_path / "file.bin.part"
    deadline = time.monotonic() + HANG_SECONDS
    while not (part.exists() and part.stat().st_size > 300_000):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = part.stat().st_size
    assert 0 < kept < len(CONTENT)
    assert not (tmp_path / "file.bin").exists()
    Handler.slow = False
    assert fetch(source, tmp_path).read_bytes() == CONTENT
    assert Handler.asked[-1] == f"bytes={kept}-"


def test_what_is_not_the_official_file_is_not_kept(tmp_path: Path, server: str) -> None:
    Handler.content = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    with pytest.raises(ValueError, match="not the official file and was deleted; try again"):
        fetch(remote(server), tmp_path)
    assert not list(tmp_path.iterdir())
    Handler.content = CONTENT
    assert fetch(remote(server), tmp_path).read_bytes() == CONTENT


def test_a_page_in_place_of_the_file_costs_nothing_that_came(tmp_path: Path, server: str) -> None:
    """A portal that answers everything with its own page, longer or shorter: the part is kept, and resumed later."""
    part = tmp_path / "file.bin.part"
    part.write_bytes(CONTENT[:900_000])
    Handler.ranges = False
    for page in (b"<html>log in</html>", CONTENT * 3):
        Handler.content = page
        with pytest.raises(
            ConnectionError, match=f"answered with {len(page)} bytes, but the file has 3000000.*are kept"
        ):
            fetch(remote(server), tmp_path, pause=0)
        assert part.read_bytes() == CONTENT[:900_000]
    Handler.content, Handler.breaks_after = CONTENT, [500_000, 2_000_000]
    assert fetch(remote(server), tmp_path, pause=0).read_bytes() == CONTENT


@pytest.mark.parametrize("status", [404, 403, 416])
def test_a_refusal_is_final(tmp_path: Path, server: str, status: int) -> None:
    Handler.status = status
    with pytest.raises(ConnectionError) as error:
        fetch(remote(server), tmp_path, pause=0)
    assert f"HTTP Error {status}" in str(error.value)
    assert "network" not in str(error.value)
    assert len(Handler.asked) == 1
    assert not list(tmp_path.iterdir())


def test_the_wrong_part_is_not_appended(tmp_path: Path, server: str) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    Handler.shift = 7
    with pytest.raises(ConnectionError, match="the wrong part, bytes 1007-"):
        fetch(remote(server), tmp_path, pause=0)
    assert (tmp_path / "file.bin.part").stat().st_size == 1000


def test_two_processes_do_not_write_one_file(tmp_path: Path, server: str) -> None:
    Handler.slow = True
    first = threading.Thread(target=fetch, args=(remote(server), tmp_path))
    first.start()
    part = tmp_path / "file.bin.part"
    deadline = time.monotonic() + HANG_SECONDS
    while not (part.exists() and part.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(BlockingIOError, match="another process is downloading"):
        fetch(remote(server), tmp_path)
    Handler.slow = False
    first.join()
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_who_comes_second_while_nothing_has_come_yet_spoils_nothing(tmp_path: Path, server: str) -> None:
    Handler.delay = 0.5
    first = threading.Thread(target=fetch, args=(remote(server), tmp_path))
    first.start()
    part = tmp_path / "file.bin.part"
    deadline = time.monotonic() + HANG_SECONDS
    while not part.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(BlockingIOError, match="another process is downloading"):
        fetch(remote(server), tmp_path)
    first.join()
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert not part.exists()


def test_a_line_that_stalls_after_some_bytes_loses_none(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 0.2)
    Handler.stall, Handler.breaks_after = 0.6, [200_000, 200_000]
    assert fetch(remote(server), tmp_path, pause=0).read_bytes() == CONTENT
    assert Handler.asked == [None, "bytes=200000-", "bytes=400000-"]


def test_a_full_disk_is_named_and_what_came_is_kept(tmp_path: Path, server: str) -> None:
    """In a process that may write no file longer than a megabyte."""
    code = (
        "import resource, sys; from pathlib import Path; from flatmin_lab.data.formats.download import Remote, fetch;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000));"
        "fetch(Remote('file.bin', sys.argv[1], int(sys.argv[2]), sys.argv[3]), Path(sys.argv[4]))"
    )
    source = remote(server)
    line = [sys.executable, "-c", code, source.url, str(source.size), source.sha256, str(tmp_path)]
    result = subprocess.run(line, capture_output=True, text=True, check=False)
    assert "could not be written" in result.stderr
    assert "needs 3 MB" in result.stderr
    assert (tmp_path / "file.bin.part").stat().st_size == 1_000_000
    assert fetch(source, tmp_path).read_bytes() == CONTENT
    assert Handler.asked[-1] == "bytes=1000000-"


def test_the_second_of_two_files_is_fetched_when_the_first_is_there(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SVHN has two: a stop between them must not be the end."""
    svhn(tmp_path / "there", made(5, 10, seed=0), made(3, 10, seed=1))
    Handler.content = (tmp_path / "there" / "test_32x32.mat").read_bytes()
    here = tmp_path / "here"
    here.mkdir()
    (here / "train_32x32.mat").write_bytes((tmp_path / "there" / "train_32x32.mat").read_bytes())
    (here / "test_32x32.mat.part").write_bytes(Handler.content[:100])
    digest = hashlib.sha256(Handler.content).hexdigest()
    never = Remote("train_32x32.mat", "http://127.0.0.1:9/", 1, "0" * 64)
    second = Remote("test_32x32.mat", server, len(Handler.content), digest)
    monkeypatch.setitem(download.REMOTE, "svhn", [never, second])
    with pytest.raises(FileNotFoundError, match="was not found"):
        load("svhn", here)
    assert len(load("svhn", here, download=True).test) == 3
    assert Handler.asked == ["bytes=100-"]


def test_a_file_of_that_name_that_is_another_one_is_left_alone(tmp_path: Path, server: str) -> None:
    (tmp_path / "file.bin").write_bytes(b"mine")
    with pytest.raises(ValueError, match="move it away to download that"):
        fetch(remote(server), tmp_path)
    assert (tmp_path / "file.bin").read_bytes() == b"mine"


def test_without_a_network_it_says_where_to_put_the_file(tmp_path: Path, server: str) -> None:
    closed = remote("http://127.0.0.1:9/file.bin")
    with pytest.raises(ConnectionError) as error:
        fetch(closed, tmp_path, pause=0)
    for part in ("http://127.0.0.1:9/file.bin", "network", f"put it into {tmp_path}"):
        assert part in str(error.value)
    Handler.breaks_after = [1_000_000, 0, 0, 0, 0]
    with pytest.raises(ConnectionError, match="1000000 bytes received so far are kept"):
        fetch(remote(server), tmp_path, pause=0)
    assert (tmp_path / "file.bin.part").stat().st_size == 1_000_000


def test_a_data_set_is_fetched_where_it_is_missing(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    train, test = made(10, 10, seed=0), made(3, 10, seed=1)
    Handler.content = packed(cifar10_python(tmp_path / "there", train, test), "x.tar.gz").read_bytes()
    digest = hashlib.sha256(Handler.content).hexdigest()
    official = Remote("cifar-10-python.tar.gz", server, len(Handler.content), digest)
    monkeypatch.setitem(download.REMOTE, "cifar10", [official])
    with download_bar() as progress:
        data = load("cifar10", tmp_path / "here", download=True, progress=progress)
    assert data.train.x.equal(train[0])
    assert "cifar-10-python.tar.gz" in capfd.readouterr().err
    load("cifar10", tmp_path / "here", download=True)
    assert len(Handler.asked) == 1


def test_every_official_file_has_an_address_a_length_and_a_checksum() -> None:
    for files in REMOTE.values():
        for file in files:
            assert re.fullmatch(r"[0-9a-f]{64}", file.sha256)
            assert file.size > 60_000_000
            assert file.url.endswith(file.name)
