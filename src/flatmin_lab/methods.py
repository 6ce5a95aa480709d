"""The eight methods of the paper's comparison: what each changes, and with which settings.

A method changes the batch or the loss (its regulariser), the model (its dropout), or the way the weights move (a
wrapper around the optimizer); the training loop is the same for all of them:

    method = build("amp", epsilon=0.5)
    model = models.build("preactresnet18", dropout=method.dropout)
    optimizer = method.wrap(SGD(model.parameters(), lr=0.1), model)
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from inspect import signature
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

import flatmin
from flatmin.ball import Ball, Norm
from flatmin.optim.radius import matched
from flatmin.optim.radius.schedule import GROWTHS, Growth, RadiusSchedule
from flatmin.optim.rmp import Noise
from flatmin.optim.wrapper import whole_number
from flatmin.regularisers import REGULARISERS, Regulariser, erm
from flatmin_lab.data.normalise import Normalisation
from flatmin_lab.system.json_types import check_types

CONSTANT = RadiusSchedule()
NOT_IN_PAPER = {**asdict(CONSTANT), "ascent_share": 1.0}  # of AMP's radius over time
# settings that are listed only if they are not the default: the paper has none of them, or only its published code
UNLISTED = {**NOT_IN_PAPER, "regulariser": "erm", "noise": "ball", "units": "pixels", "random_start": False}
BESIDE_AMP = ("erm", "label_smoothing", "flooding", "mixup")  # regularisers that AMP can be combined with
AUTO, AUTO_FIRST_RADIUS = matched.AUTO, matched.FIRST_RADIUS  # the word for a matched ε, and its initial value
AUTO_RELEASE = matched.RELEASE
AUTO_RULE = 3  # version of how ε is matched, here and in flatmin.MatchedRadius: a run keeps the one it started with
OF_AUTO = ("held_out", "release", "matches")  # settings of a matched ε only


def _unwrapped(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    return optimizer


def _wrap(optimizer: Optimizer, model: nn.Module, *, wrapper: Callable[..., Optimizer], **settings: Any) -> Optimizer:
    return wrapper(optimizer, model=model, **settings)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A regulariser, the model's dropout rate, the wrapper around the optimizer, and its radius over time."""

    name: str
    regulariser: Regulariser
    dropout: float = 0.0
    wrap: Callable[[Optimizer, nn.Module], Optimizer] = _unwrapped
    schedule: RadiusSchedule = CONSTANT  # the share of ε that a step uses
    ascent_share: float = 1.0  # of the batch, for the ascent
    release: float = 1.0  # the share of a run after which the held-out images are trained on and ε stays as it is
    matches: int = 1  # times per epoch that ε is matched


def dropout(rate: float = 0.1) -> Method:
    """10 % of the neurons after every ReLU."""
    if not 0 <= rate < 1:
        raise ValueError(f"dropout's rate must be at least 0 and below 1, got {rate}")
    return Method(name="dropout", regulariser=erm(), dropout=rate)


def rmp(
    epsilon: float = 0.1,
    *,
    ball: Ball = "global",
    norm: Norm = "l2",
    noise: Noise = "ball",
    generator: torch.Generator | None = None,
) -> Method:
    """A random perturbation of the weights in a ball of radius 0.1, or as published in a cube (see `flatmin.RMP`)."""
    settings: dict[str, Any] = {"ball": ball, "norm": norm, "noise": noise, "generator": generator}
    wrap = partial(_wrap, wrapper=flatmin.RMP, epsilon=epsilon, **settings)
    return Method(name="rmp", regulariser=erm(), wrap=wrap)


