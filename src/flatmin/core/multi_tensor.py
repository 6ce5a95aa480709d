"""Arithmetic on lists of weights in one launch and one pass over memory, on a GPU.

    move     θ + factor · gradient, written aside           reads θ and gradient, writes θ + Δ
    sgd      a step of torch.optim.SGD                      reads θ, gradient and momentum, writes θ and momentum
    lengths  ‖t‖ of each tensor                             reads them

Gradients and θ + Δ may be in half precision, θ and the momentum are float32. In the sizes of a float32 parameter, AMP
in bfloat16 so moves 1.5 (θ to the copy that the clean pass computes with) + 0.5 (the gradient's norm) + 2 (`move`)
+ 0.5 (is the last gradient finite?) + 4.5 (`sgd`) = 9. There is no copy of θ to keep, and none to put back.

The kernels take tables of addresses. In a capture the device cannot be written to from the host, so the tables of one
are filled when it is over: `bound` does that.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from flatmin.core.tensors import is_dense, lies_like

ALIGNED = 16  # bytes
TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

_captures: list["Tables"] = []  # under way


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def suit(params: Sequence[Tensor]) -> bool:
    """Can the kernels take these weights? They are float32."""
    return measurable(params) and all(p.dtype == torch.float32 for p in params)


def measurable(tensors: Sequence[Tensor]) -> bool:
    """Can a kernel go through them? They are dense and on a GPU, and Triton is installed."""
    return _has_triton() and all(
        t.is_cuda and t.dtype in TYPES and is_dense(t) and t.data_ptr() % ALIGNED == 0 for t in tensors
    )


def move(
    theta: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moved: Sequence[Tensor],
    factors: Tensor,
    finite: Tensor,
    *,
    rounded_once: bool,
) -> None:
    """Moved ← θ + factor · gradient for each tensor with its factor; θ where `finite` does not hold.

    `rounded_once`: the product is not rounded before the sum, as in torch's fused SGD.
    """
    from flatmin.core import triton_kernels

    beside = [_like(gradient, p) for gradient, p in zip(gradients, theta, strict=True)]
    factors = factors.float().contiguous()
    for kind in _kinds(beside, moved):
        lists = [[tensors[i] for i in kind] for tensors in (theta, beside, moved)]
        types = _triton_type(lists[1][0]), _triton_type(lists[2][0])
        table, chunks = _table(lists, kind, triton_kernels.BLOCK)
        arguments = (table, chunks, factors, finite, *types, rounded_once, triton_kernels.BLOCK)
        triton_kernels.move[(chunks,)](*arguments, **triton_kernels.OPTIONS)


def lengths(tensors: Sequence[Tensor]) -> Tensor:
    """‖t‖₂ of each tensor, in float32: the squares of a chunk are added up, then the sums of a tensor's chunks."""
    from flatmin.core import triton_kernels

    counts = [_chunks(tensor.numel(), triton_kernels.BLOCK) for tensor in tensors]
    firsts = [sum(counts[:place]) for place in range(len(counts))]
    sums = torch.empty(sum(counts), device=tensors[0].device)
    for kind in _kinds(tensors):
        places = [firsts[i] for i in kind]
        table, chunks = _table([[tensors[i] for i in kind]], places, triton_kernels.BLOCK, one_each=True)
        arguments = (table, chunks, sums, _triton_type(tensors[kind[0]]), triton_kernels.BLOCK)
        triton_kernels.squares[(chunks,)](*arguments, **triton_kernels.OPTIONS)
    found = torch.empty(len(tensors), device=sums.device)
    ends = _constant(torch.tensor([*firsts, len(sums)]), sums.device)
    triton_kernels.roots[(len(tensors),)](ends, sums, found, triton_kernels.ROOTS)
    return found


def is_plain_sgd(base: Optimizer) -> bool:
    """Is its step the one that `sgd` takes? Torch's own SGD, without hooks, which a kernel would not call.

    With `fused=True` torch has a kernel of its own, which rounds differently.
    """
    groups = base.param_groups
    return (
        type(base) is SGD
        and not has_hooks(base)
        and not any(isinstance(value, Tensor) and value.is_cuda for group in groups for value in group.values())
        and not any(group["differentiable"] or group["fused"] for group in groups)
    )


def has_hooks(optimizer: Optimizer) -> bool:
    """Does Python want to be called around its step?"""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def has_state(base: Optimizer, params: Iterable[Tensor]) -> bool:
    """Has each of these weights the momentum that `sgd` needs?"""
    moving = {p for group in base.param_groups if group["momentum"] for p in group["params"]}
    return all(_buffer(base, p) is not None for p in params if p in moving)


def lay_out_momentum(base: Optimizer) -> None:
    """Momentum in memory as the weights are, in place of one that is not: a checkpoint may bring another layout."""
    for p, state in base.state.items():
        buffer = state.get("momentum_buffer")
        if (
            isinstance(buffer, Tensor)
            and buffer.is_cuda
            and (_like(buffer, p) is not buffer or buffer.dtype != p.dtype)
        ):
            state["momentum_buffer"] = torch.empty_like(p, requires_grad=False).copy_(buffer)


def sgd(base: Optimizer, gradients: Mapping[Tensor, Tensor], rates: Tensor, skip: Tensor) -> None:
    """A step of the base with these gradients, unless `skip`; `rates` has a row for each group (see `rates_of`)."""
    for group, rate in zip(base.param_groups, rates, strict=True):
        params = [p for p in group["params"] if p in gradients]
        beside = [_like(gradients[p], p) for p in params]
        buffers = [_buffer(base, p) if group["momentum"] else p for p in params]
        for kind in _kinds(beside):
            _sgd(group, [[tensors[i] for i in kind] for tensors in (params, beside, buffers)], rate, skip)


