"""What else lowers the error or calibrates, AMP's gain at lower cost, and a radius that adjusts itself."""

import math
from functools import partial
from typing import Any

from flatmin_lab.methods import AUTO
from flatmin_lab.recipes.experiments.experiment import RESNET, Experiment, cell, experiment_of, home_of, small_fields
from flatmin_lab.recipes.paper_numbers import METHODS
from flatmin_lab.recipes.protocols import PAPER_LENGTH, PROTOCOLS, Protocol
from flatmin_lab.recipes.recipe import Recipe

LATE: tuple[tuple[float, float], ...] = ((0.9, 0.75), (0.97, 0.9))  # where the rate's second drop is, and AMP's start
TRIED: dict[str, dict[str, Any]] = {  # on CIFAR-10 at 60 epochs
    **{f"start-{start}": {"start": start} for start in (0.5, 0.75, 0.9)},
    "every-4": {"every": 4},
    "start-0.5-every-2": {"start": 0.5, "every": 2},
    "start-0.5-ascent-0.25": {"start": 0.5, "ascent_share": 0.25},
}
TRIED_WITH_LATER_DROP: dict[str, dict[str, Any]] = {  # likewise, with the second drop after 90 %
    "start-0.5": {"start": 0.5},
    "start-0.75-ascent-0.25": {"start": 0.75, "ascent_share": 0.25},
}
END = 0.5  # of the automatic radius on CIFAR-100 at 60 epochs
RADII: dict[str, dict[str, Any]] = {
    **{f"radius-{radius}": {"epsilon": radius} for radius in (0.03, 0.06, 0.12, 0.25, 0.5)},
    "auto": {"epsilon": AUTO},
}
TRANSFORMER: dict[str, Any] = {  # for digits, each a sequence of 16 patches; as long as the small network
    "model": "vit",
    "model_settings": {"patch": 2, "width": 48, "depth": 2, "heads": 4},
    "optimizer": "adamw",
    "lr": 2e-3,
    "weight_decay": 0.01,
    "schedule": "one_cycle",
}
LATE_AUTO: dict[str, dict[str, Any]] = {"auto-start-0.5": {"epsilon": AUTO, "start": 0.5}}  # on small data


def rivals(protocol: Protocol) -> Experiment:
    """What else lowers the error on CIFAR-10, and does it help AMP? Five times the weight decay, averaged weights."""
    recipes = []
    for method in ("erm", "amp"):
        recipes.append(cell(protocol, "cifar10", RESNET, method))
        recipes.append(cell(protocol, "cifar10", RESNET, method, variant="decay", weight_decay=5e-4))
        recipes.append(cell(protocol, "cifar10", RESNET, method, variant="ema", ema=0.9995))
    return experiment_of("rivals", "more weight decay, averaged weights", protocol, recipes, trials=3)


def frontier(protocol: Protocol) -> Experiment:
    """AMP's gain at lower cost: perturb late, or not in every step, beside ERM with as much time.

    A step without a perturbation costs one pass, so `start` s and `every` k cost 1 + (1 − s)/k passes per step. In the
    last quarter the rate is 0.001 and the weights hardly move: `drop` lowers it later, and ERM has the same rates.

    At 60 epochs all of this was tried on CIFAR-10, and what was promising on CIFAR-100. At 200 there are the best
    two modes: the last quarter and the last tenth, with a radius that adjusts itself.

    Left out after the first numbers on CIFAR-10 at 60 epochs, one run each, to spend the time on others: thinner
    perturbations of the second half (`every` 5, and 2 with a later drop), since every second step of it keeps about as
    much as every step of the last quarter, at the same cost; and twice the radius without a later drop, since 0.25 has
    a higher NLL than 0.12 in the sweep, which has N = 2 (docs/frontier.md). Added after the first table with three
    seeds, in which a late start keeps less of the gain in error than in NLL: every fourth step from the beginning, and
    twice the radius in the last quarter with a later drop. Added after that proved best: twice the radius in the last
    tenth; and after the automatic radius had kept up with fixed ones in all steps, or had been better than those: the
    same in the last quarter and tenth. In the last tenth on CIFAR-100 it had not grown to the end when it was kept: so
    the same with five adjustments per epoch. There it was better than every constant radius: is it the growth? So a
    radius that grows in proportion to time to where the automatic one ended.
    """
    recipes = []
    for data in ("cifar10", "cifar100"):
        train = partial(cell, protocol, data, RESNET)
        recipes += [train("erm"), train("amp"), train("amp", variant="auto", settings=RADII["auto"])]
        if protocol not in PAPER_LENGTH:
            recipes.append(train("erm", variant="times-1.25", epochs=_times(1.25, protocol)))
            recipes += _tried_on_cifar10(protocol) if data == "cifar10" else _tried_on_cifar100(protocol)
        for drop, start in LATE:
            late = partial(train, milestones=(0.5, drop))
            named, settings = f"drop-{drop}-start-{start}", {"start": start}
            if protocol not in PAPER_LENGTH:
                twice = 2 * train("amp").settings["epsilon"]
                recipes.append(late("erm", variant=f"drop-{drop}"))
                recipes.append(
                    late("amp", variant=f"{named}-radius-{twice:g}", settings={**settings, "epsilon": twice})
                )
            recipes.append(late("amp", variant=f"{named}-auto", settings={**settings, "epsilon": AUTO}))
    return experiment_of("frontier", "AMP's gain at lower cost", protocol, recipes, trials=3)


