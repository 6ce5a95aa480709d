"""The loss to measure: a function of the model, or several that add up to it.

    loss = lambda model: cross_entropy(model(x), y)          one batch
    loss = empirical_risk(x, y, batch_size=500)              a data set of any size, one batch at a time

With several parts, only one graph is in memory at a time, so the data set may be larger than the memory. Their losses
and gradients are added in at least float32: in bfloat16, a thousand parts of a loss of 1.63 add up to 0.5.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flatmin.core.tensors import compute_dtype

LossPart = Callable[[Callable[..., Any]], Tensor]
Loss = LossPart | Sequence[LossPart]


@dataclass(frozen=True)
class _BatchLoss:
    """One batch's share of the mean loss over all examples."""

    x: Tensor
    y: Any
    share: float
    criterion: Callable[[Any, Any], Tensor]

    def __call__(self, model: Callable[..., Any]) -> Tensor:
        x = self.x.clone()  # a model may change its inputs in place, and every point of θ has the same
        return self.share * check_loss(self.criterion(model(x), self.y))


def empirical_risk(
    x: Tensor, y: Tensor, *, batch_size: int = 500, criterion: Callable[[Any, Any], Tensor] = cross_entropy
) -> Sequence[LossPart]:
    """L_ERM: the mean loss over the examples (x, y), in parts. `criterion` must be a mean over its examples.

    >>> parts = empirical_risk(torch.zeros(5, 2), torch.tensor([0, 1, 0, 1, 0]), batch_size=2)
    >>> len(parts), sum(part(torch.nn.Identity()) for part in parts)      # ln 2
    (3, tensor(0.6931))
    """
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise TypeError(
            f"examples and labels must be tensors, got {type(x).__name__} and {type(y).__name__}; for others, give a "
            "list of functions of the model that add up to the loss, one for each batch"
        )
    if len(x) != len(y) or not len(x):
        raise ValueError(f"there must be at least one example, and one label for each, got {len(x)} and {len(y)}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if "sum" in (getattr(criterion, "reduction", None), getattr(criterion, "keywords", {}).get("reduction")):
        raise ValueError(
            "criterion must be a mean over its examples, got one with reduction='sum', which would depend on the batch "
            "size; leave the reduction out"
        )
    batches = zip(x.split(batch_size), y.split(batch_size), strict=True)
    return [_BatchLoss(here, labels, len(here) / len(x), criterion) for here, labels in batches]


def parts_of(loss: Loss) -> list[LossPart]:
    parts = list(loss) if isinstance(loss, Sequence) else [loss]
    if not parts or not all(callable(part) for part in parts):
        raise TypeError(
            "loss must be a function of the model that returns a tensor with one number, or several such, got "
            f"{type(loss).__name__}; write `lambda model: cross_entropy(model(x), y)`, or use empirical_risk(x, y)"
        )
    return parts


def check_loss(loss: Any) -> Tensor:
    """The loss as a single number, in at least float32."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        way = "take its mean" if isinstance(loss, Tensor) else "return the tensor itself"
        raise TypeError(f"loss(model) must be a tensor with one number, got {shown}; {way}")
    return loss.reshape(()).to(compute_dtype(loss))


def value(model: Callable[..., Any], parts: Sequence[LossPart]) -> Tensor:
    """L at the current weights, on their device."""
    with torch.no_grad():
        return total_loss(model, parts).clone()  # it may be a view of a weight, which will change


def total_loss(model: Callable[..., Any], parts: Sequence[LossPart]) -> Tensor:
    total = check_loss(parts[0](model))
    for part in parts[1:]:
        total = total + check_loss(part(model))
    return total


def value_and_gradient(
    model: Callable[..., Any], parts: Sequence[LossPart], parameters: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """L and ∇L in at least float32, without touching `.grad`; what L does not depend on has the gradient 0."""
    total: Tensor | None = None
    gradient: list[Tensor] = []
    with torch.enable_grad():
        for part in parts:
            loss = check_loss(part(model))
            found = gradient_of(loss, parameters)
            total = loss.detach().clone() if total is None else total + loss.detach()
            if gradient and found is not None:
                torch._foreach_add_(gradient, found)
            elif found is not None:
                gradient = [piece.to(compute_dtype(piece), copy=True) for piece in found]  # it may be an expanded view
    if not gradient or total is None:
        raise ValueError(INDEPENDENT_LOSS)
    return total, gradient


INDEPENDENT_LOSS = (
    "the loss must depend on the weights that are moved, but it does not; compute it from the model that it is "
    "given, as in `lambda model: cross_entropy(model(x), y)`, without no_grad"
)


def gradient_of(loss: Tensor, parameters: Sequence[Tensor], *, create_graph: bool = False) -> list[Tensor] | None:
    """∇L; None if L depends on no parameter. (If no part of L does, it is an error: L would look flat.)"""
    if not loss.requires_grad:
        return None
    found = torch.autograd.grad(loss, parameters, create_graph=create_graph, allow_unused=True)
    if all(piece is None for piece in found):
        return None
    return [torch.zeros_like(p) if g is None else dense(g) for p, g in zip(parameters, found, strict=True)]


def dense(gradient: Tensor) -> Tensor:
    """That of an embedding with `sparse=True`, too, has a number for each weight."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()
