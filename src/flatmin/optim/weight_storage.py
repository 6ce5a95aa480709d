"""Where θ, θ + Δ and the gradients of a step are stored: in the parameters, or beside them.

InPlace    an ordinary step. The parameters move to θ + Δ, θ is kept in copies, gradients are in `grad`
Beside     a captured step. The parameters stay at θ; θ + Δ is written to tensors beside them, in the precision that
           the passes compute in, and gradients are taken there: θ is neither copied nor restored
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.sgd import sgd

from flatmin.ball import Ball, Norm, norms
from flatmin.core import multi_tensor
from flatmin.core.copies import Copies
from flatmin.core.recorded_launches import Results, Work
from flatmin.core.recurring_work import Operands, RecurringWork, fit_kernels
from flatmin.core.tensors import ORDINARY_TYPES, copy_, is_dense, plain, zero_unless_

_DTYPE = attrgetter("dtype")
Function = Callable[..., Any]
Gradients = tuple[list[Tensor], list[Tensor]]  # the parameters that have a gradient, and their gradients


class WeightStorage(Protocol):
    """What a perturbation needs from the place where it moves the weights."""

    def keep_theta(self, params: Sequence[Tensor]) -> None:
        """Save θ of these parameters, which are about to move."""

    def theta_of(self, param: Tensor) -> Tensor: ...

    def perturbed(self, param: Tensor) -> Tensor:
        """Where θ + Δ is written."""

    def gradients_of(self, params: Sequence[Tensor]) -> Gradients: ...

    def norms_of(self, tensors: Sequence[Tensor], *, norm: Norm) -> Tensor:
        """The norm of each of these gradients, or other directions."""

    def has_kernel(self, params: Sequence[Tensor], directions: Sequence[Tensor], *, ball: Ball) -> bool:
        """Can `move` move these?"""

    def move(
        self, params: Sequence[Tensor], directions: Sequence[Tensor], factors: Tensor, finite: Tensor, *, ball: Ball
    ) -> None:
        """Write θ + factor · direction in one kernel, or θ itself if not `finite`."""

    def zero_unless(self, gradients: Sequence[Tensor], flag: Tensor) -> None: ...

    def run(self, work: Work, operands: Operands) -> Results:
        """`work(numbers)`, which launches kernels on these operands."""

    def compiled(self, function: Function) -> Function:
        """A function of a few scalars, compiled if the step is."""


@dataclass(frozen=True)
class InPlace:
    """θ + Δ is written into the parameters; θ is kept in `theta`."""

    theta: Copies[Tensor]
    recurring: RecurringWork = field(default_factory=RecurringWork)

    def keep_theta(self, params: Sequence[Tensor]) -> None:
        # as a change in place does, but not all kernels that move them: autograd then refuses graphs of earlier passes
        increment_version(params)
        if self.theta.take_again(params):
            return
        if missing := {p: p for p in params if p not in self.theta}:
            self.theta.take(missing)

    def theta_of(self, param: Tensor) -> Tensor:
        return self.theta[param]

    def perturbed(self, param: Tensor) -> Tensor:
        return param

    def gradients_of(self, params: Sequence[Tensor]) -> Gradients:
        found = [p for p in params if p.grad is not None]
        gradients = [p.grad for p in found]
        if True in map(Tensor.is_conj, gradients):  # type: ignore[arg-type]  # none of them is None
            for p, gradient in zip(found, gradients, strict=True):
                p.grad = gradient.resolve_conj()  # type: ignore[union-attr]
            gradients = [p.grad for p in found]
        return found, gradients  # type: ignore[return-value]

    def norms_of(self, tensors: Sequence[Tensor], *, norm: Norm) -> Tensor:
        kernels = self.recurring.kernels.get(id(tensors))
        return norms(tensors, norm=norm) if kernels is None or norm != "l2" else kernels.lengths()

    def has_kernel(self, params: Sequence[Tensor], directions: Sequence[Tensor], *, ball: Ball) -> bool:
        return ball != "tensor" and _fit_fused_kernel(params, directions, dense=self.theta.are_dense())

    def move(
        self, params: Sequence[Tensor], directions: Sequence[Tensor], factors: Tensor, finite: Tensor, *, ball: Ball
    ) -> None:
        kernels = self.recurring.kernels.get(id(directions))
        if kernels is None:
            _climb(params, directions, factors[0], unless=~finite)
        else:
            kernels.move(factors, finite)

    def zero_unless(self, gradients: Sequence[Tensor], flag: Tensor) -> None:
        kernels = self.recurring.kernels.get(id(gradients))
        if kernels is None:
            zero_unless_(gradients, flag)
        else:
            kernels.zero_unless(flag)

    def run(self, work: Work, operands: Operands) -> Results:
        """On a GPU, work that recurs is recorded and replayed."""
        (first, *_), numbers = operands.gradients, operands.numbers
        if not first or not first[0].is_cuda or Tensor in map(type, numbers):
            return work(numbers)
        return self.recurring.run(work, operands)

    def compiled(self, function: Function) -> Function:
        return function


@dataclass
class Beside:
    """θ + Δ is written to `weights`, and its gradients are in `gradients`; θ stays in the parameters."""

    weights: Mapping[Tensor, Tensor]
    gradients: Mapping[Tensor, Tensor]
    compiler: Callable[[Function], Function] | None  # None: the same bits as without a capture
    measures_by_kernel: bool = False  # while work is being run that `InPlace` would measure by kernel

    def keep_theta(self, params: Sequence[Tensor]) -> None:
        """Nothing to do: θ stays where it is."""

    def theta_of(self, param: Tensor) -> Tensor:
        return param

    def perturbed(self, param: Tensor) -> Tensor:
        return self.weights[param]

    def gradients_of(self, params: Sequence[Tensor]) -> Gradients:
        found = [p for p in params if p in self.gradients]
        return found, [self.gradients[p] for p in found]

    def norms_of(self, tensors: Sequence[Tensor], *, norm: Norm) -> Tensor:
        by_kernel = self.measures_by_kernel or self.compiler is not None
        if by_kernel and norm == "l2" and multi_tensor.can_read(tensors):
            return multi_tensor.lengths(tensors)
        return norms(tensors, norm=norm)

    def has_kernel(self, params: Sequence[Tensor], directions: Sequence[Tensor], *, ball: Ball) -> bool:
        if multi_tensor.can_update(params):
            return True
        same_dtypes = [self.weights[p].dtype for p in params] == [p.dtype for p in params]
        return ball != "tensor" and same_dtypes and _fit_fused_kernel(params, directions, dense=False)

    def move(
        self, params: Sequence[Tensor], directions: Sequence[Tensor], factors: Tensor, finite: Tensor, *, ball: Ball
    ) -> None:
        moved = [self.weights[p] for p in params]
        if multi_tensor.can_update(params):
            multi_tensor.move(params, directions, moved, factors, finite, rounded_once=ball != "tensor")
        else:
            copy_(zip(moved, params, strict=True))
            _climb(moved, directions, factors[0], unless=~finite)

    def zero_unless(self, gradients: Sequence[Tensor], flag: Tensor) -> None:
        zero_unless_(gradients, flag)

    def run(self, work: Work, operands: Operands) -> Results:
        """Run it as it is: it is already part of a larger capture."""
        self.measures_by_kernel = fit_kernels(operands.gradients, operands.params)
        try:
            return work(operands.numbers)
        finally:
            self.measures_by_kernel = False

    def compiled(self, function: Function) -> Function:
        return function if self.compiler is None else self.compiler(function)


def _fit_fused_kernel(params: Sequence[Tensor], directions: Sequence[Tensor], *, dense: bool) -> bool:
    """Can torch's fused kernel move these weights? Not float64, where its lr is float32, nor half precision on the CPU,
    where it is wrong (torch 2.13). `dense`: they are known to be; the kernel walks through memory, gaps included.
    """
    if not ORDINARY_TYPES.issuperset(map(type, (*params, *directions))):
        params, directions = [plain(p) for p in params], [plain(direction) for direction in directions]
    everything, home = [*params, *directions], params[0].device.type
    dtype, *dtypes = set(map(_DTYPE, everything))
    _, *devices = set(map(Tensor.get_device, everything))
    return (
        not dtypes
        and not devices
        and (dtype == torch.float32 or (home == "cuda" and dtype in (torch.bfloat16, torch.float16)))
        and home in ("cpu", "cuda")
        and list(map(Tensor.stride, params)) == list(map(Tensor.stride, directions))
        and (dense or all(map(is_dense, params)))
    )


def _climb(theta: Sequence[Tensor], directions: Sequence[Tensor], rate: Tensor, *, unless: Tensor) -> None:
    """θ + Δ = θ + rate · directions: an SGD step uphill, which leaves θ as it is if `unless` holds.

    One pass over memory and one launch for all tensors; Δ is never stored.
    """
    if not ORDINARY_TYPES.issuperset(map(type, (*theta, *directions))):
        theta, directions = [plain(p) for p in theta], [plain(direction) for direction in directions]
    home = theta[0].device
    sgd(
        list(theta),
        list(directions),
        [None] * len(theta),
        fused=True,
        foreach=False,
        found_inf=unless.to(home, torch.float32),
        lr=rate.to(home, torch.float32),  # type: ignore[arg-type]  # a tensor on the device works too
        maximize=True,
        weight_decay=0.0,
        momentum=0.0,
        dampening=0.0,
        nesterov=False,
    )