def _tried_on_cifar10(protocol: Protocol) -> list[Recipe]:
    train = partial(cell, protocol, "cifar10", RESNET)
    recipes = [train("erm", variant="times-1.5", epochs=_times(1.5, protocol))]
    recipes += [train("amp", variant=name, settings=settings) for name, settings in TRIED.items()]
    later: dict[str, Any] = {"milestones": (0.5, 0.9)}
    for name, settings in TRIED_WITH_LATER_DROP.items():
        recipes.append(train("amp", variant=f"drop-0.9-{name}", settings=settings, **later))
    for drop, start in LATE:
        named = f"drop-{drop}-start-{start}"
        recipes.append(train("amp", variant=named, settings={"start": start}, milestones=(0.5, drop)))
    return recipes


def _tried_on_cifar100(protocol: Protocol) -> list[Recipe]:
    train = partial(cell, protocol, "cifar100", RESNET, "amp")
    often: dict[str, Any] = {"start": 0.9, "epsilon": AUTO, "matches": 5}
    grows = {"epsilon": END, "growth": "linear"}
    return [
        train(variant="drop-0.97-start-0.9-auto-matches-5", settings=often, milestones=(0.5, 0.97)),
        train(variant=f"radius-{END}-linear", settings=grows),
    ]


def temperature(protocol: Protocol) -> Experiment:
    """The cheapest rival of better calibration, one number fitted after training: what is left of AMP's gain?

    The networks are those of the frontier and of table 1 on the CIFARs.
    """
    table = [cell(protocol, data, RESNET, method) for data in ("cifar10", "cifar100") for method in METHODS]
    recipes = {recipe.name: recipe for recipe in (*frontier(protocol).recipes, *table)}
    return experiment_of(
        "temperature", "after temperature scaling", protocol, [*recipes.values()], trials=3, parts=("scaled",)
    )


def auto(protocol: Protocol) -> Experiment:
    """A radius that adjusts itself beside five fixed ones and the protocol's: how much of the best one's gain is lost?

    The radius is matched to a held-out part of the training set; the fixed ones train on all of it. On digits there are
    two networks, a convolutional one and a transformer.
    """
    recipes = []
    for data in ("cifar10",) if protocol in PAPER_LENGTH else ("cifar10", "cifar100"):
        train = partial(cell, protocol, data, RESNET)
        recipes += [train("erm"), amp := train("amp")]
        others = {name: radius for name, radius in RADII.items() if radius != {"epsilon": amp.settings["epsilon"]}}
        recipes += [train("amp", variant=name, settings=radius) for name, radius in others.items()]
    for model, noise in (("convnet", 0.0), ("convnet", 0.2), ("vit", 0.2)):
        recipes += _radii_on_digits(protocol, model, noise)
    return experiment_of("auto", "a radius that adjusts itself", protocol, recipes, trials=3)


def _radii_on_digits(protocol: Protocol, model: str, noise: float) -> list[Recipe]:
    own = TRANSFORMER if model == "vit" else {}
    fields = {**small_fields("digits", protocol), **own, "label_noise": noise}
    name = f"{home_of(protocol)}/digits-{model}-{{}}{f'-noise-{noise}' if noise else ''}"
    recipes = [Recipe(**fields, method="erm", name=name.format("erm"))]
    for variant, radius in {**RADII, **LATE_AUTO}.items():
        settings, named = {**radius, "inner_lr": 1.0}, name.format(f"amp-{variant}")
        recipes.append(Recipe(**fields, method="amp", settings=settings, name=named))
    return recipes


def _times(factor: float, protocol: Protocol) -> int:
    return math.ceil(factor * PROTOCOLS[protocol].epochs)
