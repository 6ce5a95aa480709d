"""The paper's networks, and two small ones, by name.

    build("preactresnet18", num_classes=100)
    build("wideresnet16_4"), build("pyramidnet110_84"), build("vgg19")      other numbers in the name

All take `num_classes`, `in_channels` and `dropout`; what else one takes stands in its file.
"""

import re
from collections.abc import Callable

from torch import nn

from flatmin_lab.models.preact_resnet import PreActResNet, preactresnet18, preactresnet34, preactresnet50
from flatmin_lab.models.pyramidnet import PyramidNet
from flatmin_lab.models.small import MLP, convnet
from flatmin_lab.models.vgg import VGG
from flatmin_lab.models.wide_resnet import WideResNet

__all__ = ["FAMILIES", "MODELS", "VGG", "PreActResNet", "PyramidNet", "WideResNet", "build"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "preactresnet18": preactresnet18,
    "preactresnet34": preactresnet34,
    "preactresnet50": preactresnet50,
    "vgg16": VGG,
    "wideresnet28_10": WideResNet,
    "pyramidnet164_270": PyramidNet,
    "convnet": convnet,
    "mlp": MLP,
}
# whose names take numbers: wideresnetDEPTH_WIDTH, pyramidnetDEPTH_ALPHA, vggDEPTH
FAMILIES: dict[str, Callable[..., nn.Module]] = {"wideresnet": WideResNet, "pyramidnet": PyramidNet, "vgg": VGG}


def build(
    name: str, *, num_classes: int = 10, in_channels: int = 3, dropout: float = 0.0, **settings: object
) -> nn.Module:
    """A new network with first weights from torch's global generator."""
    common = {"num_classes": num_classes, "in_channels": in_channels, "dropout": dropout, **settings}
    if name in MODELS:
        return MODELS[name](**common)
    numbered = re.fullmatch(r"([a-z]+)(\d+(?:_\d+)?)", name)
    if numbered and numbered[1] in FAMILIES and ("_" in name) != (numbered[1] == "vgg"):
        return FAMILIES[numbered[1]](*map(int, numbered[2].split("_")), **common)
    raise ValueError(
        f"unknown model {name!r}; choose from {', '.join(MODELS)}, or give {', '.join(FAMILIES)} other numbers"
    )
