"""The page of `flatmin landscape`."""

from collections.abc import Mapping, Sequence
from typing import Any

from flatmin_lab.report import landscape_part
from flatmin_lab.report.page import render


def landscape_page(seen: Sequence[tuple[str, str | None, Mapping[str, Any]]]) -> str:
    """Of models by name and method, each with its landscape."""
    names: dict[str, int] = {}
    rows: list[landscape_part.Seen] = []
    for name, method, found in seen:
        names[name] = names.get(name, 0) + 1
        shown = name if names[name] == 1 else f"{name} ({names[name]})"
        rows.append((shown, method, [found]))
    return render(
        "landscape.html.jinja",
        part=landscape_part.part(rows),
        facts=seen[0][2]["facts"],
        colours=landscape_part.colours(),
        script=landscape_part.script(),
    )
