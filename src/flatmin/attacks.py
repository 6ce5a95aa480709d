"""Adversarial examples: the worst input in a small ball around the given one, found by ascent on the input.

    x ← Π(x + α · sign ∇ₓ J(x))        Π: back into ‖x − x₀‖∞ ≤ ε and into the bounds of a valid input

FGSM is one such step with α = ε. The loop works in whatever coordinates the model takes: for a model that takes
normalised pictures, ε and the bounds are normalised too, (0 − mean)/std to (1 − mean)/std, a number a channel.

The model is attacked in eval mode and left as it was found: no parameter gradient, no BatchNorm statistic, no module's
mode changes. Nothing is read back to the host.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

__all__ = ["fgsm", "pgd"]

Loss = Callable[[Tensor, Any], Tensor]
Bounds = tuple[float | Tensor, float | Tensor]


def fgsm(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Any,
    *,
    epsilon: float | Tensor,
    bounds: Bounds = (0.0, 1.0),
    loss: Loss | None = None,
) -> Tensor:
    """One step of length ε along the sign of the gradient.

    >>> fgsm(lambda x: torch.stack([x[:, 0], -x[:, 0]], dim=1), torch.tensor([[0.5]]), torch.tensor([0]), epsilon=0.1)
    tensor([[0.4000]])
    """
    return pgd(model, x, y, epsilon=epsilon, step_size=epsilon, steps=1, bounds=bounds, loss=loss)


def pgd(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Any,
    *,
    epsilon: float | Tensor,
    step_size: float | Tensor,
    steps: int,
    random_start: bool = False,
    bounds: Bounds = (0.0, 1.0),
    loss: Loss | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Projected gradient ascent in the L∞ ball; x must lie within the bounds.

    `epsilon`, `step_size` and `bounds` are numbers, or tensors that broadcast against x. The loss is cross-entropy,
    summed, so that in float16 no gradient is divided away by the batch size.
    """
    if steps < 0:
        raise ValueError(f"steps must be at least 0, got {steps}")
    for name, value in (("epsilon", epsilon), ("step_size", step_size)):
        if isinstance(value, int | float) and not value >= 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    lower, upper = (torch.as_tensor(bound, dtype=x.dtype, device=x.device) for bound in bounds)
    start = x.detach()
    low, high = torch.maximum(start - epsilon, lower), torch.minimum(start + epsilon, upper)
    found = start.clone()
    if random_start:
        noise = torch.rand(x.shape, generator=generator, device=x.device, dtype=x.dtype)
        found = (start + epsilon * (2 * noise - 1)).clamp(low, high)
    with torch.enable_grad(), evaluating(model):
        for _ in range(steps):
            found.requires_grad_()
            value = (loss or _summed)(model(found), y)
            (gradient,) = torch.autograd.grad(value, found)
            ascent = gradient.sign().nan_to_num(0)  # where the gradient is not a number there is nowhere to go
            found = (found.detach() + step_size * ascent).clamp(low, high)
    return found.detach()


def _summed(logits: Tensor, y: Any) -> Tensor:
    return cross_entropy(logits, y, reduction="sum")


@contextmanager
def evaluating(model: object) -> Iterator[None]:
    """Every module in eval mode; afterwards, also after an exception, each in the mode it had."""
    modules = [module for module in model.modules() if module.training] if isinstance(model, nn.Module) else []
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module in modules:
            module.training = True
