"""Small networks for a laptop: a convolutional one for digits and the like, and an MLP for points or images."""

from math import prod

from torch import Tensor, nn

from flatmin_lab.models.layers import check, conv3x3, head, initialise, relu


def convnet(*, num_classes: int = 10, in_channels: int = 3, dropout: float = 0.0, width: int = 32) -> nn.Sequential:
    """Four 3 × 3 convolutions with BatchNorm and one 2 × 2 pooling: images of 2 by 2 pixels or more."""
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


class MLP(nn.Module):
    """Linear layers with ReLU between; takes points of `in_channels` numbers, or images of that `side`."""

    def __init__(
        self,
        *,
        num_classes: int = 10,
        in_channels: int = 3,
        dropout: float = 0.0,
        side: int = 1,
        width: int = 128,
        depth: int = 3,
    ) -> None:
        super().__init__()
        check(num_classes, in_channels, dropout)
        for name, value in (("side", side), ("width", width), ("depth", depth)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.inputs = in_channels * side * side
        layers: list[nn.Module] = [nn.Flatten()]
        features = self.inputs
        for _ in range(depth):
            layers += [nn.Linear(features, width), *relu(dropout)]
            features = width
        self.layers = nn.Sequential(*layers, nn.Linear(features, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        if prod(x.shape[1:]) != self.inputs:
            raise ValueError(
                f"this MLP takes {self.inputs} numbers, got inputs of shape {tuple(x.shape[1:])}; "
                "build it with in_channels= and, for images, side="
            )
        logits: Tensor = self.layers(x)
        return logits
