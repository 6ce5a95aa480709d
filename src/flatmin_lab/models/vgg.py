"""VGG with BatchNorm (Simonyan and Zisserman 2015), 3 × 3 convolutions between five poolings, then three linear layers.

As published with AMP: 32 by 32 pixels shrink to one position of 512 channels, and both hidden linear layers have 4096
neurons, where many CIFAR versions have one linear layer only.
"""

from torch import Tensor, nn

from flatmin_lab.models.layers import check, conv3x3, initialise, relu

# convolutions in each of the five groups, which have 1, 2, 4, 8 and 8 times the width: 64 to 512 channels
DEPTHS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
WIDTH_FACTORS = (1, 2, 4, 8, 8)
MIN_SIDE = 2 ** len(WIDTH_FACTORS)


class VGG(nn.Module):
    """33,646,666 parameters at depth 16 for 10 classes."""

    def __init__(
        self,
        depth: int = 16,
        *,
        num_classes: int = 10,
        in_channels: int = 3,
        dropout: float = 0.0,
        hidden: int = 4096,
        width: int = 64,
    ) -> None:
        super().__init__()
        check(num_classes, in_channels, dropout)
        if depth not in DEPTHS:
            raise ValueError(f"VGG has a depth of {', '.join(map(str, DEPTHS))}, got {depth}")
        if hidden < 1:
            raise ValueError(f"VGG's hidden layers must have at least 1 neuron, got {hidden}")
        if width < 1:
            raise ValueError(f"VGG's width must be at least 1, got {width}")
        layers: list[nn.Module] = []
        channels = in_channels
        for times, count in zip(WIDTH_FACTORS, DEPTHS[depth], strict=True):
            for _ in range(count):
                layers += [conv3x3(channels, times * width, bias=True), nn.BatchNorm2d(times * width), *relu(dropout)]
                channels = times * width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),  # a single position already at 32 by 32
            nn.Flatten(),
            nn.Linear(channels, hidden),
            *relu(dropout),
            nn.Linear(hidden, hidden),
            *relu(dropout),
            nn.Linear(hidden, num_classes),
        )
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        if min(x.shape[2:]) < MIN_SIDE:
            raise ValueError(
                f"VGG halves images {len(WIDTH_FACTORS)} times and needs at least {MIN_SIDE} by {MIN_SIDE} pixels, "
                f"got {x.shape[2]} by {x.shape[3]}; use another model for small images"
            )
        logits: Tensor = self.classifier(self.features(x))
        return logits
