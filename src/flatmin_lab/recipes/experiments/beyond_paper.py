"""Other recipes than the paper's: what was tried, on a validation split, and then trained on the whole training set.

The paper's recipe is of 2020: a weight decay of 1e-4, three learning rates, batches of 50, convolutional networks.
Here the learning rate falls as a cosine, batches are larger, nothing is clipped; a protocol decides the length alone.
Radii and all else are chosen on a held-out tenth of the training set (names that end in `validation`), never on the
test set.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from flatmin_lab.methods import AUTO
from flatmin_lab.recipes.experiments.experiment import (
    RESNET,
    Experiment,
    Measurement,
    cell,
    experiment_of,
    home_of,
    small_fields,
)
from flatmin_lab.recipes.protocols import PROTOCOLS, Protocol
from flatmin_lab.recipes.recipe import Recipe

SMOKE_BATCH_SIZE = 10  # where another one is tried
WARM_UP = 1 / 12  # of a run: 5 of 60 epochs
VIT_RADII = (0.05, 0.1, 0.2, 0.5)
BEST_RADII = (0.05, 0.1, 0.2)
TRIED_RADIUS = 0.1  # of AMP with one of these changes
BEST_TRIES: dict[str, dict[str, Any]] = {  # changes to the recipe below, one at a time
    "decay-1e-3": {"weight_decay": 1e-3},
    "batch-50": {"batch_size": 50, "lr": 0.05},
    "linear": {"schedule": "linear"},
    "ema": {"ema": 0.999},
    "exempt-norms": {"exempt_norms": True},
    "muon": {"optimizer": "muon", "lr": 0.02, "weight_decay": 0.005},
}
LENGTHS: dict[str, tuple[float, ...]] = {
    "erm": (1 / 20, 1 / 8, 1 / 4, 1 / 2, 1, 2),
    "amp": (1 / 20, 1 / 8, 1 / 4, 1 / 2, 1),
}  # of the protocol's
BUDGETS = (5, 10, 20, 40, 80)  # of time, in epochs of ERM
MODES: dict[str, tuple[float, dict[str, Any]]] = {  # passes per step, and what is set
    "erm": (1, {"method": "erm"}),
    "amp-auto": (2, {"method": "amp", "settings": {"epsilon": AUTO, "inner_lr": 1.0}}),
    "amp-auto-start-0.75": (
        1.25,
        {
            "method": "amp",
            "settings": {"epsilon": AUTO, "inner_lr": 1.0, "start": 0.75},
            "milestones": (0.5, 0.9),
        },
    ),
}


def vit(protocol: Protocol) -> Experiment:
    """A small vision transformer on CIFAR-10, with AdamW: ERM, AMP at four radii, AMP in the second half alone."""
    epochs = PROTOCOLS[protocol].epochs
    train = _modern(
        protocol,
        "cifar10",
        "vit",
        optimizer="adamw",
        lr=1e-3,
        weight_decay=0.05,
        warmup=max(round(WARM_UP * epochs), 1),
    )
    recipes = []
    for validation in (True, False):
        train_on = partial(train, validation=validation)
        recipes.append(train_on("erm"))
        recipes += [train_on("amp", f"radius-{radius}", {"epsilon": radius}) for radius in VIT_RADII]
        recipes += [
            train_on("amp", f"radius-{radius}-start-0.5", {"epsilon": radius, "start": 0.5})
            for radius in VIT_RADII
            if not validation
        ]
    return experiment_of("vit", "a vision transformer: AdamW, cosine, batches of 128", protocol, recipes, trials=3)


def best(protocol: Protocol) -> Experiment:
    """The lowest error of a PreActResNet18 with crops and flips alone: tries on validation, then the whole set.

    Beside AMP stands ERM with the same recipe, and with as much time.
    """
    recipes = []
    for data in ("cifar10", "cifar100"):
        train = _modern(protocol, data, RESNET, weight_decay=5e-4)
        held_out = partial(train, validation=True)
        recipes += [held_out("erm"), *(held_out("erm", name, **changes) for name, changes in BEST_TRIES.items())]
        recipes += [held_out("amp", f"radius-{radius}", {"epsilon": radius}) for radius in BEST_RADII]
        named, chosen = f"radius-{TRIED_RADIUS}", {"epsilon": TRIED_RADIUS}
        for start in (0.5, 0.75):
            recipes.append(held_out("amp", f"{named}-start-{start}", {**chosen, "start": start}))
        recipes.append(held_out("amp", "auto", {"epsilon": AUTO}))
        recipes.append(held_out("amp", "auto-start-0.75", {"epsilon": AUTO, "start": 0.75}))
        for beside in ("label_smoothing", "mixup"):
            recipes.append(held_out("amp", f"{named}-{beside}", {**chosen, "regulariser": beside}))
        recipes += [held_out("amp", f"{named}-{name}", chosen, **changes) for name, changes in BEST_TRIES.items()]
        recipes += [train("erm"), train("erm", "twice", epochs=2 * PROTOCOLS[protocol].epochs)]
        recipes += [train("amp", f"radius-{radius}", {"epsilon": radius}) for radius in BEST_RADII]
    return experiment_of(
        "best", "a recipe of today: cosine, batches of 128, weight decay 5e-4", protocol, recipes, trials=3
    )


def length(protocol: Protocol) -> Experiment:
    """When does AMP begin to pay? The recipe of `best`, from a twentieth of the protocol's length to twice that.

    The time of each run says what it costs, so these are trained one after the other: `--together 1`. On digits, whose
    runs take seconds, each mode is as long as a budget of passes allows.
    """
    recipes, epochs = [], PROTOCOLS[protocol].epochs
    for data in ("cifar10", "cifar100"):
        train = _modern(protocol, data, RESNET, weight_decay=5e-4)
        for method, shares in LENGTHS.items():
            lengths = {max(round(share * epochs), 1): share for share in shares}  # of equal ones, the last
            for number, share in lengths.items():
                words = [] if method == "erm" else [f"radius-{TRIED_RADIUS}"]
                words += {1.0: [], 2.0: ["twice"]}.get(share, [f"length-{share:g}"])
                settings = {} if method == "erm" else {"epsilon": TRIED_RADIUS}
                recipes.append(train(method, "-".join(words), settings, epochs=number))
    for noise in (0.0, 0.2):
        recipes += _budgets_on_digits(protocol, noise)
    return experiment_of("length", "error over the time of training", protocol, recipes, trials=3)


def _budgets_on_digits(protocol: Protocol, noise: float) -> list[Recipe]:
    fields, recipes = {**small_fields("digits", protocol), "label_noise": noise}, []
    for budget in BUDGETS[:2] if protocol == "smoke" else BUDGETS:
        for mode, (passes, changes) in MODES.items():
            epochs = budget / passes
            if epochs.is_integer():
                name = (
                    f"{home_of(protocol)}/digits-convnet-{mode}-epochs-{epochs:g}{f'-noise-{noise}' if noise else ''}"
                )
                recipes.append(Recipe(**{**fields, **changes, "epochs": int(epochs), "name": name}))
    return recipes


def examine(protocol: Protocol) -> Experiment:
    """ERM's and AMP's networks of table 1: the Hessian's eigenvalues, confident mistakes, data from outside."""
    recipes = [cell(protocol, data, RESNET, method) for data in ("cifar10", "cifar100") for method in ("erm", "amp")]
    parts: tuple[Measurement, ...] = ("spectrum", "selective", "outside")
    return experiment_of("examine", "spectrum, confidence, data from outside", protocol, recipes, trials=3, parts=parts)


def _modern(protocol: Protocol, data: str, model: str, **usual: Any) -> Callable[..., Recipe]:
    """Makes recipes that share what is usual today; one tiny batch size for `smoke`, as everywhere."""
    size = {} if protocol == "smoke" else {"batch_size": 128}
    usual = {"augment": "vanilla", "nesterov": True, "clip_norm": None, "schedule": "cosine", **size, **usual}

    def train(
        method: str, name: str = "", settings: dict[str, Any] | None = None, *, validation: bool = False, **changes: Any
    ) -> Recipe:
        words = ["modern", *([name] if name else []), *(["validation"] if validation else [])]
        ball = {"ball": "global"} if method == "amp" else {}
        if protocol == "smoke" and "batch_size" in changes:
            changes["batch_size"] = SMOKE_BATCH_SIZE
        return cell(
            protocol,
            data,
            model,
            method,
            variant="-".join(words),
            validation=validation,
            settings={**ball, **(settings or {})},
            **{**usual, **changes},
        )

    return train
