"""The README's table of results, from the result files that `flatmin reproduce` wrote.

    python benchmarks/results_table.py [--results results] [--readme README.md] [--check]

It replaces what is between the two markers in the README; with --check nothing is written, and the exit code is 1 if
the README is out of date.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import readme
from flatmin_lab.recipes.paper_tables import EXPERIMENTS, Protocol
from flatmin_lab.recipes.recipe import FollowedProtocol
from flatmin_lab.report.columns import Column, column_named
from flatmin_lab.report.html import as_printed
from flatmin_lab.report.labels import TITLES
from flatmin_lab.report.loader import Run
from flatmin_lab.report.paper.deviations import TF32, of_the_data
from flatmin_lab.report.paper.tables import Row, cell_of, fill_table, read_all
from flatmin_lab.runs.result_store import ResultStore

RESULTS = Path(__file__).parent.parent / "results"
PART = "results table"
PROTOCOLS: tuple[Protocol, ...] = ("paper", "short")
COLUMNS = ("error", "nll", "ece")


def rendered(results: Path) -> str:
    """A table for every data set and network of table 1 that has runs."""
    runs = read_all(ResultStore(results, results))
    parts, shown = [], []
    for protocol in PROTOCOLS:
        rows = [row for row in fill_table(EXPERIMENTS["table1"](protocol), runs).rows if row.runs]
        shown += [run for row in rows for run in row.runs]
        places = dict.fromkeys(row.place for row in rows)
        parts += [_table(protocol, [row for row in rows if row.place == place]) for place in places]
    if not parts:
        raise ValueError(f"there is no result in {results}; make some with flatmin reproduce")
    return "\n\n".join([*parts, _measured(shown)])


def _table(protocol: Protocol, rows: Sequence[Row]) -> str:
    first = rows[0].recipe
    title = f"{TITLES[first.data]}, {TITLES[first.model]}, {first.epochs} epochs (protocol `{protocol}`)"
    columns = [column_named(name) for name in COLUMNS]
    head = [title, "n", *(label for column in columns for label in (column.label, "paper"))]
    return readme.markdown(head, [[row.name, str(len(row.runs)), *_cells(row, columns)] for row in rows])


def _cells(row: Row, columns: Sequence[Column]) -> list[str]:
    found = []
    for column in columns:
        cell = cell_of(row.recipe, row.runs, column)
        found += [cell.shown(column.digits), as_printed(cell.paper, column.digits) if cell.paper else ""]
    return found


def _precision(runs: Sequence[Run]) -> str:
    """That of most runs; other rows name their own."""
    (usual, _), *others = Counter(run.result["precision"] for run in runs).most_common()
    return f"{usual} unless a row says otherwise" if others else str(usual)


def _measured(runs: Sequence[Run]) -> str:
    def all_of(key: str) -> str:
        return ", ".join(sorted({str(run.result[key]) for run in runs if run.result.get(key)}))

    notes = f" {TF32}" if any(run.result["precision"] == "fp32" for run in runs) else ""
    if any(run.method == "label_smoothing" for run in runs):
        notes += (
            " The paper's NLL of label smoothing seems to be the smoothed loss; ours stands in brackets, smoothed over "
            "the other classes, as the published code has it, though trained with it over all."
        )
    if any(run.protocol == FollowedProtocol("short") for run in runs):
        notes += (
            " For 60 epochs AMP's ε was chosen by the test error of earlier, shorter and longer runs on CIFAR-10, "
            "and the other methods have the paper's settings for 200, unless a row says otherwise."
        )
    return (
        f"Test numbers of the last epoch: mean ± standard deviation over n seeds, fewer than three singly; the paper's "
        f"are of 10 runs with 200 epochs. {all_of('hardware')}, torch {all_of('torch')}, {_precision(runs)}, "
        f"commit {all_of('commit')}.{notes} `flatmin report results` makes the whole page: tests, agreement with the "
        f"paper, attacks, flatness, curves, and what we did otherwise. {' '.join(of_the_data(runs))}"
    )


if __name__ == "__main__":
    readme.command(PART, __doc__, "results", RESULTS, rendered)
