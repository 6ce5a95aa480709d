"""The paper's networks, two small ones and a transformer, by name; beside them the user's own and timm's.

    build("preactresnet18", num_classes=100)
    build("wideresnet16_4"), build("pyramidnet110_84"), build("vgg19")      other numbers in the name
    build_for("file.py:make_model", (3, 32, 32), num_classes=10)            whichever it is, for inputs of that shape

Other spellings of a name work too (`PreActResNet-18`, `preact_resnet18`, `wide_resnet28_10`).
All take `num_classes`, `in_channels` and `dropout`; each file says what else its network takes. `user_model.py` has
networks that are not built in, `weights.py` reads files of weights.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from flatmin_lab.models.preact_resnet import PreActResNet, preactresnet18, preactresnet34, preactresnet50
from flatmin_lab.models.pyramidnet import PyramidNet
from flatmin_lab.models.small import MLP, convnet
from flatmin_lab.models.user_model import is_own, is_timm, make_user_model
from flatmin_lab.models.vgg import VGG
from flatmin_lab.models.vit import ViT
from flatmin_lab.models.wide_resnet import WideResNet

__all__ = [
    "FAMILIES",
    "MODELS",
    "VGG",
    "PreActResNet",
    "PyramidNet",
    "ViT",
    "WideResNet",
    "build",
    "build_for",
    "canonical",
    "is_built_in",
    "recorded_name",
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
    "vit": ViT,
}
# whose names take numbers: wideresnetDEPTH_WIDTH, pyramidnetDEPTH_ALPHA, vggDEPTH
FAMILIES: dict[str, Callable[..., nn.Module]] = {"wideresnet": WideResNet, "pyramidnet": PyramidNet, "vgg": VGG}


def canonical(name: str) -> str:
    """The canonical spelling of a name: lower case, with separators between numbers only.

    >>> canonical("PreActResNet-18"), canonical("wide_resnet28-10")
    ('preactresnet18', 'wideresnet28_10')
    """
    return re.sub(r"(?<=\d)-(?=\d)", "_", re.sub(r"(?<!\d)[-_]|[-_](?!\d)", "", name.lower()))


def recorded_name(name: str) -> str:
    """The spelling that a recipe keeps: canonical for a built-in network, and any other name as it was given.

    >>> recorded_name("PreActResNet-18"), recorded_name("Mine.py:Net"), recorded_name("Res_Net")
    ('preactresnet18', 'Mine.py:Net', 'Res_Net')
    """
    return canonical(name) if is_built_in(name) else name


def settings_for(name: str, shape: Sequence[int]) -> dict[str, int]:
    """What a model must know of its inputs beyond their channels: an mlp for images needs their side.

    >>> settings_for("mlp", (1, 8, 8)), settings_for("mlp", (2,)), settings_for("convnet", (1, 8, 8))
    ({'side': 8}, {}, {})
    """
    if canonical(name) != "mlp" or len(shape) != 3:
        return {}
    if shape[1] != shape[2]:
        raise ValueError(
            f"an mlp takes points, or images that are square, got {shape[1]} by {shape[2]}; resize the images, with "
            "--size HEIGHT WIDTH for those of a folder, or use another model, such as convnet"
        )
    return {"side": shape[2]}


def build(
    name: str, *, num_classes: int = 10, in_channels: int = 3, dropout: float = 0.0, **settings: object
) -> nn.Module:
    """A new built-in network; torch's global generator draws its initial weights."""
    make = _constructor(name)
    if make is None:
        raise ValueError(
            f"unknown model {name!r}; choose from {', '.join(MODELS)}, "
            "or other numbers, as in wideresnet16_4, pyramidnet110_84, vgg19; "
            "or give your own, file.py:make_model, or timm's, timm:NAME"
        )
    return make(num_classes=num_classes, in_channels=in_channels, dropout=dropout, **settings)


def build_for(
    name: str,
    shape: Sequence[int],
    *,
    num_classes: int,
    dropout: float = 0.0,
    settings: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A new network for inputs of that shape: a built-in one, timm's, or the user's own."""
    own = settings or {}
    if is_own(name) or is_timm(name):
        return make_user_model(name, shape, num_classes=num_classes, dropout=dropout, settings=own)
    return build(name, num_classes=num_classes, in_channels=shape[0], dropout=dropout, **own)


def is_built_in(name: str) -> bool:
    return _constructor(name) is not None


def _constructor(name: str) -> Callable[..., nn.Module] | None:
    """What makes the built-in network of that name, in any spelling."""
    known = canonical(name)
    if known in MODELS:
        return MODELS[known]
    numbered = re.fullmatch(r"([a-z]+)(\d+(?:_\d+)?)", known)
    if numbered and numbered[1] in FAMILIES and ("_" in known) != (numbered[1] == "vgg"):
        return partial(FAMILIES[numbered[1]], *map(int, numbered[2].split("_")))
    return None