def amp(
    epsilon: float | Literal["auto"] = 0.5,
    *,
    inner_lr: float = 1.0,
    inner_iter: int = 1,
    ball: Ball = "global",
    norm: Norm = "l2",
    start: float = 0.0,
    growth: Growth = "constant",
    every: int = 1,
    ascent_share: float = 1.0,
    held_out: float | None = None,
    release: float | None = None,
    matches: int | None = None,
    regulariser: str = "erm",
    sync_perturbation: bool = True,
) -> Method:
    """The worst perturbation. 0.5 and 1 are the paper's for PreActResNet18 over 200 epochs; VGG16 has 0.1 and 0.2.

    `start`, `growth` and `every` are those of a `RadiusSchedule`: perturb later, grow, perturb less often.
    `ascent_share` is the share of a batch that Δ is computed on. With epsilon="auto" a `flatmin.MatchedRadius` adjusts
    ε, using the loss on a part of the training set that is held out: a share of `held_out`, or by default 2 %, or up to
    10 % if that is fewer than 500 images. Once the share `release` (0.6) of the perturbed part of the run is over,
    the held-out images are trained on too, and ε stays as it is. ε is adjusted `matches` (1) times per epoch.
    `regulariser` names one of `BESIDE_AMP`: AMP then perturbs the weights against that loss, with the paper's settings.
    `sync_perturbation=False`: one perturbation per rank, if several ranks train one model.
    """
    settings: dict[str, Any] = {"inner_lr": inner_lr, "inner_iter": inner_iter, "ball": ball, "norm": norm}
    settings["sync_perturbation"] = sync_perturbation
    first = AUTO_FIRST_RADIUS if epsilon == AUTO else epsilon
    wrap = partial(_wrap, wrapper=flatmin.AMP, epsilon=first, **settings)
    schedule = RadiusSchedule(start=start, growth=growth, every=every)
    _check_moving(epsilon, schedule, ascent_share, {"held_out": held_out, "release": release, "matches": matches})
    if regulariser not in BESIDE_AMP:
        raise ValueError(f"AMP goes together with {', '.join(BESIDE_AMP)}, got regulariser={regulariser}")
    if epsilon == AUTO and regulariser != "erm":
        raise ValueError(
            f"epsilon auto compares the training loss with that of held-out images, got regulariser={regulariser}, "
            "whose loss is another; leave it out, or give a number as epsilon"
        )
    if ascent_share < 1 and regulariser == "mixup":
        raise ValueError(
            f"mixed labels cannot be cut, got mixup and ascent_share={ascent_share}; leave one of them out"
        )
    loss = REGULARISERS[regulariser]()
    until = matched.matched_until(start, AUTO_RELEASE if release is None else release)
    return Method(
        name="amp",
        regulariser=loss,
        wrap=wrap,
        schedule=schedule,
        ascent_share=ascent_share,
        release=until,
        matches=1 if matches is None else whole_number("matches", matches, least=1),
    )


def _check_moving(
    epsilon: float | str, schedule: RadiusSchedule, ascent_share: float, of_auto: Mapping[str, float | None]
) -> None:
    if not 0 < ascent_share <= 1:
        raise ValueError(f"ascent_share is a share of the batch, above 0 and at most 1, got {ascent_share}")
    held_out, release = of_auto["held_out"], of_auto["release"]
    if held_out is not None and not 0 < held_out < 1:
        raise ValueError(f"held_out is a share of the training set, between 0 and 1, got {held_out}")
    if release is not None and not 0 < release <= 1:
        raise ValueError(f"release is a share of the perturbed part of the run, above 0 and at most 1, got {release}")
    for name, value in of_auto.items():
        if value is not None and epsilon != AUTO:
            raise ValueError(f"{name} belongs to epsilon auto, got {name}={value} and epsilon={epsilon}; leave it out")
    if epsilon == AUTO and schedule.growth != "constant":
        raise ValueError(f"epsilon auto grows by itself, got growth={schedule.growth}; leave it out")
    if epsilon == AUTO and ascent_share < 1:
        raise ValueError(
            f"epsilon auto compares losses on the same images at θ and at θ + Δ, got ascent_share={ascent_share}; "
            "leave it out, or give a number as epsilon"
        )


OTHERS: dict[str, Callable[..., Method]] = {"dropout": dropout, "rmp": rmp, "amp": amp}
METHODS = (*REGULARISERS, *OTHERS)
FLAGS = {  # settings of AMP (some also of other methods) that have a flag of their own, with its help
    "epsilon": "ε: the radius of AMP, RMP or adversarial training. AMP's default depends on the data and the length of "
    "the run; auto adjusts it during training, using held-out data.",
    "inner_lr": "ζ: the step size of AMP's ascent.",
    "inner_iter": "N: how many ascent steps AMP takes.",
    "ball": "What ε bounds: global, group or tensor.",
    "norm": "The norm of the ball: l2 or linf.",
    "start": "Fraction of the run to train without perturbation, at one pass per step, before AMP starts; default: 0.",
    "growth": f"How AMP's radius grows once it has started: {', '.join(GROWTHS)}; default: constant.",
    "every": "Perturb only every k-th step; default: 1.",
    "ascent_share": "Fraction of each batch to compute the perturbation on; default: 1.",
}


