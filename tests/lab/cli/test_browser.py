"""`--open`: a page is opened in the browser where there is a display, and only if asked."""

import sys
import webbrowser
from pathlib import Path

import pytest

from flatmin_lab.cli import browser
from tests.support.processes import flatmin, words


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that a browser was asked to open."""
    found: list[str] = []

    def open_page(address: str) -> bool:
        found.append(address)
        return True

    monkeypatch.setattr(webbrowser, "open", open_page)
    monkeypatch.setattr(browser, "has_display", lambda: True)
    return found


def test_a_page_is_opened_only_if_asked(tmp_path: Path, opened: list[str]) -> None:
    page = tmp_path / "a page.html"
    assert flatmin("theory", "--out", page).exit_code == 0
    assert opened == []
    done = flatmin("theory", "--out", page, "--open")
    assert done.exit_code == 0
    assert opened == [page.resolve().as_uri()]
    assert f"the page: {page}" in words(done.stdout)


@pytest.mark.parametrize("why", ["no display", "no browser", "an error"])
def test_where_nothing_can_be_opened_the_path_is_said(
    tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def fail(address: str) -> bool:
        raise webbrowser.Error("could not locate runnable browser")

    if why == "no display":
        monkeypatch.setattr(browser, "has_display", lambda: False)
    else:
        monkeypatch.setattr(webbrowser, "open", fail if why == "an error" else lambda address: False)
    done = flatmin("theory", "--out", tmp_path / "page.html", "--open")
    assert done.exit_code == 0
    assert opened == []
    assert str(tmp_path / "page.html") in words(done.stderr)
    assert "no browser or no display" in words(done.stderr)


@pytest.mark.parametrize("command", ["demo", "report", "landscape", "theory"])
def test_every_command_that_writes_a_page_has_the_option(command: str) -> None:
    assert "--open" in flatmin(command, "--help").stdout


def test_linux_has_a_display_where_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name in browser.DISPLAYS:
        monkeypatch.delenv(name, raising=False)
    assert not browser.has_display()
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    assert browser.has_display()
    monkeypatch.delenv("WAYLAND_DISPLAY")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert browser.has_display()
