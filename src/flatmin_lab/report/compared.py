"""Runs compared: those that differ in method and seed alone stand in one table, a row a method, against ERM.

Every method's mean is compared with ERM's by Welch's test, column by column, with Holm's rule over the methods of the
column. Only where that is significant is one of the two called better.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

from flatmin_lab.data.catalogue import DATA_SETS
from flatmin_lab.figures.drawn import NAMES
from flatmin_lab.methods import METHODS
from flatmin_lab.paper import Value
from flatmin_lab.paper import reported as reported_by_paper
from flatmin_lab.report.collected import Run
from flatmin_lab.welch import LEVEL, holm, welch

CONDITIONS = {"attack": ("norm", "radius", "step_size", "steps", "pictures"), "flatness": ("epsilon", "pictures")}
SETTING = (
    "data", "model", "model_settings", "size", "augment", "label_noise", "validation", "epochs", "batch_size", "lr",
    "momentum", "nesterov", "weight_decay", "schedule", "milestones", "gamma", "warmup", "clip_norm", "data_sha256",
)  # fmt: skip
TITLES = {
    "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN", "digits": "digits",
    "preactresnet18": "PreActResNet18", "vgg16": "VGG16", "wideresnet28_10": "WideResNet-28-10",
    "pyramidnet164_270": "PyramidNet-164-270", "convnet": "a small convolutional network", "mlp": "an MLP",
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A measure: its label, how many digits, and how it is read from a run. Lower is better in all of them."""

    name: str
    label: str
    digits: int
    value: Callable[[Run], float | None]
    command: str = ""  # what fills it
    compared: bool = True


def _result(name: str, scale: float = 1.0) -> Callable[[Run], float | None]:
    def read(run: Run) -> float | None:
        value = run.result.get(f"{run.split}_{name}")
        return None if value is None else scale * float(value)

    return read


def _evaluated(part: str, name: str, scale: float = 1.0) -> Callable[[Run], float | None]:
    def read(run: Run) -> float | None:
        value = ((run.evaluation or {}).get(part) or {}).get(name)
        return None if value is None else scale * float(value)

    return read


def _rise(run: Run) -> float | None:
    flat = (run.evaluation or {}).get("flatness") or {}
    worst, loss = flat.get("worst_case_loss"), flat.get("loss")
    return None if worst is None or loss is None else float(worst) - float(loss)


def _eigenvalue(run: Run) -> float | None:
    values = ((run.evaluation or {}).get("flatness") or {}).get("eigenvalues")
    return float(values[0]) if values and values[0] is not None else None


COLUMNS = (
    Column("error", "error, %", 2, _result("error", 100)),
    Column("nll", "NLL", 3, _result("nll")),
    Column("ece", "ECE, %", 2, _result("ece", 100)),
    Column("fgsm_error", "error under FGSM, %", 1, _evaluated("attack", "fgsm_error", 100), "--attack"),
    Column("pgd_error", "error under PGD, %", 1, _evaluated("attack", "pgd_error", 100), "--attack"),
    Column("worst_case_loss", "worst loss nearby", 3, _evaluated("flatness", "worst_case_loss"), "--flatness"),
    Column("rise", "its rise", 3, _rise, "--flatness"),
    Column("eigenvalue", "top eigenvalue", 1, _eigenvalue, "--flatness"),
    Column("trace", "trace of the Hessian", 0, _evaluated("flatness", "trace"), "--flatness"),
    Column("seconds", "seconds", 1, lambda run: float(run.result["seconds"]), compared=False),
)


@dataclass(frozen=True)
class Cell:
    """The values of a row's runs in a column, and how they compare with ERM's."""

    values: list[float]
    missing: list[str]  # commands that would fill it
    p: float | None = None  # against ERM, after Holm
    better: bool | None = None  # than ERM; None where that cannot be said
    paper: Value | None = None


@dataclass(frozen=True)
class Row:
    method: str
    name: str
    runs: list[Run]
    cells: dict[str, Cell] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Runs of one setting."""

    setting: Mapping[str, Any]
    rows: list[Row]
    seeds_twice: list[Run]
    untrained: list[str]  # commands for the paper's methods that are not there

    @property
    def title(self) -> str:
        data, model = self.setting["data"], self.setting["model"]
        shown = f"{TITLES.get(model, model)} on {TITLES.get(data, data.rstrip('/').rpartition('/')[2])}"
        return shown[0].upper() + shown[1:]

    @property
    def split(self) -> str:
        return self.rows[0].runs[0].split

    def row(self, method: str) -> Row | None:
        return next((row for row in self.rows if row.method == method), None)


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """In the order of their first runs; methods in the paper's order, ERM first and AMP second."""
    settings: dict[str, list[Run]] = {}
    for run in runs:
        setting = {key: run.result.get(key) for key in SETTING}
        settings.setdefault(json.dumps(setting, sort_keys=True), []).append(run)
    return [_group(json.loads(key), own) for key, own in settings.items()]


