"""The page about the line between two models, with the barrier in words."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from markupsafe import Markup

from flatmin_lab.report import figures
from flatmin_lab.report.figures.style import svg
from flatmin_lab.report.html import data_link, render

KINDS = {"pictures": "images", "points": "points"}  # what evaluations call the data


class BetweenSection(NamedTuple):
    """What the template shows."""

    first: str
    second: str
    sentences: list[str]
    drawings: list[Markup]  # of the loss, of the error
    link: str
    words: str


def between_page(names: tuple[str, str], found: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The page of a line between two models, given their names."""
    first, second = names if names[0] != names[1] else (f"{names[0]} (1)", f"{names[1]} (2)")
    return render("between.html.jinja", part=_section(first, second, found), facts=facts)


def _section(first: str, second: str, found: Mapping[str, Any]) -> BetweenSection:
    renewed = ""
    if found["renewed"] is not None:
        augmented = ", augmented as in training" if found["renewed"]["augmented"] else ""
        renewed = (
            " BatchNorm's statistics were recomputed at every point, the ends included, on "
            f"{found['renewed']['pictures']:,} training {KINDS[found['kind']]}{augmented}."
        )
    drawn = [
        figures.between(
            measure,
            found["ts"],
            {split: own[key] for split, own in found["splits"].items()},
            ends=(first, second),
        )
        for measure, key in (("loss", "losses"), ("error, %", "errors"))
    ]
    return BetweenSection(
        first,
        second,
        barrier_sentences(found),
        [Markup(svg(one)) for one in drawn],
        data_link(found),
        f"At {found['points']} points, in eval mode.{renewed} The thin lines join the two ends: the barrier is what "
        "rises above them.",
    )


def barrier_sentences(found: Mapping[str, Any]) -> list[str]:
    """How high the loss rises between the two models, a sentence per split."""
    return [
        _sentence(f"{own['pictures']:,} {split} {KINDS[found['kind']]}", own) for split, own in found["splits"].items()
    ]


def _sentence(where: str, own: Mapping[str, Any]) -> str:
    losses = own["losses"]
    ends = [losses[0], losses[-1]]
    if own["barrier"] is None or None in ends:
        return f"On {where}: the loss is not finite everywhere on the line, so the barrier has no height."
    shown = " and ".join(f"{end:.3f}" for end in ends)
    if own["barrier"] <= 0:
        return (
            f"On {where}: no barrier. The loss stays on or below the straight line between the losses of the two ends, "
            f"{shown}."
        )
    rise = f"the error rises by up to {100 * own['error_barrier']:.1f} percentage points"
    return (
        f"On {where}: a barrier of {own['barrier']:.3f} at t = {own['highest']:.3g}. The loss rises that far above the "
        f"straight line between the losses of the two ends, {shown}; {rise}."
    )
