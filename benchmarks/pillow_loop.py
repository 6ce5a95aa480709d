"""The augmentations as a loop over PIL pictures, the way a data loader does them: what the batched ones are measured
against, and checked with.

Each function takes one picture and the numbers that the batched stage draws for it, so both can be given the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from flatmin_lab.data.augment import operations
from flatmin_lab.data.augment.autoaugment import AutoAugment
from flatmin_lab.data.augment.transforms import Augmentation, Crop, Cutout, Flip

Picture = Image.Image
FILL = (operations.FILL,) * 3
ENHANCERS: dict[str, Callable[[Picture], Any]] = {
    "color": ImageEnhance.Color,
    "contrast": ImageEnhance.Contrast,
    "brightness": ImageEnhance.Brightness,
    "sharpness": ImageEnhance.Sharpness,
}
PLAIN: dict[str, Callable[[Picture], Picture]] = {
    "autocontrast": ImageOps.autocontrast,
    "equalize": ImageOps.equalize,
    "invert": ImageOps.invert,
}


def to_pil(x: Tensor) -> Picture:
    return Image.fromarray(x.permute(1, 2, 0).numpy())


def to_tensor(picture: Picture) -> Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def operation(picture: Picture, name: str, amount: float) -> Picture:
    """One of the 14, with interpolation and fill as in the published AMP code."""
    width, height = picture.size
    matrices = {
        "shear_x": (1, amount, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, amount, 1, 0),
        "translate_x": (1, 0, amount * width, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, amount * height),
    }
    if name in matrices:
        how = Image.Resampling.BICUBIC if name in operations.SHEARS else Image.Resampling.NEAREST
        return picture.transform(picture.size, Image.Transform.AFFINE, matrices[name], how, fillcolor=FILL)
    if name == "rotate":
        turned = picture.convert("RGBA").rotate(amount)
        return Image.composite(turned, Image.new("RGBA", turned.size, (*FILL, 128)), turned).convert("RGB")
    if name == "posterize":
        return ImageOps.posterize(picture, int(amount))
    if name == "solarize":
        return ImageOps.solarize(picture, amount)  # type: ignore[arg-type]  # a threshold of 28.4 works as well as 28
    if name in operations.FACTORS:
        enhanced: Picture = ENHANCERS[name](picture).enhance(1 + amount)
        return enhanced
    return PLAIN[name](picture)


def autoaugment(stage: AutoAugment, picture: Picture, u: Sequence[float]) -> Picture:
    pairs = stage.pairs
    for half, chosen in enumerate(pairs[min(int(u[0] * len(pairs)), len(pairs) - 1)]):
        if u[1 + 2 * half] < chosen.probability:
            sign = -1 if chosen.name in operations.SIGNED and u[2 + 2 * half] < 0.5 else 1
            picture = operation(picture, chosen.name, sign * operations.magnitude(chosen.name, chosen.level))
    return picture


def crop(stage: Crop, picture: Picture, u: Sequence[float]) -> Picture:
    places = 2 * stage.padding + 1
    top, left = (min(int(number * places), places - 1) for number in u)
    wide = ImageOps.expand(picture, stage.padding, (stage.fill,) * 3)
    return wide.crop((left, top, left + picture.width, top + picture.height))


def flip(stage: Flip, picture: Picture, u: Sequence[float]) -> Picture:
    return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if u[0] < 0.5 else picture


def cutout(stage: Cutout, picture: Picture, u: Sequence[float]) -> Picture:
    top = min(int(u[0] * picture.height), picture.height - 1) - stage.length // 2
    left = min(int(u[1] * picture.width), picture.width - 1) - stage.length // 2
    holed = picture.copy()
    holed.paste((0, 0, 0), (max(left, 0), max(top, 0), left + stage.length, top + stage.length))
    return holed


STAGES: dict[type, Callable[..., Picture]] = {AutoAugment: autoaugment, Crop: crop, Flip: flip, Cutout: cutout}


def augment(augmentation: Augmentation, x: Tensor, u: Tensor) -> Tensor:
    """A batch, picture by picture."""
    rows = []
    for own, numbers in zip(x, u.tolist(), strict=True):
        picture, rest = to_pil(own), numbers
        for stage in augmentation.stages:
            picture = STAGES[type(stage)](stage, picture, rest[: stage.draws])
            rest = rest[stage.draws :]
        rows.append(to_tensor(picture))
    return torch.stack(rows)
