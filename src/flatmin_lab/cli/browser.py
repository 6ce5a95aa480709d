"""`--open`: opens a page in the default browser. Without a display, its path is printed."""

import os
import sys
import webbrowser
from pathlib import Path

import typer

from flatmin_lab.cli import display

DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")  # one of these is set where Linux has a screen


def announce(page: Path, *, in_browser: bool) -> None:
    """Print the page's path, and open it if asked to."""
    typer.echo(f"the page: {page}")
    if in_browser and not _opened(page):
        display.say(display.terminal(), f"--open found no browser or no display here; open {page.resolve()} yourself")


def _opened(page: Path) -> bool:
    """Whether a browser opened it. Without a display Python might start one that takes over the terminal."""
    if not has_display():
        return False
    try:
        return webbrowser.open(page.resolve().as_uri())
    except (webbrowser.Error, OSError):
        return False


def has_display() -> bool:
    return not sys.platform.startswith(("linux", "freebsd")) or any(os.environ.get(name) for name in DISPLAYS)