def rehearse_sgd(base: Optimizer, gradients: Mapping[Tensor, Tensor], rates: Tensor, skip: Tensor) -> None:
    """Compile what `sgd` will launch, without a step: on tensors of one number."""
    for group, rate in zip(base.param_groups, rates, strict=True):
        for dtype in {gradients[p].dtype for p in group["params"] if p in gradients}:
            theta, gradient, buffer = (torch.zeros(1, device=rates.device) for _ in range(3))
            _sgd(group, [[theta], [gradient.to(dtype)], [buffer]], rate, skip)


def rates_of(base: Optimizer) -> list[list[float]]:
    """(lr, weight decay, momentum, dampening) of each group."""
    keys = ("lr", "weight_decay", "momentum", "dampening")
    return [[float(group[key]) for key in keys] for group in base.param_groups]


def _sgd(group: dict[str, Any], lists: Sequence[Sequence[Tensor]], rates: Tensor, skip: Tensor) -> None:
    from flatmin.core import triton_kernels

    table, chunks = _table(lists, range(len(lists[0])), triton_kernels.BLOCK)
    triton_kernels.sgd[(chunks,)](
        table,
        chunks,
        rates,
        skip,
        _triton_type(lists[1][0]),
        group["momentum"] != 0,
        group["weight_decay"] != 0,
        group["nesterov"],
        group["maximize"],
        triton_kernels.BLOCK,
        **triton_kernels.OPTIONS,
    )


def _buffer(base: Optimizer, param: Tensor) -> Any:
    return base.state.get(param, {}).get("momentum_buffer")


def _like(tensor: Tensor, param: Tensor) -> Tensor:
    """The numbers in memory as those of `param` are: the kernels walk through memory."""
    if lies_like(tensor, param) and tensor.data_ptr() % ALIGNED == 0:
        return tensor
    return torch.empty_like(param, dtype=tensor.dtype).copy_(tensor)


def _kinds(*lists: Sequence[Tensor]) -> list[list[int]]:
    """The places of tensors that are alike in all lists: a launch each."""
    kinds: dict[tuple[torch.dtype, ...], list[int]] = {}
    for place, tensors in enumerate(zip(*lists, strict=True)):
        if tensors[0].numel():
            kinds.setdefault(tuple(tensor.dtype for tensor in tensors), []).append(place)
    return list(kinds.values())


def _triton_type(tensor: Tensor) -> Any:
    import triton.language as tl

    return getattr(tl, TYPES[tensor.dtype])


# ---- tables of addresses


class Tables:
    """Room for the tables of one capture, from before it.

    Memory that is asked for during a capture may be written by what was captured earlier, at every replay.
    """

    def __init__(self, params: Sequence[Tensor], passes: int) -> None:
        from flatmin.core import triton_kernels

        chunks = sum(_chunks(p.numel(), triton_kernels.BLOCK) for p in params)
        # `lengths` for each pass, `move` and `sgd`: five words for a chunk at most, and the ends of their tables
        words = (passes + 2) * (5 * chunks + 4 * len(params) + 2)
        self.room = torch.empty(words, dtype=torch.int64, device=params[0].device)
        self.used = 0
        self.contents: list[tuple[Tensor, Tensor]] = []

    def later(self, content: Tensor) -> Tensor:
        """A place for that content, which is written there by `fill`."""
        place = self.room[self.used : self.used + len(content)]
        if len(place) < len(content):
            raise RuntimeError(f"a capture's tables need more than the {len(self.room)} numbers set aside for them")
        self.used += -(-len(content) // 2) * 2  # so that all begin at a multiple of 16 bytes
        self.contents.append((place, content))
        return place

    def fill(self) -> None:
        for place, content in self.contents:
            place.copy_(content)
        self.contents.clear()


@contextmanager
def bound(params: Sequence[Tensor], passes: int) -> Iterator[Tables | None]:
    """Around the capture of that many passes: its tables, which must live as long as the graph; filled at the end."""
    if not _has_triton():
        yield None
        return
    tables = Tables(params, passes)
    _captures.append(tables)
    try:
        yield tables
    finally:
        _captures.pop()
    tables.fill()


def _table(
    lists: Sequence[Sequence[Tensor]], places: Sequence[int], block: int, *, one_each: bool = False
) -> tuple[Tensor, int]:
    """The table of these lists, as kernels.py describes it, on their device; and the number of chunks.

    A chunk's place is its tensor's, or with `one_each` the one after that of the chunk before.
    """
    sizes = torch.tensor([tensor.numel() for tensor in lists[0]])
    counts = (sizes + block - 1) // block
    owners = torch.arange(len(sizes)).repeat_interleave(counts)
    numbers = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
    rows = []
    for tensors in lists:
        begins = torch.tensor([tensor.data_ptr() for tensor in tensors])
        rows.append(begins[owners] + numbers * block * tensors[0].element_size())
    rows.append((sizes[owners] - numbers * block).clamp(max=block))
    rows.append(torch.tensor(places)[owners] + (numbers if one_each else 0))
    return _constant(torch.cat(rows), lists[0][0].device), len(owners)


def _constant(content: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on the device; during a capture, from its end on."""
    return _captures[-1].later(content) if _captures else content.to(device, non_blocking=True)


def _chunks(size: int, block: int) -> int:
    return -(-size // block)
