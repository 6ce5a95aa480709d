"""A finding: what was checked, the verdict, what was seen in numbers, and what to change.

A crash of the user's code is a finding too, reported with the user's own lines and what was being done.
"""

import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "error", "cannot tell"]

LIBRARIES = (  # whose lines in a traceback mean nothing to a user
    "flatmin",
    "flatmin_lab",
    "torch",
    "importlib",
    "contextlib",
    "typer",
    "click",
)
MAX_LINES = 3  # of the user's, the innermost ones


@dataclass(frozen=True)
class Finding:
    """What a check found. `change` is what to do about it; with the verdict "ok" it is empty, or advice."""

    name: str
    verdict: Verdict
    seen: str
    change: str = ""


class Crash(Exception):  # noqa: N818
    """The user's code raised while something was being done."""

    def __init__(self, doing: str, error: BaseException) -> None:
        super().__init__(doing)
        self.doing, self.error = doing, error

    def finding(self) -> Finding:
        lines = [
            *traceback.format_list(own_lines(self.error)[-MAX_LINES:]),
            *traceback.format_exception_only(self.error),
        ]
        return Finding(self.doing, "error", "".join(lines).rstrip(), "fix this error first")


@contextmanager
def during(doing: str) -> Iterator[None]:
    """Turns an exception inside into a `Crash` of the user's code while `doing` this."""
    try:
        yield
    except Crash:
        raise
    except Exception as error:
        raise Crash(doing, error) from error


def own_lines(error: BaseException) -> list[traceback.FrameSummary]:
    """The user's own lines in a traceback."""
    walked = [
        (frame.f_globals.get("__name__", ""), frame, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    kept = [(frame, line) for module, frame, line in walked if _is_own(module)]
    return list(traceback.StackSummary.extract(iter(kept)))


def _is_own(module: str) -> bool:
    top = module.partition(".")[0]
    return top not in LIBRARIES and not top.startswith("_frozen")


def has_error(findings: Iterable[Finding]) -> bool:
    return any(finding.verdict == "error" for finding in findings)


def first_few(names: Sequence[str], most: int = 4) -> str:
    """The first names, and how many more there are.

    >>> first_few(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
