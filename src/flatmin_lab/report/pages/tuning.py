"""The report's section about a tuning: what was chosen, all trials, and the measure over each hyper-parameter."""

import shlex
from pathlib import Path
from typing import NamedTuple

from flatmin_lab.report import figures
from flatmin_lab.report.figures.style import NAMES, DrawnFigure
from flatmin_lab.report.figures.tuning import SearchRange
from flatmin_lab.report.labels import TITLES
from flatmin_lab.tuning import summary
from flatmin_lab.tuning.result import Trial, Tuning
from flatmin_lab.tuning.search_space import Knob


class TuningSection(NamedTuple):
    path: Path
    title: str
    words: str
    knobs: int  # how many hyper-parameters: each has a panel of the figure
    columns: list[str]
    rows: list[tuple[list[str], bool]]  # a trial's cells, and whether it was chosen
    figure: DrawnFigure | None  # None if no trial has a value
    command: str  # that trains with the chosen values
    note: str


def tuning_section(path: Path, found: Tuning) -> TuningSection:
    signs = (knob.sign for knob in found.knobs)
    columns = ["trial", *signs, "validation error, %", "validation NLL", "epochs", "seconds", ""]
    return TuningSection(
        path,
        title(found),
        summary.chosen(found),
        len(found.knobs),
        columns,
        [(_cells(trial, found), trial == found.chosen) for trial in found.ranked()],
        _figure(found),
        shlex.join(found.command()) if found.chosen else "",
        f"All trials have the seed {found.seed}: the same split, first weights and order of pictures. The test set was "
        "not looked at.",
    )


def title(found: Tuning) -> str:
    data = TITLES.get(found.data, found.data.rstrip("/").rpartition("/")[2])
    name = NAMES[found.method]
    length = summary.epochs(found.epochs)
    return f"{name[0].upper()}{name[1:]}, {TITLES.get(found.model, found.model)} on {data}, {length}"


def _cells(trial: Trial, found: Tuning) -> list[str]:
    return [
        str(trial.number),
        *(knob.words(trial.settings[knob.name]) if knob.name in trial.settings else "" for knob in found.knobs),
        summary.number("error", trial.error).removesuffix(" %"),
        summary.number("nll", trial.nll),
        str(trial.epochs),
        "" if trial.seconds is None else f"{trial.seconds:.1f}",
        summary.ended(trial, found),
    ]


def _figure(found: Tuning) -> DrawnFigure | None:
    scale, label = (100, "validation error, %") if found.measure == "error" else (1, "validation NLL")
    knobs = {_label(knob): knob for knob in found.knobs}
    if not any(trial.value is not None for trial in found.trials):
        return None
    trials = [
        {
            "number": trial.number,
            "settings": {label: trial.settings[knob.name] / knob.unit for label, knob in knobs.items()},
            "value": None if trial.value is None else scale * trial.value,
            "state": trial.state,
            "chosen": trial == found.chosen,
        }
        for trial in found.trials
        if trial.state != "running"
    ]
    ranges = {
        label: SearchRange(knob.low / knob.unit, knob.high / knob.unit, knob.log) for label, knob in knobs.items()
    }
    return figures.tuning(found.method, label, ranges, trials)


def _label(knob: Knob) -> str:
    return knob.sign if knob.unit == 1 else f"{knob.sign}, in 255ths of a pixel's range"