def _group(setting: dict[str, Any], runs: Sequence[Run]) -> Group:
    runs = _alike(runs)
    kinds: dict[tuple[str, str], dict[int, Run]] = {}
    twice = []
    for run in runs:
        kind = kinds.setdefault((run.method, json.dumps(run.result.get("settings", {}), sort_keys=True)), {})
        if run.result["seed"] in kind:
            twice.append(run)  # the same training again: it is no further evidence
        kind.setdefault(run.result["seed"], run)
    several = {method for method, _ in kinds if sum(method == other for other, _ in kinds) > 1}
    order = ["erm", "amp", *METHODS]
    rows = [
        Row(method, _name(method, settings, method in several), [own[seed] for seed in sorted(own)])
        for (method, settings), own in sorted(kinds.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
    ]
    return Group(setting, _with_cells(rows, setting), twice, _untrained(rows, setting))


def _name(method: str, settings: str, several: bool) -> str:
    if not several:
        return NAMES[method]
    knobs = ", ".join(f"{_knob(key)} {value:g}" for key, value in json.loads(settings).items() if _is_plain(value))
    return f"{NAMES[method]}, {knobs}" if knobs else NAMES[method]


def _knob(key: str) -> str:
    return {"epsilon": "ε", "inner_lr": "ζ", "inner_iter": "N"}.get(key, key)


def _is_plain(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _with_cells(rows: list[Row], setting: Mapping[str, Any]) -> list[Row]:
    cells: dict[int, dict[str, Cell]] = {place: {} for place in range(len(rows))}
    for column in COLUMNS:
        values = [[v for run in row.runs if (v := column.value(run)) is not None] for row in rows]
        tests = {}
        if column.compared and rows[0].method == "erm":
            for place in range(1, len(rows)):
                test = welch(values[place], values[0])
                if test is not None:
                    tests[place] = test.p
        adjusted = holm(tests)
        for place, row in enumerate(rows):
            p = adjusted.get(place)
            better = mean(values[place]) < mean(values[0]) if p is not None and p < LEVEL else None
            missing = [_command(run, column) for run in row.runs if column.value(run) is None and column.command]
            theirs = reported_by_paper(setting["data"], setting["model"], row.method, setting["augment"] or "")
            cells[place][column.name] = Cell(values[place], missing, p, better, theirs.get(column.name))
    return [Row(row.method, row.name, row.runs, cells[place]) for place, row in enumerate(rows)]


def _command(run: Run, column: Column) -> str:
    return f"flatmin evaluate {shlex.quote(str(run.path))} {column.command}"


def _alike(runs: Sequence[Run]) -> list[Run]:
    """The same runs, each without what was measured otherwise than in most of them: such numbers do not compare."""
    for part, knobs in CONDITIONS.items():
        kinds = [_condition(run, part, knobs) for run in runs]
        known = [kind for kind in kinds if kind]
        usual = max(known, key=known.count) if known else ""
        runs = [
            run if kind in ("", usual) else replace(run, evaluation={**(run.evaluation or {}), part: {}})
            for run, kind in zip(runs, kinds, strict=True)
        ]
    return list(runs)


def _condition(run: Run, part: str, knobs: Sequence[str]) -> str:
    found = (run.evaluation or {}).get(part)
    return json.dumps([found.get(knob) for knob in knobs]) if found else ""


def _untrained(rows: list[Row], setting: Mapping[str, Any]) -> list[str]:
    if setting["data"] not in DATA_SETS:
        return []
    seeds = sorted({run.result["seed"] for row in rows for run in row.runs})
    trained = {row.method for row in rows}
    extra = f" --label-noise {setting['label_noise']:g}" if setting.get("label_noise") else ""
    return [
        f"flatmin train --data {setting['data']} --model {setting['model']} --method {method} "
        f"--epochs {setting['epochs']}{extra} --seed {seeds[0]}"
        for method in METHODS
        if method not in trained
    ]
