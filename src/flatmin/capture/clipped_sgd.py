"""SGD that clips the norm of the gradient it steps with, in a form that fits into a captured step's graph.

    base = ClippedSGD(model.parameters(), lr=0.1, momentum=0.9, clip_norm=50.0)

A custom optimizer class that clips would step outside the graph, launch by launch, which takes longer than the graph
itself.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

EPSILON = 1e-6  # added to the norm, as in torch.nn.utils.clip_grad_norm_


class ClippedStep(Optimizer):
    """A mixin, listed before an optimizer class, that clips the norm of the gradient that the optimizer steps with.

    It clips after the closure, and after a scaler has unscaled the gradient. A step pre-hook would run before the
    closure, and clip the gradient of the previous step. (Hooks may run twice per step, because the optimizer's own step
    runs them too; there are none here.)
    """

    def __init__(self, params: Iterable[Tensor], *, clip_norm: float, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.clip_norm = clip_norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], self.clip_norm)
        super().step()
        return result


class ClippedSGD(ClippedStep, SGD):
    """SGD that clips the norm of the gradient it steps with."""


@torch.no_grad()
def clipped(gradients: dict[Tensor, Tensor], clip_norm: float) -> dict[Tensor, Tensor]:
    """The gradients of these weights, clipped in the weights' precision as torch clips them, without a host sync.

    >>> weight = torch.zeros(2)
    >>> clipped({weight: torch.tensor([3.0, 4.0], dtype=torch.bfloat16)}, 2.5)[weight]
    tensor([1.5000, 2.0000])
    """
    if not gradients:
        return gradients
    scaled = [torch.empty_like(gradient, dtype=p.dtype) for p, gradient in gradients.items()]
    torch._foreach_copy_(scaled, list(gradients.values()))
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(scaled)))
    torch._foreach_mul_(scaled, (clip_norm / (total + EPSILON)).clamp(max=1.0))
    return dict(zip(gradients, scaled, strict=True))
