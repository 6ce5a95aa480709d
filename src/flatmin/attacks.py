"""Adversarial examples: the worst input in a small ball around the given one, found by ascent on the input.

    x ← Π(x + α · sign ∇ₓ J(x))        Π: back into ‖x − x₀‖∞ ≤ ε and into the bounds of a valid input

FGSM is one such step with α = ε. The loop works in whatever coordinates the model takes: for a model that takes
normalised pictures, ε and the bounds are normalised too, (0 − mean)/std to (1 − mean)/std, a number per channel.

An `nn.Module` is attacked in eval mode and left as it was found: no parameter gradient, no BatchNorm statistic, no
module's mode changes. Any other function is called as it is. The host never waits for the device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

__all__ = ["fgsm", "pgd"]

Loss = Callable[[Tensor, Any], Tensor]
Number = float | Tensor


def fgsm(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Any,
    *,
    epsilon: Number,
    bounds: tuple[Number, Number] = (0.0, 1.0),
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
    epsilon: Number,
    step_size: Number,
    steps: int,
    random_start: bool = False,
    bounds: tuple[Number, Number] = (0.0, 1.0),
    loss: Loss | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Projected gradient ascent in the L∞ ball; x must lie within the bounds.

    `epsilon`, `step_size` and `bounds` are numbers, or tensors that broadcast against x. The loss is cross-entropy,
    summed, so that in float16 no gradient is divided away by the batch size.
    """
    if not x.is_floating_point():
        raise TypeError(
            f"inputs must be floats to be moved by a gradient, got {x.dtype}; for pictures, use x.float() / 255"
        )
    if steps < 0:
        raise ValueError(f"steps must be at least 0, got {steps}")
    for name, value in (("epsilon", epsilon), ("step_size", step_size)):
        if isinstance(value, int | float) and not value >= 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    radius, step, lower, upper = (_like(x, number) for number in (epsilon, step_size, *bounds))
    with torch.inference_mode(False), torch.enable_grad(), evaluating(model):
        start = x.detach().clone()
        low, high = (start - radius).clamp(min=lower), (start + radius).clamp(max=upper)
        found = start
        if random_start:
            noise = torch.rand(x.shape, generator=generator, device=x.device, dtype=x.dtype)
            found = (start + radius * (2 * noise - 1)).clamp(low, high)
        for _ in range(steps):
            asked = found.detach().requires_grad_()
            (gradient,) = torch.autograd.grad((loss or _summed)(model(asked), y), asked)
            ascent = gradient.sign().nan_to_num(0)  # where the gradient is not a number there is nowhere to go
            found = (asked.detach() + step * ascent).clamp(low, high)
        return found.detach()


def _like(x: Tensor, number: Number) -> Number:
    """A tensor in x's type and place. A number stays one: making a tensor of it would be a copy from the host."""
    return number.to(x.device, x.dtype) if isinstance(number, Tensor) else number


def _summed(logits: Tensor, y: Any) -> Tensor:
    return cross_entropy(logits, y, reduction="sum")


@contextmanager
def evaluating(model: object) -> Iterator[None]:
    """Every module in eval mode; afterwards, also after an exception, each in the mode it had."""
    modes = [(module, module.training) for module in model.modules()] if isinstance(model, nn.Module) else []
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training
