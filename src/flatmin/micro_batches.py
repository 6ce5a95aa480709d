"""The mean gradient of several micro-batches.

Each micro-batch has a perturbation of its own, so its gradient at θ + Δᵢ is there before the next one climbs from θ:

    g = (1/k) Σᵢ ∇Jᵢ(θ + Δᵢ)        m-sharpness, with m pictures to a micro-batch

The sum is kept aside, in float32 at least, and left in `grad` at the end.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from flatmin.tensors import wide


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
        for param in self._params:
            if param.grad is None:
                continue
            if param in self._sums:
                self._sums[param].add_(param.grad)
            else:  # copied: the next backward pass may write into this memory
                self._sums[param] = param.grad.to(wide(param.grad), copy=True)

    @torch.no_grad()
    def leave(self) -> None:
        """A parameter that a micro-batch has no gradient of counts as 0 there."""
        for param, total in self._sums.items():
            mean = total.div_(self._count)
            if param.grad is None or param.grad.is_sparse:
                param.grad = mean.to(param.dtype)
            else:
                param.grad.copy_(mean)  # in place: it may be a view of a bucket that ranks exchange
