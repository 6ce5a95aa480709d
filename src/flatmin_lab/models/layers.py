"""What the networks share: activation with dropout, initial weights, the head, and checks of their arguments.

`dropout` is the paper's Dropout baseline: that share of the neurons after every ReLU. (Its published code drops once
per block and once before the classifier instead, except for VGG: a PreActResNet does so with dropout_at="block".) At 0
there is no dropout module at all, so no random number is drawn. A network's initial weights depend on the seed alone,
not on its dropout.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

CHANNEL_MULTIPLE = 8  # a GPU's half-precision kernels are fast for multiples of 8 channels


def relu(dropout: float) -> list[nn.Module]:
    """ReLU, and dropout after it."""
    return [nn.ReLU(inplace=True), *([nn.Dropout(dropout)] if dropout > 0 else [])]


def head(
    channels: int, num_classes: int, dropout: float, *, momentum: float = 0.1, pooled_dropout: float = 0.0
) -> nn.Sequential:
    """From the last feature maps to logits: BatchNorm, ReLU, global average pooling, one linear layer."""
    return nn.Sequential(
        nn.BatchNorm2d(channels, momentum=momentum),
        *relu(dropout),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        *([nn.Dropout(pooled_dropout)] if pooled_dropout > 0 else []),
        nn.Linear(channels, num_classes),
    )


class PaddedConv2d(nn.Conv2d):
    """A convolution of images, which have three channels or one.

    In half precision a GPU has no fast kernels for so few, so they are padded with zeros to eight: same sums.
    """

    def forward(self, x: Tensor) -> Tensor:
        missing = -self.in_channels % CHANNEL_MULTIPLE
        if not (missing and x.is_cuda and torch.is_autocast_enabled("cuda")):
            return super().forward(x)
        filled, weight = (pad(tensor, [0, 0, 0, 0, 0, missing]) for tensor in (x, self.weight))
        out: Tensor = self._conv_forward(filled, weight, self.bias)
        return out


def conv3x3(inputs: int, outputs: int, *, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    kind = PaddedConv2d if inputs < CHANNEL_MULTIPLE else nn.Conv2d
    return kind(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=bias)


def conv1x1(inputs: int, outputs: int, *, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=bias)


def initialise(model: nn.Module) -> None:
    """As published: He's normal distribution by fan-out for convolutions, no bias in linear layers."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


def check(num_classes: int, in_channels: int, dropout: float) -> None:
    """Check the arguments that every network takes."""
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, got {num_classes}")
    if in_channels < 1:
        raise ValueError(f"in_channels must be at least 1, got {in_channels}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
