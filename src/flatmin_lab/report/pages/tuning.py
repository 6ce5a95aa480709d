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
from flatmin_lab.tuning.search_space import HyperParameter


class TuningSection(NamedTuple):
    path: Path
    title: str
    words: str
    gain: str  # over ERM
    knobs: int  # how many hyper-parameters: each has a panel of the figure
    columns: list[str]
    rows: list[tuple[list[str], bool]]  # a trial's cells, and whether it was chosen
    figure: DrawnFigure | None  # None if no trial has a value
    command: str  # that trains with the chosen values
    note: str


def tuning_section(path: Path, found: Tuning) -> TuningSection:
    symbols = (parameter.symbol for parameter in found.hyper_parameters)
    columns = ["trial", *symbols, "validation error, %", "validation NLL", "epochs", "seconds", ""]
    return TuningSection(
        path,
        title(found),
        summary.describe_choice(found),
        summary.describe_gain(found),
        len(found.hyper_parameters),
        columns,
        [(_cells(trial, found), trial == found.chosen) for trial in found.ranked()],
        _figure(found),
        shlex.join(found.command()) if found.chosen else "",
        f"All trials have the seed {found.seed}: the same split, initial weights and order of images. The test set was "
        "not used.",
    )


def title(found: Tuning) -> str:
    data = TITLES.get(found.data, found.data.rstrip("/").rpartition("/")[2])
    name = NAMES[found.method]
    length = summary.epochs(found.epochs)
    model = TITLES.get(found.model, found.model.rpartition("/")[2])  # of a file its name, as in other sections
    return f"{name[0].upper()}{name[1:]}, {model} on {data}, {length}"


def _cells(trial: Trial, found: Tuning) -> list[str]:
    return [
        str(trial.number),
        *(p.formatted(trial.settings[p.name]) if p.name in trial.settings else "" for p in found.hyper_parameters),
        summary.format_measure("error", trial.error).removesuffix(" %"),
        summary.format_measure("nll", trial.nll),
        str(trial.epochs),
        "" if trial.seconds is None else f"{trial.seconds:.1f}",
        summary.describe_end(trial, found),
    ]


def _figure(found: Tuning) -> DrawnFigure | None:
    scale, label = (100, "validation error, %") if found.measure == "error" else (1, "validation NLL")
    parameters = {_label(parameter): parameter for parameter in found.hyper_parameters}
    if not any(trial.value is not None for trial in found.trials):
        return None
    trials = [
        {
            "number": trial.number,
            "settings": {label: trial.settings[p.name] / p.unit for label, p in parameters.items() if not trial.is_erm},
            "value": None if trial.value is None else scale * trial.value,
            "state": trial.state,
            "chosen": trial == found.chosen,
            "is_erm": trial.is_erm,
        }
        for trial in found.trials
        if trial.state != "running"
    ]
    ranges = {label: SearchRange(p.low / p.unit, p.high / p.unit, p.log) for label, p in parameters.items()}
    return figures.tuning(found.method, label, ranges, trials)


def _label(parameter: HyperParameter) -> str:
    return parameter.symbol if parameter.unit == 1 else f"{parameter.symbol}, in 255ths of the pixel range"
