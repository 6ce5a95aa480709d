"""An experiment: which runs a table or a figure needs under a protocol, and what is measured of them.

    cell("short", "cifar10", "preactresnet18", "amp").name          short/cifar10-preactresnet18-amp

A run may serve several experiments: the calibration figure, the attacks and the landscapes use table 1's networks. So a
recipe's name says what it trains, not which table asked for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from flatmin_lab.data.augment.transforms import Kind
from flatmin_lab.data.sources.synthetic import SUFFIX
from flatmin_lab.recipes.defaults import SMALL_DATA
from flatmin_lab.recipes.protocols import PROTOCOLS, TABLE_1, Protocol, method_settings, recipe_fields
from flatmin_lab.recipes.recipe import Job, Recipe, perturbation

Measurement = Literal[
    "attack", "flatness", "batch_rise", "spectrum", "scaled", "selective", "outside", "landscape", "boundary"
]
SETS = ("svhn", "cifar10", "cifar100")
RESNET = TABLE_1[0]
SMOKE_MODEL_SETTINGS: dict[str, dict[str, Any]] = {
    "preactresnet18": {"width": 4},
    "vgg16": {"width": 4, "hidden": 16},
    "wideresnet28_10": {"depth": 10, "width": 1},
    "pyramidnet164_270": {"depth": 11, "alpha": 6},
    "vit": {"depth": 1, "width": 12},
}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or a figure: `parts` is what is measured besides error, NLL and calibration.

    One without trials times a few steps, and trains no network to the end.
    """

    name: str
    title: str
    protocol: Protocol
    recipes: tuple[Recipe, ...]
    trials: int
    parts: tuple[Measurement, ...] = ()
    beside: tuple[Recipe, ...] = ()  # rows of other experiments, shown where they have been trained
    in_paper: str = ""  # which of the paper's tables, figures or sections this is

    @cached_property
    def names(self) -> frozenset[str]:
        """Of all recipes it shows."""
        return frozenset(recipe.name for recipe in (*self.recipes, *self.beside))

    def jobs(self, seeds: tuple[int, ...] | None = None) -> list[Job]:
        """Seed by seed, so that an interrupted CPU leaves complete tables; a GPU goes data set by data set."""
        chosen = (seeds or range(self.trials)) if self.trials else ()
        return [Job(recipe, seed) for seed in chosen for recipe in self.recipes]


def cell(
    protocol: Protocol,
    data: str,
    model: str,
    method: str,
    *,
    augment: Kind = "vanilla",
    variant: str = "",
    **changes: Any,
) -> Recipe:
    """A cell of the paper's tables under a protocol; a variant has a name, and recipe fields that differ."""
    words = [data, model, method, *([augment] if augment != "vanilla" else []), *([variant] if variant else [])]
    values: dict[str, Any] = recipe_fields(protocol, data, model, method, augment)
    if protocol == "smoke":
        small = {**SMOKE_MODEL_SETTINGS[model], **values.get("model_settings", {})}
        values |= {"data": f"{data}{SUFFIX}", "model_settings": small, "batch_size": 20}
    else:
        values |= {"data": data, "precision": "bf16", "channels_last": True, "compile": True}
    settings: Mapping[str, Any] = changes.pop("settings", {})
    recipe = Recipe(
        **values,
        name=f"{protocol}/{'-'.join(words)}",
        model=model,
        method=method,
        epochs=PROTOCOLS[protocol].epochs,
    )
    known = perturbation(recipe) if method == "amp" else {}
    return replace(recipe, settings={**known, **method_settings(protocol, method), **settings}, **changes)


def experiment_of(
    name: str,
    title: str,
    protocol: Protocol,
    recipes: list[Recipe],
    *,
    trials: int | None = None,
    parts: tuple[Measurement, ...] = (),
    in_paper: str = "",
) -> Experiment:
    return Experiment(
        name=name,
        title=title,
        protocol=protocol,
        recipes=tuple(recipes),
        trials=PROTOCOLS[protocol].trials if trials is None else trials,
        parts=parts,
        in_paper=in_paper,
    )


def small_fields(data: str, protocol: Protocol) -> dict[str, Any]:
    """A small data set's own recipe, which `smoke` shortens."""
    shortened = {"epochs": PROTOCOLS["smoke"].epochs} if protocol == "smoke" else {}
    return {"data": data, **SMALL_DATA[data], **shortened}


def home_of(protocol: Protocol) -> Protocol:
    """The protocol whose runs of small data sets it shares: these have no crops, and one recipe for both versions."""
    return "paper" if protocol == "paper-v2" else protocol
