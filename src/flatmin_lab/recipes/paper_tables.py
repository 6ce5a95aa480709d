"""The paper's tables and figures as experiments: which runs each needs under a protocol, and what is measured.

    experiment = EXPERIMENTS["table1"]("short")
    experiment.recipes[0].name                  short/svhn-preactresnet18-erm

A run may serve several experiments: the calibration figure, the attacks and the landscapes use table 1's networks. So a
recipe's name says what it trains, not which table asked for it. The paper's own numbers are in `paper_numbers.py`.

    paper       200 epochs, the rate divided by ten after 100 and 150, 10 trials, as the published code trains; a
                PreActResNet18 takes an H200 some 6 minutes with ERM and 11 with AMP
    paper-v2    the same length, as in the second version of that code and the paper's text
    short       60 epochs, divided after 30 and 45, 3 trials, AMP with a radius of at most 0.1: a large one needs a long
                run. Everything else as in `paper-v2`, not `paper`
    smoke       3 epochs of narrow networks on 200 synthetic images, 3 trials: seconds on a CPU, and not evidence.
                Otherwise as `paper`

Runs are in bf16, channels-last and compiled. How the protocols differ is in protocols.py. The spiral and the digits
have no crops, and recipes of their own: `paper-v2` shares those of `paper`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Literal

from flatmin_lab.data.augment.transforms import Kind
from flatmin_lab.data.sources.synthetic import SUFFIX
from flatmin_lab.methods import AUTO
from flatmin_lab.recipes.defaults import SMALL_DATA
from flatmin_lab.recipes.paper_numbers import METHODS
from flatmin_lab.recipes.protocols import (
    NAMES,
    PROTOCOLS,
    TABLE_1,
    TABLE_2,
    Protocol,
    method_settings,
    recipe_fields,
)
from flatmin_lab.recipes.recipe import Job, Recipe, perturbation

Measurement = Literal["attack", "flatness", "batch_rise", "landscape", "boundary"]
SETS = ("svhn", "cifar10", "cifar100")
RESNET = TABLE_1[0]
AUGMENTATIONS: tuple[Kind, ...] = ("vanilla", "cutout", "autoaugment")
LATER_DROP: dict[str, dict[str, Any]] = {  # AMP with its second drop after 90 %
    "start-0.5": {"start": 0.5},
    "start-0.5-ascent-0.25": {"start": 0.5, "ascent_share": 0.25},
    "start-0.75-ascent-0.25": {"start": 0.75, "ascent_share": 0.25},
}
AUTO_RADII = (0.03, 0.06, 0.12, 0.25, 0.5)
RADII = (0.03, 0.06, 0.12, 0.25)  # the paper's optimum lies at 0.06, on all three sets
SMOKE_MODEL_SETTINGS: dict[str, dict[str, Any]] = {
    "preactresnet18": {"width": 4},
    "vgg16": {"width": 4, "hidden": 16},
    "wideresnet28_10": {"depth": 10, "width": 1},
    "pyramidnet164_270": {"depth": 11, "alpha": 6},
}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or a figure: `parts` is what is measured besides error, NLL and calibration.

    One without trials times a few steps, and trains no network to the end.
    """

    name: str
    title: str
    protocol: Protocol
    recipes: tuple[Recipe, ...]
    trials: int
    parts: tuple[Measurement, ...] = ()
    beside: tuple[Recipe, ...] = ()  # rows of other experiments, shown where they have been trained

    @cached_property
    def names(self) -> frozenset[str]:
        """Of all recipes it shows."""
        return frozenset(recipe.name for recipe in (*self.recipes, *self.beside))

    def jobs(self, seeds: tuple[int, ...] | None = None) -> list[Job]:
        """Seed by seed, so that an interrupted CPU leaves complete tables; a GPU goes data set by data set."""
        chosen = (seeds or range(self.trials)) if self.trials else ()
        return [Job(recipe, seed) for seed in chosen for recipe in self.recipes]


