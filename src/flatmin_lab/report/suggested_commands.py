"""The commands that fill a report's gaps: evaluate a run like the others, train a missing method like the others.

Numbers measured under different conditions cannot be compared: runs that differ from the majority are set aside.
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
from flatmin_lab.recipes.fields import TRAINING, flags
from flatmin_lab.recipes.optimizers import SGD_FIELDS
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.report.loader import Run
from flatmin_lab.report.schema import is_number

Condition = dict[str, Any]
# the conditions of a measurement: the flag, and its default
FLAGS: dict[str, dict[str, tuple[str, Any]]] = {
    "attack": {
        "norm": ("--norm", "linf"),
        "radius": ("--radius", measurements.ATTACK_RADIUS),
        "step_size": ("--step-size", None),  # it depends on the radius
        "steps": ("--steps", measurements.ATTACK_STEPS),
        "pictures": ("--images", None),
    },
    "flatness": {"epsilon": ("--epsilon", measurements.FLATNESS_EPSILON), "pictures": ("--images", None)},
}
MEASURED_DIFFERENTLY = "measured otherwise"
TRAIN_FLAGS = (*(name for name, flag in flags(Recipe).items() if flag.panel == TRAINING), "precision")
DEFAULTS = {"warmup": 0.0, "label_noise": 0.0, "nesterov": True}


def evaluate_command(run: Run, parts: Sequence[str], usual: Mapping[str, Condition]) -> str | None:
    """The command that measures these parts like the other runs'; None without a run folder, which has the weights."""
    if not run.path.is_dir():
        return None
    flags: dict[str, list[str]] = {}
    for part in parts:
        flags[f"--{part}"] = []
        for option, value in usual.get(part, {}).items():
            flag, default = FLAGS[part][option]
            if option == "step_size":
                default = measurements.default_step_size(usual[part]["radius"], usual[part]["steps"])
            if value != (_default_images(run, part) if option == "pictures" else default):
                flags[flag] = [str(value)]  # to the last digit, else the conditions would differ again
    words = [word for flag, value in flags.items() for word in (flag, *value)]
    return shlex.join(["flatmin", "evaluate", str(run.path), *words])


def evaluate_commands(run: Run, parts: Sequence[str], usual: Mapping[str, Condition]) -> list[str]:
    """One command for all parts, or one each if their numbers of images differ."""
    apart = len({usual[part]["pictures"] for part in parts if part in usual}) > 1
    found = [evaluate_command(run, [part], usual) for part in parts] if apart else [evaluate_command(run, parts, usual)]
    return [command for command in found if command]


def _default_images(run: Run, part: str) -> int | None:
    """The number of images without --images: the whole test set, counted by its bins; for flatness 1000."""
    bins = run.result.get("reliability")
    return measurements.FLATNESS_IMAGES if part == "flatness" else (int(sum(bins["number"])) if bins else None)


def mark_differing(runs: Sequence[Run]) -> tuple[list[Run], dict[str, Condition]]:
    """The same runs, with what was measured unlike the majority marked; and the majority's conditions."""
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
    """The commands that train the paper's missing methods like the others, for each seed in use."""
    data, model = setting["data"], setting["model"]
    if data not in DATA_SETS or setting.get("files"):
        return []  # code of the user's own may be elsewhere, or changed
    flags = ["--data", data]
    usual = SMALL_DATA.get(data, {})
    own: Mapping[str, Any] = usual.get("model_settings", {})  # which --model would leave out
    settings = known if isinstance(known := setting.get("model_settings"), dict) else {}
    if model != usual.get("model", "preactresnet18") or not own.keys() <= settings.keys():
        flags += ["--model", model]
        own = {}
    changed = {key: value for key, value in settings.items() if key not in own or own[key] != value}
    flags += _flag("model_settings", changed, None)
    uses_sgd = setting.get("optimizer", "sgd") == "sgd"
    for key in TRAIN_FLAGS:
        if uses_sgd or key not in SGD_FIELDS:  # others refuse them
            flags += _flag(key, setting.get(key), setting.get("schedule"))
    flags += ["--no-nesterov"] if uses_sgd and setting.get("momentum") and setting.get("nesterov") is False else []
    mark = hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:6]  # a folder per setting
    found = []
    for method in METHODS:
        for seed in seeds if method not in trained else ():
            out = beside / f"{data}-{model}-{method}-{seed}-{mark}"
            found.append(["flatmin", "train", "--method", method, *flags, "--seed", str(seed), "--out", str(out)])
    return [shlex.join(command) for command in found]


def _flag(key: str, value: object, schedule: object) -> list[str]:
    """The flag of `flatmin train` for it; none for a default."""
    flag = f"--{key.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value and value != DEFAULTS.get(key) else []
    if key == "normalise":
        return [flag, *map(str, value)] if isinstance(value, list) else []
    if isinstance(value, dict):
        return [word for name, one in value.items() for word in (flag, f"{name}={json.dumps(one)}")]
    if isinstance(value, list):
        return [flag, ",".join(map(str, value))] if schedule == "multi_step" else []
    if isinstance(value, str) or (is_number(value) and value != DEFAULTS.get(key)):
        return [flag, str(value)]
    return []
