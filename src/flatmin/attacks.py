"""Adversarial examples: the worst input in a small ball around the given one, found by ascent on the input.

    x ← Π(x + α · d)        Π: projection onto ‖x − x₀‖ ≤ ε and the bounds of a valid input

    "linf"    d = sign ∇ₓ J(x)               the ball is a box: no entry moves by more than ε (the paper's attacks)
    "l2"      d = ∇ₓ J(x) / ‖∇ₓ J(x)‖        one ball for each example: Σ (x − x₀)² ≤ ε²

FGSM is one such step with α = ε. The loop works in the coordinates of the model's input. For a model that takes
normalised images, attack `nn.Sequential(normalise, model)` in pixels; or, in "linf", the model itself with ε and the
bounds normalised too, (0 − mean)/std to (1 − mean)/std, one number per channel.

An `nn.Module` is attacked in eval mode and left as it was: no parameter gradient, BatchNorm statistic or module
mode changes. Any other function is called as it is. There is no host sync.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import cross_entropy

from flatmin.ball import NORMS, Norm, shrink
from flatmin.core.model_state import eval_mode_with_gradients
from flatmin.core.tensors import moved_within, widest_dtype

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
    """Projected gradient ascent in the ball and within the bounds, from x or from a random point of the ball.

    `epsilon`, `step_size` and `bounds` are numbers, or tensors that broadcast against x; in "l2" a radius or step
    size is one number for all, or one per example. The default loss is the summed cross-entropy, because a mean could
    make float16 gradients underflow. The result is in the ball in x's own dtype: its entries are rounded towards x. An
    entry of x that is out of bounds may move back, but no further out: for normalised inputs, give normalised bounds.

    >>> def margin(x):
    ...     return torch.stack([x @ torch.tensor([3.0, 4.0]), torch.zeros(len(x))], dim=1)
    >>> pgd(margin, torch.tensor([[0.5, 0.5]]), torch.tensor([0]), epsilon=0.1, step_size=0.04, steps=5, norm="l2")
    tensor([[0.4400, 0.4200]])
    """
    _check(x, epsilon, step_size, steps, norm, bounds)
    step, lower, upper = _like(x, step_size, x.dtype), _inside(x, bounds[0], math.inf), _inside(x, bounds[1], -math.inf)
    with eval_mode_with_gradients(model):
        y = y.clone() if isinstance(y, Tensor) and y.is_inference() else y  # autograd cannot save an inference tensor
        ball = _BALLS[norm](x.detach().clone(), epsilon, lower, upper)
        found = ball.random_point(generator) if random_start else ball.start
        for _ in range(steps):
            point = found.detach().requires_grad_()
            outputs = model(point.clone())  # which the model may change in place
            (gradient,) = torch.autograd.grad(_check_loss((loss or _summed_cross_entropy)(outputs, y)), point)
            found = ball.nearest(point.detach() + step * ball.direction(gradient))
        return found.detach()


class _Box:
    """|x − x₀| ≤ ε for each entry, within the bounds; an entry of x₀ outside them moves no further out."""

    def __init__(self, start: Tensor, epsilon: Number, lower: Number, upper: Number) -> None:
        self.start, self.epsilon = start, _like(start, epsilon, start.dtype)
        far = _like(start, epsilon, widest_dtype(start))
        self.low = torch.maximum(moved_within(start, -far), start.clamp(max=lower))
        self.high = torch.minimum(moved_within(start, far), start.clamp(min=upper))

    def direction(self, gradient: Tensor) -> Tensor:
        return gradient.sign().nan_to_num(0)  # where the gradient is nan, stay

    def random_point(self, generator: torch.Generator | None) -> Tensor:
        noise = _draw(torch.rand, self.start.shape, self.start, generator).to(self.start.dtype)
        return self.nearest(self.start + self.epsilon * (2 * noise - 1))

    def nearest(self, x: Tensor) -> Tensor:
        return x.clamp(self.low, self.high)


class _Ball:
    """‖x − x₀‖₂ ≤ ε for each example, within the bounds; in float64, where no square underflows or overflows.

    Clamping to bounds that contain x₀ moves every entry towards it, so never out of the ball.
    """

    def __init__(self, start: Tensor, epsilon: Number, lower: Number, upper: Number) -> None:
        self.start, self.lower, self.upper = start, start.clamp(max=lower), start.clamp(min=upper)
        self.epsilon = _like(start, epsilon, widest_dtype(start))

    def direction(self, gradient: Tensor) -> Tensor:
        """Of length 1; 0 for an example whose gradient is 0 or not finite: it stays where it is."""
        length = _lengths(gradient)
        return torch.where((length > 0) & length.isfinite(), gradient / length, 0)

    def random_point(self, generator: torch.Generator | None) -> Tensor:
        """Uniform in the ball of n dimensions: a direction of normal numbers, and a radius of ε · U^(1/n)."""
        normal = _draw(torch.randn, self.start.shape, self.start, generator)
        uniform = _draw(torch.rand, (len(normal), *[1] * (normal.ndim - 1)), self.start, generator)
        radius = self.epsilon * uniform ** (1 / max(math.prod(normal.shape[1:]), 1))
        return self.nearest(self.start + radius * self.direction(normal))

    def nearest(self, x: Tensor) -> Tensor:
        delta = x.to(widest_dtype(x)) - self.start
        inside = moved_within(self.start, delta * shrink(_lengths(delta), self.epsilon))
        return inside.clamp(self.lower, self.upper)


_BALLS: dict[str, Callable[[Tensor, Number, Number, Number], _Box | _Ball]] = {"linf": _Box, "l2": _Ball}


def _draw(draw: Callable[..., Tensor], shape: Sequence[int], x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Random numbers on x's device, drawn on the generator's: the same ones on every device."""
    where = x.device if generator is None else generator.device
    dtype = torch.float64 if where.type == "cpu" else widest_dtype(x)
    return draw(shape, generator=generator, device=where, dtype=dtype).to(x.device, widest_dtype(x))


