"""BatchNorm and ReLU in training, in two kernels each way, on channels-last pictures: M = N·H·W rows of C channels.

    μ = mean(x)    r = 1/√(var(x) + eps)    y = max(0, (x − μ)·r·weight + bias)
    dz = dy where y > 0    dx = weight·r·(dz − mean(dz) − x̂·mean(dz·x̂)),    x̂ = (x − μ)·r

The first kernel cuts the rows into parts and writes two numbers a part and channel; the second merges them, every
program for its own channels, and applies them. No atomics: equal input gives equal bits. A part's moments are taken
about its first row and merged about the first part's mean (Chan et al. 1983), so that a large mean costs no digits.
With few rows one kernel does both. The backward pass finds the ReLU's mask again from x: y is not kept for it.
"""

from __future__ import annotations  # tl may be None

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:  # it comes with torch's builds for CUDA alone
    triton = tl = None

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PROGRAMS = 128  # nearly one for each of the 132 multiprocessors of an H200
WARPS = 16
CHANNELS = 32  # a program's; 64 bytes a row in half precision. Wider means more parts, and more for each to merge
TILE = 8192  # numbers a step: two loads of 16 bytes a thread in half precision; the next step's are under way
ALONE_ROWS = 4096  # up to here one kernel does both; it finds the rows in the nearest cache the second time
ALONE_CHANNELS = 8

jit: Callable[[Callable[..., Any]], Any] = triton.jit if triton is not None else lambda function: function


@jit
def _tile(
    start: tl.tensor, last: tl.tensor, channel: tl.tensor, inside: tl.tensor, channels: tl.tensor, tile: tl.constexpr
) -> Any:
    """Offsets and mask of the rows from `start`, as many as a tile has and before `last`."""
    row = start + tl.arange(0, tile)
    return row[:, None] * channels + channel[None, :], (row < last)[:, None] & inside[None, :]


@jit
def _moments_of_rows(
    x: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    channels: tl.tensor,
    tile: tl.constexpr,
) -> Any:
    """Mean and Σ(x − mean)² of the rows from `first` to before `last`, found about the first of them."""
    pivot = tl.load(x + first * channels + channel, mask=inside, other=0.0)
    total = tl.zeros([tile, channel.shape[0]], tl.float32)
    square = tl.zeros([tile, channel.shape[0]], tl.float32)
    place, mask = _tile(first, last, channel, inside, channels, tile)
    ahead = tl.load(x + place, mask=mask, other=pivot[None, :])
    for start in range(first, last, tile):
        value = ahead
        place, mask = _tile(start + tile, last, channel, inside, channels, tile)
        ahead = tl.load(x + place, mask=mask, other=pivot[None, :])  # what is masked off adds 0
        centred = value.to(tl.float32) - pivot.to(tl.float32)[None, :]
        total += centred
        square += centred * centred
    shift = tl.sum(total, 0)
    mean = shift / (last - first)
    return pivot.to(tl.float32) + mean, tl.sum(square, 0) - shift * mean


@jit
def _merged_moments(
    partial: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    rows: tl.tensor,
    parts: tl.tensor,
    share: tl.tensor,
    channels: tl.tensor,
    tile: tl.constexpr,
) -> Any:
    """Mean and Σ(x − mean)² of all rows from those of the parts, found about the first part's mean."""
    pivot = tl.load(partial + channel, mask=inside, other=0.0)
    total = tl.zeros([tile, channel.shape[0]], tl.float32)
    square = tl.zeros([tile, channel.shape[0]], tl.float32)
    for start in range(0, parts, tile):
        part = start + tl.arange(0, tile)
        mask = (part < parts)[:, None] & inside[None, :]
        place = partial + part[:, None] * (2 * channels) + channel[None, :]
        centred = tl.load(place, mask=mask, other=0.0) - pivot[None, :]
        count = tl.maximum(tl.minimum(rows - part * share, share), 0).to(tl.float32)[:, None]
        total += count * centred
        square += tl.load(place + channels, mask=mask, other=0.0) + count * centred * centred
    shift = tl.sum(total, 0)
    mean = shift / rows
    return pivot + mean, tl.sum(square, 0) - shift * mean


@jit
def _load_both(x: tl.tensor, dy: tl.tensor, place: tl.tensor, mask: tl.tensor) -> Any:
    return tl.load(x + place, mask=mask, other=0.0), tl.load(dy + place, mask=mask, other=0.0)


