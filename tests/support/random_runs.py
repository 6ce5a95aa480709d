"""Random recipes of tiny runs, which combine whatever can be combined; and a disk that fills up."""

import errno
import os
import random
from pathlib import Path
from typing import Any

from flatmin_lab import methods
from flatmin_lab.recipes.recipe import Recipe
from tests.support import awkward_networks, own_networks
from tests.support.small_runs import tiny_recipe

OWN, AWKWARD = (str(Path(str(module.__file__))) for module in (own_networks, awkward_networks))
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("convnet", {"width": 3}),
    ("mlp", {"side": 6}),
    ("vit", {"width": 12, "patch": 3}),
    *((f"{OWN}:{name}", {}) for name in ("ResNet", "ViT", "TiedMLP")),
    *((f"{AWKWARD}:{name}", {}) for name in ("Skipping", "Counting", "Masked")),
]
OPTIMIZERS = ("sgd", "adamw", "muon", "rmsprop", "nadam", f"{OWN}:make_optimizer", f"{AWKWARD}:mixed_moments")


def draw_recipe(draw: random.Random) -> Recipe:
    """A recipe for `tiny_data()`: batches of 11 divide its 44 images, the others leave a smaller one."""

    def sometimes(share: float, **values: Any) -> dict[str, Any]:
        return {key: draw.choice(value) for key, value in values.items()} if draw.random() < share else {}

    method = draw.choice([*methods.METHODS, "amp", "amp", "amp"])
    model, model_settings = draw.choice(MODELS[:3] if method == "dropout" else MODELS)
    optimizer = draw.choice(OPTIMIZERS)
    changes: dict[str, Any] = {
        "method": method,
        "model": model,
        "model_settings": model_settings,
        "optimizer": optimizer,
        "lr": 0.05 if optimizer == "sgd" else 0.005,
        "weight_decay": 0.0 if optimizer.startswith(AWKWARD) else 1e-3,
        "batch_size": draw.choice([8, 10, 11]),
        "epochs": draw.choice([2, 3]),
        "schedule": draw.choice(["constant", "multi_step", "cosine", "one_cycle"]),
        "augment": draw.choice(["none", "vanilla"]),
        "settings": _amp_settings(draw) if method == "amp" else {},
        **sometimes(0.4, ema=[0.5, 0.9]),
        **sometimes(0.4, label_noise=[0.25]),
        **sometimes(0.3, validation=[True]),
        **sometimes(0.3, precision=["bf16", "fp16"]),
        **sometimes(0.3, channels_last=[True]),
    }
    if changes["schedule"] != "one_cycle":
        changes |= sometimes(0.3, warmup=[0.7])
    if ":" not in optimizer:
        changes |= {**sometimes(0.3, clip_norm=[0.5]), **sometimes(0.2, exempt_norms=[True])}
    return tiny_recipe(**changes)


def _amp_settings(draw: random.Random) -> dict[str, Any]:
    settings: dict[str, Any] = {"epsilon": draw.choice(["auto", 0.05, 0.3])}
    common: dict[str, list[Any]] = {
        "start": [0.3, 0.5],
        "every": [2, 3],
        "inner_iter": [2],
        "ball": ["group", "tensor"],
        "norm": ["linf"],
    }
    of_auto: dict[str, list[Any]] = {"held_out": [0.2], "release": [0.4, 1.0]}
    of_number: dict[str, list[Any]] = {"growth": ["linear", "cosine"], "ascent_share": [0.4]}
    known = {**common, **(of_auto if settings["epsilon"] == "auto" else of_number)}
    settings |= {key: draw.choice(values) for key, values in known.items() if draw.random() < 0.35}
    if settings["epsilon"] != "auto" and "ascent_share" not in settings and draw.random() < 0.4:
        settings["regulariser"] = draw.choice(methods.BESIDE_AMP)
    return settings


def fill_disk(call: int) -> None:
    """From that call of fsync on, the disk is full; the caller restores `os.fsync`."""
    left, real = [call], os.fsync

    def failing(handle: int) -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    setattr(os, "fsync", failing)  # noqa: B010  # typed as another signature
