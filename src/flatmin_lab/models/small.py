"""Small networks for a laptop: a convolutional one for digits and the like, and an MLP for points or pictures."""

from torch import nn

from flatmin_lab.models.layers import check, conv3x3, head, initialise, relu


def convnet(*, num_classes: int = 10, in_channels: int = 3, dropout: float = 0.0, width: int = 32) -> nn.Sequential:
    """Four 3 × 3 convolutions with BatchNorm and one halving: any picture of 2 by 2 pixels or more."""
    check(num_classes, in_channels, dropout)
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")

    def layer(inputs: int, outputs: int) -> list[nn.Module]:
        return [conv3x3(inputs, outputs), nn.BatchNorm2d(outputs), *relu(dropout)]

    model = nn.Sequential(
        *layer(in_channels, width),
        *layer(width, width),
        nn.MaxPool2d(2),
        *layer(width, 2 * width),
        conv3x3(2 * width, 2 * width),
        head(2 * width, num_classes, dropout),
    )
    initialise(model)
    return model


def mlp(
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    dropout: float = 0.0,
    side: int = 1,
    width: int = 128,
    depth: int = 3,
) -> nn.Sequential:
    """Linear layers with ReLU between; takes points of `in_channels` numbers, or pictures of that `side`."""
    check(num_classes, in_channels, dropout)
    for name, value in (("side", side), ("width", width), ("depth", depth)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    layers: list[nn.Module] = [nn.Flatten()]
    inputs = in_channels * side * side
    for _ in range(depth):
        layers += [nn.Linear(inputs, width), *relu(dropout)]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, num_classes))
