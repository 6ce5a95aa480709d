"""Tables and figures as experiments, by name: the paper's, and those that it does not have.

    experiment = EXPERIMENTS["table1"]("short")
    experiment.recipes[0].name                  short/svhn-preactresnet18-erm

experiment.py      what an experiment is: its recipes, and what is measured of its networks
paper_tables.py    the paper's tables and figures
readings.py        readings of its text and code, equal compute, precision
cheaper_amp.py     rivals of AMP, its gain at lower cost, a radius that adjusts itself
beyond_paper.py    other recipes and networks than the paper's
"""

from collections.abc import Callable
from functools import cache

from flatmin_lab.recipes.experiments import beyond_paper, cheaper_amp, paper_tables, readings
from flatmin_lab.recipes.experiments.experiment import Experiment
from flatmin_lab.recipes.protocols import NAMES, Protocol
from flatmin_lab.recipes.recipe import Recipe

__all__ = ["EXPERIMENTS", "Experiment", "by_name"]

# each is made once per protocol: a report asks for all of them
EXPERIMENTS: dict[str, Callable[[Protocol], Experiment]] = {
    make.__name__: cache(make)
    for make in (
        paper_tables.table1,
        paper_tables.table2,
        paper_tables.table3,
        paper_tables.ece,
        paper_tables.sweep,
        paper_tables.cost,
        paper_tables.curves,
        paper_tables.landscape,
        paper_tables.flatness,
        paper_tables.spiral,
        readings.ball,
        readings.adversary,
        readings.first_version,
        readings.compute,
        readings.precision,
        cheaper_amp.rivals,
        cheaper_amp.frontier,
        cheaper_amp.temperature,
        cheaper_amp.auto,
        beyond_paper.vit,
        beyond_paper.best,
        beyond_paper.length,
        beyond_paper.examine,
    )
}


@cache
def by_name() -> dict[str, Recipe]:
    """Every recipe of every experiment under every protocol."""
    experiments = [make(protocol) for make in EXPERIMENTS.values() for protocol in NAMES]
    return {recipe.name: recipe for experiment in experiments for recipe in (*experiment.recipes, *experiment.beside)}
