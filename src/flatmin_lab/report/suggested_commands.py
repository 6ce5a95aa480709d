"""The commands that fill what a report lacks: measure a run as the others were measured, train a method as the others.

Numbers that were measured under other conditions do not compare: those of a run that differs from most are set aside.
"""

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flatmin_lab.data.registry import DATA_SETS
from flatmin_lab.evaluation import measurements
from flatmin_lab.methods import METHODS
from flatmin_lab.recipes.defaults import SMALL_DATA
from flatmin_lab.report.loader import Run
from flatmin_lab.report.schema import is_number

Condition = dict[str, Any]
# under what conditions something was measured: the flag, and what it is where nothing is said
FLAGS: dict[str, dict[str, tuple[str, Any]]] = {
    "attack": {
        "norm": ("--norm", "linf"),
        "radius": ("--radius", measurements.RADIUS),
        "step_size": ("--step-size", measurements.STEP),
        "steps": ("--steps", measurements.STEPS),
        "pictures": ("--pictures", None),
    },
    "flatness": {"epsilon": ("--epsilon", measurements.EPSILON), "pictures": ("--pictures", None)},
}
OTHERWISE = "measured otherwise"
TRAINED_WITH = (
    "epochs", "batch_size", "lr", "momentum", "weight_decay", "schedule", "milestones", "warmup", "augment",
    "clip_norm", "label_noise", "validation", "precision",
)  # fmt: skip
UNSAID = {"warmup": 0.0, "label_noise": 0.0}


def measuring(run: Run, parts: Sequence[str], usual: Mapping[str, Condition]) -> str | None:
    """What measures these parts as the others were measured; without its run's folder a result cannot be measured."""
    if not run.path.is_dir():
        return None
    flags: dict[str, list[str]] = {}
    for part in parts:
        flags[f"--{part}"] = []
        for knob, value in usual.get(part, {}).items():
            flag, default = FLAGS[part][knob]
            if value != (_unasked(run, part) if knob == "pictures" else default):
                flags[flag] = [str(value)]  # to the last digit: else it would be measured otherwise again
    words = [word for flag, value in flags.items() for word in (flag, *value)]
    return shlex.join(["flatmin", "evaluate", str(run.path), *words])


def measuring_all(run: Run, parts: Sequence[str], usual: Mapping[str, Condition]) -> list[str]:
    """One command for all parts, or one each where they were measured on other numbers of pictures."""
    apart = len({usual[part]["pictures"] for part in parts if part in usual}) > 1
    found = [measuring(run, [part], usual) for part in parts] if apart else [measuring(run, parts, usual)]
    return [command for command in found if command]


def _unasked(run: Run, part: str) -> int | None:
    """How many pictures are taken where nothing is said: all of the test set, which its bins count; or 1000."""
    bins = run.result.get("reliability")
    return measurements.PICTURES if part == "flatness" else (int(sum(bins["number"])) if bins else None)


def alike(runs: Sequence[Run]) -> tuple[list[Run], dict[str, Condition]]:
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


def training(setting: Mapping[str, Any], trained: set[str], seeds: Sequence[int], beside: Path) -> list[str]:
    """For each of the paper's methods that is not there, and each seed that is, the command that trains it alike."""
    data, model = setting["data"], setting["model"]
    if data not in DATA_SETS or (setting.get("momentum") and setting.get("nesterov") is False):
        return []  # no flag of `flatmin train` leaves out Nesterov's alone
    flags = ["--data", data]
    if model != SMALL_DATA.get(data, {}).get("model", "preactresnet18"):
        flags += ["--model", model]
    for key in TRAINED_WITH:
        flags += _flag(key, setting.get(key), setting.get("schedule"))
    mark = hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:6]  # one folder for each setting
    found = []
    for method in METHODS:
        for seed in seeds if method not in trained else ():
            out = beside / f"{data}-{model}-{method}-{seed}-{mark}"
            found.append(["flatmin", "train", "--method", method, *flags, "--seed", str(seed), "--out", str(out)])
    return [shlex.join(command) for command in found]


def _flag(key: str, value: object, schedule: object) -> list[str]:
    """What says it to `flatmin train`; nothing where that is said by saying nothing."""
    flag = f"--{key.replace('_', '-')}"
    if value is True:
        return [flag]
    if isinstance(value, list):
        return [flag, ",".join(map(str, value))] if schedule == "multi_step" else []
    if isinstance(value, str) or (is_number(value) and value != UNSAID.get(key)):
        return [flag, str(value)]
    return []
