"""The 14 operations of AutoAugment as tables: what each does to a pixel position, or to a grey level.

A geometric operation maps every pixel of the new image to the pixel of the old one that it shows. The map depends on
operation, level and sign alone, so it is computed once and a batch only looks it up:

    rotate, translate_x, translate_y    one pixel, the nearest
    shear_x, shear_y                    four pixels in a row or a column, and their weights (bicubic)

Pixels outside the image show the fill, 128. invert, posterize, solarize and brightness are tables of 256 grey levels;
contrast, autocontrast and equalize too, but their tables depend on the image. color and sharpness blend the image
with a duller one, d + factor · (x − d), where a factor 1 is the image itself.

Pillow is followed in everything, down to its 16.16 fixed point for rotations, with the interpolation, fill and signs of
the published AMP code: rotation is never mirrored, the other signed operations are.
"""

import math

import torch
from torch import Tensor

FILL = 128
LEVELS = 10
SHEARS = ("shear_x", "shear_y")
GEOMETRIC = (*SHEARS, "translate_x", "translate_y", "rotate")
TABLES = ("invert", "posterize", "solarize", "brightness", "contrast", "autocontrast", "equalize")
BLENDS = ("color", "sharpness")
FACTORS = ("color", "contrast", "brightness", "sharpness")
SIGNED = (*SHEARS, "translate_x", "translate_y", *FACTORS)
OPERATIONS = (*GEOMETRIC, *TABLES, *BLENDS)


def magnitude(name: str, level: int) -> float:
    """What a level means: a slope, a share of the side, degrees, a change of the factor, bits, or a threshold.

    >>> magnitude("rotate", 9), magnitude("solarize", 9), magnitude("posterize", 9)
    (30.0, 0.0, 4.0)
    """
    step = level / (LEVELS - 1)
    if name in FACTORS:
        return 0.9 * step
    kinds = {"shear": 0.3 * step, "translate": 150 / 331 * step, "rotate": 30 * step, "solarize": 256 * (1 - step)}
    kinds["posterize"] = float(round(8 - 4 * step))
    return kinds.get(name.partition("_")[0], 0.0)


