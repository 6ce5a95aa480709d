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

    name: str
    title: str
    labels: list[str]
    rows: list[tuple[str, int, list[str]]]  # the name, how many runs, the cells
    missing: list[str]  # rows without a run that was compared with these data
    roc: DrawnFigure | None  # by the largest probability, of runs that recorded it


def outside_tables(rows: Sequence[Row], drawn: Sequence[Row]) -> list[OutsideTable]:
    """One table per outside data set, by name; runs that saw other data of that name are left out.

    The figure has a line for each of the `drawn` rows, one a method.
    """
    names = dict.fromkeys(name for row in rows for run in row.runs for name in _outside(run))
    return [_table(name, rows, drawn) for name in names]


def _outside(run: Run) -> Mapping[str, Any]:
    found: Mapping[str, Any] = run.evaluation.get("outside", {})
    return found


def _table(name: str, rows: Sequence[Row], drawn: Sequence[Row]) -> OutsideTable:
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
    missing = [row for row, own in found if not own]
    curves = {row.method: _of_usual(row.runs, name, usual) for row in drawn}
    return OutsideTable(name, title, [label for *_, label in COLUMNS], shown, missing, _roc_figure(name, curves))


def _of_usual(runs: Iterable[Run], name: str, checksum: str) -> list[Mapping[str, Any]]:
    return [_outside(run)[name] for run in runs if name in _outside(run) and _outside(run)[name]["sha256"] == checksum]


def _roc_figure(name: str, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> DrawnFigure | None:
    """The mean curve of each method's runs; older files have none."""
    curves, count = {}, {}
    for method, own in found.items():
        known = [one["max_probability"]["roc"] for one in own if "roc" in one["max_probability"]]
        alike = [shares for shares in known if len(shares) == len(known[0])]
        if alike:
            curves[method] = [mean(values) for values in zip(*alike, strict=True)]
            count[method] = len(alike)
    return figures.roc(TITLES.get(name, name), curves, count=count) if curves else None


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
