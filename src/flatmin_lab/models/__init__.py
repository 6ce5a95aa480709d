"""The paper's networks, and two small ones, by name.

    build("preactresnet18", num_classes=100)
    build("wideresnet16_4"), build("pyramidnet110_84")      families take their numbers in the name

All take `num_classes`, `in_channels` and `dropout`; what else one takes stands in its file.
"""

import re
from collections.abc import Callable

from torch import nn

from flatmin_lab.models.preact_resnet import PreActResNet, preactresnet18, preactresnet34, preactresnet50
from flatmin_lab.models.pyramidnet import PyramidNet
from flatmin_lab.models.small import convnet, mlp
from flatmin_lab.models.vgg import VGG, vgg16
from flatmin_lab.models.wide_resnet import WideResNet

__all__ = ["FAMILIES", "MODELS", "VGG", "PreActResNet", "PyramidNet", "WideResNet", "build"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "preactresnet18": preactresnet18,
    "preactresnet34": preactresnet34,
    "preactresnet50": preactresnet50,
    "vgg16": vgg16,
    "wideresnet28_10": WideResNet,
    "pyramidnet164_270": PyramidNet,
    "convnet": convnet,
    "mlp": mlp,
}
FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "wideresnet": WideResNet,
    "pyramidnet": PyramidNet,
}  # name, two numbers


def build(
    name: str, *, num_classes: int = 10, in_channels: int = 3, dropout: float = 0.0, **settings: object
) -> nn.Module:
    """A new network with first weights from torch's global generator."""
    common = {"num_classes": num_classes, "in_channels": in_channels, "dropout": dropout, **settings}
    if name in MODELS:
        return MODELS[name](**common)
    numbered = re.fullmatch(r"([a-z]+)(\d+)_(\d+)", name)
    if numbered and numbered[1] in FAMILIES:
        return FAMILIES[numbered[1]](int(numbered[2]), int(numbered[3]), **common)
    families = ", ".join(f"{family}A_B" for family in FAMILIES)
    raise ValueError(f"unknown model {name!r}; choose from {', '.join(MODELS)}, or with other numbers {families}")
