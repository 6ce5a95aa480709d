"""What a cheaper training mode costs compared with ERM, from the measured milliseconds of its kinds of steps.

    cost = Σ share · ms(kind) / ms(erm)        over the kinds of steps that a run has, times its length over ERM's

`flatmin bench` times the kinds in turn, in one process (contenders.py): a step without a perturbation, one with, and
one with an ascent on a quarter of the batch. A mode with another kind of step has no measured cost, only passes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flatmin_lab.bench.time_estimate import kinds_of_steps
from flatmin_lab.methods import resolve_settings
from flatmin_lab.recipes.recipe import Recipe

# the forms: as the laboratory trains on a GPU, the same without torch.compile, and plain PyTorch
CAPTURED, GRAPH, EAGER = "compiled", "graph", "eager"


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds per step of each contender, by form, for one network on one machine."""

    hardware: str
    model: str
    batch_size: int
    precision: str
    ms: Mapping[str, Mapping[str, float]]  # form → contender → median
    source: str = ""  # machine, torch and commit, in words

    def fits(self, recipe: Recipe, hardware: str) -> bool:
        """Are they of this network, with these batches, on that machine?"""
        known = (self.hardware, self.model, self.batch_size, self.precision)
        return known == (hardware, recipe.model, recipe.batch_size, recipe.precision)

    def cost(self, recipe: Recipe, base: Recipe, form: str) -> float | None:
        """The mean step of the recipe over one of ERM, times its length over the base's; None where not measured."""
        ms = self.ms.get(form, {})
        kinds = [(share, contender_of(kind)) for share, kind in kinds_of_steps(recipe)]
        if "erm" not in ms or any(name not in ms for _, name in kinds):
            return None
        return sum(share * ms[name or ""] for share, name in kinds) / ms["erm"] * recipe.epochs / base.epochs


def contender_of(kind: Recipe) -> str | None:
    """The contender of `flatmin bench` that takes this recipe's steps, all of one kind; None if there is none.

    >>> contender_of(Recipe(data="cifar10", model="preactresnet18", method="amp", settings={"ascent_share": 0.25}))
    'amp-quarter'
    """
    if kind.method != "amp":
        return "erm" if kind.method == "erm" else None
    settings = resolve_settings("amp", kind.settings)
    if settings["epsilon"] == 0:
        return "amp-idle"
    by_share = {1.0: "amp", 0.25: "amp-quarter"}
    return by_share.get(float(settings.get("ascent_share", 1.0))) if settings["inner_iter"] == 1 else None


def step_times(benchmark: Mapping[str, Any]) -> list[StepTimes]:
    """One for each table of a file that `flatmin bench` wrote, without rows that failed or have several models."""
    found = []
    for table in benchmark["tables"]:
        ms: dict[str, dict[str, float]] = {}
        for row in table["rows"]:
            if "ms" in row and row["models"] == 1:
                ms.setdefault(row["form"], {})[row["method"]] = row["ms"]
        where = (benchmark["hardware"], table["model"], table["batch_size"], benchmark["precision"])
        versions = [f"{name} {benchmark[name]}" for name in ("torch", "commit") if benchmark.get(name)]
        source = ", ".join([benchmark["hardware"], *versions])
        found.append(StepTimes(*where, ms, source))
    return found
