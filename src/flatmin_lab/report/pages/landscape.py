"""Loss landscapes, as a page and as a section of the report: lines, contours, surfaces to turn with the mouse.

Landscapes share a figure only if they were computed alike: with the same directions, reach and images.
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
from flatmin_lab.report.html import data_link, render

NamedLandscapes = tuple[str, str | None, Sequence[Mapping[str, Any]]]  # a model's name, its method, its landscapes
COMPARED_KEYS = ("seed", "reach", "points", "axis")  # equal in landscapes that can be compared


class LandscapeSection(NamedTuple):
    """What the template shows."""

    lines: list[Markup]
    contours: list[list[Markup]]  # a list per split
    surfaces: list[list[dict[str, Any]]]
    link: str
    file: str
    words: str


def _comparable(landscapes: Sequence[NamedLandscapes]) -> list[tuple[str, str | None, Mapping[str, Any]]]:
    """Each model's first landscape with the settings of the majority."""
    kinds = [_settings_key(found) for _, _, own in landscapes for found in own]
    usual = max(kinds, key=kinds.count) if kinds else ""
    chosen = [
        (name, method, next((f for f in own if _settings_key(f) == usual), None)) for name, method, own in landscapes
    ]
    return [(name, method, found) for name, method, found in chosen if found is not None]


def landscape_section(landscapes: Sequence[NamedLandscapes]) -> LandscapeSection | None:
    """The section; None if there is no landscape."""
    comparable = _comparable(landscapes)
    if not comparable:
        return None
    others = [name for name, _, own in landscapes if own and name not in [known for known, _, _ in comparable]]
    first = comparable[0][2]
    axis, splits = first["axis"], list(first["splits"])
    lines = {split: {name: found["splits"][split]["line"] for name, _, found in comparable} for split in splits}
    styles = {name: method for name, method, _ in comparable}
    pictures = " and ".join(f"{first['splits'][split]['pictures']:,} {split}" for split in splits)
    top = max(figures.landscapes.top_of(list(own.values())) for own in lines.values())
    drawn = [figures.lines(axis, {split: own}, methods=styles, top=top) for split, own in lines.items()]
    planes = {
        split: {
            name: found["splits"][split]["plane"] for name, _, found in comparable if found["splits"][split]["plane"]
        }
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
    lost = [name for name, _, found in comparable if any(s["line"][middle] is None for s in found["splits"].values())]
    data = {"axis": axis, "lines": lines, "planes": planes, **{key: first[key] for key in COMPARED_KEYS}}
    seeds = ", ".join(
        f"{name}, seed {found['training_seed']}" for name, _, found in comparable if "training_seed" in found
    )
    return LandscapeSection(
        [Markup(svg(line)) for line in drawn],
        [[Markup(svg(contour)) for contour in own] for own in contours],
        surfaces,
        data_link(data),
        "landscapes.json",
        _caption(first, pictures, seeds, lost, others),
    )


def _settings_key(found: Mapping[str, Any]) -> str:
    counts = [split["pictures"] for split in found["splits"].values()]
    return json.dumps([[found.get(key) for key in COMPARED_KEYS], list(found["splits"]), counts])


def _caption(found: Mapping[str, Any], pictures: str, seeds: str, lost: Sequence[str], others: Sequence[str]) -> str:
    apart = f" Computed with other settings, and not shown: {', '.join(others)}." if others else ""
    nowhere = f" {' and '.join(lost)}: the loss is not finite at the weights themselves." if lost else ""
    of = f" Shown: {seeds}." if seeds else ""
    return (
        f"The loss at θ + x·d₁ + y·d₂ on {pictures} examples, in eval mode, with {found['points']} points per "
        f"side. The directions are random (seed {found['seed']}, the same noise for every model) and scaled to each "
        f"filter of the weights: at 1, a filter has moved by its own length. Biases and BatchNorm are not "
        f"moved.{of}{nowhere}{apart}"
    )


def surface_script() -> Markup:
    return Markup((files("flatmin_lab.report") / "templates" / "surface.js").read_text())


def height_colours() -> list[str]:
    """The colours of heights, from low to high."""
    colours = mpl.colormaps["cividis"]  # a copy each time
    return [to_hex(colours(step / 32)) for step in range(33)]


def landscape_page(landscapes: Sequence[tuple[str, str | None, Mapping[str, Any]]]) -> str:
    """The page of several models, each with its name, method and landscape."""
    names: dict[str, int] = {}
    rows: list[NamedLandscapes] = []
    for name, method, found in landscapes:
        names[name] = names.get(name, 0) + 1
        shown = name if names[name] == 1 else f"{name} ({names[name]})"
        rows.append((shown, method, [found]))
    return render(
        "landscape.html.jinja",
        part=landscape_section(rows),
        facts=landscapes[0][2]["facts"],
        colours=height_colours(),
        script=surface_script(),
    )
