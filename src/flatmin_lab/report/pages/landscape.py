"""Landscapes, on a page of their own and as a section of the report: lines, contours, surfaces to turn with the mouse.

Landscapes are shown side by side only where they were computed alike: the same directions, reach and pictures.
"""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.colors import to_hex

from flatmin_lab.report import figures
from flatmin_lab.report.figures.style import svg
from flatmin_lab.report.html import link, render

Seen = tuple[str, str | None, Sequence[Mapping[str, Any]]]  # a name, its method, its landscapes
ALIKE = ("seed", "reach", "points", "axis")


class Part(NamedTuple):
    """What the template shows."""

    lines: list[Markup]
    contours: list[list[Markup]]  # those of a split together
    surfaces: list[list[dict[str, Any]]]
    link: str
    file: str
    words: str


def _alike(seen: Sequence[Seen]) -> list[tuple[str, str | None, Mapping[str, Any]]]:
    """Of each model its first landscape that was computed as most of them were."""
    kinds = [_kind(found) for _, _, own in seen for found in own]
    usual = max(kinds, key=kinds.count) if kinds else ""
    chosen = [(name, method, next((f for f in own if _kind(f) == usual), None)) for name, method, own in seen]
    return [(name, method, found) for name, method, found in chosen if found is not None]


def part(seen: Sequence[Seen]) -> Part | None:
    """What there is to show; None where there is no landscape."""
    alike = _alike(seen)
    if not alike:
        return None
    others = [name for name, _, own in seen if own and name not in [known for known, _, _ in alike]]
    first = alike[0][2]
    axis, splits = first["axis"], list(first["splits"])
    lines = {split: {name: found["splits"][split]["line"] for name, _, found in alike} for split in splits}
    styles = {name: method for name, method, _ in alike}
    pictures = " and ".join(f"{first['splits'][split]['pictures']:,} {split}" for split in splits)
    top = max(figures.landscapes.top_of(list(own.values())) for own in lines.values())
    drawn = [figures.lines(axis, {split: own}, methods=styles, top=top) for split, own in lines.items()]
    planes = {
        split: {name: found["splits"][split]["plane"] for name, _, found in alike if found["splits"][split]["plane"]}
        for split in splits
    }
    contours = [
        [
            figures.contours(axis, axis, {f"{name}, {split}": plane}, levels=figures.landscapes.levels_of(own.values()))
            for name, plane in own.items()
        ]
        for split, own in planes.items()
        if own
    ]
    middle = len(axis) // 2
    surfaces = [
        [
            {"title": f"{name}, {split}", "axis": axis, "plane": plane}
            for name, plane in own.items()
            if plane[middle][middle] is not None
        ]
        for split, own in planes.items()
        if own
    ]
    lost = [name for name, _, found in alike if any(s["line"][middle] is None for s in found["splits"].values())]
    data = {"axis": axis, "lines": lines, "planes": planes, **{key: first[key] for key in ALIKE}}
    seeds = ", ".join(f"{name}, seed {found['training_seed']}" for name, _, found in alike if "training_seed" in found)
    return Part(
        [Markup(svg(line)) for line in drawn],
        [[Markup(svg(contour)) for contour in own] for own in contours],
        surfaces,
        link(data),
        "landscapes.json",
        _words(first, pictures, seeds, lost, others),
    )


def _kind(found: Mapping[str, Any]) -> str:
    counts = [split["pictures"] for split in found["splits"].values()]
    return json.dumps([[found.get(key) for key in ALIKE], list(found["splits"]), counts])


def _words(found: Mapping[str, Any], pictures: str, seeds: str, lost: Sequence[str], others: Sequence[str]) -> str:
    apart = f" Computed otherwise, and not shown: {', '.join(others)}." if others else ""
    nowhere = f" {' and '.join(lost)}: the loss is not finite at the weights themselves." if lost else ""
    of = f" Shown: {seeds}." if seeds else ""
    return (
        f"The loss at θ + x·d₁ + y·d₂ on {pictures} examples, in eval mode, at {found['points']} points a side. The "
        f"directions are random (seed {found['seed']}, the same noise for every model), each filter as long as that "
        f"filter of the weights; biases and BatchNorm stay. At 1 a filter has moved by its own "
        f"length.{of}{nowhere}{apart}"
    )


def script() -> Markup:
    return Markup(files("flatmin_lab.report").joinpath("templates", "surface.js").read_text())


def colours() -> list[str]:
    """The colour of a height, from low to high."""
    return [to_hex(mpl.colormaps["cividis"](step / 32)) for step in range(33)]


def landscape_page(seen: Sequence[tuple[str, str | None, Mapping[str, Any]]]) -> str:
    """Of models by name and method, each with its landscape."""
    names: dict[str, int] = {}
    rows: list[Seen] = []
    for name, method, found in seen:
        names[name] = names.get(name, 0) + 1
        shown = name if names[name] == 1 else f"{name} ({names[name]})"
        rows.append((shown, method, [found]))
    return render(
        "landscape.html.jinja",
        part=part(rows),
        facts=seen[0][2]["facts"],
        colours=colours(),
        script=script(),
    )
