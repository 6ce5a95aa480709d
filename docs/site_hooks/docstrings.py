"""Docstrings as Markdown. They are written to be read as they stand, in a terminal and in the file:

    an indented block           an equation or code: Markdown has it so too
    lines that begin with >>>   an example, which becomes a block of code
    a word, spaces, a text      a list of arguments, which becomes a table

Everything else is left as it is.
"""

import re
from typing import Any

import griffe

ROW = re.compile(r"(\S+(?: \S+)*?) {2,}(\S.*)")
INDENTED = re.compile(r" {4,}\S")


class PlainText(griffe.Extension):
    """Makes Markdown of every docstring, before it is rendered."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """A docstring, paragraph by paragraph.

    >>> print(markdown("A sum.\\n\\n>>> 1 + 1\\n2"))
    A sum.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    return "\n\n".join(map(_paragraph, re.split(r"\n\s*\n", text.strip("\n"))))


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    if lines[0].startswith(">>>"):
        return "\n".join(["```pycon", *lines, "```"])
    if lines[0].startswith("    "):
        return text
    if len(lines) > 1 and all(ROW.fullmatch(line) or INDENTED.match(line) for line in lines):
        return _table(lines)
    return text


def _table(lines: list[str]) -> str:
    rows: list[list[str]] = []
    for line in lines:
        if found := None if INDENTED.match(line) else ROW.fullmatch(line):
            rows.append([found[1], found[2]])
        else:
            rows[-1][1] += " " + line.strip()
    return "\n".join(["| | |", "|---|---|", *(f"| `{name}` | {what.replace('|', '&#124;')} |" for name, what in rows)])
