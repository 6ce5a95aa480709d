"""Where θ, θ + Δ and the gradients of a step are stored: in the parameters, or beside them.

InPlace    an ordinary step. The parameters move to θ + Δ, θ is kept in copies, gradients are in `grad`
Beside     a captured step. The parameters stay at θ; θ + Δ is written to tensors beside them, in the precision that
           the passes compute in, and gradients are taken there: θ is neither copied nor restored
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flatmin.ball import Norm, norms
from flatmin.core import multi_tensor
from flatmin.core.tensors import Copies

Function = Callable[..., Any]


@dataclass(frozen=True)
class InPlace:
    """θ + Δ is written into the parameters; θ is kept in `theta`."""

    theta: Copies[Tensor]

    def keep_theta(self, params: Iterable[Tensor]) -> None:
        self.theta.take({p: p for p in params if p not in self.theta})

    def theta_of(self, param: Tensor) -> Tensor:
        return self.theta[param]

    def perturbed(self, param: Tensor) -> Tensor:
        """Where θ + Δ is written."""
        return param

    def gradient_of(self, param: Tensor) -> Tensor | None:
        return param.grad

    def norms_of(self, tensors: Sequence[Tensor], *, norm: Norm) -> Tensor:
        return norms(tensors, norm=norm)

    def compiled(self, function: Function) -> Function:
        """A function of a few numbers, compiled where the step is."""
        return function


@dataclass
class Beside:
    """θ + Δ is written to `weights`, and its gradients are in `gradients`; θ stays in the parameters."""

    weights: Mapping[Tensor, Tensor]
    gradients: Mapping[Tensor, Tensor]
    compiler: Callable[[Function], Function] | None  # None: the same bits as without a capture

    def keep_theta(self, params: Iterable[Tensor]) -> None:
        """It stays where it is."""

    def theta_of(self, param: Tensor) -> Tensor:
        return param

    def perturbed(self, param: Tensor) -> Tensor:
        return self.weights[param]

    def gradient_of(self, param: Tensor) -> Tensor | None:
        return self.gradients.get(param)

    def norms_of(self, tensors: Sequence[Tensor], *, norm: Norm) -> Tensor:
        if self.compiler is not None and norm == "l2" and multi_tensor.can_read(tensors):
            return multi_tensor.lengths(tensors)
        return norms(tensors, norm=norm)

    def compiled(self, function: Function) -> Function:
        return function if self.compiler is None else self.compiler(function)


WeightStorage = InPlace | Beside
