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

from flatmin_lab import examine
from flatmin_lab.data.catalogue import DATA_SETS
from flatmin_lab.figures.drawn import NAMES
from flatmin_lab.methods import METHODS
from flatmin_lab.paper import Value
from flatmin_lab.paper import reported as reported_by_paper
from flatmin_lab.recipes import SMALL
from flatmin_lab.report.collected import Run
from flatmin_lab.welch import LEVEL, holm, welch

Condition = dict[str, Any]
# under what conditions something was measured: the flag, and what it is where nothing is said
FLAGS: dict[str, dict[str, tuple[str, Any]]] = {
    "attack": {
        "norm": ("--norm", "linf"),
        "radius": ("--radius", examine.RADIUS),
        "step_size": ("--step-size", examine.STEP),
        "steps": ("--steps", examine.STEPS),
        "pictures": ("--pictures", None),
    },
    "flatness": {"epsilon": ("--epsilon", examine.EPSILON), "pictures": ("--pictures", None)},
}
OTHERWISE = "measured otherwise"
TRAINED_WITH = (
    "epochs", "batch_size", "lr", "momentum", "weight_decay", "schedule", "milestones", "warmup", "augment",
    "clip_norm", "label_noise", "validation", "precision",
)  # fmt: skip
UNSAID = {"warmup": 0.0, "label_noise": 0.0}
SETTING = (
    "data", "model", "model_settings", "size", "augment", "label_noise", "validation", "epochs", "batch_size", "lr",
    "momentum", "nesterov", "weight_decay", "schedule", "milestones", "gamma", "warmup", "clip_norm", "precision",
    "data_sha256",
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

    @property
    def part(self) -> str:
        """Of evaluation.json."""
        return self.command.removeprefix("--")


def _result(name: str, scale: float = 1.0) -> Callable[[Run], float | None]:
    def read(run: Run) -> float | None:
        value = run.result.get(f"{run.split}_{name}")
        return None if value is None else scale * float(value)

    return read


def _evaluated(part: str, name: str, scale: float = 1.0) -> Callable[[Run], float | None]:
    def read(run: Run) -> float | None:
        value = run.evaluation.get(part, {}).get(name)
        return None if value is None else scale * float(value)

    return read


def _rise(run: Run) -> float | None:
    flat = run.evaluation.get("flatness", {})
    worst, loss = flat.get("worst_case_loss"), flat.get("loss")
    return None if worst is None or loss is None else float(worst) - float(loss)


def _eigenvalue(run: Run) -> float | None:
    values = run.evaluation.get("flatness", {}).get("eigenvalues")
    return float(values[0]) if values and values[0] is not None else None


COLUMNS = (
    Column("error", "error, %", 2, _result("error", 100)),
    Column("nll", "NLL", 3, _result("nll")),
    Column("ece", "ECE, %", 2, _result("ece", 100)),
    Column("fgsm_error", "error under FGSM,\u00a0%", 1, _evaluated("attack", "fgsm_error", 100), "--attack"),
    Column("pgd_error", "error under PGD,\u00a0%", 1, _evaluated("attack", "pgd_error", 100), "--attack"),
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
    otherwise: bool = False  # some were measured, but not as the others
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
    runs, usual = _alike(runs)
    kinds: dict[tuple[str, str], dict[int, Run]] = {}
    twice = []
    for run in runs:
        kind = kinds.setdefault((run.method, json.dumps(run.result["settings"], sort_keys=True)), {})
        if run.result["seed"] in kind:
            twice.append(run)  # the same training again: it is no further evidence
        kind.setdefault(run.result["seed"], run)
    order = ["erm", "amp", *METHODS]
    rows = []
    for (method, settings), own in sorted(kinds.items(), key=lambda item: (order.index(item[0][0]), item[0][1])):
        others = [json.loads(other) for name, other in kinds if name == method]
        rows.append(Row(method, _name(method, json.loads(settings), others), [own[seed] for seed in sorted(own)]))
    return Group(setting, _with_cells(rows, setting, usual), twice, _untrained(rows, setting))


def _name(method: str, settings: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """The method's, and the knobs in which it differs from others of the same one."""
    apart = [key for key in settings if any(other.get(key) != settings[key] for other in others)]
    knobs = ", ".join(f"{_knob(key)} {settings[key]:g}" for key in apart if _is_plain(settings[key]))
    return f"{NAMES[method]} ({knobs})" if knobs else NAMES[method]


def _knob(key: str) -> str:
    return {"epsilon": "ε", "inner_lr": "ζ", "inner_iter": "N"}.get(key, key)


def _is_plain(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _with_cells(rows: list[Row], setting: Mapping[str, Any], usual: Mapping[str, Condition]) -> list[Row]:
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
            lacking = [run for run in row.runs if column.value(run) is None and column.command]
            missing = [_command(run, column, usual) for run in lacking]
            otherwise = any(OTHERWISE in run.evaluation.get(column.part, {}) for run in lacking)
            theirs = reported_by_paper(setting["data"], setting["model"], row.method, setting["augment"] or "")
            cells[place][column.name] = Cell(values[place], missing, otherwise, p, better, theirs.get(column.name))
    return [Row(row.method, row.name, row.runs, cells[place]) for place, row in enumerate(rows)]


def _command(run: Run, column: Column, usual: Mapping[str, Condition]) -> str:
    """What measures it as the others were measured."""
    flags = [column.command]
    for knob, value in usual.get(column.part, {}).items():
        flag, default = FLAGS[column.part].get(knob, ("", None))
        if flag and value != default and not (knob == "pictures" and value == len_of(run, column.part)):
            flags += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(["flatmin", "evaluate", str(run.path), *flags])


def len_of(run: Run, part: str) -> int | None:
    """How many pictures are taken where nothing is said: all of the test set, which its bins count; or 1000."""
    bins = run.result.get("reliability")
    return examine.PICTURES if part == "flatness" else (int(sum(bins["number"])) if bins else None)


def _alike(runs: Sequence[Run]) -> tuple[list[Run], dict[str, Condition]]:
    """The same runs, with a mark for what was measured otherwise than in most of them; and how that is."""
    usual: dict[str, Condition] = {}
    for part, knobs in FLAGS.items():
        kinds = [_condition(run, part, knobs) for run in runs]
        known = [kind for kind in kinds if kind]
        if not known:
            continue
        usual[part] = max(known, key=known.count)
        runs = [
            run if kind in ({}, usual[part]) else replace(run, evaluation={**run.evaluation, part: {OTHERWISE: kind}})
            for run, kind in zip(runs, kinds, strict=True)
        ]
    return list(runs), usual


def _condition(run: Run, part: str, knobs: Mapping[str, Any]) -> Condition:
    found = run.evaluation.get(part)
    return {knob: found[knob] for knob in knobs} if found else {}


def _untrained(rows: list[Row], setting: Mapping[str, Any]) -> list[str]:
    """For each of the paper's methods that is not there, and each seed that is, the command that trains it alike."""
    data, model = setting["data"], setting["model"]
    if data not in DATA_SETS:
        return []
    beside = rows[0].runs[0].path.parent
    flags = ["--data", data]
    if model != SMALL.get(data, {}).get("model", "preactresnet18"):
        flags += ["--model", model]
    for key in TRAINED_WITH:
        value = setting.get(key)
        if value is True:
            flags.append(f"--{key.replace('_', '-')}")
        elif isinstance(value, list) and setting.get("schedule") == "multi_step":
            flags += [f"--{key}", ",".join(f"{number:g}" for number in value if _is_plain(number))]
        elif _is_plain(value) and value != UNSAID.get(key):
            flags += [f"--{key.replace('_', '-')}", f"{value:g}"]
        elif isinstance(value, str):
            flags += [f"--{key}", value]
    seeds = sorted({run.result["seed"] for row in rows for run in row.runs})
    trained = {row.method for row in rows}
    return [
        shlex.join(["flatmin", "train", "--method", method, *flags, "--seed", str(seed), "--out", str(beside / name)])
        for method in METHODS
        if method not in trained
        for seed in seeds
        for name in (f"{data}-{model}-{method}-{seed}",)
    ]