def places(name: str, amount: float, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Source pixels of the new image in the old one: (4, H·W) indices, and their (4, H·W) weights.

    Index H·W stands for the fill. Operations that take one pixel have it second, with weight 1.
    """
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    if name == "rotate":
        return _rotation(amount, x, y)
    along, across, side = (x, y, width) if name.endswith("_x") else (y, x, height)
    at = along.double() + 0.5
    if name in SHEARS:
        at += amount * (across.double() + 0.5)
        low = (at - 0.5).floor()
        between = at - 0.5 - low
        neighbours = (low.long() + torch.arange(-1, 3)[:, None, None]).clamp(0, side - 1)  # the border repeats
    else:
        at += amount * side
        between = torch.zeros_like(at)
        neighbours = at.floor().long().expand(4, -1, -1)
    taps = y * width + neighbours if along is x else neighbours * width + x
    inside = (at >= 0) & (at < side)
    taps = torch.where(inside, taps, height * width)
    return taps.flatten(1), cubic(between.flatten())


def _rotation(degrees: float, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Counter-clockwise about the centre, in Pillow's fixed point: numbers are rounded to 1/65536."""
    height, width = x.shape
    angle = -math.radians(degrees % 360.0)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    shift_x = cos * -width / 2 + sin * -height / 2 + width / 2
    shift_y = -sin * -width / 2 + cos * -height / 2 + height / 2

    def fixed(number: float) -> int:
        return math.floor(number * 65536 + 0.5)

    column = (fixed(shift_x + cos * 0.5 + sin * 0.5) + fixed(cos) * x + fixed(sin) * y) >> 16
    row = (fixed(shift_y - sin * 0.5 + cos * 0.5) + fixed(-sin) * x + fixed(cos) * y) >> 16
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    taps = torch.where(inside, row * width + column, height * width).flatten()
    return taps.expand(4, -1), cubic(torch.zeros(height * width))


def cubic(between: Tensor) -> Tensor:
    """The weights of four neighbours, (4, …), for a position `between` the middle two: Pillow's bicubic filter.

    >>> cubic(torch.tensor(0.5))
    tensor([-0.1250,  0.6250,  0.6250, -0.1250])
    """
    d = between.double()
    before, low = d * (-1 + d * (2 - d)), 1 + d * d * (d - 2)
    high, after = d * (1 + d * (1 - d)), d * d * (d - 1)
    return torch.stack([before, low, high, after]).float()


def to_uint8(x: Tensor) -> Tensor:
    """Clamp to 0 … 255 and truncate to integers; clamps x in place."""
    return x.clamp_(0, 255).to(torch.int16).to(torch.uint8)  # float32 straight to uint8 takes a CPU four times as long


def blend(bright: Tensor, dull: Tensor, factor: Tensor | float) -> Tensor:
    """Dull + factor · (bright − dull), clamped to 0 … 255 and truncated to integers."""
    return to_uint8((bright - dull).mul_(factor).add_(dull))  # in two roundings, as Pillow: a fused one would differ


def levels(name: str, amount: float) -> Tensor:
    """The new grey level of each of the 256, for the operations whose table does not depend on the image."""
    old = torch.arange(256)
    if name == "invert":
        new = 255 - old
    elif name == "posterize":
        new = old & -(1 << (8 - int(amount)))
    elif name == "solarize":
        new = torch.where(old < amount, old, 255 - old)
    elif name == "brightness":
        new = blend(old, torch.zeros(()), 1 + amount)
    else:
        new = old
    return new.to(torch.uint8)


def contrast(luma: Tensor, factor: Tensor) -> Tensor:
    """Tables that move away from the mean grey of (B, 1, H, W) images, or towards it: (B, 1, 256)."""
    count = luma.shape[2] * luma.shape[3]
    mean = (2 * luma.sum(dim=(2, 3)) + count) // (2 * count)  # rounded, in integers
    return blend(torch.arange(256, device=luma.device), mean[..., None].float(), factor[:, None, None])


def autocontrast(darkest: Tensor, brightest: Tensor) -> Tensor:
    """Tables that stretch each channel to the full range: from (…,) darkest and brightest levels to (…, 256)."""
    low, high = darkest.double()[..., None], brightest.double()[..., None]
    scale = torch.full_like(low, 255).div((high - low).clamp(min=1))  # `255 / t` multiplies by the inverse: inexact
    old = torch.arange(256, device=darkest.device, dtype=torch.float64)
    stretched = (old * scale - low * scale).trunc().clamp(0, 255)
    return torch.where(high > low, stretched, old).to(torch.uint8)


def equalize(counts: Tensor) -> Tensor:
    """Tables that make every grey level about as frequent: from (…, 256) int32 counts to (…, 256)."""
    old = torch.arange(256, device=counts.device, dtype=torch.int32)
    last = torch.where(counts > 0, old, -1).amax(dim=-1, keepdim=True)  # the brightest level there is
    brightest = counts.gather(-1, last.long())
    step = (counts.sum(dim=-1, keepdim=True, dtype=torch.int32) - brightest) // 255
    below = counts.cumsum(dim=-1, dtype=torch.int32) - counts
    spread = (below + step // 2) // step.clamp(min=1)
    return torch.where(step > 0, spread.clamp(max=255), old).to(torch.uint8)


def grey(x: Tensor) -> Tensor:
    """Luma of (B, 3, H, W) images as Pillow's mode L: (B, 1, H, W) int32."""
    red, green, blue = x.int().split(1, dim=1)
    luma: Tensor = (red * 19595).add_(green, alpha=38470).add_(blue, alpha=7471).add_(0x8000)
    return luma >> 16


def smooth(x: Tensor) -> Tensor:
    """Each pixel averaged with its eight neighbours, itself weighted 5; the border unchanged: Pillow's SMOOTH.

    Integers in float32. Thirteenths never lie halfway between two of them, so rounding needs no rule for ties.
    """
    wide = x.to(torch.int16)
    rows = (wide[..., :-2] + wide[..., 1:-1]).add_(wide[..., 2:])
    boxes = (rows[..., :-2, :] + rows[..., 1:-1, :]).add_(rows[..., 2:, :]).add_(wide[..., 1:-1, 1:-1], alpha=4)
    result = x.float()
    result[..., 1:-1, 1:-1] = boxes.float().div_(13).round_()
    return result
