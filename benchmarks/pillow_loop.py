"""The augmentations as a loop over PIL images, as a data loader does them: the reference for the speed and the results
of the batched ones.

Each function takes one image and the numbers that the batched stage draws for it, so both can be given the same.
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

PILImage = Image.Image
FILL = (operations.FILL,) * 3
ENHANCERS: dict[str, Callable[[PILImage], Any]] = {
    "color": ImageEnhance.Color,
    "contrast": ImageEnhance.Contrast,
    "brightness": ImageEnhance.Brightness,
    "sharpness": ImageEnhance.Sharpness,
}
PLAIN: dict[str, Callable[[PILImage], PILImage]] = {
    "autocontrast": ImageOps.autocontrast,
    "equalize": ImageOps.equalize,
    "invert": ImageOps.invert,
}


def to_pil(x: Tensor) -> PILImage:
    return Image.fromarray(x.permute(1, 2, 0).numpy())


def to_tensor(image: PILImage) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def operation(image: PILImage, name: str, amount: float) -> PILImage:
    """One of the 14, with interpolation and fill as in the published AMP code."""
    width, height = image.size
    matrices = {
        "shear_x": (1, amount, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, amount, 1, 0),
        "translate_x": (1, 0, amount * width, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, amount * height),
    }
    if name in matrices:
        how = Image.Resampling.BICUBIC if name in operations.SHEARS else Image.Resampling.NEAREST
        return image.transform(image.size, Image.Transform.AFFINE, matrices[name], how, fillcolor=FILL)
    if name == "rotate":
        turned = image.convert("RGBA").rotate(amount)
        return Image.composite(turned, Image.new("RGBA", turned.size, (*FILL, 128)), turned).convert("RGB")
    if name == "posterize":
        return ImageOps.posterize(image, int(amount))
    if name == "solarize":
        return ImageOps.solarize(image, amount)  # type: ignore[arg-type]  # a threshold of 28.4 works as well as 28
    if name in operations.FACTORS:
        enhanced: PILImage = ENHANCERS[name](image).enhance(1 + amount)
        return enhanced
    return PLAIN[name](image)


def autoaugment(stage: AutoAugment, image: PILImage, u: Sequence[float]) -> PILImage:
    pairs = stage.pairs
    for half, chosen in enumerate(pairs[min(int(u[0] * len(pairs)), len(pairs) - 1)]):
        if u[1 + 2 * half] < chosen.probability:
            sign = -1 if chosen.name in operations.SIGNED and u[2 + 2 * half] < 0.5 else 1
            image = operation(image, chosen.name, sign * operations.magnitude(chosen.name, chosen.level))
    return image


def crop(stage: Crop, image: PILImage, u: Sequence[float]) -> PILImage:
    places = 2 * stage.padding + 1
    top, left = (min(int(number * places), places - 1) for number in u)
    wide = ImageOps.expand(image, stage.padding, (stage.fill,) * 3)
    return wide.crop((left, top, left + image.width, top + image.height))


def flip(stage: Flip, image: PILImage, u: Sequence[float]) -> PILImage:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if u[0] < 0.5 else image


def cutout(stage: Cutout, image: PILImage, u: Sequence[float]) -> PILImage:
    top = min(int(u[0] * image.height), image.height - 1) - stage.length // 2
    left = min(int(u[1] * image.width), image.width - 1) - stage.length // 2
    holed = image.copy()
    holed.paste((0, 0, 0), (max(left, 0), max(top, 0), left + stage.length, top + stage.length))
    return holed


STAGES: dict[type, Callable[..., PILImage]] = {AutoAugment: autoaugment, Crop: crop, Flip: flip, Cutout: cutout}


def augment(augmentation: Augmentation, x: Tensor, u: Tensor) -> Tensor:
    """A batch, image by image."""
    rows = []
    for own, numbers in zip(x, u.tolist(), strict=True):
        image, rest = to_pil(own), numbers
        for stage in augmentation.stages:
            image = STAGES[type(stage)](stage, image, rest[: stage.draws])
            rest = rest[stage.draws :]
        rows.append(to_tensor(image))
    return torch.stack(rows)
