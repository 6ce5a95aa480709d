"""The pages of the documentation, and the blocks of code in them."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from tests import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


class Block(NamedTuple):
    """What stands between two fences."""

    page: Path
    language: str
    text: str


def blocks(page: Path, language: str | None = None) -> list[Block]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(page, name, text) for name, text in found if language in (None, name)]


def after(diff: str) -> str:
    """What stands there when the change has been made."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))


def before(diff: str) -> str:
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("+"))


def code(page: Path) -> list[str]:
    """The Python of a page: its blocks, and both sides of its diffs."""
    diffs = [block.text for block in blocks(page, "diff")]
    return [*(block.text for block in blocks(page, "python")), *map(after, diffs), *map(before, diffs)]


def is_program(text: str) -> bool:
    """Does it bring all that it needs, and train a model of its own?"""
    return text.startswith("import torch\n")


def commands(page: Path) -> list[str]:
    """The command lines of a page, in its order and without their comments."""
    text = "".join(block.text for block in blocks(page, "bash")).replace("\\\n", " ")
    return [shlex.join(words) for line in text.splitlines() if (words := shlex.split(line, comments=True))]