def cell(
    protocol: Protocol,
    data: str,
    model: str,
    method: str,
    *,
    augment: Kind = "vanilla",
    variant: str = "",
    **changes: Any,
) -> Recipe:
    """A cell of the paper's tables under a protocol; a variant has a name, and recipe fields that differ."""
    words = [data, model, method, *([augment] if augment != "vanilla" else []), *([variant] if variant else [])]
    values: dict[str, Any] = recipe_fields(protocol, data, model, method, augment)
    if protocol == "smoke":
        small = {**SMOKE_MODEL_SETTINGS[model], **values.get("model_settings", {})}
        values |= {"data": f"{data}{SUFFIX}", "model_settings": small, "batch_size": 20}
    else:
        values |= {"data": data, "precision": "bf16", "channels_last": True, "compile": True}
    settings: Mapping[str, Any] = changes.pop("settings", {})
    recipe = Recipe(
        **values,
        name=f"{protocol}/{'-'.join(words)}",
        model=model,
        method=method,
        epochs=PROTOCOLS[protocol].epochs,
    )
    known = perturbation(recipe) if method == "amp" else {}
    return replace(recipe, settings={**known, **method_settings(protocol, method), **settings}, **changes)


def table1(protocol: Protocol) -> Experiment:
    """Eight methods, two networks, three data sets. AMP on CIFAR-10 with PreActResNet18: 3.97 % against ERM's 5.02."""
    recipes = [cell(protocol, data, model, method) for data in SETS for model in TABLE_1 for method in METHODS]
    beside = {
        recipe.name: recipe for make in (ball, adversary, compute, precision) for recipe in make(protocol).recipes
    }
    found = _experiment("table1", "test error and NLL of eight methods", protocol, recipes)
    return replace(found, beside=tuple(recipe for recipe in beside.values() if recipe not in recipes))


def table2(protocol: Protocol) -> Experiment:
    """Wide networks under three augmentations. CIFAR-10, WideResNet-28-10, Cutout: 2.67 % against ERM's 3.38."""
    recipes = [
        cell(protocol, data, model, method, augment=augment)
        for data in SETS
        for model in TABLE_2
        for augment in AUGMENTATIONS
        for method in ("erm", "amp")
    ]
    return _experiment("table2", "test error under stronger augmentation", protocol, recipes)


def table3(protocol: Protocol) -> Experiment:
    """FGSM and PGD on table 1's PreActResNet18. CIFAR-10, PGD: AMP 49.72 %, ERM 58.88, adversarial training 21.46."""
    return _experiment("table3", "error under attack", protocol, _resnets(protocol, METHODS), parts=("attack",))


def ece(protocol: Protocol) -> Experiment:
    """The calibration of table 1's PreActResNet18. CIFAR-10: AMP 1.25 %, ERM 3.36."""
    return _experiment("ece", "expected calibration error", protocol, _resnets(protocol, METHODS))


def sweep(protocol: Protocol) -> Experiment:
    """Risk over the radius ε, N = 2 and ζ = 2 (the paper writes η), on the validation split; lowest near 0.06."""
    recipes = []
    for data in SETS:
        recipes.append(cell(protocol, data, RESNET, "erm", variant="validation", validation=True))
        for radius in RADII:
            settings = {"epsilon": radius, "inner_lr": 2.0, "inner_iter": 2}
            variant = f"sweep-{radius}-validation"
            recipes.append(cell(protocol, data, RESNET, "amp", variant=variant, validation=True, settings=settings))
    return _experiment("sweep", "risk over the radius ε", protocol, recipes, trials=1)


def curves(protocol: Protocol) -> Experiment:
    """Training and test loss over the epochs: ERM has the lowest training loss, AMP the lowest test loss."""
    return _experiment("curves", "loss curves", protocol, _resnets(protocol, ("erm", "flooding", "mixup", "amp")))


def landscape(protocol: Protocol) -> Experiment:
    """The loss around the weights along random directions, on training and test images: AMP's is flatter."""
    recipes = _resnets(protocol, ("erm", "amp"))
    return _experiment("landscape", "loss landscapes", protocol, recipes, trials=1, parts=("landscape",))


def flatness(protocol: Protocol) -> Experiment:
    """Not in the paper: the worst loss in the ball and the Hessian's largest eigenvalue of the same networks."""
    return _experiment("flatness", "flatness in numbers", protocol, _resnets(protocol, METHODS), parts=("flatness",))