def resolve_settings(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A method's settings, completed with the paper's: numbers and strings, not generators or flags.

    The paper has one radius for all steps; settings that change it over time are listed only if they are used.

    >>> resolve_settings("amp", {"epsilon": 0.1, "start": 0.5})
    {'epsilon': 0.1, 'inner_lr': 1.0, 'inner_iter': 1, 'ball': 'global', 'norm': 'l2', 'start': 0.5}
    """
    own = {key: value for key, value in settings.items() if UNLISTED.get(key, ...) != value}
    return {**_defaults(name), **own}


def dropout_rate(name: str, settings: Mapping[str, Any]) -> float:
    """The dropout of a method's model: 0 for all methods but one.

    >>> dropout_rate("dropout", {}), dropout_rate("amp", {"epsilon": 0.1})
    (0.1, 0.0)
    """
    return dropout(**settings).dropout if name == "dropout" else 0.0


def passes_per_step(name: str, settings: Mapping[str, Any]) -> float:
    """Forward and backward passes over a batch in a step that perturbs.

    >>> passes_per_step("erm", {}), passes_per_step("adversarial", {}), passes_per_step("amp", {"inner_iter": 2})
    (1.0, 2.0, 3.0)
    """
    if name == "amp":
        known = resolve_settings("amp", settings)
        of_ascent = int(known["inner_iter"]) * float(known.get("ascent_share", 1))
        return 1.0 if known["epsilon"] == 0 else 1.0 + of_ascent
    return 2.0 if name == "adversarial" else 1.0


def perturbed_share(settings: Mapping[str, Any]) -> float:
    """The share of a run's steps that perturb: fewer with a late start, or if only every k-th does.

    >>> perturbed_share({}), perturbed_share({"start": 0.5, "every": 2})
    (1.0, 0.25)
    """
    radius = RadiusSchedule(**{key: settings[key] for key in asdict(CONSTANT).keys() & settings.keys()})
    return (1 - radius.start) / radius.every


def mean_passes(name: str, settings: Mapping[str, Any]) -> float:
    """Passes over a batch in the mean step of a whole run.

    >>> mean_passes("amp", {}), mean_passes("amp", {"start": 0.5}), mean_passes("erm", {})
    (2.0, 1.5, 1.0)
    """
    return 1 + perturbed_share(settings) * (passes_per_step(name, settings) - 1)


@cache
def setting_names(name: str) -> frozenset[str]:
    """The names of all settings of a method."""
    return frozenset(signature(OTHERS.get(name) or REGULARISERS[name]).parameters)


@cache
def _defaults(name: str) -> Mapping[str, Any]:
    make = OTHERS.get(name) or REGULARISERS[name]
    known = {key: parameter.default for key, parameter in signature(make).parameters.items()}
    shown = {key: value for key, value in known.items() if isinstance(value, int | float | str)}
    shown = {key: value for key, value in shown.items() if key not in UNLISTED}
    return {key: value for key, value in shown.items() if not isinstance(value, bool)}


def build(name: str, *, normalise: Normalisation | None = None, **settings: Any) -> Method:
    """A method by name, with the paper's settings where none are given.

    `normalise` is the normalisation of the model's images: adversarial training must undo it, the others ignore it.
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; choose from {', '.join(METHODS)}")
    make = OTHERS.get(name) or REGULARISERS[name]
    known = list(signature(make).parameters)
    unknown = [key for key in settings if key not in known]
    if unknown:
        taking = [m for m in METHODS if unknown[0] in setting_names(m)]
        way_out = f"; {unknown[0]} belongs to {', '.join(taking)}" if taking else ""
        raise ValueError(f"{name} takes {', '.join(known) or 'no settings'}, got {', '.join(unknown)}{way_out}")
    if name == "adversarial" and not {"mean", "std"} & settings.keys():
        if normalise is None:
            raise ValueError(
                "adversarial training must know how the images were normalised: give "
                "normalise=Normalisation.of(data.train), or mean= and std= ([0.0] and [1.0] for images of 0 to 1)"
            )
        settings = {"mean": normalise.mean, "std": normalise.std, **settings}
    if name != "amp" and settings.get("epsilon") == AUTO:
        raise ValueError(f"epsilon {AUTO} works only with AMP, got it for {name}; give a number")
    check_types(make, {key: value for key, value in settings.items() if isinstance(value, str)})
    made = make(**settings)
    return made if isinstance(made, Method) else Method(name=name, regulariser=made)
