"""The regularisers that the paper compares AMP with: each changes the batch or the loss, nothing else.

    x, y = regulariser.batch(model, x, y)       once a step, outside the closure
    loss = regulariser.loss(model(x), y)        inside it

    erm                ℓ(x, y), cross-entropy: ordinary training
    label_smoothing    cross-entropy with (1 − s) of the target on the label and s spread over the classes
    flooding           |J − b| + b: the loss is kept from sinking below b
    mixup              λx + (1 − λ)x′ with the labels y and y′ in the same proportion, λ ~ Beta(α, α)
    adversarial        x moved by ε a pixel, one step uphill, back into the valid range

Dropout is an argument of the model, RMP and AMP are optimizers. With λ = 1, s = 0, b = 0 or ε = 0 each is erm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flatmin.attacks import fgsm

__all__ = ["REGULARISERS", "Mixed", "Regulariser", "adversarial", "erm", "flooding", "label_smoothing", "mixup"]


class Mixed(NamedTuple):
    """Labels of a mixed batch: `share` of y, the rest of `partner`; all of shape (B,)."""

    y: Tensor
    partner: Tensor
    share: Tensor


Target = Tensor | Mixed  # labels (B,), class probabilities (B, K), or a mixture of labels
Batch = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Any]]
Loss = Callable[[Tensor, Any], Tensor]


def _unchanged(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y


@dataclass(frozen=True)
class Regulariser:
    """A pair of functions: what is done to a batch, and the loss."""

    name: str
    batch: Batch = _unchanged
    loss: Loss = cross_entropy


def erm() -> Regulariser:
    """Empirical risk minimisation: the batch as it is, cross-entropy."""
    return Regulariser("erm")


def label_smoothing(smoothing: float = 0.2, *, over: Literal["all", "others"] = "all") -> Regulariser:
    """The target is 1 − s on the label, and s spread evenly over all classes, or over the others.

    Over all classes is the original (Szegedy et al. 2016) and torch's; over the others is what the paper's published
    code does. For K classes, s over the others is s · K/(K − 1) over all.

    >>> label_smoothing(0.2).loss(torch.zeros(1, 10), torch.tensor([3]))      # ln 10, whatever s
    tensor(2.3026)
    """
    if not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing must be between 0 and 1, got {smoothing}")
    if over not in ("all", "others"):
        raise ValueError(f"unknown over={over!r}; choose from all, others")

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        classes = logits.shape[1]
        spread = smoothing if over == "all" else smoothing * classes / max(classes - 1, 1)
        if spread > 1:
            raise ValueError(
                f"smoothing over the other classes must be at most {(classes - 1) / classes:g} for {classes} classes, "
                f"got {smoothing}; beyond, the label would be less likely than they are"
            )
        return cross_entropy(logits, y, label_smoothing=spread)

    return Regulariser("label_smoothing", loss=loss)


def flooding(level: float = 0.02) -> Regulariser:
    """|J − b| + b (Ishida et al. 2020): below the level b the gradient turns round.

    >>> sure = torch.tensor([[9.0, 0.0]])
    >>> flooding(0.02).loss(sure, torch.tensor([0]))          # cross-entropy is 0.0001
    tensor(0.0399)
    """
    if not level >= 0:
        raise ValueError(f"the flooding level must be at least 0, got {level}")
    return Regulariser("flooding", loss=lambda logits, y: (cross_entropy(logits, y) - level).abs() + level)


def mixup(
    alpha: float = 1.0,
    *,
    per: Literal["picture", "batch"] = "picture",
    generator: torch.Generator | None = None,
) -> Regulariser:
    """Pairs of pictures and of their labels, mixed (Zhang et al. 2018). α = 0 mixes nothing.

    λ is drawn for each picture, as in the paper's published code, or once for the batch, as in MixUp's own. A generator
    must live on the data's device.
    """
    if not alpha >= 0:
        raise ValueError(f"mixup's alpha must be at least 0, got {alpha}")
    if per not in ("picture", "batch"):
        raise ValueError(f"unknown per={per!r}; choose from picture, batch")

    def batch(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Mixed]:
        count = len(x) if per == "picture" else 1
        if alpha == 0:
            share = torch.ones(count, device=x.device)
        else:
            both = torch.full((count, 2), alpha, device=x.device)
            share = torch._sample_dirichlet(both, generator=generator)[
                :, 0
            ]  # Beta(α, α); takes a generator, unlike Beta
        share = share.expand(len(x))
        order = torch.rand(len(x), device=x.device, generator=generator).argsort()
        weight = share.to(x.dtype).view(-1, *[1] * (x.ndim - 1))
        return weight * x + (1 - weight) * x[order], Mixed(y, y[order], share)

    return Regulariser("mixup", batch, mixed_cross_entropy)


def mixed_cross_entropy(logits: Tensor, target: Target) -> Tensor:
    """λ ℓ(y) + (1 − λ) ℓ(y′), the cross-entropy against the mixed labels."""
    if not isinstance(target, Mixed):
        return cross_entropy(logits, target)
    own = cross_entropy(logits, target.y, reduction="none")
    other = cross_entropy(logits, target.partner, reduction="none")
    return (target.share * own + (1 - target.share) * other).mean()


def adversarial(
    epsilon: float = 1 / 255,
    *,
    mean: Tensor | Sequence[float] | None = None,
    std: Tensor | Sequence[float] | None = None,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> Regulariser:
    """Training on adversarial examples in place of the pictures (Goodfellow et al. 2015): one step of ε a pixel.

    ε and `bounds` are in pixels of 0 to 1. If the model takes normalised pictures, give the `mean` and `std` of their
    channels: the step is then ε/std, and the result lies where a valid picture can, (0 − mean)/std to (1 − mean)/std.
    """
    if not epsilon >= 0:
        raise ValueError(f"adversarial's epsilon must be at least 0, got {epsilon}")
    if not bounds[0] < bounds[1]:
        raise ValueError(f"bounds must be two rising numbers, got {bounds}")
    if (mean is None) != (std is None):
        raise ValueError(f"mean and std belong together: give both, or neither; got mean={mean}, std={std}")
    centre = torch.as_tensor(0.0 if mean is None else mean)
    scale = torch.as_tensor(1.0 if std is None else std)
    if scale.device.type == "cpu" and not bool((scale > 0).all()):
        raise ValueError(f"std must be above 0 in every channel, got {scale.tolist()}")

    def batch(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if epsilon == 0:
            return x, y
        view = (-1, *[1] * (x.ndim - 2))
        middle, spread = (number.to(x.device, x.dtype).view(view) for number in (centre, scale))
        low, high = (bounds[0] - middle) / spread, (bounds[1] - middle) / spread
        return fgsm(model, x, y, epsilon=epsilon / spread, bounds=(low, high)), y

    return Regulariser("adversarial", batch)


REGULARISERS: dict[str, Callable[..., Regulariser]] = {
    "erm": erm,
    "label_smoothing": label_smoothing,
    "flooding": flooding,
    "mixup": mixup,
    "adversarial": adversarial,
}
