"""Triton kernels that go through whole lists of tensors in one launch.

A list reaches a kernel as a table of addresses, because its tensors lie anywhere. `table` holds, as 64-bit integers,

    L rows of T addresses · T sizes · T places in the vector of factors · C chunks' tensors · C chunks' first numbers

and program c handles chunk c: `BLOCK` numbers of one tensor. Every rounding is written out, so that a kernel gives the
bits of the torch operations that it stands for: a product of two float32 is exact in float64, and a cast from there
rounds once.
"""

import triton
import triton.language as tl

BLOCK = 4096
WARPS = 8  # 16 numbers a thread


@triton.jit
def _here(table, tensors, chunks, lists: tl.constexpr, block: tl.constexpr):
    """Which tensor this program works on, its place among the factors, its numbers, and which of them exist."""
    chunk = tl.program_id(0)
    shape = table + lists * tensors
    tensor = tl.load(shape + 2 * tensors + chunk)
    first = tl.load(shape + 2 * tensors + chunks + chunk)
    size = tl.load(shape + tensor)
    place = tl.load(shape + tensors + tensor)
    numbers = first + tl.arange(0, block)
    return tensor, place, numbers, numbers < size


@triton.jit
def _row(table, tensors, tensor, row: tl.constexpr, dtype: tl.constexpr):
    """The address of a tensor in one of the lists; all begin at a multiple of 16 bytes, so loads can be wide."""
    address = tl.load(table + row * tensors + tensor).to(tl.pointer_type(dtype))
    return tl.multiple_of(address, 16)


@triton.jit(do_not_specialize=["tensors", "chunks"])
def move(
    table,
    tensors,
    chunks,
    factors,
    finite,
    gradient_type: tl.constexpr,
    moved_type: tl.constexpr,
    rounded_once: tl.constexpr,
    block: tl.constexpr,
):
    """Moved = θ + factor · gradient, or θ where `finite` does not hold. Lists: θ, gradients, moved."""
    tensor, place, numbers, exist = _here(table, tensors, chunks, 3, block)
    theta = tl.load(_row(table, tensors, tensor, 0, tl.float32) + numbers, mask=exist)
    gradient = tl.load(_row(table, tensors, tensor, 1, gradient_type) + numbers, mask=exist)
    factor = tl.load(factors + place).to(tl.float64)
    delta = factor * gradient.to(tl.float32).to(tl.float64)
    if rounded_once:
        there = (theta.to(tl.float64) + delta).to(tl.float32)
    else:
        there = theta + delta.to(tl.float32)
    there = tl.where(tl.load(finite), there, theta)
    tl.store(_row(table, tensors, tensor, 2, moved_type) + numbers, there.to(moved_type), mask=exist)


@triton.jit(do_not_specialize=["tensors", "chunks"])
def sgd(
    table,
    tensors,
    chunks,
    rates,
    skip,
    gradient_type: tl.constexpr,
    has_momentum: tl.constexpr,
    has_decay: tl.constexpr,
    nesterov: tl.constexpr,
    maximize: tl.constexpr,
    fused: tl.constexpr,
    block: tl.constexpr,
):
    """A step of torch.optim.SGD, with the roundings of its fused kernel or of its foreach operations.

    Lists: θ, gradients, momentum. `rates` is (lr, weight decay, momentum, dampening) in float64. Where `skip` holds, θ
    stays; the momentum stays too (fused), or is what a gradient of zero makes of it.
    """
    tensor, _, numbers, exist = _here(table, tensors, chunks, 3, block)
    at = _row(table, tensors, tensor, 0, tl.float32) + numbers
    theta = tl.load(at, mask=exist)
    gradient = tl.load(_row(table, tensors, tensor, 1, gradient_type) + numbers, mask=exist).to(tl.float32)
    lr, decay, momentum = tl.load(rates), tl.load(rates + 1), tl.load(rates + 2)
    stay = tl.load(skip)
    if not fused:
        gradient = tl.where(stay, 0.0, gradient)
    if maximize:
        gradient = -gradient
    if has_decay:
        if fused:
            gradient = (gradient.to(tl.float64) + decay * theta.to(tl.float64)).to(tl.float32)
        else:
            gradient = tl.fma(decay.to(tl.float32) + tl.zeros_like(theta), theta, gradient)
    if has_momentum:
        kept = 1.0 - tl.load(rates + 3)
        buffer_at = _row(table, tensors, tensor, 2, tl.float32) + numbers
        before = tl.load(buffer_at, mask=exist)
        if fused:
            buffer = (momentum * before.to(tl.float64) + kept * gradient.to(tl.float64)).to(tl.float32)
            tl.store(buffer_at, tl.where(stay, before, buffer), mask=exist)
            ahead = (gradient.to(tl.float64) + momentum * buffer.to(tl.float64)).to(tl.float32)
        else:
            slowed = (momentum.to(tl.float32).to(tl.float64) * before.to(tl.float64)).to(tl.float32)
            buffer = tl.fma(kept.to(tl.float32) + tl.zeros_like(theta), gradient, slowed)
            tl.store(buffer_at, buffer, mask=exist)
            ahead = tl.fma(momentum.to(tl.float32) + tl.zeros_like(theta), buffer, gradient)
        gradient = ahead if nesterov else buffer
    if fused:
        there = (theta.to(tl.float64) - lr * gradient.to(tl.float64)).to(tl.float32)
    else:
        there = tl.fma((-lr).to(tl.float32) + tl.zeros_like(theta), gradient, theta)
    tl.store(at, tl.where(stay, theta, there), mask=exist)