def _lengths(x: Tensor) -> Tensor:
    """The norm of each example, in a shape that broadcasts against x."""
    flat = x.reshape(len(x), math.prod(x.shape[1:]))
    lengths: Tensor = vector_norm(flat, dim=1, dtype=widest_dtype(x))
    return lengths.view(-1, *[1] * (x.ndim - 1))


def _like(x: Tensor, number: Number, dtype: torch.dtype) -> Number:
    """A tensor in this dtype on x's device. A number stays a number: a tensor would be a copy from the host."""
    return number.to(x.device, dtype) if isinstance(number, Tensor) else number


def _inside(x: Tensor, bound: Number, towards: float) -> Number:
    """A bound in x's dtype, rounded towards the inside: to nearest, 0.1 in bfloat16 is 0.1001."""
    if isinstance(bound, Tensor):
        exact = bound.to(x.device, widest_dtype(x))
    else:  # on the CPU: on x's device, a number would be a copy from the host
        exact = torch.tensor(bound, dtype=torch.float64, device="cpu")
    rounded = exact.to(x.dtype)
    outside = rounded.to(exact.dtype) < exact if towards > 0 else rounded.to(exact.dtype) > exact
    found = torch.where(outside, torch.nextafter(rounded, torch.full_like(rounded, towards)), rounded)
    return found if isinstance(bound, Tensor) else float(found)


def _check(x: Tensor, epsilon: Number, step_size: Number, steps: int, norm: str, bounds: tuple[Number, Number]) -> None:
    if not x.is_floating_point():
        raise TypeError(
            f"inputs must be floats to be moved by a gradient, got {x.dtype}; for images, use x.float() / 255"
        )
    if norm not in NORMS:
        raise ValueError(f"unknown norm {norm!r}; choose from {', '.join(NORMS)}")
    if steps < 0:
        raise ValueError(f"steps must be at least 0, got {steps}")
    if not any(isinstance(bound, Tensor) for bound in bounds) and not bounds[0] < bounds[1]:
        raise ValueError(f"bounds must be a lower and an upper number, got {bounds}")
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


def _check_loss(loss: Tensor) -> Tensor:
    if loss.numel() != 1:
        raise ValueError(f"the loss must be one number for all examples, got shape {tuple(loss.shape)}; take its sum")
    if not loss.requires_grad:
        raise ValueError("the loss must be differentiable in the input; is the model called under no_grad?")
    return loss


def _summed_cross_entropy(logits: Tensor, y: Any) -> Tensor:
    return cross_entropy(logits, y, reduction="sum")
