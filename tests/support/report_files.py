"""Result files as a training leaves them, with numbers that a test chooses."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatmin_lab.methods import resolve_settings
from flatmin_lab.recipes.recipe import Recipe

BINS = {"number": [0] * 14 + [100], "confidence": [0.0] * 14 + [0.9], "accuracy": [0.0] * 14 + [0.8]}
AXIS = [-1.0, 0.0, 1.0]


def result(method: str, seed: int, error: float, **changes: Any) -> dict[str, Any]:
    values = {
        "recipe": "",
        "data": "cifar10",
        "model": "preactresnet18",
        "method": method,
        "protocol": "paper",
        "settings": {"epsilon": 0.5, "inner_lr": 1.0} if method == "amp" else {},
        "augment": "vanilla",
        "label_noise": 0.0,
        "epochs": 3,
        "batch_size": 50,
        "seed": seed,
        "train_loss": 0.1,
        "test_error": error,
        "test_nll": 4 * error,
        "test_ece": error / 2,
        "seconds": 20.0 if method == "amp" else 10.0,
        "hardware": "a machine",
        "torch": "2.13.0",
        "commit": "abc1234",
        "reliability": BINS,
    }
    return {**values, **changes}


def evaluation(pgd: float = 0.5, **changes: Any) -> dict[str, Any]:
    attack = {"pictures": 100, "norm": "linf", "radius": 4 / 255, "step_size": 1 / 255, "steps": 10}
    flat = {"pictures": 50, "epsilon": 0.1, "loss": 0.1, "worst_case_loss": 0.4, "eigenvalues": [9.0], "trace": 50.0}
    return {
        "checkpoint": "checkpoint-00000003.safetensors",
        "epoch": 3,
        "attack": {**attack, "fgsm_error": pgd / 2, "pgd_error": pgd},
        "flatness": flat,
        **changes,
    }


def scaled(nll: float = 0.3, ece: float = 0.01) -> dict[str, Any]:
    """What temperature scaling leaves."""
    return {"temperatures": [1.4, 1.6], "nll": nll, "ece": ece}


def spectrum(largest: float = 8.0, **changes: Any) -> dict[str, Any]:
    """Two probes: at 0 nearly everything, and at two values away from it."""
    return {
        "pictures": 50,
        "parameters": 1000,
        "steps": 3,
        "products": 6,
        "smallest": -0.5,
        "largest": largest,
        "trace": 12.0,
        "trace_error": 1.0,
        "negative_curvature": 0.25,
        "values": [[-0.5, 0.0, largest], [0.0, largest]],
        "weights": [[0.01, 0.98, 0.01], [0.99, 0.01]],
        **changes,
    }


def landscape(height: float = 1.0, **changes: Any) -> dict[str, Any]:
    plane = [[height * (x * x + y * y) + 0.1 for x in AXIS] for y in AXIS]
    split = {"pictures": 50, "line": plane[1], "plane": plane}
    splits = {"training": split, "test": split}
    return {"epoch": 3, "seed": 0, "reach": 1.0, "points": 3, "axis": AXIS, "splits": splits, **changes}


def write(folder: Path, found: Mapping[str, Any], **others: Any) -> Path:
    """A run's folder with this result, three epochs, and other files by name."""
    folder.mkdir(parents=True)
    config = {"recipe": {"epochs": found["epochs"]}, "seed": found["seed"], "data_sha256": "0"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "result.json").write_text(json.dumps(found))
    lines = [
        {
            "epoch": n + 1,
            "train_loss": 1 / (n + 1),
            "test_nll": 1 / (n + 1),
            "test_error": found["test_error"] + 0.1 * n,  # lowest in the first epoch
            "test_ece": 0.03 - 0.01 * n,
        }
        for n in range(3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, content in others.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


ERRORS = {
    "erm": [0.050, 0.052, 0.051, 0.049],
    "amp": [0.040, 0.041, 0.039, 0.040],
    "mixup": [0.050, 0.053, 0.047, 0.051],
}


def write_all(root: Path, *, landscapes: bool) -> Path:
    """Three methods, four seeds each: AMP is better, MixUp is not. Landscapes take longest to draw."""
    for method, errors in ERRORS.items():
        for seed, error in enumerate(errors):
            pgd = {"erm": 0.6, "amp": 0.5, "mixup": 0.65}[method] + 0.01 * seed
            steep = {"landscape": landscape(2.0 if method == "erm" else 1.0)} if landscapes else {}
            write(root / f"{method}-{seed}", result(method, seed, error), evaluation=evaluation(pgd), **steep)
    return root


def of_recipe(recipe: Recipe, seed: int, error: float, **changes: Any) -> dict[str, Any]:
    """A result file of one of the paper's recipes."""
    settings = recipe.as_json()
    name = settings.pop("name")
    return {
        **result(recipe.method, seed, error),
        "recipe": name,
        "protocol": str(recipe.protocol),
        **settings,
        "settings": resolve_settings(recipe.method, recipe.settings),
        "data_sha256": "0" * 64,
        "clean_train_nll": 0.1,
        **changes,
    }


def write_result(results: Path, recipe: Recipe, seed: int, error: float, **changes: Any) -> Path:
    place = results / f"{recipe.name}-{seed}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(of_recipe(recipe, seed, error, **changes)))
    return place
