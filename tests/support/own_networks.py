"""A user's file: three networks that flatmin was not built for, and an optimizer. It needs torch alone."""

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, relu


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = relu(self.first_norm(self.first(x)))
        return relu(self.second_norm(self.second(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, num_classes: int, in_channels: int, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(Residual(in_channels, width, 1), Residual(width, 2 * width, 2))
        self.fc = nn.Linear(2 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.body(x).mean(dim=(2, 3)))
        return logits


class ViT(nn.Module):
    """Its batch size is `len(x)`, as many write it, and its encoder has dropout."""

    def __init__(self, num_classes: int, in_channels: int, image_size: tuple[int, int], width: int = 8) -> None:
        super().__init__()
        patches = (image_size[0] // 2) * (image_size[1] // 2)
        self.embed = nn.Conv2d(in_channels, width, 2, 2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(torch.randn(1, patches + 1, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], dim=1) + self.place
        logits: Tensor = self.head(self.encoder(tokens)[:, 0])
        return logits


class TiedMLP(nn.Module):
    """LayerNorm, two layers with one weight, and a frozen one."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...], width: int = 16) -> None:
        super().__init__()
        self.frozen = nn.Linear(prod(input_shape), width).requires_grad_(False)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = relu(self.first(relu(self.frozen(x.flatten(1)))))
        logits: Tensor = self.head(self.norm(hidden + relu(self.second(hidden))))
        return logits


def make_optimizer(params: Iterable[Tensor], lr: float = 0.002, weight_decay: float = 0.05, **more: Any) -> Any:
    """Weight decay for matrices alone, and half the rate for the rest."""
    known = list(params)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in known if p.ndim > 1]},
        {"params": [p for p in known if p.ndim <= 1], "lr": lr / 2, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay, **more)


def softmax_too_soon(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes), nn.Softmax(dim=1))


def too_few_outputs() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(2))


def norm_of_the_batch_alone(num_classes: int) -> nn.Module:
    """A norm that needs two inputs, also when it is evaluated."""
    return nn.Sequential(
        nn.Flatten(), nn.LazyLinear(4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, num_classes)
    )


class NormedByHand(nn.Module):
    """The same without a module for it."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer, self.head = nn.LazyLinear(4), nn.Linear(4, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(batch_norm(self.layer(x.flatten(1)), None, None, training=True))  # type: ignore[no-any-return]


class Squeezed(nn.Module):
    """As after a pooling with `squeeze()`: one image alone loses its dimension too."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.pool, self.layer = nn.AdaptiveAvgPool2d(1), nn.Conv2d(in_channels, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.pool(x)).squeeze()  # type: ignore[no-any-return]


class TwoAnswers(nn.Module):
    """As networks with a second head do: a pair while they are trained."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = nn.Linear(prod(input_shape), num_classes)

    def forward(self, x: Tensor) -> Any:
        logits = self.layer(x.flatten(1))
        return (logits, logits) if self.training else logits


class ForOtherImages(nn.Module):
    """Of 64 numbers, whatever the data have."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x.flatten(1))
        return logits
