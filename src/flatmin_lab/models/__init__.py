"""The paper's networks, and two small ones, by name.

    build("preactresnet18", num_classes=100)
    build("wideresnet16_4"), build("pyramidnet110_84"), build("vgg19")      other numbers in the name

Other spellings of a name work too (`PreActResNet-18`, `preact_resnet18`, `wide_resnet28_10`).
All take `num_classes`, `in_channels` and `dropout`; each file says what else its network takes.
"""

import re
from collections.abc import Callable, Sequence

from torch import nn

from flatmin_lab.models.preact_resnet import PreActResNet, preactresnet18, preactresnet34, preactresnet50
from flatmin_lab.models.pyramidnet import PyramidNet
from flatmin_lab.models.small import MLP, convnet
from flatmin_lab.models.vgg import VGG
from flatmin_lab.models.wide_resnet import WideResNet

__all__ = [
    "FAMILIES",
    "MODELS",
    "VGG",
    "PreActResNet",
    "PyramidNet",
    "WideResNet",
    "build",
    "canonical",
    "settings_for",
]

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


def canonical(name: str) -> str:
    """The canonical spelling of a name: lower case, with separators between numbers only.

    >>> canonical("PreActResNet-18"), canonical("wide_resnet28-10")
    ('preactresnet18', 'wideresnet28_10')
    """
    return re.sub(r"(?<=\d)-(?=\d)", "_", re.sub(r"(?<!\d)[-_]|[-_](?!\d)", "", name.lower()))


def settings_for(name: str, shape: Sequence[int]) -> dict[str, int]:
    """What a model must know of its inputs beyond their channels: an mlp for images needs their side.

    >>> settings_for("mlp", (1, 8, 8)), settings_for("mlp", (2,)), settings_for("convnet", (1, 8, 8))
    ({'side': 8}, {}, {})
    """
    return {"side": shape[-1]} if canonical(name) == "mlp" and len(shape) == 3 else {}


def build(
    name: str, *, num_classes: int = 10, in_channels: int = 3, dropout: float = 0.0, **settings: object
) -> nn.Module:
    """A new network; torch's global generator draws its initial weights."""
    name, given = canonical(name), name
    common = {"num_classes": num_classes, "in_channels": in_channels, "dropout": dropout, **settings}
    if name in MODELS:
        return MODELS[name](**common)
    numbered = re.fullmatch(r"([a-z]+)(\d+(?:_\d+)?)", name)
    if numbered and numbered[1] in FAMILIES and ("_" in name) != (numbered[1] == "vgg"):
        return FAMILIES[numbered[1]](*map(int, numbered[2].split("_")), **common)
    raise ValueError(
        f"unknown model {given!r}; choose from {', '.join(MODELS)}, "
        "or other numbers, as in wideresnet16_4, pyramidnet110_84, vgg19"
    )
