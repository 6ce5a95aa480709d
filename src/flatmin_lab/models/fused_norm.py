"""BatchNorm and ReLU in training, in two kernels each way, on channels-last pictures: M = N·H·W rows of C channels.

    μ = mean(x)    r = 1/√(var(x) + eps)    y = max(0, (x − μ)·r·weight + bias)
    dz = dy where y > 0    dx = weight·r·(dz − mean(dz) − x̂·mean(dz·x̂)),    x̂ = (x − μ)·r

The first kernel cuts the rows into parts and writes two numbers a part and channel, in a fixed order and without
atomics, so that equal input gives equal bits; the second merges them, each program for its own channels, and applies
them. Of a part's moments the first is its mean and the second Σ(x − mean)², taken about the part's first row and merged
about the first part's mean (Chan et al. 1983): a large mean costs no digits. With few rows one kernel does both. The
backward pass finds the ReLU's mask again from x: y is not kept. There is no second derivative.
"""

from collections.abc import Callable
from typing import Any

import torch

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:  # builds of torch without CUDA come without it
    triton = tl = None

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PROGRAMS = 128  # one for nearly every multiprocessor of an H100 or H200, which have 132
WARPS = 16
CHANNELS = 32  # 64 bytes a row in half precision; wider blocks mean more parts, and more to merge for every program
SUM_TILE = 4096  # numbers a step of a sum: one load of 16 bytes a thread in half precision, and four steps at once
MAP_TILE = 8192  # numbers a step of what is applied
ALONE_ROWS = 4096  # up to here one kernel does it all, its second look at the rows served by the cache near by
ALONE_CHANNELS = 8

jit: Callable[[Callable[..., Any]], Any] = triton.jit if triton is not None else lambda function: function


@jit
def _row_sums(x: Any, channel: Any, inside: Any, first: Any, last: Any, channels: Any, tile: "tl.constexpr") -> Any:
    """A pivot p for every channel, Σ(x − p) and Σ(x − p)² over the rows from `first` to before `last`."""
    pivot = tl.load(x + first * channels + channel, mask=inside, other=0.0)
    total = tl.zeros([tile, channel.shape[0]], tl.float32)
    square = tl.zeros([tile, channel.shape[0]], tl.float32)
    for start in range(first, last, 4 * tile):
        for step in tl.static_range(4):
            row = start + step * tile + tl.arange(0, tile)
            mask = (row < last)[:, None] & inside[None, :]
            # what is masked off reads as the pivot, and so adds 0
            value = tl.load(x + row[:, None] * channels + channel[None, :], mask=mask, other=pivot[None, :])
            difference = value.to(tl.float32) - pivot.to(tl.float32)[None, :]
            total += difference
            square += difference * difference
    return pivot.to(tl.float32), tl.sum(total, 0), tl.sum(square, 0)


@jit
def _gradient_sums(
    dy: Any,
    x: Any,
    mean: Any,
    scale: Any,
    bias: Any,
    channel: Any,
    inside: Any,
    first: Any,
    last: Any,
    channels: Any,
    tile: "tl.constexpr",
) -> Any:
    """Σdz and Σdz·(x − μ) over the rows from `first` to before `last`."""
    total = tl.zeros([tile, channel.shape[0]], tl.float32)
    product = tl.zeros([tile, channel.shape[0]], tl.float32)
    for start in range(first, last, 4 * tile):
        for step in tl.static_range(4):
            row = start + step * tile + tl.arange(0, tile)
            mask = (row < last)[:, None] & inside[None, :]
            place = row[:, None] * channels + channel[None, :]
            value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
            slope = tl.load(dy + place, mask=mask, other=0.0).to(tl.float32)
            centred = value - mean[None, :]
            slope = tl.where(tl.fma(centred, scale[None, :], bias[None, :]) <= 0, 0.0, slope)
            total += slope
            product += slope * centred
    return tl.sum(total, 0), tl.sum(product, 0)


@jit
def _write_y(
    x: Any,
    y: Any,
    ahead: Any,
    mean: Any,
    scale: Any,
    bias: Any,
    channel: Any,
    inside: Any,
    first: Any,
    last: Any,
    channels: Any,
    tile: "tl.constexpr",
) -> None:
    """Y for the rows from `first` to before `last`; `ahead` is the first tile of x. The next one is always under way."""
    for start in range(first, last, tile):
        value = ahead
        row = start + tl.arange(0, tile)
        place = row[:, None] * channels + channel[None, :]
        mask = (row + tile < last)[:, None] & inside[None, :]
        ahead = tl.load(x + (place + tile * channels), mask=mask, other=0.0)
        mask = (row < last)[:, None] & inside[None, :]
        # a sum and a product in one rounding, here and where the mask is found again: the same sign. NaN stays NaN
        result = tl.fma(value.to(tl.float32) - mean[None, :], scale[None, :], bias[None, :])
        tl.store(y + place, tl.where(result <= 0, 0.0, result).to(y.dtype.element_ty), mask=mask)


@jit
def _write_dx(
    dy: Any,
    x: Any,
    dx: Any,
    mean: Any,
    scale: Any,
    bias: Any,
    offset: Any,
    tilt: Any,
    channel: Any,
    inside: Any,
    first: Any,
    last: Any,
    channels: Any,
    tile: "tl.constexpr",
) -> None:
    """Dx = scale·(dz − offset − tilt·(x − μ)) for the rows from `first` to before `last`."""
    for start in range(first, last, tile):
        row = start + tl.arange(0, tile)
        mask = (row < last)[:, None] & inside[None, :]
        place = row[:, None] * channels + channel[None, :]
        value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        slope = tl.load(dy + place, mask=mask, other=0.0).to(tl.float32)
        centred = value - mean[None, :]
        slope = tl.where(tl.fma(centred, scale[None, :], bias[None, :]) <= 0, 0.0, slope)
        result = scale[None, :] * (slope - offset[None, :] - centred * tilt[None, :])
        tl.store(dx + place, result.to(dx.dtype.element_ty), mask=mask)
