"""The report's section about confidence: error over coverage, and what was found of outside data sets."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

from flatmin_lab.report import figures
from flatmin_lab.report.comparison import Row
from flatmin_lab.report.figures.selective import RiskCurve
from flatmin_lab.report.figures.style import DrawnFigure
from flatmin_lab.report.html import mean_and_std
from flatmin_lab.report.labels import TITLES
from flatmin_lab.report.loader import Run

# part of evaluation.json, score, label
COLUMNS = tuple(
    (part, score, f"{title}, {name}")
    for part, title in (("auroc", "AUROC"), ("fpr95", "FPR95"))
    for score, name in (
        ("max_probability", "probability"),
        ("negative_energy", "energy"),
        ("negative_entropy", "entropy"),
    )
)


class OutsideTable(NamedTuple):
    """What the runs of a group found of one outside data set; a row's cells are those of COLUMNS."""

    title: str
    labels: list[str]
    rows: list[tuple[str, int, list[str]]]  # the name, how many runs, the cells
    missing: list[str]  # rows without a run that was compared with these data


def outside_tables(rows: Sequence[Row]) -> list[OutsideTable]:
    """One table per outside data set, by name; runs that saw other data of that name are left out."""
    names = dict.fromkeys(name for row in rows for run in row.runs for name in _outside(run))
    return [_table(name, rows) for name in names]


def _outside(run: Run) -> Mapping[str, Any]:
    found: Mapping[str, Any] = run.evaluation.get("outside", {})
    return found


def _table(name: str, rows: Sequence[Row]) -> OutsideTable:
    known = Counter(_outside(run)[name]["sha256"] for row in rows for run in row.runs if name in _outside(run))
    usual = known.most_common(1)[0][0]
    found = [(row.name, _of_usual(row.runs, name, usual)) for row in rows]
    pictures = next(own[0]["pictures"] for _, own in found if own)
    shown = [
        (row, len(own), [mean_and_std([100 * one[score][part] for one in own]) for part, score, _ in COLUMNS])
        for row, own in found
        if own
    ]
    title = f"{TITLES.get(name, name)}, {pictures:,} examples"
    return OutsideTable(title, [label for *_, label in COLUMNS], shown, [row for row, own in found if not own])


def _of_usual(runs: Iterable[Run], name: str, checksum: str) -> list[Mapping[str, Any]]:
    return [_outside(run)[name] for run in runs if name in _outside(run) and _outside(run)[name]["sha256"] == checksum]


def risk_figure(rows: Sequence[Row]) -> DrawnFigure | None:
    """The mean curve of each row's runs; of runs with another number of test examples, those of the first."""
    curves, count = {}, {}
    for row in rows:
        known = [run.evaluation["selective"] for run in row.runs if "selective" in run.evaluation]
        alike = [one for one in known if one["coverage"] == known[0]["coverage"]]
        if alike:
            risks = [mean(values) for values in zip(*(one["risk"] for one in alike), strict=True)]
            curves[row.method], count[row.method] = RiskCurve(alike[0]["coverage"], risks), len(alike)
    return figures.risk_over_coverage(curves, count=count) if curves else None
