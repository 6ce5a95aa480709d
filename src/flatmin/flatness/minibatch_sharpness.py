"""The rise of the loss as AMP sees it: on mini-batches in train mode, each along its own gradient.

    rise(ρ) = mean over batches B of L_B(θ + Δ_B) − L_B(θ)

    scale="filter"    Δ_B = ρ ‖θ_f‖ ∇L_B / ‖∇L_B‖, filter by filter: the worst Δ, to first order, that moves no filter
                      by more than the share ρ of its own length
    scale="global"    Δ_B = ρ ∇L_B / ‖∇L_B‖ over all parameters: a step of AMP to the edge of its ball

Once a network fits every image, the loss over the training set is 0, and so are its derivatives: at the weights alone
it looks flat, whatever surrounds them. Augmented mini-batches with their own BatchNorm statistics, which training sees,
are not fitted so well. Lengths are relative to each filter's own, because BatchNorm makes any other length meaningless
(see landscape.py).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flatmin.ball import combine, norms
from flatmin.flatness.landscape import scaled_to_filters
from flatmin.flatness.weights import Weights, check_radius

Scale = Literal["filter", "global"]
SCALES: tuple[Scale, ...] = get_args(Scale)


class BatchRise(NamedTuple):
    """`rises[i, j]` is the rise of batch i at radius j, `losses[i]` its loss at θ."""

    radii: Tensor
    losses: Tensor
    rises: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean rise at each radius, over the batches."""
        return self.rises.mean(dim=0)


def batch_rise(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Any]],
    *,
    radii: Sequence[float],
    scale: Scale = "filter",
    loss: Callable[[Tensor, Any], Tensor] = cross_entropy,
    parameters: Iterable[Tensor] | None = None,
) -> BatchRise:
    """The rise on each of these batches, in train mode; afterwards the model is bit for bit as it was.

    Give batches as in training: augmented, and of the same size. A batch costs two passes, and one more for every
    further radius. Dropout uses the same masks in all of them. Vectors (biases, BatchNorm's weights) move only with
    `"global"`.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> found = batch_rise(layer, [(torch.ones(4, 1), torch.zeros(4, 1))], radii=[0.5], loss=lambda x, y: x.mean())
    >>> torch.allclose(found.mean, 0.5 * layer.weight.detach().abs().flatten())
    True
    """
    if scale not in SCALES:
        raise ValueError(f"unknown scale {scale!r}; choose from {', '.join(SCALES)}")
    radii = [float(radius) for radius in radii]
    if not radii:
        raise ValueError("there must be at least one radius, got none")
    for radius in radii:
        check_radius(radius)
    batches = list(batches)  # drawn before the passes, which rewind the random generators for their masks
    for batch in batches:
        _check_pair(batch)
    weights = Weights(model, parameters)
    losses, rises = [], []
    with weights.movable():  # which restores the modes too
        model.train()
        for x, y in batches:
            parts = [partial(_loss_of, x, y, loss)]
            centre, gradient = weights.value_and_gradient(parts)
            delta = _unit(weights.theta(), gradient, scale)
            found = []
            for radius in radii:
                weights.move([radius * d for d in delta])
                found.append(weights.value(parts) - centre)
            weights.move(weights.zeros())
            losses.append(centre)
            rises.append(torch.stack(found))
    if not losses:
        raise ValueError("there must be at least one batch, got none")
    of = torch.tensor(radii, dtype=torch.float64, device="cpu")
    return BatchRise(of, torch.stack(losses), torch.stack(rises))


def _check_pair(batch: object) -> None:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise TypeError(f"batches must be pairs (inputs, targets), got a {type(batch).__name__}{size}; make it a pair")


def _loss_of(x: Any, y: Any, loss: Callable[[Tensor, Any], Tensor], model: Callable[..., Any]) -> Tensor:
    return loss(model(x.clone() if isinstance(x, Tensor) else x), y)  # which the model may change in place


def _unit(theta: Sequence[Tensor], gradient: Sequence[Tensor], scale: Scale) -> list[Tensor]:
    """Δ at radius 1; a filter or a batch without a gradient stays where it is."""
    if scale == "filter":
        return [scaled_to_filters(g, p, "zero") for p, g in zip(theta, gradient, strict=True)]
    length = combine(norms(gradient))
    return [torch.where(length > 0, g / length.to(g.device, g.dtype), 0.0) for g in gradient]
