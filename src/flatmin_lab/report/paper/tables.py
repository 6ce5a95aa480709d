"""A table or figure of the paper, filled with our results beside the paper's.

Rows are the experiment's recipes, cells the values of all seeds that are there. At the paper's own length,
its numbers are shown beside ours, and a cell says whether the two agree (stats.py). The paper's are from the best test
epoch, which its published code reports: so they are in a row with ours from that epoch, below the last epoch's row.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any, NamedTuple

from flatmin_lab.data.sources.synthetic import original_name
from flatmin_lab.recipes.experiments import Experiment, by_name
from flatmin_lab.recipes.paper_numbers import Value, reported
from flatmin_lab.recipes.protocols import OWN, PAPER_LENGTH, PROTOCOLS, kind_of
from flatmin_lab.recipes.recipe import EXCEPTIONS, Job, Recipe
from flatmin_lab.report import schema
from flatmin_lab.report.columns import Column, as_in_paper, at_best_epoch, column_named
from flatmin_lab.report.figures.style import NAMES
from flatmin_lab.report.html import mean_and_std
from flatmin_lab.report.labels import SIGNS
from flatmin_lab.report.loader import Run, UnusableFile, read_result
from flatmin_lab.report.paper.claims import families_with
from flatmin_lab.report.paper.families import Families, Family, p_of_pair, split_name
from flatmin_lab.report.stats import LEVEL, agreement, agrees
from flatmin_lab.runs.result_store import PLANNED, ResultStore, differs
from flatmin_lab.system.json_data import read_json

COLUMNS = {
    "table1": ("error", "nll"),
    "table2": ("error",),
    "table3": ("fgsm_normalised", "pgd_normalised", "fgsm_error", "pgd_error"),
    "ece": ("ece",),
    "sweep": ("clean_train_nll", "nll", "error", "ece"),
    "curves": ("train_loss", "nll"),
    "landscape": ("landscape_rise",),
    "adversary": ("error", "nll", "fgsm_normalised", "pgd_normalised"),
    "flatness": ("worst_case_loss", "rise", "worst_at_half", "eigenvalue", "trace", "batch_rise", "batch_rise_test"),
    "length": ("error", "nll", "ece", "training_time"),
    "temperature": ("nll_scaled", "ece_scaled", "temperature"),
    "examine": ("aurc", "fpr95_svhn", "fpr95_cifar", "spectrum_largest", "spectrum_trace", "negative_curvature"),
}
DEFAULT_COLUMNS = ("error", "nll", "ece")
USUAL_SETTINGS = ("ball", "inner_lr")  # the same in all rows of AMP that follow no protocol
# how rows that follow no protocol may differ from ERM's among them
DIFFERENCES: dict[str, Callable[[Any], str]] = {
    **EXCEPTIONS,
    "batch_size": lambda size: f"batches of {size}",
    "schedule": lambda name: f"schedule {name}",
    "lr": lambda rate: f"rate {rate:g}",
    "optimizer": lambda name: name,
    "exempt_norms": lambda _: "norms exempt from decay",
}
BESIDE_PAPER = ("table1", "table2", "table3", "ece", "first_version")  # the others compare ours with ours


@dataclass(frozen=True)
class Cell:
    values: list[float]  # comparable with the paper's
    paper: Value | None
    agrees: bool | None  # with the paper; None if unknown
    p: float | None = None  # against ERM, corrected for its family
    better: bool | None = None  # than ERM; None if not significant
    compared: list[float] = field(default_factory=list)  # compared between methods

    @property
    def agreement(self) -> str:
        return agreement(self.values, self.agrees)

    def shown(self, digits: int, mark: str = "") -> str:
        """The value that methods are compared by, and the smoothed one if it differs."""
        return f"{mean_and_std(self.compared, digits)}{mark} {self.smoothed(digits)}".rstrip()

    def smoothed(self, digits: int) -> str:
        """The value that compares with the paper's, if methods are compared by another."""
        apart = self.values and self.values != self.compared
        return f"(smoothed: {mean_and_std(self.values, digits)})" if apart else ""


class Place(NamedTuple):
    """What the rows of a block share."""

    data: str
    model: str
    augment: str
    label_noise: float  # the share of wrong labels
    validation: bool  # are the images held out of the training set?


