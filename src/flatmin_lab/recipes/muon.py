"""Muon: momentum whose matrices are made orthogonal, so that every direction of a layer moves equally far.

    Bₜ = μ Bₜ₋₁ + gₜ,    θₜ = (1 − γλ) θₜ₋₁ − γ √max(1, m/n) · orthogonal(gₜ + μ Bₜ)        (Jordan et al. 2024)

For a matrix U S Vᵀ, orthogonal is about U Vᵀ, from a few Newton–Schulz iterations in bfloat16, which leave singular
values between about 0.7 and 1.2. The filters of a convolution are a matrix too, m of them with n numbers each.
torch.optim.Muon takes only matrices; here biases, norms and whatever else has fewer dimensions take steps of SGD with
the same momentum and a rate that is `others` times as large, and are not decayed.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# a cubic and a quintic term that lift small singular values fast: s → a s + b s³ + c s⁵ (Jordan's)
A, B, C = 3.4445, -4.7750, 2.0315
SMALLEST = 1e-7  # norm that is divided by


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """About U Vᵀ of the matrix U S Vᵀ.

    >>> round(float(torch.linalg.svdvals(orthogonal(torch.diag(torch.tensor([3.0, 1.0])), 5).float()).min()), 1) > 0.6
    True
    """
    wide = matrix.size(0) <= matrix.size(1)
    x = (matrix if wide else matrix.T).bfloat16()
    x = x / x.norm().clamp(min=SMALLEST)  # singular values are at most 1 now
    for _ in range(steps):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=B, alpha=C), x, beta=A)
    return x if wide else x.T


class Muon(Optimizer):
    """`params` of any shapes; the groups' `lr` is that of matrices."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        weight_decay: float = 0.005,
        momentum: float = 0.95,
        steps: int = 5,
        others: float = 5.0,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("others", others)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be at least 0 and finite, got {value}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {momentum}")
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        usual = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "steps": steps, "others": others}
        super().__init__(params, usual)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._move(param, param.grad, group)
        return loss

    def _move(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        momentum, rate = state["momentum_buffer"], group["lr"]
        momentum.mul_(group["momentum"]).add_(gradient)
        ahead = gradient.add(momentum, alpha=group["momentum"])  # Nesterov's
        if param.ndim < 2:
            param.sub_(ahead * (rate * group["others"]))
            return
        rows = ahead.flatten(1)
        stretch = max(1.0, rows.size(0) / rows.size(1)) ** 0.5
        param.mul_(1 - rate * group["weight_decay"])
        param.sub_(orthogonal(rows, group["steps"]).to(param.dtype).reshape(param.shape) * (rate * stretch))
