"""Gradients kept outside `grad`: the mean over micro-batches, and a snapshot that survives a pass.

Each micro-batch has its own perturbation, so its gradient at θ + Δᵢ is ready before the next ascent from θ:

    g = (1/k) Σᵢ ∇Jᵢ(θ + Δᵢ)        m-sharpness, with m images per micro-batch

The sum is accumulated separately, in at least float32, and the mean is written to `grad` at the end.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.amp import GradScaler

from flatmin.ball import combine, norms
from flatmin.core.tensors import compute_dtype, plain
from flatmin.optim.update.grad_scaler import Owners, restore_scaler_state, scaler_state


class MeanGradient:
    """Sums up the parameters' `grad`, and writes the mean back.

    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> mean = MeanGradient([weight])
    >>> for gradient in (1.0, 3.0):
    ...     weight.grad = torch.tensor([gradient])
    ...     mean.add()
    >>> mean.write_mean()
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
            if param.grad.is_conj():
                param.grad = param.grad.resolve_conj()
            total = self._sums.get(param)
            if total is None:  # copied: the next backward pass may write into this memory
                self._sums[param] = param.grad.to(compute_dtype(param.grad), copy=True)
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
    def write_mean(self) -> None:
        """A missing gradient of a micro-batch counts as 0."""
        for param, total in self._sums.items():
            put_gradient(param, total.div_(self._count))

    def is_finite(self, home: torch.device) -> Tensor:
        return combine(norms(list(self._sums.values())).to(home)).isfinite()


class GradientSnapshot:
    """The current gradients, and what a scaler knows about them, to be restored later."""

    def __init__(self, params: Iterable[Tensor], scaler: GradScaler | None, owners: Owners) -> None:
        # copied, because the next backward pass may write into this memory: a bucket's, or one that was zeroed in place
        self._kept = {param: None if param.grad is None else param.grad.clone() for param in params}
        self._scaler, self._owners = scaler, owners
        self._scaler_state = scaler_state(scaler, owners)

    @torch.no_grad()
    def put_back(self) -> None:
        for param, gradient in self._kept.items():
            if gradient is None:
                param.grad = None
            else:
                put_gradient(param, gradient)
        restore_scaler_state(self._scaler, self._owners, self._scaler_state)


def put_gradient(param: Tensor, gradient: Tensor) -> None:
    """In place if possible: `grad` may be a view of a bucket that ranks exchange."""
    if param.grad is None or param.grad.is_sparse or gradient.is_sparse:
        param.grad = gradient.to(getattr(param, "grad_dtype", None) or param.dtype)
    else:
        param.grad.copy_(gradient)
