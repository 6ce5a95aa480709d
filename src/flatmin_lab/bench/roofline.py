"""The least time that a step could take on this device: its arithmetic at the peak rate, and its memory traffic at the
speed of a copy, both measured in the same run.

    arithmetic   operations of the forward and backward pass, counted; two passes for AMP
    bytes        what the optimizer moves, in units of a float32 copy of the parameters

In half precision, gradients and the copies that the passes compute with have 16 bits (flatmin/core/multi_tensor.py):

    ERM   1.5 (θ to its copy) + 4.5 (SGD: reads θ, gradient, momentum, writes θ, momentum)                         = 6
    AMP   the same + 0.5 (the gradient's norm) + 2 (θ, gradient to θ + Δ) + 0.5 (is the last gradient finite?)     = 9

In float32 a pass computes with θ itself: ERM 5 (SGD); AMP 5 + 1 (norm) + 3 (θ + Δ) + 1 (finite?) = 10.

It leaves out reading and writing activations, which no step can avoid, so no step reaches the floor.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import conv2d
from torch.utils.flop_counter import FlopCounterMode

from flatmin_lab import models
from flatmin_lab.bench.timing import device_seconds
from flatmin_lab.bench.workload import CLASSES, SHAPE
from flatmin_lab.training.learner import AUTOCAST

PASSES = {"erm": 1, "amp": 2}
PARAMETER_COPIES = {"half": {"erm": 6.0, "amp": 9.0}, "fp32": {"erm": 5.0, "amp": 10.0}}
MATRIX_SIDE = {"cuda": 8192, "cpu": 1024}  # of the square matrices that are multiplied
MAX_TRIES, MAX_SECONDS = 50, 0.5  # of one measurement
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}  # of the tensor that is copied


def flops_of(model: str) -> int:
    """Operations of one forward and backward pass for one image; a multiply-add counts as two.

    >>> flops_of("mlp")
    1777152
    """
    with torch.device("meta"):
        made = models.build(model, num_classes=CLASSES, **models.settings_for(model, SHAPE)).train()
        x = torch.empty(2, *SHAPE)  # BatchNorm needs two
    counter = FlopCounterMode(display=False)
    with counter:
        made(x).sum().backward()
    return counter.get_total_flops() // len(x)


def measure_rates(device: torch.device, precision: str) -> dict[str, Any]:
    """Operations per second of a large product, and bytes per second of a large copy (read and written)."""
    dtype = AUTOCAST.get(precision, torch.float32)
    before = torch.get_float32_matmul_precision()
    tf32 = device.type == "cuda" and precision == "fp32" and torch.backends.cudnn.allow_tf32
    if tf32:  # as float32 convolutions do
        torch.set_float32_matmul_precision("high")
    try:
        flops_per_s = max(flops / _shortest_seconds(work, device) for work, flops in _products(device, dtype))
    finally:
        if tf32:
            torch.set_float32_matmul_precision(before)
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = _shortest_seconds(lambda: target.copy_(source), device)
    return {
        "flops_per_s": flops_per_s,
        "flops_in": "tf32" if tf32 else precision,
        "bytes_per_s": 2 * len(source) / copy,
    }


def floor(method: str, *, flops: int, batch_size: int, size: int, precision: str, speed: dict[str, Any]) -> Any:
    """The floor of a method's step, in ms; `size` is that of the float32 parameters, in bytes."""
    moved = PARAMETER_COPIES["fp32" if precision == "fp32" else "half"][method]
    arithmetic = 1e3 * PASSES[method] * flops * batch_size / speed["flops_per_s"]
    traffic = 1e3 * moved * size / speed["bytes_per_s"]
    return {
        "arithmetic_ms": arithmetic,
        "bytes_ms": traffic,
        "floor_ms": arithmetic + traffic,
        "parameter_sizes_moved": moved,
    }


def _products(device: torch.device, dtype: torch.dtype) -> list[tuple[Callable[[], object], int]]:
    """Large products and their operation counts: of two matrices, and on a CPU a convolution, which is often faster."""
    side = MATRIX_SIDE[device.type]
    a, b = torch.randn(2, side, side, device=device).to(dtype).unbind()
    found: list[tuple[Callable[[], object], int]] = [(lambda: a @ b, 2 * side**3)]
    if device.type == "cpu":
        x = torch.randn(16, 256, 16, 16).to(dtype).contiguous(memory_format=torch.channels_last)
        weight = torch.randn(256, 256, 3, 3).to(dtype)
        found.append((lambda: conv2d(x, weight, padding=1), 2 * x.numel() * weight[0].numel()))
    return found


def _shortest_seconds(work: Callable[[], object], device: torch.device) -> float:
    """The fastest of as many tries as there is time for: a floor takes the best."""
    work()
    times = [device_seconds(work, device)]
    while len(times) < MAX_TRIES and sum(times) < MAX_SECONDS:
        times.append(device_seconds(work, device))
    return min(times)
