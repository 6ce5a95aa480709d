"""Wide residual networks (Zagoruyko and Komodakis 2016): few blocks, many channels.

    block(x) = conv(ReLU(BN(conv(ReLU(BN(x)))))) + shortcut(x)

WRN-d-k has (d − 4)/6 blocks in each of three groups with 16k, 32k and 64k channels. Three details are those of the
published AMP code and not of the original: a block that halves the image strides in its second convolution, a
shortcut with weights starts from x, not from ReLU(BN(x)), and the last BatchNorm has momentum 0.9, so that its
statistics follow the latest batches.
"""

from torch import Tensor, nn

from flatmin_lab.models.layers import check, conv1x1, conv3x3, head, initialise, relu


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, *, dropout: float) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.BatchNorm2d(inputs),
            *relu(dropout),
            conv3x3(inputs, outputs),
            nn.BatchNorm2d(outputs),
            *relu(dropout),
            conv3x3(outputs, outputs, stride=stride),
        )
        reshaping = stride != 1 or inputs != outputs
        self.shortcut = conv1x1(inputs, outputs, stride=stride) if reshaping else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        short: Tensor = self.shortcut(x)
        change: Tensor = self.residual(x)
        return short + change


class WideResNet(nn.Module):
    """36,479,194 parameters for depth 28, width 10 and 10 classes."""

    def __init__(
        self, depth: int = 28, width: int = 10, *, num_classes: int = 10, in_channels: int = 3, dropout: float = 0.0
    ) -> None:
        super().__init__()
        check(num_classes, in_channels, dropout)
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"a WideResNet's depth must be 6n + 4 with n at least 1 (10, 16, 22, 28 …), got {depth}")
        if width < 1:
            raise ValueError(f"a WideResNet's width must be at least 1, got {width}")
        self.stem = conv3x3(in_channels, 16)
        groups, channels = [], 16
        for number in range(3):
            outputs = 16 * width << number
            group = []
            for place in range((depth - 4) // 6):
                group.append(Block(channels, outputs, 2 if number and not place else 1, dropout=dropout))
                channels = outputs
            groups.append(nn.Sequential(*group))
        self.groups = nn.Sequential(*groups)
        self.head = head(channels, num_classes, dropout, momentum=0.9)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.groups(self.stem(x)))
        return logits
