"""Algorithm 1 of the paper in plain Python loops over float64 numbers: what AMP must compute, with nothing clever."""

from collections.abc import Callable

import torch
from torch import Tensor

Vector = list[list[float]]  # a list of numbers for each parameter


def norm_of(delta: Vector, norm: str) -> float:
    numbers = [abs(number) for part in delta for number in part]
    return sum(number * number for number in numbers) ** 0.5 if norm == "l2" else max(numbers)


def project(delta: Vector, epsilon: float, norm: str) -> Vector:
    length = norm_of(delta, norm)
    if norm == "linf":
        return [[max(-epsilon, min(epsilon, number)) for number in part] for part in delta]
    if length > epsilon:
        return [[epsilon * number / length for number in part] for part in delta]
    return delta


def project_by_balls(delta: Vector, epsilon: float, norm: str, groups: list[list[int]]) -> Vector:
    """`groups` has the indices of the parameters that share a ball."""
    projected = [list(part) for part in delta]
    for group in groups:
        for index, part in zip(group, project([delta[i] for i in group], epsilon, norm), strict=True):
            projected[index] = part
    return projected


class Twin:
    """SGD with momentum and weight decay, stepped with the gradient at θ + Δ."""

    def __init__(self, params: list[Tensor], loss: Callable[[], Tensor], groups: list[list[int]]) -> None:
        self.params, self.loss, self.groups = params, loss, groups
        self.momentum_buffer: Vector | None = None

    def gradient_at(self, point: Vector) -> Vector:
        with torch.no_grad():
            for param, part in zip(self.params, point, strict=True):
                param.copy_(torch.tensor(part, dtype=torch.float64).view_as(param))
        return [gradient.flatten().tolist() for gradient in torch.autograd.grad(self.loss(), self.params)]

    def step(
        self, *, epsilon: float, zeta: float, n: int, norm: str, lr: float, momentum: float, weight_decay: float
    ) -> None:
        theta: Vector = [param.flatten().tolist() for param in self.params]
        delta: Vector = [[0.0 for _ in part] for part in theta]
        for _ in range(n):
            gradient = self.gradient_at(add(theta, delta, 1.0))
            delta = project_by_balls(add(delta, gradient, zeta), epsilon, norm, self.groups)
        gradient = add(self.gradient_at(add(theta, delta, 1.0)), theta, weight_decay)
        buffer = gradient if self.momentum_buffer is None else add(gradient, self.momentum_buffer, momentum)
        self.momentum_buffer = buffer
        self.gradient_at(add(theta, buffer, -lr))  # which also leaves the weights there


def add(left: Vector, right: Vector, factor: float) -> Vector:
    return [[a + factor * b for a, b in zip(x, y, strict=True)] for x, y in zip(left, right, strict=True)]
