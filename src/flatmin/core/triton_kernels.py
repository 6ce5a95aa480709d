"""Triton kernels that process whole lists of tensors in one launch.

A list reaches a kernel as a table of addresses, because its tensors may lie anywhere in memory. Program c handles chunk
c: `BLOCK` numbers of one tensor, or as many as are left. `table` holds, as 64-bit integers, one row after the other,

    L rows of the chunks' addresses, one for each list · how many numbers a chunk has · its index in another list

so a program finds its numbers with one load. The kernels are launched with LAUNCH_OPTIONS, under which a + b·c is
rounded twice unless the code says `fma`: so a kernel gives the same bits as the torch operations it replaces.
"""

import triton
import triton.language as tl

BLOCK = 4096  # numbers per program
ROOTS_BLOCK = 1024  # chunk sums added at a time
LAUNCH_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}  # 16 numbers per thread


@triton.jit
def _at(table, chunks, row: tl.constexpr, dtype: tl.constexpr, block: tl.constexpr):
    """The addresses of a chunk's numbers in one of the lists; aligned to 16 bytes, for wide loads."""
    address = tl.load(table + row * chunks + tl.program_id(0)).to(tl.pointer_type(dtype))
    return tl.multiple_of(address, 16) + tl.arange(0, block)


@triton.jit
def _load(address, exist, whole: tl.constexpr):
    """A chunk, whole or partial: a mask would make the loads of whole chunks narrow."""
    if whole:
        return tl.load(address).to(tl.float32)
    return tl.load(address, mask=exist, other=0.0).to(tl.float32)


@triton.jit
def _store(address, values, exist, whole: tl.constexpr):
    if whole:
        tl.store(address, values)
    else:
        tl.store(address, values, mask=exist)


@triton.jit(do_not_specialize=["chunks"])
def move(
    table,
    chunks,
    factors,
    finite,
    gradient_type: tl.constexpr,
    moved_type: tl.constexpr,
    rounded_once: tl.constexpr,
    block: tl.constexpr,
):
    """Moved = θ + factor · gradient, or θ if `finite` does not hold. Lists: θ, gradients, moved."""
    if tl.load(table + 3 * chunks + tl.program_id(0)) == block:
        _move(table, chunks, factors, finite, gradient_type, moved_type, rounded_once, block, True)
    else:
        _move(table, chunks, factors, finite, gradient_type, moved_type, rounded_once, block, False)


@triton.jit
def _move(
    table,
    chunks,
    factors,
    finite,
    gradient_type: tl.constexpr,
    moved_type: tl.constexpr,
    rounded_once: tl.constexpr,
    block: tl.constexpr,
    whole: tl.constexpr,
):
    exist = tl.arange(0, block) < tl.load(table + 3 * chunks + tl.program_id(0))
    factor = tl.load(factors + tl.load(table + 4 * chunks + tl.program_id(0)))
    theta = _load(_at(table, chunks, 0, tl.float32, block), exist, whole)
    gradient = _load(_at(table, chunks, 1, gradient_type, block), exist, whole)
    if rounded_once:
        there = tl.fma(factor + tl.zeros_like(theta), gradient, theta)
    else:
        there = theta + factor * gradient
    there = tl.where(tl.load(finite), there, theta)
    _store(_at(table, chunks, 2, moved_type, block), there.to(moved_type), exist, whole)


@triton.jit(do_not_specialize=["chunks"])
def sgd(
    table,
    chunks,
    rates,
    skip,
    gradient_type: tl.constexpr,
    has_momentum: tl.constexpr,
    has_decay: tl.constexpr,
    nesterov: tl.constexpr,
    maximize: tl.constexpr,
    block: tl.constexpr,
):
    """A step of torch.optim.SGD, as its foreach operations round. Lists: θ, gradients, momentum.

    `rates` is (lr, weight decay, momentum, dampening) in float64. If `skip` holds, θ stays, and the momentum is updated
    with a gradient of zero.
    """
    if tl.load(table + 3 * chunks + tl.program_id(0)) == block:
        _sgd(table, chunks, rates, skip, gradient_type, has_momentum, has_decay, nesterov, maximize, block, True)
    else:
        _sgd(table, chunks, rates, skip, gradient_type, has_momentum, has_decay, nesterov, maximize, block, False)


