"""The tables that every law runs over: base optimizers, models, perturbed optimizers, and how to step them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer, RMSprop

import flatmin

Params = Iterable[Any]
MakeBase = Callable[[Params], Optimizer]
Method = Callable[..., flatmin.AMP | flatmin.RMP]


def fused_sgd(params: Params) -> Optimizer:
    """With momentum for float32 alone: torch 2.13's fused SGD on the CPU spoils the momentum of bfloat16 weights."""
    optimizer = SGD(params, lr=0.1, weight_decay=1e-2, fused=True)
    for group in optimizer.param_groups:
        group["momentum"] = 0.9 if all(param.dtype == torch.float32 for param in group["params"]) else 0.0
    return optimizer


OPTIMIZERS: dict[str, Callable[[Params], Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.1, foreach=False),
    "nesterov": lambda params: SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2, foreach=False),
    "adamw": lambda params: AdamW(params, lr=1e-2, foreach=False),
    "rmsprop": lambda params: RMSprop(params, lr=1e-2, momentum=0.5, foreach=False),
    "nesterov-foreach": lambda params: SGD(
        params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2, foreach=True
    ),
    "adamw-foreach": lambda params: AdamW(params, lr=1e-2, foreach=True),
    "sgd-fused": fused_sgd,
    "adamw-fused": lambda params: AdamW(params, lr=1e-2, fused=True),
}

METHODS: dict[str, Callable[..., flatmin.AMP | flatmin.RMP]] = {
    "amp": lambda base, **settings: flatmin.AMP(base, **{"epsilon": 0.1, **settings}),
    "amp-tensor": lambda base, **settings: flatmin.AMP(base, **{"epsilon": 0.1, "ball": "tensor", **settings}),
    "amp-n2": lambda base, **settings: flatmin.AMP(base, **{"epsilon": 0.1, "inner_iter": 2, **settings}),
    "amp-linf": lambda base, **settings: flatmin.AMP(base, **{"epsilon": 0.01, "norm": "linf", **settings}),
    "amp-auto": lambda base, **settings: flatmin.AMP(base, **{"epsilon": "auto", **settings}),
    "rmp": lambda base, **settings: flatmin.RMP(base, **{"epsilon": 0.1, **settings}),
}


class Tied(nn.Module):
    """Encoder and decoder share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 6, bias=False)
        self.decode = nn.Linear(6, 6)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decode(torch.tanh(self.encode(x)))
        return out


class Unused(nn.Module):
    """One of its parameters never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 3)
        self.unused = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def conv_batchnorm() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


def frozen_layer() -> nn.Module:
    model = mlp()
    for param in model[0].parameters():  # type: ignore[index]
        param.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "conv-batchnorm": conv_batchnorm,
    "dropout": dropout,
    "tied": Tied,
    "frozen": frozen_layer,
    "unused": Unused,
    "bfloat16": lambda: mlp().bfloat16(),
}


@dataclass
class Setup:
    """A model with a fixed batch."""

    model: nn.Module
    x: Tensor
    y: Tensor

    def loss(self) -> Tensor:
        return functional.cross_entropy(self.model(self.x).float(), self.y)

    def closure(self, optimizer: Optimizer) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        return closure

    def watched(self, optimizer: Optimizer, seen: list[list[Tensor]]) -> Callable[[], Tensor]:
        """The closure, which also records the weights of every pass."""

        def closure() -> Tensor:
            seen.append(self.weights())
            return self.closure(optimizer)()

        return closure

    def layers(self) -> list[list[nn.Parameter]]:
        """The parameters of each layer that has some: a list for groups."""
        owned = [list(module.parameters(recurse=False)) for module in self.model.modules()]
        return [params for params in owned if params]

    def step_in_blocks(self, optimizer: flatmin.AMP | flatmin.RMP) -> None:
        optimizer.zero_grad()
        if isinstance(optimizer, flatmin.AMP):
            self.loss().backward()
        for _ in range(optimizer.inner_iter):
            with optimizer.perturbed():
                self.loss().backward()
        optimizer.step()

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]

    def buffers(self) -> list[Tensor]:
        return [buffer.detach().clone() for buffer in self.model.buffers()]


def setup(model: str = "mlp", *, dtype: torch.dtype | None = None, seed: int = 0) -> Setup:
    torch.manual_seed(seed)
    net = MODELS[model]()
    if dtype is not None:
        net.to(dtype)
    kind = next(net.parameters()).dtype
    return Setup(net, torch.randn(10, 6).to(kind), torch.randint(0, 3, (10,)))


def run(case: Setup, optimizer: Optimizer, steps: int) -> list[Tensor]:
    """Take this many steps on the case's batch; returns the weights after them."""
    for _ in range(steps):
        optimizer.step(case.closure(optimizer))  # type: ignore[arg-type]  # torch says float, everyone returns a tensor
    return case.weights()


def same(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    """Equal bit for bit, also where both are nan."""

    def octets(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1).contiguous().view(torch.uint8)

    return all(torch.equal(octets(a), octets(b)) for a, b in zip(left, right, strict=True))


def tensors_in(optimizer: Optimizer) -> list[Tensor]:
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
