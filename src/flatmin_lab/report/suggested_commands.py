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
from flatmin_lab.recipes.defaults import SMALL
from flatmin_lab.report.loader import Run
from flatmin_lab.report.schema import is_number

Condition = dict[str, Any]
# under what conditions something was measured: the flag, and what it is where nothing is said
FLAGS: dict[str, dict[str, tuple[str, Any]]] = {
    "attack": {
        "norm": ("--norm", "linf"),
        "radius": ("--radius", measurements.ATTACK_RADIUS),
        "step_size": ("--step-size", measurements.ATTACK_STEP_SIZE),
        "steps": ("--steps", measurements.ATTACK_STEPS),
        "pictures": ("--pictures", None),
    },
    "flatness": {"epsilon": ("--epsilon", measurements.FLATNESS_EPSILON), "pictures": ("--pictures", None)},
}
MEASURED_DIFFERENTLY = "measured otherwise"
TRAIN_FLAGS = (
    "epochs", "batch_size", "lr", "momentum", "weight_decay", "schedule", "milestones", "warmup", "augment",
    "clip_norm", "label_noise", "validation", "precision",
)  # fmt: skip
DEFAULTS = {"warmup": 0.0, "label_noise": 0.0}


def evaluate_command(run: Run, parts: Sequence[str], usual: Mapping[str, Condition]) -> str | None:
    """What measures these parts as the others were measured; without its run's folder a result cannot be measured."""
    if not run.path.is_dir():
        return None
    flags: dict[str, list[str]] = {}
    for part in parts:
        flags[f"--{part}"] = []
        for option, value in usual.get(part, {}).items():
            flag, default = FLAGS[part][option]
            if value != (_default_images(run, part) if option == "pictures" else default):
                flags[flag] = [str(value)]  # to the last digit: else it would be measured otherwise again
    words = [word for flag, value in flags.items() for word in (flag, *value)]
    return shlex.join(["flatmin", "evaluate", str(run.path), *words])


def evaluate_commands(run: Run, parts: Sequence[str], usual: Mapping[str, Condition]) -> list[str]:
    """One command for all parts, or one each where they were measured on other numbers of pictures."""
    apart = len({usual[part]["pictures"] for part in parts if part in usual}) > 1
    found = [evaluate_command(run, [part], usual) for part in parts] if apart else [evaluate_command(run, parts, usual)]
    return [command for command in found if command]


def _default_images(run: Run, part: str) -> int | None:
    """How many pictures are taken where nothing is said: all of the test set, which its bins count; or 1000."""
    bins = run.result.get("reliability")
    return measurements.FLATNESS_IMAGES if part == "flatness" else (int(sum(bins["number"])) if bins else None)


def mark_differing(runs: Sequence[Run]) -> tuple[list[Run], dict[str, Condition]]:
    """The same runs, with a mark for what was measured otherwise than in most of them; and how that is."""
    usual: dict[str, Condition] = {}
    for part, options in FLAGS.items():
        kinds = [_condition(run, part, options) for run in runs]
        known = [kind for kind in kinds if kind]
        if not known:
            continue
        usual[part] = max(known, key=known.count)
        runs = [
            run
            if kind in ({}, usual[part])
            else replace(run, evaluation={**run.evaluation, part: {MEASURED_DIFFERENTLY: kind}})
            for run, kind in zip(runs, kinds, strict=True)
        ]
    return list(runs), usual


def _condition(run: Run, part: str, options: Mapping[str, Any]) -> Condition:
    found = run.evaluation.get(part)
    return {option: found[option] for option in options} if found else {}


def train_commands(setting: Mapping[str, Any], trained: set[str], seeds: Sequence[int], beside: Path) -> list[str]:
    """For each of the paper's methods that is not there, and each seed that is, the command that trains it alike."""
    data, model = setting["data"], setting["model"]
    if data not in DATA_SETS or (setting.get("momentum") and setting.get("nesterov") is False):
        return []  # no flag of `flatmin train` leaves out Nesterov's alone
    flags = ["--data", data]
    if model != SMALL.get(data, {}).get("model", "preactresnet18"):
        flags += ["--model", model]
    for key in TRAIN_FLAGS:
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
    if isinstance(value, str) or (is_number(value) and value != DEFAULTS.get(key)):
        return [flag, str(value)]
    return []