@jit
def _slope(dy: tl.tensor, value: tl.tensor, mean: tl.tensor, scale: tl.tensor, bias: tl.tensor) -> Any:
    """Both dz = dy where y > 0 and x − μ; y has the forward pass's sign: the same numbers, rounded the same way."""
    centred = value.to(tl.float32) - mean[None, :]
    y = tl.fma(centred, scale[None, :], bias[None, :])
    return tl.where(y <= 0, 0.0, dy.to(tl.float32)), centred


@jit
def _sums_of_rows(
    dy: tl.tensor,
    x: tl.tensor,
    mean: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    channels: tl.tensor,
    tile: tl.constexpr,
) -> Any:
    """Σdz and Σdz·(x − μ) of the rows from `first` to before `last`."""
    total = tl.zeros([tile, channel.shape[0]], tl.float32)
    product = tl.zeros([tile, channel.shape[0]], tl.float32)
    place, mask = _tile(first, last, channel, inside, channels, tile)
    ahead, slope_ahead = _load_both(x, dy, place, mask)
    for start in range(first, last, tile):
        value, slope = ahead, slope_ahead
        place, mask = _tile(start + tile, last, channel, inside, channels, tile)
        ahead, slope_ahead = _load_both(x, dy, place, mask)
        slope, centred = _slope(slope, value, mean, scale, bias)
        total += slope
        product += slope * centred
    return tl.sum(total, 0), tl.sum(product, 0)


@jit
def _merged_sums(
    partial: tl.tensor, channel: tl.tensor, inside: tl.tensor, parts: tl.tensor, channels: tl.tensor, tile: tl.constexpr
) -> Any:
    """The two sums of all rows from those of the parts."""
    total = tl.zeros([tile, channel.shape[0]], tl.float32)
    product = tl.zeros([tile, channel.shape[0]], tl.float32)
    for start in range(0, parts, tile):
        part = start + tl.arange(0, tile)
        mask = (part < parts)[:, None] & inside[None, :]
        place = partial + part[:, None] * (2 * channels) + channel[None, :]
        total += tl.load(place, mask=mask, other=0.0)
        product += tl.load(place + channels, mask=mask, other=0.0)
    return tl.sum(total, 0), tl.sum(product, 0)


@jit
def _forward_parts(
    x: tl.tensor,
    partial: tl.tensor,
    rows: tl.tensor,
    share: tl.tensor,
    channels: tl.tensor,
    width: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """The first kernel forward: the moments of this program's part, for this program's channels."""
    channel = tl.program_id(0) * width + tl.arange(0, width)
    inside = channel < channels
    first = tl.program_id(1) * share
    mean, square = _moments_of_rows(x, channel, inside, first, tl.minimum(first + share, rows), channels, tile)
    place = partial + tl.program_id(1) * (2 * channels) + channel
    tl.store(place, mean, mask=inside)
    tl.store(place + channels, square, mask=inside)


@jit
def _forward_apply(
    x: tl.tensor,
    y: tl.tensor,
    partial: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    running_mean: tl.tensor,
    running_var: tl.tensor,
    saved_mean: tl.tensor,
    saved_rstd: tl.tensor,
    momentum: tl.tensor,
    eps: tl.tensor,
    rows: tl.tensor,
    parts: tl.tensor,
    share: tl.tensor,
    channels: tl.tensor,
    width: tl.constexpr,
    tile: tl.constexpr,
    merge_tile: tl.constexpr,
    alone: tl.constexpr,
) -> None:
    """The second kernel forward, or where there is one part the only one: μ, r, and y for this program's rows."""
    channel = tl.program_id(0) * width + tl.arange(0, width)
    inside = channel < channels
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, rows)
    place, mask = _tile(first, last, channel, inside, channels, tile)
    ahead = tl.load(x + place, mask=mask, other=0.0)  # under way while the parts are merged
    shift = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    if alone:
        mean, square = _moments_of_rows(x, channel, inside, first, last, channels, tile)
    else:
        mean, square = _merged_moments(partial, channel, inside, rows, parts, share, channels, merge_tile)
    rstd = 1 / tl.sqrt(square / rows + eps)
    scale *= rstd
    for start in range(first, last, tile):
        value = ahead
        place, mask = _tile(start + tile, last, channel, inside, channels, tile)
        ahead = tl.load(x + place, mask=mask, other=0.0)
        result = tl.fma(value.to(tl.float32) - mean[None, :], scale[None, :], shift[None, :])
        result = tl.where(result <= 0, 0.0, result)  # not max: NaN stays NaN
        place, mask = _tile(start, last, channel, inside, channels, tile)
        tl.store(y + place, result.to(y.dtype.element_ty), mask=mask)
    if tl.program_id(1) == 0:
        tl.store(saved_mean + channel, mean, mask=inside)
        tl.store(saved_rstd + channel, rstd, mask=inside)
        before = tl.load(running_mean + channel, mask=inside)
        tl.store(running_mean + channel, (1 - momentum) * before + momentum * mean, mask=inside)
        before = tl.load(running_var + channel, mask=inside)
        tl.store(running_var + channel, (1 - momentum) * before + momentum * (square / (rows - 1)), mask=inside)


