"""Residual networks with activation before the convolutions (He et al. 2016), for images of about 32 by 32.

    a = ReLU(BN(x))        block(x) = F(a) + shortcut

Where a block changes the shape, its shortcut is a 1 × 1 convolution of a. Where it does not, He et al. add x itself
(`shortcut="identity"`), except in the very first block, where they add a; the published AMP code adds a in all of them
(`"activated"`, the default, which the paper's numbers come from). Its convolutions have biases, except the first;
`bias=False` leaves them out, as He et al. do.

Dropout follows every ReLU, as the paper says (`dropout_at="relu"`), or as in its published code the last ReLU of a
block and the pooling (`"block"`).
"""

from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor, nn

from flatmin_lab.models.layers import check, conv1x1, conv3x3, head, initialise, relu

Shortcut = Literal["activated", "identity"]
SHORTCUTS: tuple[Shortcut, ...] = get_args(Shortcut)
DropoutAt = Literal["relu", "block"]
DROPOUTS_AT: tuple[DropoutAt, ...] = get_args(DropoutAt)


class Block(nn.Module):
    """Two 3 × 3 convolutions, or for the deeper networks 1 × 1, 3 × 3, 1 × 1 with four times the channels."""

    def __init__(
        self,
        inputs: int,
        width: int,
        stride: int,
        *,
        bottleneck: bool,
        dropout: float,
        shortcut: Shortcut,
        bias: bool,
        dropout_at: DropoutAt = "relu",
    ) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        earlier = dropout if dropout_at == "relu" else 0.0  # of the block's ReLUs but the last
        self.activation = nn.Sequential(nn.BatchNorm2d(inputs), *relu(earlier))
        outer = conv1x1 if bottleneck else conv3x3
        layers: list[nn.Module] = [outer(inputs, width, stride=stride, bias=bias)]
        if bottleneck:
            layers += [nn.BatchNorm2d(width), *relu(earlier), conv3x3(width, width, bias=bias)]
        layers += [nn.BatchNorm2d(width), *relu(dropout), outer(width, outputs, bias=bias)]
        self.residual = nn.Sequential(*layers)
        reshaping = stride != 1 or inputs != outputs
        self.shortcut = conv1x1(inputs, outputs, stride=stride, bias=bias) if reshaping else nn.Identity()
        self.from_input = shortcut == "identity" and not reshaping

    def forward(self, x: Tensor) -> Tensor:
        active = self.activation(x)
        short: Tensor = x if self.from_input else self.shortcut(active)
        change: Tensor = self.residual(active)
        return short + change


class PreActResNet(nn.Module):
    """Four groups of blocks with 64, 128, 256 and 512 channels (times 4 with bottlenecks)."""

    def __init__(
        self,
        blocks: Sequence[int],
        *,
        bottleneck: bool,
        num_classes: int = 10,
        in_channels: int = 3,
        dropout: float = 0.0,
        dropout_at: DropoutAt = "relu",
        shortcut: Shortcut = "activated",
        bias: bool = True,
        width: int = 64,
    ) -> None:
        super().__init__()
        check(num_classes, in_channels, dropout)
        if width < 1:
            raise ValueError(f"a PreActResNet's width must be at least 1, got {width}")
        if shortcut not in SHORTCUTS:
            raise ValueError(f"unknown shortcut {shortcut!r}; choose from {', '.join(SHORTCUTS)}")
        if dropout_at not in DROPOUTS_AT:
            raise ValueError(f"unknown dropout_at {dropout_at!r}; choose from {', '.join(DROPOUTS_AT)}")
        self.stem = conv3x3(in_channels, width)
        groups: list[nn.Module] = []
        channels = width
        for number, count in enumerate(blocks):
            inner = width << number
            group: list[nn.Module] = []
            for place in range(count):
                stride = 2 if number and not place else 1
                taken = shortcut if number or place else "activated"
                block = Block(
                    channels,
                    inner,
                    stride,
                    bottleneck=bottleneck,
                    dropout=dropout,
                    dropout_at=dropout_at,
                    shortcut=taken,
                    bias=bias,
                )
                group.append(block)
                channels = 4 * inner if bottleneck else inner
            groups.append(nn.Sequential(*group))
        self.groups = nn.Sequential(*groups)
        each, pooled = (dropout, 0.0) if dropout_at == "relu" else (0.0, dropout)
        self.head = head(channels, num_classes, each, pooled_dropout=pooled)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.groups(self.stem(x)))
        return logits


def preactresnet18(**settings: object) -> PreActResNet:
    """11,176,906 parameters in 75 tensors for 10 classes; 11,172,170 without the convolutions' biases."""
    return PreActResNet([2, 2, 2, 2], bottleneck=False, **settings)  # type: ignore[arg-type]


def preactresnet34(**settings: object) -> PreActResNet:
    return PreActResNet([3, 4, 6, 3], bottleneck=False, **settings)  # type: ignore[arg-type]


def preactresnet50(**settings: object) -> PreActResNet:
    return PreActResNet([3, 4, 6, 3], bottleneck=True, **settings)  # type: ignore[arg-type]
