"""Experiments about the paper's own: readings of its text and code, equal compute, precision."""

from dataclasses import replace

from flatmin_lab.recipes.experiments.experiment import RESNET, Experiment, cell, experiment_of
from flatmin_lab.recipes.protocols import PROTOCOLS, Protocol, method_settings, recipe_fields


def ball(protocol: Protocol) -> Experiment:
    """AMP on CIFAR-10 with one ball over all parameters (the paper) and one per tensor (its published code)."""
    usual = cell(protocol, "cifar10", RESNET, "amp")
    other = "global" if usual.settings.get("ball") == "tensor" else "tensor"
    recipes = [usual, cell(protocol, "cifar10", RESNET, "amp", variant=other, settings={"ball": other})]
    return experiment_of("ball", "the two readings of the ball", protocol, recipes, trials=1)


def adversary(protocol: Protocol) -> Experiment:
    """Adversarial training on CIFAR-10 with the step of 1 as 1/255 of the pixel range, and of the normalised inputs.

    The latter, as in the published code, is a quarter of the former: 0.00095 to 0.00103 of the range, by colour.
    That code also starts at random, as `paper` does; the others take 0.001 of the range from the image itself.
    """
    published = PROTOCOLS[protocol].published
    pixels = {"units": "pixels", "random_start": False}
    variant, settings = ("pixels", pixels) if published else ("small", {"epsilon": 0.001})
    recipes = [
        cell(protocol, "cifar10", RESNET, "adversarial"),
        cell(protocol, "cifar10", RESNET, "adversarial", variant=variant, settings=settings),
    ]
    title = "the two readings of adversarial training's step"
    return experiment_of("adversary", title, protocol, recipes, trials=1, parts=("attack",))


def first_version(protocol: Protocol) -> Experiment:
    """ERM and AMP as in the first version of the published code, as in the second, and with one change at a time.

    Is the paper's table 1 from the first? On CIFAR-100 the paper has 24.31 % and an NLL of 1.056 for ERM, 21.51 % and
    0.774 for AMP. `paper` is the first version; `paper-v2` also has ERM with only its crops, and with only its
    momentum, and so does `short`, with the complete first version too.
    """
    recipes, beside = [], []
    for data in ("cifar10", "cifar100"):
        recipes += [cell(protocol, data, RESNET, method) for method in ("erm", "amp")]
        if PROTOCOLS[protocol].published:
            continue
        whole = recipe_fields("paper", data, RESNET, "erm")
        changes = {"v1-crops": {"augment": whole["augment"]}, "v1-momentum": {"nesterov": whole["nesterov"]}}
        if protocol == "paper-v2":
            beside += [cell("paper", data, RESNET, method) for method in ("erm", "amp")]
        else:
            changes = {"v1": whole, **changes}
            ball = method_settings("paper", "amp")
            recipes.append(replace(cell(protocol, data, RESNET, "amp", variant="v1", settings=ball), **whole))
        recipes += [replace(cell(protocol, data, RESNET, "erm", variant=name), **own) for name, own in changes.items()]
    found = experiment_of("first_version", "the two versions of the published code", protocol, recipes, trials=1)
    return replace(found, beside=tuple(beside))


def compute(protocol: Protocol) -> Experiment:
    """ERM at twice the epochs costs what AMP costs: is it as good?"""
    epochs = 2 * PROTOCOLS[protocol].epochs
    recipes = [
        cell(protocol, "cifar10", RESNET, "amp"),
        cell(protocol, "cifar10", RESNET, "erm", variant="twice", epochs=epochs),
    ]
    return experiment_of("compute", "equal compute", protocol, recipes)


def precision(protocol: Protocol) -> Experiment:
    """AMP on CIFAR-10 in float32 beside bfloat16: is the perturbation lost in rounding? Is ERM over-confident?

    ERM's NLL on CIFAR-100 is well above the paper's. On a GPU with TF32, convolutions use it, which is torch's default.
    """
    recipes = []
    for data, method in (("cifar10", "amp"), ("cifar100", "erm")):
        recipes.append(cell(protocol, data, RESNET, method))
        recipes.append(cell(protocol, data, RESNET, method, variant="fp32", precision="fp32"))
    return experiment_of("precision", "float32 and bfloat16", protocol, recipes, trials=1)
