"""Pages for the tests: in a real browser, Chromium without a window, and as text without markup."""

import html
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import HANG_SECONDS

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Reports uncaught errors; and frames come every 16 ms, where without a window their timing is arbitrary.
WATCH = """<script>
window.onerror = (message) => console.error("uncaught: " + message);
window.requestAnimationFrame = (draw) => setTimeout(draw, 16);
</script>"""
CONSOLE = re.compile(r'CONSOLE.*?\] "(.*)", source: ')


class Visit(NamedTuple):
    dom: str  # after the scripts have run
    console: list[str]  # what they logged, uncaught errors included


def found() -> str:
    """The browser; a test that needs it is skipped where there is none."""
    for name in NAMES:
        path = shutil.which(name)
        if path:
            return path
    pytest.skip(f"needs a browser, one of {', '.join(NAMES)}")


def visit(path: Path, script: str = "", *, width: int = 1200, height: int = 900) -> Visit:
    """Open a copy of a page with a script of the test's own at its end, and let four seconds of its time go by."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        text = path.read_text(encoding="utf-8")
        text = text.replace("<head>", f"<head>{WATCH}", 1)
        page.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
        done = _chromium(page, folder, "--dump-dom", "--enable-logging=stderr", "--v=0", width=width, height=height)
        return Visit(done.stdout, CONSOLE.findall(done.stderr))


def _chromium(page: Path, folder: str, *flags: str, width: int, height: int) -> subprocess.CompletedProcess[str]:
    command = [found(), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000"]
    command += [f"--user-data-dir={folder}/profile", f"--window-size={width},{height}", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_SECONDS)


def text_of(page: str) -> str:
    """What a reader sees."""
    page = re.sub(r"<(style|svg|script).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).replace("\u00a0", " ").split())
