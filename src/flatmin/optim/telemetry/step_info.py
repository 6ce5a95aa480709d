"""What a step measures: losses, norms and flags while it runs and when it is done; the loss that a closure returned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Last:
    """What the last step measured, as tensors on the device: there is no host sync until they are read.

    `loss` is that of the clean pass and `loss_perturbed` that of the last pass, at θ + Δ; their difference is the
    sharpness. (RMP has only the latter pass, so its two losses are the same.) `grad_norm` is ‖∇J(θ)‖ (RMP: at θ + Δ)
    and `delta_norm` is ‖Δ‖ over all balls together, both in the ball's norm. `on_ball` is the share of balls where Δ
    was projected back to the edge (for "linf", of tensors with a clamped entry). `skipped` is true if a gradient was
    not finite and θ stayed as it was. `epsilon` is the radius that the step used (that of the first perturbed group, a
    plain number, or the group's own tensor), and 0 if nothing was perturbed. None means not measured. In
    `step(closure, ascent=…)` no pass at θ has all the data, so `loss` is None and `grad_norm` is that of the ascent
    pass.
    """

    loss: Tensor | None = None
    loss_perturbed: Tensor | None = None
    grad_norm: Tensor | None = None
    delta_norm: Tensor | None = None
    on_ball: Tensor | None = None
    skipped: Tensor | None = None
    epsilon: float | Tensor | None = None


@dataclass
class Measured:
    """What the passes of a step have measured so far."""

    finite: Tensor | None = None  # was every gradient behind Δ finite? None: there were none
    skipped: Tensor | None = None  # was the last gradient, or an earlier one, not finite?
    numbers: dict[str, Tensor] = field(default_factory=dict)
    epsilon: float | Tensor = 0.0  # of the first group that was perturbed


def loss_in(result: object) -> Tensor | None:
    """The loss in a closure's result: the tensor itself, a dict's "loss", or the first tensor of a tuple or list."""
    if isinstance(result, Mapping):
        result = result.get("loss")
    elif isinstance(result, tuple | list):
        result = next((item for item in result if isinstance(item, Tensor)), None)
    return result if isinstance(result, Tensor) else None


def whole(loss: Tensor) -> Tensor:
    """A loss without its graph; of one that is spread over ranks, the whole number on each of them."""
    number = loss.detach()
    full = getattr(number, "full_tensor", None)  # a DTensor; by name: a build of torch may lack torch.distributed
    return number if full is None else full()


def detached_loss(result: object) -> Tensor | None:
    loss = loss_in(result)
    return None if loss is None else whole(loss)


def mean_loss(results: Sequence[object], home: torch.device) -> Tensor | None:
    """The mean loss of micro-batches; None if one of them has no loss, or their shapes differ."""
    losses = [loss for loss in map(detached_loss, results) if loss is not None]
    alike = len(losses) == len(results) and len({loss.shape for loss in losses}) == 1
    return mean_of(losses, home) if alike else None


def mean_of(numbers: Sequence[Tensor], home: torch.device) -> Tensor:
    """The mean of numbers on any devices.

    >>> mean_of([torch.tensor(1.0), torch.tensor(2.0)], torch.device("cpu"))
    tensor(1.5000)
    """
    return torch.stack([number.to(home, torch.float32) for number in numbers]).mean(dim=0)
