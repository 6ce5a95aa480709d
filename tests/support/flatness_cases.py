"""Small models in float64 and quadratic functions, whose landscapes are known, for the tests of flatness."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from flatmin import flatness

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 2, bias=False), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(2, 3)
    )


class Tied(nn.Module):
    """One weight in two places, dropout, and a parameter that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.outer = nn.Linear(3, 3)
        self.outer.weight = self.inner.weight
        self.unused = nn.Parameter(torch.ones(2))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.drop(torch.sigmoid(self.inner(x))))
        return out


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (3,)),
    "convolutional": (convolutional, (1, 3, 3)),
    "tied": (Tied, (3,)),
}


class Case:
    """A model in float64 (in train mode, which shows whether it is evaluated in eval mode) and its data."""

    def __init__(self, name: str, *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(seed)
        make, shape = CASES[name]
        self.model: Any = make().to(dtype)
        self.x = torch.randn(12, *shape, dtype=dtype).to(device)
        self.y = torch.randint(0, 3, (12,)).to(device)
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                nn.init.uniform_(module.running_mean, -1, 1)
                nn.init.uniform_(module.running_var, 0.5, 2)
        self.model.to(device)  # drawn on the CPU, so that all devices have the same
        self.loss = flatness.empirical_risk(self.x, self.y, batch_size=5)

    def at(self, theta: Tensor) -> Tensor:
        """L as a function of the flat weights, written down plainly."""
        named = dict(self.model.named_parameters())
        pieces = theta.split([p.numel() for p in named.values()])
        weights = {name: piece.view(p.shape) for (name, p), piece in zip(named.items(), pieces, strict=True)}
        twin = copy.deepcopy(self.model).eval()
        return cross_entropy(functional_call(twin, weights, (self.x,)), self.y)

    def theta(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])

    def dense_hessian(self) -> Tensor:
        dense = hessian(self.at, self.theta())
        assert isinstance(dense, Tensor)
        return dense


def flat(direction: list[Tensor]) -> Tensor:
    return torch.cat([d.reshape(-1) for d in direction])


class Quadratic(nn.Module):
    """½ θᵀHθ + gᵀθ, whatever the input."""

    def __init__(self, h: Tensor, g: Tensor | None = None, theta: Tensor | None = None) -> None:
        super().__init__()
        self.h, self.g = h, torch.zeros(len(h), dtype=h.dtype) if g is None else g
        self.theta = nn.Parameter(torch.zeros(len(h), dtype=h.dtype) if theta is None else theta)

    def forward(self) -> Tensor:
        return self.theta @ self.h @ self.theta / 2 + self.g @ self.theta


def itself(model: Any) -> Tensor:
    found: Tensor = model()
    return found


def symmetric(eigenvalues: list[float], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    n = len(eigenvalues)
    q, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))
    matrix: Tensor = q @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ q.T
    return matrix