@jit
def _backward_parts(
    dy: tl.tensor,
    x: tl.tensor,
    partial: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    saved_mean: tl.tensor,
    saved_rstd: tl.tensor,
    rows: tl.tensor,
    share: tl.tensor,
    channels: tl.tensor,
    width: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """The first kernel backward: Σdz and Σdz·(x − μ) of this program's part, for this program's channels."""
    channel = tl.program_id(0) * width + tl.arange(0, width)
    inside = channel < channels
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, rows)
    mean = tl.load(saved_mean + channel, mask=inside, other=0.0)
    scale = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    scale *= tl.load(saved_rstd + channel, mask=inside, other=0.0)
    shift = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    total, product = _sums_of_rows(dy, x, mean, scale, shift, channel, inside, first, last, channels, tile)
    place = partial + tl.program_id(1) * (2 * channels) + channel
    tl.store(place, total, mask=inside)
    tl.store(place + channels, product, mask=inside)


@jit
def _backward_apply(
    dy: tl.tensor,
    x: tl.tensor,
    dx: tl.tensor,
    partial: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    saved_mean: tl.tensor,
    saved_rstd: tl.tensor,
    dweight: tl.tensor,
    dbias: tl.tensor,
    rows: tl.tensor,
    parts: tl.tensor,
    share: tl.tensor,
    channels: tl.tensor,
    width: tl.constexpr,
    tile: tl.constexpr,
    merge_tile: tl.constexpr,
    alone: tl.constexpr,
) -> None:
    """The second kernel backward, or where there is one part the only one: dweight, dbias, and dx for these rows."""
    channel = tl.program_id(0) * width + tl.arange(0, width)
    inside = channel < channels
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, rows)
    place, mask = _tile(first, last, channel, inside, channels, tile)
    ahead, slope_ahead = _load_both(x, dy, place, mask)
    mean = tl.load(saved_mean + channel, mask=inside, other=0.0)
    rstd = tl.load(saved_rstd + channel, mask=inside, other=0.0)
    scale = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32) * rstd
    shift = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if alone:
        total, product = _sums_of_rows(dy, x, mean, scale, shift, channel, inside, first, last, channels, tile)
    else:
        total, product = _merged_sums(partial, channel, inside, parts, channels, merge_tile)
    level = total / rows  # mean(dz)
    tilt = product * rstd * rstd / rows  # mean(dz·x̂)·r
    for start in range(first, last, tile):
        value, slope = ahead, slope_ahead
        place, mask = _tile(start + tile, last, channel, inside, channels, tile)
        ahead, slope_ahead = _load_both(x, dy, place, mask)
        slope, centred = _slope(slope, value, mean, scale, shift)
        result = scale[None, :] * (slope - level[None, :] - centred * tilt[None, :])
        place, mask = _tile(start, last, channel, inside, channels, tile)
        tl.store(dx + place, result.to(dx.dtype.element_ty), mask=mask)
    if tl.program_id(1) == 0:
        tl.store(dweight + channel, product * rstd, mask=inside)
        tl.store(dbias + channel, total, mask=inside)


class Plan(NamedTuple):
    """How M rows of C channels are shared out: `grid` programs, each with `share` rows of `width` channels."""

    grid: tuple[int, int]
    share: int
    width: int
    alone: bool


