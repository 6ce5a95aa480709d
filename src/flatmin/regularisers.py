"""The regularisers that the paper compares AMP with: each changes the batch or the loss, nothing else.

    x, target = regulariser.batch(model, x, y)      once per step, before the closure (in blocks: before zero_grad)
    loss = regulariser.loss(model(x), target)       inside it

    erm                ℓ(x, y), cross-entropy: ordinary training
    label_smoothing    cross-entropy with (1 − s) of the target on the label and s spread over the classes
    flooding           |J − b| + b: keeps the loss from falling below b
    mixup              λx + (1 − λ)x′ with the labels y and y′ in the same proportion, λ ~ Beta(α, α)
    adversarial        x moved by ε per pixel, one step uphill, back into the valid range

Dropout is an argument of the model; RMP and AMP are optimizers. With λ = 1, s = 0, b = 0 or ε = 0 each is erm.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flatmin.attacks import fgsm, pgd

__all__ = ["REGULARISERS", "Mixed", "Regulariser", "adversarial", "erm", "flooding", "label_smoothing", "mixup"]


class Mixed(NamedTuple):
    """The target of a mixed batch: `share` of the labels y, the rest of `partner`; all of shape (B,)."""

    y: Tensor
    partner: Tensor
    share: Tensor


Number = float | Tensor
Target = Tensor | Mixed  # labels (B,), class probabilities (B, K), or a mixture of labels
Batch = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Any]]
Loss = Callable[[Tensor, Any], Tensor]


def _unchanged(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y


@dataclass(frozen=True)
class Regulariser:
    """A pair of functions: one changes the batch, the other is the loss."""

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
    return Regulariser("label_smoothing", loss=partial(_smoothed, smoothing=smoothing, over=over))


def _smoothed(logits: Tensor, y: Tensor, *, smoothing: float, over: str) -> Tensor:
    classes = logits.shape[1]
    spread = smoothing if over == "all" else smoothing * classes / max(classes - 1, 1)
    if spread > 1:
        raise ValueError(
            f"smoothing over the other classes must be at most {(classes - 1) / classes:g} for {classes} classes, "
            f"got {smoothing}; beyond that, the label would be less likely than they are"
        )
    return cross_entropy(logits, y, label_smoothing=spread)


def flooding(level: float = 0.02) -> Regulariser:
    """|J − b| + b (Ishida et al. 2020): below the level b the gradient is reversed.

    >>> sure = torch.tensor([[9.0, 0.0]])
    >>> flooding(0.02).loss(sure, torch.tensor([0]))          # cross-entropy is 0.0001
    tensor(0.0399)
    """
    if not level >= 0:
        raise ValueError(f"the flooding level must be at least 0, got {level}")
    return Regulariser("flooding", loss=partial(_flooded, level=level))


def _flooded(logits: Tensor, y: Tensor, *, level: float) -> Tensor:
    return (cross_entropy(logits, y) - level).abs() + level


def mixup(
    alpha: float = 1.0,
    *,
    per: Literal["picture", "batch"] = "picture",
    generator: torch.Generator | None = None,
) -> Regulariser:
    """Mixes pairs of images, and their labels (Zhang et al. 2018). α = 0 mixes nothing.

    λ is drawn per image (`per="picture"`), as in the paper's published code, or once per batch, as in MixUp's own. The
    generator must be on the data's device.
    """
    if alpha != 0 and not 1e-6 <= alpha <= 1e6:  # float32 cannot draw others
        raise ValueError(f"mixup's alpha must be 0, or from 1e-6 to 1e6, got {alpha}")
    if per not in ("picture", "batch"):
        raise ValueError(f"unknown per={per!r}; choose from picture, batch")
    if alpha == 0:
        return Regulariser("mixup", loss=mixed_cross_entropy)
    return Regulariser("mixup", partial(_mixed, alpha=float(alpha), per=per, generator=generator), mixed_cross_entropy)


def _mixed(
    model: nn.Module, x: Tensor, y: Tensor, *, alpha: float, per: str, generator: torch.Generator | None
) -> tuple[Tensor, Mixed]:
    if not x.is_floating_point():
        raise TypeError(f"images must be floats to be mixed, got {x.dtype}; use x.float() / 255")
    count = len(x) if per == "picture" else 1
    share = _beta(alpha, count, x, generator).to(x.dtype)
    order = torch.rand(len(x), device=x.device, generator=generator).argsort()
    weight = share.view(-1, *[1] * (x.ndim - 1))
    exact = (
        share if x.dtype == torch.float64 else share.float()
    )  # the rounded share that the images got, even if x is bfloat16
    return weight * x + (1 - weight) * x[order], Mixed(y, y[order], exact.expand(len(x)))


def _beta(alpha: float, count: int, x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Beta(α, α) as G/(G + G′) for gamma variables, in logarithms: Γ(α) ~ Γ(α + 1) · U^(1/α) is tiny for a small α."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    above = torch._standard_gamma(torch.full((2, count), alpha + 1, device=x.device, dtype=dtype), generator=generator)
    uniform = 1 - torch.rand(2, count, device=x.device, dtype=dtype, generator=generator)
    mine, other = above.log() + uniform.log() / alpha
    return torch.sigmoid(mine - other)


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
    units: Literal["pixels", "inputs"] = "pixels",
    random_start: bool = False,
) -> Regulariser:
    """Training on adversarial examples instead of the images (Goodfellow et al. 2015): one step of ε per pixel.

    ε and `bounds` are pixel values from 0 to 1. If the model takes normalised images, give the `mean` and `std` of
    their channels: the step is then ε/std, and the result stays in the valid range, (0 − mean)/std to (1 − mean)/std.
    For data without bounds, give `bounds=(-inf, inf)`. The first batch is checked to lie within them.

    With `units="inputs"`, ε is in units of the model's inputs, normalised or not, and there are no bounds; for CIFAR
    the step is then a quarter as long. With `random_start`, the step starts at a point drawn uniformly from the box of
    ±ε, and ends in the box again. The paper's published code does both.
    """
    if units not in ("pixels", "inputs"):
        raise ValueError(f"unknown units={units!r}; choose from pixels, inputs")
    if units == "inputs":
        if not 0 <= epsilon < math.inf:
            raise ValueError(f"adversarial's epsilon must be at least 0 and finite, got {epsilon}")
        attack = partial(_attacked, epsilon=epsilon, bounds=(-math.inf, math.inf), random_start=random_start)
        return Regulariser("adversarial", attack if epsilon > 0 else _unchanged)
    if not bounds[0] < bounds[1]:
        raise ValueError(f"bounds must be a lower and an upper number, got {bounds}")
    if not 0 <= epsilon <= bounds[1] - bounds[0]:
        raise ValueError(
            f"adversarial's epsilon must be at least 0 and at most the width of the bounds {bounds}, got {epsilon}; "
            "a step of 8 grey levels is 8 / 255"
        )
    if (mean is None) != (std is None):
        raise ValueError(f"mean and std must be given together, got mean={mean}, std={std}; give both, or neither")
    centre = torch.as_tensor([0.0] if mean is None else mean, dtype=torch.float64).flatten()
    scale = torch.as_tensor([1.0] if std is None else std, dtype=torch.float64).flatten()
    if not bool((scale > 0).all() & scale.isfinite().all() & centre.isfinite().all()):
        raise ValueError(
            f"mean must be finite and std above 0 in every channel, got {centre.tolist()} and {scale.tolist()}"
        )
    attack_pixels = _Attack(epsilon, centre, scale, bounds, random_start)
    return Regulariser("adversarial", attack_pixels if epsilon > 0 else _unchanged)


def _attacked(
    model: nn.Module, x: Tensor, y: Tensor, *, epsilon: Number, bounds: tuple[Number, Number], random_start: bool
) -> tuple[Tensor, Tensor]:
    """One step of ε from x, or from a random point of the box around it, back into the box."""
    if not random_start:
        return fgsm(model, x, y, epsilon=epsilon, bounds=bounds), y
    return pgd(model, x, y, epsilon=epsilon, step_size=epsilon, steps=1, random_start=True, bounds=bounds), y


@dataclass(eq=False)
class _Attack:
    """FGSM in the model's own coordinates; ε and bounds are copied there once per device and dtype."""

    epsilon: float
    mean: Tensor
    std: Tensor
    bounds: tuple[float, float]
    random_start: bool = False
    scaled: dict[Any, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        key = (x.device, x.dtype, x.ndim)
        if key not in self.scaled:
            self.scaled[key] = self._scale_checked(x)
        epsilon, low, high = self.scaled[key]
        return _attacked(model, x, y, epsilon=epsilon, bounds=(low, high), random_start=self.random_start)

    def _scale_checked(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ε, lowest and highest value per channel; only here does the host read the images."""
        if not {len(self.mean), len(self.std)} <= {1, x.shape[1]}:
            raise ValueError(
                "mean and std must have one number per channel: "
                f"got {len(self.mean)} and {len(self.std)} for {x.shape[1]}"
            )
        view = (-1, *[1] * (x.ndim - 2))
        ends = [(bound - self.mean) / self.std for bound in self.bounds]
        epsilon, low, high = (number.view(view).to(x.device, x.dtype) for number in (self.epsilon / self.std, *ends))
        slack = 0.01 * (high - low).nan_to_num(0)
        if bool(((x < low - slack) | (x > high + slack)).any()):
            raise ValueError(
                f"adversarial training takes inputs of {self.bounds[0]:g} to {self.bounds[1]:g} before normalisation, "
                f"got {float(x.min()):.3g} to {float(x.max()):.3g} after it; give mean= and std= of the normalisation, "
                "or bounds=(-inf, inf) for data without bounds"
            )
        return epsilon, low, high


REGULARISERS: dict[str, Callable[..., Regulariser]] = {
    "erm": erm,
    "label_smoothing": label_smoothing,
    "flooding": flooding,
    "mixup": mixup,
    "adversarial": adversarial,
}