def spiral(protocol: Protocol) -> Experiment:
    """Two decision boundaries on a spiral: AMP's is smoother."""
    points = _small("spiral", protocol)
    recipes = []
    for method in ("erm", "amp"):
        recipe = Recipe(**points, method=method, name=f"{_home(protocol)}/spiral-mlp-{method}")
        recipes.append(replace(recipe, settings=perturbation(recipe)) if method == "amp" else recipe)
    return _experiment("spiral", "decision boundaries on a spiral", protocol, recipes, parts=("boundary",))


def cost(protocol: Protocol) -> Experiment:
    """The time of table 1's ERM and AMP on CIFAR-10, from a few steps; paper: 1.8 times, 2.4 and 4.2 h on a V100."""
    recipes = [cell(protocol, "cifar10", RESNET, method) for method in ("erm", "amp")]
    return _experiment("cost", "computational cost", protocol, recipes, trials=0)


# ---- experiments the paper does not have: readings of its text and code, equal compute, precision


def ball(protocol: Protocol) -> Experiment:
    """AMP on CIFAR-10 with one ball over all parameters (the paper) and one per tensor (its published code)."""
    usual = cell(protocol, "cifar10", RESNET, "amp")
    other = "global" if usual.settings.get("ball") == "tensor" else "tensor"
    recipes = [usual, cell(protocol, "cifar10", RESNET, "amp", variant=other, settings={"ball": other})]
    return _experiment("ball", "the two readings of the ball", protocol, recipes, trials=1)


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
    return _experiment("adversary", title, protocol, recipes, trials=1, parts=("attack",))


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
    found = _experiment("first_version", "the two versions of the published code", protocol, recipes, trials=1)
    return replace(found, beside=tuple(beside))


def compute(protocol: Protocol) -> Experiment:
    """ERM at twice the epochs costs what AMP costs: is it as good?"""
    epochs = 2 * PROTOCOLS[protocol].epochs
    recipes = [
        cell(protocol, "cifar10", RESNET, "amp"),
        cell(protocol, "cifar10", RESNET, "erm", variant="twice", epochs=epochs),
    ]
    return _experiment("compute", "equal compute", protocol, recipes)


def precision(protocol: Protocol) -> Experiment:
    """AMP on CIFAR-10 in float32 beside bfloat16: is the perturbation lost in rounding? Is ERM over-confident?

    ERM's NLL on CIFAR-100 is well above the paper's. On a GPU with TF32, convolutions use it, which is torch's default.
    """
    recipes = []
    for data, method in (("cifar10", "amp"), ("cifar100", "erm")):
        recipes.append(cell(protocol, data, RESNET, method))
        recipes.append(cell(protocol, data, RESNET, method, variant="fp32", precision="fp32"))
    return _experiment("precision", "float32 and bfloat16", protocol, recipes, trials=1)


def rivals(protocol: Protocol) -> Experiment:
    """What else lowers the error on CIFAR-10, and does it help AMP? Five times the weight decay, averaged weights."""
    recipes = []
    for method in ("erm", "amp"):
        recipes.append(cell(protocol, "cifar10", RESNET, method))
        recipes.append(cell(protocol, "cifar10", RESNET, method, variant="decay", weight_decay=5e-4))
        recipes.append(cell(protocol, "cifar10", RESNET, method, variant="ema", ema=0.9995))
    return _experiment("rivals", "more weight decay, averaged weights", protocol, recipes, trials=3)


def frontier(protocol: Protocol) -> Experiment:
    """AMP's gain at lower cost: perturb late, or not in every step, beside ERM with as much time.

    A step without a perturbation costs one pass, so `start` s and `every` k cost 1 + (1 − s)/k passes per step. In the
    last quarter the rate is 0.001 and the weights hardly move: `drop` lowers it later, and ERM has the same rates.

    Left out after the first numbers on CIFAR-10 at 60 epochs, one run each, to spend the time on others: thinner
    perturbations (`every` 5, and 2 with a later drop), since every second step of the second half keeps about as
    much as every step of the last quarter, at the same cost; and twice the radius, since 0.25 has a higher NLL than
    0.12 in the sweep, which has N = 2 (docs/cheaper.md).
    """
    recipes = []
    for data in ("cifar10", "cifar100"):
        late = partial(cell, protocol, data, RESNET)
        recipes += [late("erm"), late("amp")]
        recipes += [late("erm", variant=f"times-{factor}", epochs=_times(factor, protocol)) for factor in (1.25, 1.5)]
        recipes += [late("amp", variant=f"start-{start}", settings={"start": start}) for start in (0.5, 0.75, 0.9)]
        for name, settings in (("every-2", {"every": 2}), ("ascent-0.25", {"ascent_share": 0.25})):
            recipes.append(late("amp", variant=f"start-0.5-{name}", settings={"start": 0.5, **settings}))
        for drop, start in ((0.9, 0.75), (0.97, 0.9)):
            rates: dict[str, Any] = {"milestones": (0.5, drop)}
            recipes.append(late("erm", variant=f"drop-{drop}", **rates))
            recipes.append(late("amp", variant=f"drop-{drop}-start-{start}", settings={"start": start}, **rates))
        for name, settings in LATER_DROP.items():
            recipes.append(late("amp", variant=f"drop-0.9-{name}", settings=settings, milestones=(0.5, 0.9)))
    return _experiment("frontier", "AMP's gain at lower cost", protocol, recipes, trials=3)