@triton.jit
def _sgd(
    table,
    chunks,
    rates,
    skip,
    gradient_type: tl.constexpr,
    has_momentum: tl.constexpr,
    has_decay: tl.constexpr,
    nesterov: tl.constexpr,
    maximize: tl.constexpr,
    block: tl.constexpr,
    whole: tl.constexpr,
):
    exist = tl.arange(0, block) < tl.load(table + 3 * chunks + tl.program_id(0))
    at = _at(table, chunks, 0, tl.float32, block)
    theta = _load(at, exist, whole)
    zeros = tl.zeros_like(theta)
    stay = tl.load(skip)
    gradient = _load(_at(table, chunks, 1, gradient_type, block), exist, whole)
    gradient = tl.where(stay, 0.0, gradient)
    if maximize:
        gradient = -gradient
    if has_decay:
        gradient = tl.fma(tl.load(rates + 1).to(tl.float32) + zeros, theta, gradient)
    if has_momentum:
        momentum = tl.load(rates + 2).to(tl.float32) + zeros
        kept = (1.0 - tl.load(rates + 3)).to(tl.float32) + zeros
        buffer_at = _at(table, chunks, 2, tl.float32, block)
        buffer = tl.fma(kept, gradient, momentum * _load(buffer_at, exist, whole))
        _store(buffer_at, buffer, exist, whole)
        if nesterov:
            gradient = tl.fma(momentum, buffer, gradient)
        else:
            gradient = buffer
    there = tl.fma((-tl.load(rates)).to(tl.float32) + zeros, gradient, theta)
    _store(at, tl.where(stay, theta, there), exist, whole)


@triton.jit(do_not_specialize=["chunks"])
def squares(table, chunks, sums, dtype: tl.constexpr, block: tl.constexpr):
    """The sum of squares of each chunk, written to its index in `sums`. One list."""
    count = tl.load(table + chunks + tl.program_id(0))
    place = sums + tl.load(table + 2 * chunks + tl.program_id(0))
    at = _at(table, chunks, 0, dtype, block)
    exist = tl.arange(0, block) < count
    if count == block:
        values = _load(at, exist, True)
        tl.store(place, tl.sum(values * values))
    else:
        values = _load(at, exist, False)
        tl.store(place, tl.sum(values * values))


@triton.jit(do_not_specialize=["chunks"])
def zero_unless(table, chunks, flag, dtype: tl.constexpr, block: tl.constexpr):
    """Zero every number unless `flag` holds. One list."""
    if not tl.load(flag):
        exist = tl.arange(0, block) < tl.load(table + chunks + tl.program_id(0))
        tl.store(_at(table, chunks, 0, dtype, block), tl.zeros([block], dtype), mask=exist)


@triton.jit(do_not_specialize=["chunks"])
def copy_if(table, chunks, flag, block: tl.constexpr):
    """Target ← source if `flag` holds, bit by bit. Lists: targets, sources."""
    if tl.load(flag):
        exist = tl.arange(0, block) < tl.load(table + 2 * chunks + tl.program_id(0))
        source = tl.load(_at(table, chunks, 1, tl.int32, block), mask=exist)
        tl.store(_at(table, chunks, 0, tl.int32, block), source, mask=exist)


@triton.jit
def roots(ends, sums, lengths, block: tl.constexpr):
    """The root of each tensor's sums, those between two `ends`."""
    tensor = tl.program_id(0)
    first, last = tl.load(ends + tensor), tl.load(ends + tensor + 1)
    total = tl.zeros([block], tl.float32)
    for start in range(first, last, block):
        numbers = start + tl.arange(0, block)
        total += tl.load(sums + numbers, mask=numbers < last, other=0.0)
    tl.store(lengths + tensor, tl.sqrt(tl.sum(total)))
