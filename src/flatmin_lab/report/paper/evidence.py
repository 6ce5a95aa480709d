"""The report's section about the paper: its tables as far as they have runs, its claims, and where we differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

from flatmin_lab.recipes.experiments import EXPERIMENTS
from flatmin_lab.recipes.experiments.experiment import SETS
from flatmin_lab.recipes.protocols import NAMES as PROTOCOLS
from flatmin_lab.recipes.protocols import OWN, PAPER_LENGTH
from flatmin_lab.report.comparison import settings_of
from flatmin_lab.report.labels import TITLES
from flatmin_lab.report.loader import Failure, LoadedResults, Run, UnusableFile
from flatmin_lab.report.paper.claims import NO_DATA, ClaimVerdict, best_radius, check_claims, families_with
from flatmin_lab.report.paper.deviations import deviations
from flatmin_lab.report.paper.families import Family, NamedFamily, named_families
from flatmin_lab.report.paper.frontier import Frontier, frontiers
from flatmin_lab.report.paper.recovered_curves import Point, figure_8, figure_11
from flatmin_lab.report.paper.regret import MeanRegret, Regret, mean_regrets, regrets
from flatmin_lab.report.paper.step_costs import TimedSetting, timed_settings
from flatmin_lab.report.paper.tables import FilledTable, Row, fill_table, runs_by_recipe

PAIRS = ("ball", "adversary", "first_version", "compute", "precision", "rivals")  # tables that compare rows pairwise
TABLES = (
    "table1",
    "table2",
    "table3",
    "ece",
    "sweep",
    "landscape",
    "flatness",
    "spiral",
    "auto",
    "temperature",
    "vit",
    "best",
    "length",
    "examine",
    *PAIRS,
)  # the rest is in the figures below


@dataclass(frozen=True)
class ProtocolEvidence:
    """Tables and claims under one protocol."""

    name: str
    tables: list[FilledTable]
    claims: list[ClaimVerdict]
    waiting: list[ClaimVerdict]  # claims with a side that is not trained or measured yet
    settings: list[str]  # of the methods, per network and augmentation
    frontiers: list[Frontier]  # what cheaper training modes keep of AMP's gain
    regrets: list[Regret]  # what radii that adjust themselves lose of it
    figure_8: list[Point]
    figure_11: list[Point]
    families: Mapping[str, NamedFamily]  # of what was tested

    @property
    def has_paper_length(self) -> bool:
        """Whether the paper's numbers stand beside these."""
        return self.name in PAPER_LENGTH

    @property
    def mean_regrets(self) -> list[MeanRegret]:
        return mean_regrets(self.regrets)

    @property
    def tested(self) -> list[ClaimVerdict]:
        return [claim for claim in self.claims if not claim.too_few]

    @property
    def too_few(self) -> list[ClaimVerdict]:
        """Claims with fewer than three runs on a side."""
        return [claim for claim in self.claims if claim.too_few]


@dataclass(frozen=True)
class Evidence:
    """The whole section."""

    protocols: list[ProtocolEvidence]
    deviations: list[str]
    planned: int  # runs, recorded before they ran
    failed: int  # of these
    missing: list[str]  # of these
    withdrawn: Sequence[tuple[str, int, str]]  # of these: never to be run
    broken_off: Sequence[tuple[str, int, str]]  # started, and given up
    renamed: int  # results that carried another name when they were trained
    failures: Sequence[Failure]
    timed: list[TimedSetting]  # what a step of ERM and of AMP takes, by setting


def evidence(found: LoadedResults, unusable: list[UnusableFile]) -> Evidence | None:
    """The section; None if there is no run of the paper's tables."""
    runs = runs_by_recipe(found.runs, unusable)
    if not runs:
        return None
    families = families_with({name: Family(*family) for name, family in found.families.items()})
    parts = []
    for protocol in PROTOCOLS:
        experiments = [EXPERIMENTS[name](protocol) for name in TABLES]
        trained = {name for name in runs if name.startswith(f"{protocol}/")}
        tables = [fill_table(one, runs, families) for one in experiments if one.names & trained]
        shown = [table for table in map(_without_empty, tables) if table.rows]
        if shown:
            radii = [best_radius(runs, protocol, data) for data in SETS]
            said = [] if protocol == "smoke" else [*check_claims(runs, protocol, families), *radii]
            decided = [claim for claim in said if claim.verdict != NO_DATA]
            waiting = [claim for claim in said if claim.verdict == NO_DATA]
            cheaper = frontiers(fill_table(EXPERIMENTS["frontier"](protocol), runs, families), found.step_times)
            lost = [one for table in tables if table.experiment.name == "auto" for one in regrets(table)]
            drawn = figure_8(runs, protocol), figure_11(runs, protocol)
            named = named_families(families, trained)
            less = cheaper, lost
            parts.append(ProtocolEvidence(protocol, shown, decided, waiting, _settings(shown), *less, *drawn, named))
    done = {(name, run.result["seed"]) for name, own in runs.items() for run in own}
    failed = {(failure.name, failure.seed) for failure in found.failures} & set(found.planned)
    gone = done | failed | {(name, seed) for name, seed, _ in found.withdrawn}
    missing = [f"{name}, seed {seed}" for name, seed in found.planned if (name, seed) not in gone]
    every = [run for own in runs.values() for run in own]
    renamed = sum("renamed_from" in run.result for run in every)
    planned = len(found.planned), len(failed), missing, found.withdrawn, found.broken_off, renamed
    timed = timed_settings(found.costs, found.step_times)
    return Evidence(parts, deviations(every), *planned, found.failures, timed)


def _settings(tables: Sequence[FilledTable]) -> list[str]:
    """Of the runs in the two large tables, per network and augmentation."""
    trained: dict[str, list[Run]] = {}
    for row in (row for table in tables if table.experiment.name in ("table1", "table2") for row in table.rows):
        model, augment = TITLES[row.place.model], row.place.augment
        name = model if augment == "vanilla" else f"{model} with {TITLES[augment]}"
        if row.main:
            trained.setdefault(name, []).extend(row.runs)
    knobs = {name: settings_of([(run.method, run.result["settings"]) for run in own]) for name, own in trained.items()}
    return [f"{name}: {'; '.join(own)}." for name, own in knobs.items() if own]


def _is_in_table_1(row: Row) -> bool:
    return not row.variant and row.recipe.protocol != OWN and not row.recipe.protocol.exceptions


def _without_empty(table: FilledTable) -> FilledTable:
    """The table without empty rows and columns, and without data sets and networks that have no run.

    In pairwise tables, a data set is kept only if all its rows have runs and it is not complete in table 1.
    """
    rows = table.rows
    if table.experiment.name in PAIRS:
        lacking = {row.data for row in rows if row.main and not row.has_values}
        rows = [row for row in rows if row.data not in lacking]
    if table.experiment.name in (*PAIRS, "auto"):
        told = {row.place for row in rows if row.has_values and not _is_in_table_1(row)}
        rows = [row for row in rows if row.place in told]
    places = {row.place for row in rows if row.has_values}
    rows = [row for row in rows if row.place in places and (row.has_values or any(c.paper for c in row.cells))]
    there = [any(row.cells[n].values or row.cells[n].paper for row in rows) for n in range(len(table.columns))]
    rows = [replace(row, cells=list(compress(row.cells, there))) for row in rows]
    return FilledTable(table.experiment, list(compress(table.columns, there)), rows)