def auto(protocol: Protocol) -> Experiment:
    """A radius that adjusts itself beside five fixed ones: how much of the best one's gain is lost?

    The radius is matched to a held-out part of the training set; the fixed ones train on all of it.
    """
    recipes = []
    for data in ("cifar10", "cifar100"):
        train = partial(cell, protocol, data, RESNET)
        recipes += [train("erm"), *(train("amp", variant=f"radius-{r}", settings={"epsilon": r}) for r in AUTO_RADII)]
        recipes.append(train("amp", variant="auto", settings={"epsilon": AUTO}))
        recipes.append(train("amp", variant="auto-start-0.5", settings={"epsilon": AUTO, "start": 0.5}))
    small = _small("digits", protocol)
    for noise in (0.0, 0.2):
        name = f"{_home(protocol)}/digits-convnet-{{}}{f'-noise-{noise}' if noise else ''}"
        recipes.append(Recipe(**small, label_noise=noise, method="erm", name=name.format("erm")))
        for radius in (*AUTO_RADII, AUTO):
            named = name.format(f"amp-{radius if radius == AUTO else f'radius-{radius}'}")
            settings = {"epsilon": radius, "inner_lr": 1.0}
            recipes.append(Recipe(**small, label_noise=noise, method="amp", settings=settings, name=named))
    return _experiment("auto", "a radius that adjusts itself", protocol, recipes, trials=3)


def _times(factor: float, protocol: Protocol) -> int:
    return math.ceil(factor * PROTOCOLS[protocol].epochs)


# each is made once per protocol: a report asks for all of them
EXPERIMENTS: dict[str, Callable[[Protocol], Experiment]] = {
    make.__name__: cache(make)
    for make in (
        table1,
        table2,
        table3,
        ece,
        sweep,
        cost,
        curves,
        landscape,
        flatness,
        spiral,
        ball,
        adversary,
        first_version,
        compute,
        precision,
        rivals,
        frontier,
        auto,
    )
}


@cache
def by_name() -> dict[str, Recipe]:
    """Every recipe of every experiment under every protocol."""
    experiments = [make(protocol) for make in EXPERIMENTS.values() for protocol in NAMES]
    return {recipe.name: recipe for experiment in experiments for recipe in (*experiment.recipes, *experiment.beside)}


def _small(data: str, protocol: Protocol) -> dict[str, Any]:
    """A small data set's own recipe, which `smoke` shortens."""
    shortened = {"epochs": PROTOCOLS["smoke"].epochs} if protocol == "smoke" else {}
    return {"data": data, **SMALL_DATA[data], **shortened}


def _home(protocol: Protocol) -> Protocol:
    """The protocol whose runs of small data sets it shares: these have no crops, and one recipe for both versions."""
    return "paper" if protocol == "paper-v2" else protocol


def _resnets(protocol: Protocol, methods: tuple[str, ...]) -> list[Recipe]:
    return [cell(protocol, data, RESNET, method) for data in SETS for method in methods]


def _experiment(
    name: str,
    title: str,
    protocol: Protocol,
    recipes: list[Recipe],
    *,
    trials: int | None = None,
    parts: tuple[Measurement, ...] = (),
) -> Experiment:
    return Experiment(
        name=name,
        title=title,
        protocol=protocol,
        recipes=tuple(recipes),
        trials=PROTOCOLS[protocol].trials if trials is None else trials,
        parts=parts,
    )
