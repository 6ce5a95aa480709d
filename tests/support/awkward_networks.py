"""A user's file: networks and optimizers that keep more than weights, or draw from generators other than torch's."""

import random
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer


class Skipping(nn.Module):
    """Stochastic depth: a layer is skipped as Python's generator says, another one as numpy's does."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(prod(input_shape), 8)
        self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8)
        with torch.no_grad():
            self.second.bias.add_(torch.tensor(np.random.rand(8)))
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.flatten(1)).relu()
        if not self.training or random.random() < 0.5:
            hidden = hidden + self.second(hidden).relu()
        if not self.training or np.random.rand() < 0.5:
            hidden = hidden + self.third(hidden).relu()
        logits: Tensor = self.head(hidden)
        return logits


class Counting(nn.Module):
    """Its outputs depend on how many batches it has seen, which its state dict does not hold."""

    seen: Tensor

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = nn.Linear(prod(input_shape), num_classes)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        logits: Tensor = self.layer(x.flatten(1)) / (1 + 0.01 * self.seen)
        return logits


class Masked(nn.Module):
    """A mask with −∞, as those of causal attention are; an expanded buffer; and a child called `module`."""

    mask: Tensor
    ones: Tensor

    def __init__(self, num_classes: int, input_shape: tuple[int, ...], above: float = -torch.inf) -> None:
        super().__init__()
        size = prod(input_shape)
        self.module = nn.Linear(size, num_classes)
        self.register_buffer("mask", torch.full((size, size), above).triu(1))
        self.register_buffer("ones", torch.ones(1).expand(size))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.module(self.ones * x.flatten(1) @ self.mask.softmax(dim=1).T)
        return logits


class Sparse(nn.Module):
    """A sparse buffer, in its state dict or not."""

    passed: Tensor

    def __init__(self, num_classes: int, input_shape: tuple[int, ...], persistent: bool = False) -> None:
        super().__init__()
        size = prod(input_shape)
        self.layer = nn.Linear(size, num_classes)
        self.register_buffer("passed", torch.eye(size).to_sparse(), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer((self.passed @ x.flatten(1).T).T)
        return logits


class Rotating(nn.Module):
    """Complex numbers, which safetensors may not know, made anew with the network, as rotary embeddings are."""

    turns: Tensor

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        size = prod(input_shape)
        self.layer = nn.Linear(size, num_classes)
        angles = torch.arange(size, dtype=torch.float64)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer((x.flatten(1) * self.turns).real.float())
        return logits


class Noting(nn.Module):
    """Something other than a tensor in its state dict."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = nn.Linear(prod(input_shape), num_classes)

    def get_extra_state(self) -> Any:
        return {"notes": []}

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x.flatten(1))
        return logits


class MixedMoments(Optimizer):
    """Momentum in bfloat16 and in float64, and a count: types other than the weights'."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                own = self.state[param]
                if not own:
                    own["short"] = torch.zeros_like(param, dtype=torch.bfloat16)
                    own["long"] = torch.zeros_like(param, dtype=torch.float64)
                    own["count"] = torch.tensor(2**24)  # one more is lost in float32
                for moment in (own["short"], own["long"]):
                    moment.mul_(0.9).add_(param.grad.to(moment.dtype))
                own["count"] += 1
                move = own["short"].float() + own["long"].float() + 1e-3 * (own["count"] % 2)
                param.add_(move, alpha=-group["lr"] / 2)
        return loss


def mixed_moments(params: Iterable[Tensor], lr: float = 0.05) -> Optimizer:
    return MixedMoments(params, lr)


class CountingSGD(SGD):
    """Its state has something that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["count"] = {"steps": 1}  # type: ignore[index]
        return super().step(closure)


def counting_sgd(params: Iterable[Tensor], lr: float = 0.05) -> Optimizer:
    return CountingSGD(params, lr=lr, momentum=0.9)
