"""Gradients kept aside: the mean of several micro-batches', and those that a pass must not spoil.

Each micro-batch has a perturbation of its own, so its gradient at θ + Δᵢ is there before the next one climbs from θ:

    g = (1/k) Σᵢ ∇Jᵢ(θ + Δᵢ)        m-sharpness, with m pictures to a micro-batch

The sum is kept aside, in float32 at least, and left in `grad` at the end.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.amp import GradScaler

from flatmin.ball import combine, norms
from flatmin.core.tensors import plain, wide
from flatmin.optim.grad_scaler import Owners, notes_of, put_back_notes


class MeanGradient:
    """Adds up what is in the parameters' `grad`, and leaves the mean there.

    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> mean = MeanGradient([weight])
    >>> for gradient in (1.0, 3.0):
    ...     weight.grad = torch.tensor([gradient])
    ...     mean.add()
    >>> mean.leave()
    >>> weight.grad
    tensor([2.])
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._params = list(params)
        self._sums: dict[Tensor, Tensor] = {}
        self._count = 0

    @torch.no_grad()
    def add(self) -> None:
        self._count += 1
        sums, gradients = [], []
        for param in self._params:
            if param.grad is None:
                continue
            total = self._sums.get(param)
            if total is None:  # copied: the next backward pass may write into this memory
                self._sums[param] = param.grad.to(wide(param.grad), copy=True)
            elif param.grad.is_sparse:
                total.add_(param.grad)
            elif total.is_sparse:
                self._sums[param] = param.grad.to(total.dtype, copy=True).add_(total)
            else:
                sums.append(plain(total))
                gradients.append(plain(param.grad))
        if sums:
            torch._foreach_add_(sums, gradients)

    @torch.no_grad()
    def leave(self) -> None:
        """A parameter that a micro-batch has no gradient of counts as 0 there."""
        for param, total in self._sums.items():
            put_gradient(param, total.div_(self._count))

    def is_finite(self, home: torch.device) -> Tensor:
        return combine(norms(list(self._sums.values())).to(home)).isfinite()


class Gradients:
    """The gradients of this moment, and what a scaler has noted of them; to be put back."""

    def __init__(self, params: Iterable[Tensor], scaler: GradScaler | None, owners: Owners) -> None:
        # copied, because the next backward pass may write into this memory: a bucket's, or one that was zeroed in place
        self._kept = {param: None if param.grad is None else param.grad.clone() for param in params}
        self._scaler, self._owners = scaler, owners
        self._notes = notes_of(scaler, owners)

    @torch.no_grad()
    def put_back(self) -> None:
        for param, gradient in self._kept.items():
            if gradient is None:
                param.grad = None
            else:
                put_gradient(param, gradient)
        put_back_notes(self._scaler, self._owners, self._notes)


def put_gradient(param: Tensor, gradient: Tensor) -> None:
    """In place where that can be: `grad` may be a view of a bucket that ranks exchange."""
    if param.grad is None or param.grad.is_sparse or gradient.is_sparse:
        param.grad = gradient.to(param.dtype)
    else:
        param.grad.copy_(gradient)
