"""Figures 8 and 11 of the paper as numbers, beside ours; both are of CIFAR-10.

The paper prints no numbers for them: these were read off its figures, and are as exact as a drawn line can be.

    figure 8     the test NLL over the radius ε, with N = 2 and ζ = 2
    figure 11    the training loss over the epochs, as means over some of them; AMP's is the loss at θ + Δ
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from flatmin_lab.data.sources.synthetic import original_name
from flatmin_lab.recipes.experiments.experiment import RESNET, cell
from flatmin_lab.recipes.experiments.paper_tables import sweep
from flatmin_lab.recipes.paper_numbers import FIGURE_8, FIGURE_8_ERM, FIGURE_11
from flatmin_lab.recipes.protocols import PAPER_LENGTH, Protocol
from flatmin_lab.report.columns import column_named
from flatmin_lab.report.loader import Run

Runs = Mapping[str, Sequence[Run]]


@dataclass(frozen=True)
class Point:
    """What is measured, the paper's number, and ours, one per run."""

    label: str
    paper: float | None
    ours: list[float]


def figure_8(runs: Runs, protocol: Protocol) -> list[Point]:
    """ERM, then the radii of the paper and of our sweep, rising; none where nothing was swept."""
    swept = {
        recipe.settings.get("epsilon", 0.0): [column_named("nll").value(run) for run in runs.get(recipe.name, ())]
        for recipe in sweep(protocol).recipes
        if original_name(recipe.data) == "cifar10"
    }
    ours = {radius: [value for value in values if value is not None] for radius, values in swept.items()}
    if not any(ours.values()):
        return []
    theirs = {0.0: FIGURE_8_ERM, **FIGURE_8}
    radii = sorted({*theirs, *(radius for radius, values in ours.items() if values)})
    return [Point(f"ε = {r:g}" if r else "ERM", theirs.get(r), ours.get(r, [])) for r in radii]


def figure_11(runs: Runs, protocol: Protocol) -> list[Point]:
    """The means over the paper's epochs; none under a protocol of another length, or without curves of ours."""
    if protocol not in PAPER_LENGTH:
        return []
    found = []
    for method, first, last, theirs in FIGURE_11:
        own = [_mean_loss(run, first, last) for run in runs.get(cell(protocol, "cifar10", RESNET, method).name, ())]
        where = "AMP at θ + Δ" if method == "amp" else "ERM"
        label = f"{where}, epochs {first} to {last}"
        found.append(Point(label, theirs, [value for value in own if value is not None]))
    return found if any(point.ours for point in found) else []


def _mean_loss(run: Run, first: int, last: int) -> float | None:
    """The training loss over these epochs, counted from 1: at θ, or where AMP moved the weights at θ + Δ."""
    lines = run.lines[first - 1 : last]
    losses = [line.get("train_loss") for line in lines]
    rises = [line.get("sharpness") for line in lines] if run.method == "amp" else [0.0] * len(lines)
    known = [loss + rise for loss, rise in zip(losses, rises, strict=True) if loss is not None and rise is not None]
    return mean(known) if known and len(known) == last - first + 1 else None
