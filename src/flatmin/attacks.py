"""Adversarial examples: the worst input in a small ball around the given one, found by ascent on the input.

    x ← Π(x + α · d)        Π: back into ‖x − x₀‖ ≤ ε and into the bounds of a valid input

    "linf"    d = sign ∇ₓ J(x)               the ball is a box: no number moves by more than ε (the paper's attacks)
    "l2"      d = ∇ₓ J(x) / ‖∇ₓ J(x)‖        one ball for each example: Σ (x − x₀)² ≤ ε²

FGSM is one such step with α = ε. The loop works in whatever coordinates the model takes. For a model that takes
normalised pictures, attack `nn.Sequential(normalise, model)` in pixels; or, in "linf", the model itself with ε and the
bounds normalised too, (0 − mean)/std to (1 − mean)/std, a number per channel.

An `nn.Module` is attacked in eval mode and left as it was found: no parameter gradient, no BatchNorm statistic, no
module's mode changes. Any other function is called as it is. The host never waits for the device.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import cross_entropy

from flatmin.ball import NORMS, Norm, shrink

__all__ = ["fgsm", "pgd"]

Loss = Callable[[Tensor, Any], Tensor]
Number = float | Tensor


def fgsm(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Any,
    *,
    epsilon: Number,
    norm: Norm = "linf",
    bounds: tuple[Number, Number] = (0.0, 1.0),
    loss: Loss | None = None,
) -> Tensor:
    """One step of length ε: along the sign of the gradient in "linf", along the gradient in "l2".

    >>> fgsm(lambda x: torch.stack([x[:, 0], -x[:, 0]], dim=1), torch.tensor([[0.5]]), torch.tensor([0]), epsilon=0.1)
    tensor([[0.4000]])
    """
    return pgd(model, x, y, epsilon=epsilon, step_size=epsilon, steps=1, norm=norm, bounds=bounds, loss=loss)


def pgd(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Any,
    *,
    epsilon: Number,
    step_size: Number,
    steps: int,
    norm: Norm = "linf",
    random_start: bool = False,
    bounds: tuple[Number, Number] = (0.0, 1.0),
    loss: Loss | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Projected gradient ascent in the ball, from x or from a point drawn in it; x must lie within the bounds.

    `epsilon`, `step_size` and `bounds` are numbers, or tensors that broadcast against x; in "l2" a radius or step has
    one number for all, or one per example. The loss is cross-entropy, summed, so that in float16 no gradient is divided
    away by the batch size. The result is in the ball in x's own type: its numbers are rounded towards x.

    >>> def margin(x):
    ...     return torch.stack([x @ torch.tensor([3.0, 4.0]), torch.zeros(len(x))], dim=1)
    >>> pgd(margin, torch.tensor([[0.5, 0.5]]), torch.tensor([0]), epsilon=0.1, step_size=0.04, steps=5, norm="l2")
    tensor([[0.4400, 0.4200]])
    """
    _check(x, epsilon, step_size, steps, norm)
    step, lower, upper = (_like(x, number, x.dtype) for number in (step_size, *bounds))
    with torch.inference_mode(False), torch.enable_grad(), evaluating(model):
        y = y.clone() if isinstance(y, Tensor) and y.is_inference() else y  # which autograd would not keep
        ball = _BALLS[norm](x.detach().clone(), epsilon, lower, upper)
        found = ball.drawn(generator) if random_start else ball.start
        for _ in range(steps):
            asked = found.detach().requires_grad_()
            (gradient,) = torch.autograd.grad((loss or _summed)(model(asked), y), asked)
            found = ball.nearest(asked.detach() + step * ball.direction(gradient))
        return found.detach()


class _Box:
    """|x − x₀| ≤ ε for each number, within the bounds."""

    def __init__(self, start: Tensor, epsilon: Number, lower: Number, upper: Number) -> None:
        self.start, self.epsilon = start, _like(start, epsilon, start.dtype)
        far = torch.zeros_like(start, dtype=torch.float64) + _like(start, epsilon, torch.float64)
        self.low, self.high = _moved(start, -far).clamp(min=lower), _moved(start, far).clamp(max=upper)

    def direction(self, gradient: Tensor) -> Tensor:
        return gradient.sign().nan_to_num(0)  # where the gradient is not a number there is nowhere to go

    def drawn(self, generator: torch.Generator | None) -> Tensor:
        noise = torch.rand(self.start.shape, generator=generator, device=self.start.device, dtype=self.start.dtype)
        return self.nearest(self.start + self.epsilon * (2 * noise - 1))

    def nearest(self, x: Tensor) -> Tensor:
        return x.clamp(self.low, self.high)