@dataclass(frozen=True)
class Row:
    recipe: Recipe
    runs: list[Run]
    cells: list[Cell]
    main: bool = True  # of the experiment itself
    variant: str = ""  # the precision or protocol, if it differs from the other rows'
    at_best_epoch: bool = False  # its numbers are of the best test epoch, and not of the last

    @property
    def data(self) -> str:
        return original_name(self.recipe.data)

    @property
    def count(self) -> int:
        """Runs that have a value in these columns."""
        return max((len(cell.values) for cell in self.cells), default=0)

    @property
    def has_values(self) -> bool:
        return self.count > 0

    @property
    def family(self) -> str:
        """The name of the family that its comparisons belong to."""
        return split_name(self.recipe.name)[0]

    @property
    def place(self) -> Place:
        recipe = self.recipe
        return Place(self.data, recipe.model, kind_of(recipe.augment), recipe.label_noise, recipe.validation)

    @property
    def name(self) -> str:
        """The method, and how it differs from the paper's."""
        if self.at_best_epoch:
            return "at the best test epoch"
        return self._with([self.variant, *self.recipe.protocol.exceptions, *self._own_settings])

    @property
    def mode(self) -> str:
        """The method with its own settings, which rows of several lengths share."""
        return self._with(self._own_settings)

    @property
    def _own_settings(self) -> list[str]:
        settings = self.recipe.settings if self.recipe.protocol == OWN else {}
        return [f"{key} {value}" for key, value in settings.items() if key not in USUAL_SETTINGS]

    def _with(self, differences: Iterable[str]) -> str:
        apart = ", ".join(filter(None, differences))
        for name, sign in SIGNS.items():
            apart = apart.replace(name, sign)
        return f"{NAMES[self.recipe.method]}{f' ({apart})' if apart else ''}"


@dataclass(frozen=True)
class FilledTable:
    experiment: Experiment
    columns: list[Column]
    rows: list[Row]

    @property
    def in_paper(self) -> list[bool]:
        """For each column, whether the paper has a value in it."""
        return [any(row.cells[place].paper for row in self.rows) for place in range(len(self.columns))]

    @property
    def with_agreement(self) -> list[bool]:
        """For each column, whether agreement with the paper is known for any cell."""
        return [any(row.cells[place].agrees is not None for row in self.rows) for place in range(len(self.columns))]

    @property
    def trained(self) -> list[Row]:
        """The rows with values."""
        return [row for row in self.rows if row.has_values]

    @property
    def untrained(self) -> list[Row]:
        """The rows for which only the paper has values."""
        return [row for row in self.rows if not row.has_values]

    @property
    def untrained_names(self) -> list[str]:
        return list(dict.fromkeys(row.name for row in self.untrained))

    @property
    def title(self) -> str:
        name, title = self.experiment.name, self.experiment.title
        return f"Table {name[-1]}: {title}" if name.startswith("table") else title[0].upper() + title[1:]

    @property
    def short_title(self) -> str:
        """In a list of contents."""
        name, title = self.experiment.name, self.experiment.title
        return f"table {name[-1]}" if name.startswith("table") else title.partition(":")[0]

    @property
    def has_tries(self) -> bool:
        """Are there rows of held-out images beside rows of test images?"""
        return {row.place.validation for row in self.trained} == {True, False}


def fill_table(
    experiment: Experiment, runs: Mapping[str, Sequence[Run]], families: Families | None = None
) -> FilledTable:
    """The table with all runs of its recipes (`runs`: by recipe name), whatever their seeds."""
    columns = [column_named(name) for name in COLUMNS.get(experiment.name, DEFAULT_COLUMNS)]
    rows = []
    for recipe in (*experiment.recipes, *(recipe for recipe in experiment.beside if recipe.name in runs)):
        own = [run.averaged() for run in runs.get(recipe.name, ())]
        main = recipe in experiment.recipes
        rows.append(
            Row(recipe, own, [cell_of(recipe, own, column) for column in columns], main, _variant(recipe, experiment))
        )
    places = list(dict.fromkeys(row.place for row in rows))
    rows.sort(key=lambda row: places.index(row.place))  # additional rows go below the block they belong to
    tested = _with_tests(rows, columns, families_with(families or {}))
    if experiment.name not in BESIDE_PAPER:
        return FilledTable(experiment, columns, [_without_paper(row) for row in tested])
    return FilledTable(experiment, columns, [one for row in tested for one in _readings(row, columns)])


def _without_paper(row: Row) -> Row:
    return replace(row, cells=[replace(cell, paper=None, agrees=None) for cell in row.cells])


def _variant(recipe: Recipe, experiment: Experiment) -> str:
    protocol, usual = recipe.name.partition("/")[0], experiment.recipes[0]
    elsewhere = f"protocol {protocol}" if recipe in experiment.beside and protocol != experiment.protocol else ""
    if recipe.protocol == OWN:  # small data sets have their own
        return elsewhere or ", ".join(_differences(recipe, experiment))
    return elsewhere or ("" if recipe.precision == usual.precision else recipe.precision)


def _differences(recipe: Recipe, experiment: Experiment) -> list[str]:
    """From the experiment's first ERM with these data and network that follows no protocol but has its length."""
    alike = [
        one
        for one in experiment.recipes
        if (one.method, one.data, one.model, one.validation, one.protocol)
        == ("erm", recipe.data, recipe.model, recipe.validation, OWN)
    ]
    usual = PROTOCOLS[experiment.protocol].epochs
    base = next((one for one in alike if one.epochs == usual), alike[0] if alike else recipe)
    apart = {key for key in DIFFERENCES if getattr(recipe, key) != getattr(base, key)}
    apart |= {"epochs"} if experiment.name == "length" else set()
    return [say(getattr(recipe, key)) for key, say in DIFFERENCES.items() if key in apart]


