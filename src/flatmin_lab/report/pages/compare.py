"""The page of `flatmin compare`, made only from its numbers (comparison.json)."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from flatmin.comparison import LONGER, PLAIN, show
from flatmin.comparison.verdict import PERCENT
from flatmin_lab.comparing.comparison_file import TITLES, interval_text
from flatmin_lab.report.figures.compare import Curve, Gap, forest, legend, seed_curves
from flatmin_lab.report.figures.style import svg
from flatmin_lab.report.html import render

TRAINING_LOSS = "training loss"


def compare_page(content: Mapping[str, Any]) -> str:
    names = {one["key"]: one["name"] for one in content["contenders"]}
    measures = _decisive_first(content)
    drawn = [svg(forest(_title(measure), gaps(content, measure))) for measure in measures]
    lines = [
        svg(seed_curves(_title(measure), found))
        for measure in (*measures, TRAINING_LOSS)
        if (found := curves(content, measure))
    ]
    return render(
        "compare.html.jinja",
        found=content,
        measures=[_title(measure) for measure in measures],
        decides=TITLES.get(content["measure"], content["measure"]),
        unit=", points" if content["measure"] in PERCENT else "",
        rows=[row(content, measures, number) for number in range(len(names))] if measures else [],
        forests=[Markup(one) for one in drawn],
        curves=[Markup(one) for one in lines],
        legend=[(Markup(sample), name) for sample, name in legend(names)],
    )


def _decisive_first(content: Mapping[str, Any]) -> list[str]:
    return sorted(content["rows"], key=lambda measure: measure != content["measure"])


def _title(measure: str) -> str:
    return f"{TITLES.get(measure, measure)}{', %' if measure in PERCENT else ''}"


def row(content: Mapping[str, Any], measures: Sequence[str], number: int) -> dict[str, Any]:
    """A contender's line of the table."""
    contender, main = content["contenders"][number], content["rows"][content["measure"]][number]
    return {
        "is_amp": contender["key"] not in (PLAIN, LONGER),
        "name": contender["name"],
        "seeds": len(main["values"]),
        "failed": main["failed"],
        "passes": f"{contender['passes']:g}",
        "numbers": [_number(measure, content["rows"][measure][number]) for measure in measures],
        "from_plain": interval_text(content["measure"], main["from_plain"]),
        "from_longer": interval_text(content["measure"], main["from_longer"]),
    }


def _number(measure: str, found: Mapping[str, Any]) -> tuple[str, str]:
    """The mean, and the standard deviation if there is one, to two digits."""
    if found["mean"] is None:
        return "—", ""
    mean, spread = show(measure, found["mean"]).removesuffix(" %"), found["deviation"]
    if spread is None:
        return mean, ""
    return mean, f"{100 * spread:.2f}" if measure in PERCENT else f"{spread:.2g}"


def gaps(content: Mapping[str, Any], measure: str) -> list[Gap]:
    """The differences of all contenders but the plain one, in per cent where the measure is a share."""
    scale = 100 if measure in PERCENT else 1

    def scaled(found: Mapping[str, Any] | None) -> tuple[float, float | None, float | None] | None:
        if found is None:
            return None
        low, high = (None if found[end] is None else scale * found[end] for end in ("low", "high"))
        return scale * found["mean"], low, high

    short = {one["key"]: _short(one) for one in content["contenders"]}
    return [
        Gap(short[one["contender"]], scaled(one["from_plain"]), scaled(one["from_longer"]))
        for one in content["rows"][measure]
        if one["contender"] != PLAIN
    ]


def _short(contender: Mapping[str, Any]) -> str:
    if contender["key"] == LONGER:
        return f"plain, {contender['length']:g}×"
    return "AMP, ε found" if contender["epsilon"] is None else f"AMP, ε = {contender['epsilon']:.4g}"


def curves(content: Mapping[str, Any], measure: str) -> list[Curve]:
    """Each contender's curves over its passes, those that have the measure."""
    scale = 100 if measure in PERCENT else 1
    found = []
    for contender in content["contenders"]:
        passes = contender["passes"] / contender["length"]  # of an epoch
        seeds = [
            [(point["epoch"] * passes, scale * point[measure]) for point in one["curve"] if measure in point]
            for one in content["outcomes"]
            if one["contender"] == contender["key"]
        ]
        if kept := [points for points in seeds if points]:
            found.append(Curve(contender["key"], kept))
    return found