def plan(rows: int, channels: int) -> Plan:
    """About as many programs as multiprocessors, or with few rows one for every few channels.

    >>> plan(51200, 64)
    Plan(grid=(2, 64), share=800, width=32, alone=False)
    >>> plan(800, 512)
    Plan(grid=(64, 1), share=800, width=8, alone=True)
    """
    if rows <= ALONE_ROWS:
        return Plan((-(-channels // ALONE_CHANNELS), 1), rows, ALONE_CHANNELS, alone=True)
    width = min(CHANNELS, _power_of_two(channels))
    blocks = -(-channels // width)
    share = -(-rows // max(PROGRAMS // blocks, 1))
    return Plan((blocks, -(-rows // share)), share, width, alone=False)


def _power_of_two(number: int) -> int:
    """The least that is not smaller."""
    return 1 << (number - 1).bit_length()


def _sizes(made: Plan) -> dict[str, Any]:
    """What both second kernels take of a plan."""
    return {
        "width": made.width,
        "tile": TILE // made.width,
        "merge_tile": min(_power_of_two(made.grid[1]), TILE // made.width),
        "alone": made.alone,
        "num_warps": WARPS,
    }


@torch.library.custom_op("flatmin_lab::norm_relu_forward", mutates_args=("running_mean", "running_var"))
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous(memory_format=torch.channels_last)
    channels, rows = x.shape[1], x.numel() // x.shape[1]
    made = plan(rows, channels)
    parts = made.grid[1]
    y, mean, rstd = _forward_shapes(x, weight, bias, running_mean, running_var, momentum, eps)
    sizes = _sizes(made)
    with torch.cuda.device_of(x):
        partial = mean  # alone, there are no parts, and nothing reads it
        if not made.alone:
            partial = torch.empty(parts, 2, channels, dtype=torch.float32, device=x.device)
            _forward_parts[made.grid](
                x, partial, rows, made.share, channels, made.width, sizes["tile"], num_warps=WARPS
            )
        stores = (x, y, partial, weight, bias, running_mean, running_var, mean, rstd)
        _forward_apply[made.grid](*stores, momentum, eps, rows, parts, made.share, channels, **sizes)
    return y, mean, rstd


@_forward.register_fake
def _forward_shapes(
    x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = (torch.empty(x.shape[1], dtype=torch.float32, device=x.device) for _ in range(2))
    return torch.empty_like(x, memory_format=torch.channels_last), mean, rstd


@torch.library.custom_op("flatmin_lab::norm_relu_backward", mutates_args=())
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dy, x = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (dy, x))
    channels, rows = x.shape[1], x.numel() // x.shape[1]
    made = plan(rows, channels)
    parts = made.grid[1]
    dx, dweight, dbias = _backward_shapes(dy, x, weight, bias, mean, rstd)
    sizes = _sizes(made)
    with torch.cuda.device_of(x):
        partial = mean
        if not made.alone:
            partial = torch.empty(parts, 2, channels, dtype=torch.float32, device=x.device)
            inputs = (dy, x, partial, weight, bias, mean, rstd, rows, made.share, channels)
            _backward_parts[made.grid](*inputs, made.width, sizes["tile"], num_warps=WARPS)
        stores = (dy, x, dx, partial, weight, bias, mean, rstd, dweight, dbias)
        _backward_apply[made.grid](*stores, rows, parts, made.share, channels, **sizes)
    return dx, dweight, dbias


@_backward.register_fake
def _backward_shapes(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    return dx, torch.empty_like(weight), torch.empty_like(bias)


class _NormReLU(torch.autograd.Function):
    """Around the two operations: torch.library gives no derivative to one that changes its arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        momentum: float,
        eps: float,
    ) -> Tensor:
        saved: tuple[Tensor, Tensor, Tensor] = _forward(x, weight, bias, running_mean, running_var, momentum, eps)
        y, mean, rstd = saved
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias = _backward(dy.contiguous(memory_format=torch.channels_last), *ctx.saved_tensors)
        return dx, dweight, dbias, None, None, None, None


def suits(x: Tensor) -> bool:
    """Whether `norm_relu` takes x: a dense channels-last picture on a GPU, of more than one row."""
    return (
        triton is not None
        and x.is_cuda
        and x.ndim == 4
        and x.dtype in DTYPES
        and x.shape[1] < x.numel() < 2**31  # offsets are 32 bits wide
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def norm_relu(
    x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float, eps: float
) -> Tensor:
    """ReLU(BatchNorm(x)) in training, where `suits(x)`; the running statistics are updated in place, as torch does."""
    y: Tensor = _NormReLU.apply(x, weight, bias, running_mean, running_var, momentum, eps)  # type: ignore[no-untyped-call]
    return y