def _readings(row: Row, columns: Sequence[Column]) -> list[Row]:
    """The row and, where the paper has a number and our runs a curve, the row of the best test epoch below it.

    The paper's number moves there, and agreement with it.
    """
    cells, best = [], []
    for cell, column in zip(row.cells, columns, strict=True):
        values = [value for run in row.runs if (value := at_best_epoch(run, column)) is not None]
        if cell.paper is None or not values:
            cells.append(cell)
            best.append(Cell([], None, None))
        else:
            cells.append(replace(cell, paper=None, agrees=None))
            best.append(Cell(values, cell.paper, agrees(values, cell.paper), compared=values))
    if not any(cell.values for cell in best):
        return [row]
    return [replace(row, cells=cells), replace(row, cells=best, main=False, at_best_epoch=True)]


def _with_tests(rows: list[Row], columns: list[Column], families: Families) -> list[Row]:
    """Test each cell against ERM's in the same block, if its family has that comparison."""
    cells = [list(row.cells) for row in rows]
    for place in dict.fromkeys(row.place for row in rows):
        numbers = [number for number, row in enumerate(rows) if row.place == place and row.main]
        base = next((n for n in numbers if rows[n].recipe.method == "erm"), None)
        for number, column in enumerate(columns):
            if base is None or not column.compared:
                continue
            erm = cells[base][number].compared
            for n in (n for n in numbers if n != base):
                mine = cells[n][number].compared
                names = rows[n].recipe.name, rows[base].recipe.name
                p = p_of_pair(families, column.name, names, mine, erm)
                if p is not None:
                    better = mean(mine) < mean(erm) if p < LEVEL else None
                    cells[n][number] = replace(cells[n][number], p=p, better=better)
    return [replace(row, cells=own) for row, own in zip(rows, cells, strict=True)]


def runs_by_recipe(runs: Iterable[Run], unusable: list[UnusableFile]) -> dict[str, list[Run]]:
    """Runs of the paper's recipes by name, sorted by seed; those that do not match their recipe are left out.

    A seed counts once: the same run again is not further evidence. If a data set comes with several checksums, only the
    most common one counts.
    """
    known = by_name()
    found: dict[str, dict[int, Run]] = {}
    usual = _usual_checksums(runs := list(runs))
    for run in runs:
        if (recipe := known.get(str(run.result.get("recipe")))) is None:
            continue
        if apart := differs(run.result, Job(recipe, run.result["seed"])):
            unusable.append(UnusableFile(run.path, f"it is not {recipe.name}: {'; '.join(apart)}"))
        elif run.result.get("data_sha256") != usual[recipe.data]:
            unusable.append(
                UnusableFile(run.path, f"it was trained on another {recipe.data} than most (another SHA-256)")
            )
        else:
            found.setdefault(recipe.name, {}).setdefault(int(run.result["seed"]), run)
    return {name: [own[seed] for seed in sorted(own)] for name, own in found.items()}


def _usual_checksums(runs: Iterable[Run]) -> dict[str, object]:
    counts: dict[str, Counter[object]] = {}
    for run in runs:
        counts.setdefault(str(run.result["data"]), Counter())[run.result.get("data_sha256")] += 1
    return {name: count.most_common(1)[0][0] for name, count in counts.items()}


def read_all(store: ResultStore) -> dict[str, list[Run]]:
    """Those of a result store that can be read, by name; the report says what is wrong with others."""
    found = []
    for file in sorted(store.results.rglob("*.json")):
        with suppress(ValueError, OSError):  # a plan, a failure, a cost, or a damaged file
            found.append(read_result(file))
    return runs_by_recipe(found, [])


def planned_families(store: ResultStore) -> dict[str, Family]:
    """Those of the store's plan; none where it cannot be read, which the report says."""
    try:
        return {name: Family(*family) for name, family in schema.families(read_json(store.results / PLANNED)).items()}
    except (ValueError, OSError):
        return {}


def cell_of(recipe: Recipe, runs: Sequence[Run], column: Column) -> Cell:
    values = [value for run in runs if (value := as_in_paper(run, column)) is not None]
    compared = [value for run in runs if (value := column.value(run)) is not None]
    cell = reported(original_name(recipe.data), recipe.model, recipe.method, recipe.augment)
    comparable = not recipe.protocol.exceptions and recipe.protocol.name in PAPER_LENGTH
    theirs = cell.get(column.paper) if comparable else None
    return Cell(values, theirs, agrees(values, theirs), compared=compared)
