"""The eight methods of the paper's comparison: what each changes, and with which settings.

A method changes the batch or the loss (its regulariser), the model (its dropout), or the way the weights move (a
wrapper around the optimizer); the training loop is the same for all of them:

    method = build("amp", epsilon=0.5)
    model = models.build("preactresnet18", dropout=method.dropout)
    optimizer = method.wrap(SGD(model.parameters(), lr=0.1), model)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

import flatmin
from flatmin.regularisers import REGULARISERS, Regulariser, erm
from flatmin_lab.data.normalise import Normalisation


def _as_it_is(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    return optimizer


@dataclass(frozen=True, kw_only=True)
class Method:
    """A regulariser, the model's dropout, and what is put around the optimizer."""

    name: str
    regulariser: Regulariser
    dropout: float = 0.0
    wrap: Callable[[Optimizer, nn.Module], Optimizer] = _as_it_is


def dropout(rate: float = 0.1) -> Method:
    """10 % of the neurons after every ReLU."""
    return Method(name="dropout", regulariser=erm(), dropout=rate)


def rmp(epsilon: float = 0.1, **settings: Any) -> Method:
    """A random perturbation of the weights in a ball of radius 0.1."""
    return Method(
        name="rmp",
        regulariser=erm(),
        wrap=lambda optimizer, model: flatmin.RMP(optimizer, epsilon=epsilon, model=model, **settings),
    )


def amp(epsilon: float = 0.5, **settings: Any) -> Method:
    """The worst perturbation; 0.5 and `inner_lr=1` for PreActResNet18, 0.1 and 0.2 for VGG16."""
    return Method(
        name="amp",
        regulariser=erm(),
        wrap=lambda optimizer, model: flatmin.AMP(optimizer, epsilon=epsilon, model=model, **settings),
    )


OTHERS: dict[str, Callable[..., Method]] = {"dropout": dropout, "rmp": rmp, "amp": amp}
METHODS = (*REGULARISERS, *OTHERS)


def build(name: str, *, normalise: Normalisation | None = None, **settings: Any) -> Method:
    """A method by name, with the paper's settings where none are given.

    `normalise` is what the model's pictures went through; adversarial training must undo it.
    """
    if name in OTHERS:
        return OTHERS[name](**settings)
    if name not in REGULARISERS:
        raise ValueError(f"unknown method {name!r}; choose from {', '.join(METHODS)}")
    if name == "adversarial" and normalise is not None:
        settings = {"mean": normalise.mean, "std": normalise.std, **settings}
    return Method(name=name, regulariser=REGULARISERS[name](**settings))
