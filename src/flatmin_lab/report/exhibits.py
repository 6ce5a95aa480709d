"""A table or figure of the paper, filled: what our results say, beside what the paper says.

Rows are the exhibit's recipes, cells the values of all seeds that are there. Where the protocol is the paper's own, a
cell also tells whether the two agree (agreement.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flatmin_lab.agreement import agrees
from flatmin_lab.data.made import SUFFIX
from flatmin_lab.figures.drawn import NAMES
from flatmin_lab.ledger import Ledger
from flatmin_lab.paper import Value, reported
from flatmin_lab.recipe import Recipe
from flatmin_lab.recipes import Exhibit
from flatmin_lab.report.collected import Broken, Run, read_result
from flatmin_lab.report.columns import Column, as_in_paper, named

COLUMNS = {
    "table1": ("error", "nll"),
    "table2": ("error",),
    "table3": ("fgsm_normalised", "pgd_normalised", "fgsm_error", "pgd_error"),
    "ece": ("ece",),
    "sweep": ("clean_train_nll", "nll"),
    "cost": ("seconds",),
    "curves": ("train_loss", "nll"),
    "landscape": ("error",),
    "flatness": ("worst_case_loss", "rise", "eigenvalue", "trace"),
}
OTHERS = ("error", "nll", "ece")


@dataclass(frozen=True)
class Cell:
    values: list[float]
    paper: Value | None
    agrees: bool | None  # None where it cannot be said


@dataclass(frozen=True)
class Row:
    recipe: Recipe
    runs: list[Run]
    cells: list[Cell]

    @property
    def data(self) -> str:
        return self.recipe.data.removesuffix(SUFFIX)

    @property
    def place(self) -> tuple[str, str, str]:
        """What its neighbours share: data, model, augmentation."""
        return self.data, self.recipe.model, self.recipe.augment

    @property
    def name(self) -> str:
        """The method, and in what it differs from the paper's."""
        apart = self.recipe.protocol.partition(", but ")[2]
        return f"{NAMES[self.recipe.method]}{f' ({apart})' if apart else ''}"


@dataclass(frozen=True)
class Filled:
    exhibit: Exhibit
    columns: list[Column]
    rows: list[Row]


def filled(exhibit: Exhibit, ledger: Ledger, broken: list[Broken] | None = None) -> Filled:
    """With all results that are there, whatever their seeds."""
    columns = [named(name) for name in COLUMNS.get(exhibit.name, OTHERS)]
    rows = []
    for recipe in exhibit.recipes:
        runs = list(_runs(recipe, ledger, broken if broken is not None else []))
        rows.append(Row(recipe, runs, [_cell(recipe, runs, column) for column in columns]))
    return Filled(exhibit, columns, rows)


def _runs(recipe: Recipe, ledger: Ledger, broken: list[Broken]) -> Iterable[Run]:
    place = ledger.results / recipe.name
    found = [path for path in place.parent.glob(f"{place.name}-*.json") if _seed(path, place.name) is not None]
    for path in sorted(found, key=lambda path: _seed(path, place.name) or 0):
        try:
            yield read_result(path, broken)
        except (ValueError, OSError) as error:
            broken.append(Broken(path, str(error)))


def _seed(path: Path, name: str) -> int | None:
    seed = path.name.removeprefix(f"{name}-").removesuffix(".json")
    return int(seed) if seed.isdecimal() else None


def _cell(recipe: Recipe, runs: list[Run], column: Column) -> Cell:
    values = [value for run in runs if (value := as_in_paper(run, column)) is not None]
    cell = reported(recipe.data.removesuffix(SUFFIX), recipe.model, recipe.method, recipe.augment)
    theirs = cell.get(column.paper or column.name) if ", but" not in recipe.protocol else None
    return Cell(values, theirs, agrees(values, theirs) if recipe.protocol == "paper" else None)