class _Ball:
    """‖x − x₀‖₂ ≤ ε for each example, within the bounds; in float64, where no square is lost or infinite.

    The bounds hold x₀, so clamping to them moves every number towards it, and never out of the ball.
    """

    def __init__(self, start: Tensor, epsilon: Number, lower: Number, upper: Number) -> None:
        self.start, self.lower, self.upper = start, lower, upper
        self.epsilon = _like(start, epsilon, torch.float64)

    def direction(self, gradient: Tensor) -> Tensor:
        """Of length 1; 0 for an example whose gradient is 0 or not finite: there is nowhere to go."""
        length = _lengths(gradient)
        return torch.where((length > 0) & length.isfinite(), gradient / length, 0)

    def drawn(self, generator: torch.Generator | None) -> Tensor:
        """Uniform in the ball of n dimensions: a direction of normal numbers, and a radius of ε · U^(1/n)."""
        shape, device = self.start.shape, self.start.device
        normal = torch.randn(shape, generator=generator, device=device, dtype=torch.float64)
        each = (len(normal), *[1] * (normal.ndim - 1))
        uniform = torch.rand(each, generator=generator, device=device, dtype=torch.float64)
        radius = self.epsilon * uniform ** (1 / max(math.prod(shape[1:]), 1))
        return self.nearest(self.start + radius * self.direction(normal))

    def nearest(self, x: Tensor) -> Tensor:
        delta = x.double() - self.start
        inside = _moved(self.start, delta * shrink(_lengths(delta), self.epsilon))
        return inside.clamp(min=self.lower).clamp(max=self.upper)


_BALLS: dict[str, Callable[[Tensor, Number, Number, Number], _Box | _Ball]] = {"linf": _Box, "l2": _Ball}


def _moved(start: Tensor, delta: Tensor) -> Tensor:
    """x₀ + Δ in the type of x₀, each number rounded towards x₀: rounded to the nearest, it could leave the ball."""
    moved = (start + delta).to(start.dtype)
    too_far = (moved.double() - start).abs() > delta.abs()
    return torch.where(too_far, torch.nextafter(moved, start), moved)


def _lengths(x: Tensor) -> Tensor:
    """The norm of each example, of a shape that broadcasts against x."""
    flat = x.reshape(len(x), math.prod(x.shape[1:]))
    lengths: Tensor = vector_norm(flat, dim=1, dtype=torch.float64)
    return lengths.view(-1, *[1] * (x.ndim - 1))


def _like(x: Tensor, number: Number, dtype: torch.dtype) -> Number:
    """A tensor in this type and x's place. A number stays one: making a tensor of it would be a copy from the host."""
    return number.to(x.device, dtype) if isinstance(number, Tensor) else number


def _check(x: Tensor, epsilon: Number, step_size: Number, steps: int, norm: str) -> None:
    if not x.is_floating_point():
        raise TypeError(
            f"inputs must be floats to be moved by a gradient, got {x.dtype}; for pictures, use x.float() / 255"
        )
    if norm not in NORMS:
        raise ValueError(f"unknown norm {norm!r}; choose from {', '.join(NORMS)}")
    if steps < 0:
        raise ValueError(f"steps must be at least 0, got {steps}")
    each = (*x.shape[:1], *[1] * (x.ndim - 1))
    for name, value in (("epsilon", epsilon), ("step_size", step_size)):
        if not isinstance(value, Tensor):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite, got {value}")
        elif norm == "l2" and value.numel() != 1 and value.shape != each:
            raise ValueError(
                f"{name} must be one number in l2, or one per example in the shape {each}, got {tuple(value.shape)}; "
                "radii per channel are for linf"
            )


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
