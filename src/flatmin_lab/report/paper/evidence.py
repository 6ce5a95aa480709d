"""A part of the report: the paper's tables as far as they were trained, what it claims, what we did otherwise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, get_args

from flatmin_lab.recipes.paper_tables import EXPERIMENTS, SETS, Protocol
from flatmin_lab.report.comparison import settings_of
from flatmin_lab.report.labels import TITLES
from flatmin_lab.report.loader import Broken, Collected, Failure, Run
from flatmin_lab.report.paper.claims import NOTHING, Judged, best_radius, judged
from flatmin_lab.report.paper.deviations import deviations
from flatmin_lab.report.paper.tables import Filled, by_recipe, filled

PAIRS = ("ball", "adversary", "first_version", "compute", "precision")  # each row beside another
TABLES = (
    "table1",
    "table2",
    "table3",
    "ece",
    "sweep",
    "landscape",
    "flatness",
    "spiral",
    *PAIRS,
)  # the rest is in the figures below


@dataclass(frozen=True)
class Under:
    """What there is under one protocol."""

    protocol: str
    tables: list[Filled]
    claims: list[Judged]
    waiting: list[Judged]  # of which one side has not been trained, or not measured, yet
    settings: list[str]  # of the methods, by network and augmentation


@dataclass(frozen=True)
class Evidence:
    under: list[Under]
    deviations: list[str]
    planned: int  # trainings, before they ran
    failed: int  # of these
    missing: list[str]  # of these
    failures: Sequence[Failure]
    costs: Sequence[Mapping[str, Any]]


def evidence(found: Collected, broken: list[Broken]) -> Evidence | None:
    """None where nothing of the paper's tables has been trained."""
    runs = by_recipe(found.runs, broken)
    if not runs:
        return None
    parts = []
    for protocol in get_args(Protocol):
        tables = [filled(EXPERIMENTS[name](protocol), runs) for name in TABLES]
        shown = [table for table in map(_with_something, tables) if table.rows]
        if shown:
            radii = [best_radius(runs, protocol, data) for data in SETS]
            said = [] if protocol == "smoke" else [*judged(runs, protocol), *radii]
            told = [claim for claim in said if claim.verdict != NOTHING]
            waiting = [claim for claim in said if claim.verdict == NOTHING]
            parts.append(Under(protocol, shown, told, waiting, _settings(shown)))
    done = {(name, run.result["seed"]) for name, own in runs.items() for run in own}
    failed = {(failure.name, failure.seed) for failure in found.failures} & set(found.planned)
    missing = [f"{name}, seed {seed}" for name, seed in found.planned if (name, seed) not in done | failed]
    every = [run for own in runs.values() for run in own]
    return Evidence(parts, deviations(every), len(found.planned), len(failed), missing, found.failures, found.costs)


def _settings(tables: Sequence[Filled]) -> list[str]:
    """Of what was trained for the two large tables, by network and augmentation."""
    trained: dict[str, list[Run]] = {}
    for row in (row for table in tables if table.experiment.name in ("table1", "table2") for row in table.rows):
        _, model, augment = row.place
        name = TITLES[model] if augment == "vanilla" else f"{TITLES[model]} with {TITLES[augment]}"
        if row.main:
            trained.setdefault(name, []).extend(row.runs)
    knobs = {name: settings_of([(run.method, run.result["settings"]) for run in own]) for name, own in trained.items()}
    return [f"{name}: {'; '.join(own)}." for name, own in knobs.items() if own]


def _with_something(table: Filled) -> Filled:
    """Only the places of a table, data and network, of which something has been trained; no empty rows and columns.

    Of pairs, only the data sets of which everything has been.
    """
    rows = table.rows
    if table.experiment.name in PAIRS:
        lacking = {row.data for row in rows if not row.has_values}
        rows = [row for row in rows if row.data not in lacking]
    places = {row.place for row in rows if row.has_values}
    rows = [row for row in rows if row.place in places and (row.has_values or any(c.paper for c in row.cells))]
    there = [any(row.cells[n].values or row.cells[n].paper for row in rows) for n in range(len(table.columns))]
    rows = [replace(row, cells=list(compress(row.cells, there))) for row in rows]
    return Filled(table.experiment, list(compress(table.columns, there)), rows)
