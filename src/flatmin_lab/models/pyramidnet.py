"""Pyramidal residual networks (Han et al. 2017): every block is a little wider than the one before.

The width grows from 16 by `alpha` in equal steps over all 3n blocks, rounded to whole channels. Shortcuts have no
weights: where a block halves the image the shortcut averages 2 × 2 pixels, and missing channels are zeros. There is
no ReLU before the first convolution of a block and none after the sum.
"""

from torch import Tensor, nn
from torch.nn.functional import pad

from flatmin_lab.models.layers import check, conv1x1, conv3x3, head, initialise, relu


class Block(nn.Module):
    """BN, 1 × 1, BN, ReLU, 3 × 3, BN, ReLU, 1 × 1 to four times the width, BN; or two 3 × 3 without bottleneck."""

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool, dropout: float) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            middle = [conv3x3(width, width, stride=stride), nn.BatchNorm2d(width), *relu(dropout)]
            first, last, strided = conv1x1, conv1x1, 1
        else:
            middle, first, last, strided = [], conv3x3, conv3x3, stride
        self.residual = nn.Sequential(
            nn.BatchNorm2d(inputs),
            first(inputs, width, stride=strided),
            nn.BatchNorm2d(width),
            *relu(dropout),
            *middle,
            last(width, outputs),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.AvgPool2d(2, ceil_mode=True) if stride != 1 else nn.Identity()
        self.missing = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        short: Tensor = self.shortcut(x)
        change: Tensor = self.residual(x)
        return change + pad(short, (0, 0, 0, 0, 0, self.missing))


class PyramidNet(nn.Module):
    """27,216,021 parameters for depth 164, alpha 270 with bottlenecks and 10 classes."""

    def __init__(
        self,
        depth: int = 164,
        alpha: float = 270,
        *,
        bottleneck: bool = True,
        num_classes: int = 10,
        in_channels: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check(num_classes, in_channels, dropout)
        layers = 9 if bottleneck else 6
        if depth < layers + 2 or (depth - 2) % layers:
            kind = "with" if bottleneck else "without"
            raise ValueError(
                f"a PyramidNet's depth must be {layers}n + 2 {kind} bottlenecks "
                f"({layers + 2}, {2 * layers + 2}, {3 * layers + 2} …), got {depth}"
            )
        if not alpha > 0:
            raise ValueError(f"a PyramidNet's alpha, by which its width grows, must be above 0, got {alpha}")
        self.stem = nn.Sequential(conv3x3(in_channels, 16), nn.BatchNorm2d(16))
        count = (depth - 2) // layers
        blocks, channels, exact = [], 16, 16.0
        for number in range(3 * count):
            exact += alpha / (3 * count)  # summed as in the published code, so that halves round alike
            width = round(exact)
            stride = 2 if number and number % count == 0 else 1
            blocks.append(Block(channels, width, stride, bottleneck=bottleneck, dropout=dropout))
            channels = 4 * width if bottleneck else width
        self.blocks = nn.Sequential(*blocks)
        self.head = head(channels, num_classes, dropout)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(x)))
        return logits
