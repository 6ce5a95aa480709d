"""Arithmetic on lists of weights in one launch and one pass over memory, on a GPU.

    move     θ + factor · gradient, written elsewhere       reads θ and gradient, writes θ + Δ
    sgd      a step of torch.optim.SGD                      reads θ, gradient and momentum, writes θ and momentum
    lengths  ‖t‖ of each tensor                             reads them

Gradients and θ + Δ may be in half precision, θ and the momentum are float32. So AMP in bfloat16 moves, in units of a
float32 copy of the parameters, 1.5 (θ to the copy that the clean pass computes with) + 0.5 (the gradient's norm)
+ 2 (`move`) + 0.5 (is the last gradient finite?) + 4.5 (`sgd`) = 9. θ is neither copied nor restored.

The kernels take tables of addresses. The host cannot write to the device during a capture, so a capture's tables are
filled when it is over: `reserved_tables` does that.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from flatmin.core.recorded_launches import DeviceNumbers
from flatmin.core.tensors import has_layout_of, is_dense

ALIGNMENT_BYTES = 16  # of every tensor, for the kernels' wide loads
FLOAT32_BYTES = 4
TRITON_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class _Captures(local):
    """The captures of this thread that are in progress."""

    def __init__(self) -> None:
        self.tables: list[Tables] = []


_captures = _Captures()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def can_update(params: Sequence[Tensor]) -> bool:
    """Can the kernels update these weights? They must be float32, besides what `can_read` requires."""
    return can_read(params) and all(p.dtype == torch.float32 for p in params)


def can_read(tensors: Sequence[Tensor]) -> bool:
    """Can the kernels read these tensors? They must be dense, aligned and on a GPU, and Triton must be installed."""
    return _has_triton() and all(
        t.is_cuda and t.dtype in TRITON_TYPES and is_dense(t) and t.data_ptr() % ALIGNMENT_BYTES == 0 for t in tensors
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
    """Moved ← θ + factor · gradient, with one factor per tensor; θ if `finite` does not hold.

    `rounded_once`: the product is not rounded before the sum, as in torch's fused SGD.
    """
    from flatmin.core import triton_kernels

    aligned = [_in_layout_of(gradient, p) for gradient, p in zip(gradients, theta, strict=True)]
    factors = factors.float().contiguous()
    for kind in _by_dtype(aligned, moved):
        lists = [[tensors[i] for i in kind] for tensors in (theta, aligned, moved)]
        types = _triton_type(lists[1][0]), _triton_type(lists[2][0])
        table, chunks = _table(lists, kind, triton_kernels.BLOCK)
        arguments = (table, chunks, factors, finite, *types, rounded_once, triton_kernels.BLOCK)
        triton_kernels.move[(chunks,)](*arguments, **triton_kernels.LAUNCH_OPTIONS)


def lengths(tensors: Sequence[Tensor]) -> Tensor:
    """‖t‖₂ of each tensor, in float32: the squares of each chunk are summed, then the sums of a tensor's chunks."""
    from flatmin.core import triton_kernels

    counts = [_chunks(tensor.numel(), triton_kernels.BLOCK) for tensor in tensors]
    firsts = [sum(counts[:place]) for place in range(len(counts))]
    sums = torch.empty(sum(counts), dtype=torch.float32, device=tensors[0].device)
    for kind in _by_dtype(tensors):
        places = [firsts[i] for i in kind]
        table, chunks = _table([[tensors[i] for i in kind]], places, triton_kernels.BLOCK, one_each=True)
        arguments = (table, chunks, sums, _triton_type(tensors[kind[0]]), triton_kernels.BLOCK)
        triton_kernels.squares[(chunks,)](*arguments, **triton_kernels.LAUNCH_OPTIONS)
    found = torch.empty(len(tensors), dtype=torch.float32, device=sums.device)
    ends = _to_device(torch.tensor([*firsts, len(sums)], device="cpu"), sums.device)
    triton_kernels.roots[(len(tensors),)](ends, sums, found, triton_kernels.ROOTS_BLOCK)
    return found


class GradientKernels:
    """The same for one list of weights and their gradients in an eager step, in tables that outlive it.

    The weights stay where they are; the gradients are at new addresses in every step. `locate` writes these to the
    device, and kernels turn them into the chunks' addresses. So the launches of a step are always the same, and can be
    recorded (recorded_launches.py).
    """

    def __init__(self, gradients: Sequence[Tensor], params: Sequence[Tensor] | None = None) -> None:
        """Without `params` there is nothing to move."""
        from flatmin.core.triton_kernels import BLOCK

        device = gradients[0].device
        self._type = _triton_type(gradients[0])
        owners, numbers, counts = _chunks_of(gradients, BLOCK)
        self._chunks, self._block = len(owners), BLOCK
        self._begins = DeviceNumbers([0] * len(gradients), torch.int64, device)
        self._offsets = _to_device(numbers * BLOCK * gradients[0].element_size(), device)
        rows = [torch.zeros_like(owners), counts, torch.arange(len(owners), device="cpu")]
        self._gradients = _to_device(torch.cat(rows), device)
        self._owners = _to_device(owners, device)
        self._ends = _to_device(torch.searchsorted(owners, torch.arange(len(gradients) + 1, device="cpu")), device)
        self._sums = torch.empty(self._chunks, dtype=torch.float32, device=device)
        if params is not None:
            theta = (
                torch.tensor(list(map(Tensor.data_ptr, params)), device="cpu")[owners] + numbers * BLOCK * FLOAT32_BYTES
            )
            self._moved = _to_device(torch.cat([theta, torch.zeros_like(owners), theta, counts, owners]), device)

    def locate(self, addresses: Sequence[int]) -> None:
        """Tell the kernels where the gradients are now."""
        self._begins.write(addresses)

    def lengths(self) -> Tensor:
        """‖g‖₂ of each gradient."""
        from flatmin.core import triton_kernels

        self._find_chunks()
        arguments = (self._gradients, self._chunks, self._sums, self._type, self._block)
        triton_kernels.squares[(self._chunks,)](*arguments, **triton_kernels.LAUNCH_OPTIONS)
        found = torch.empty(len(self._ends) - 1, dtype=torch.float32, device=self._sums.device)
        triton_kernels.roots[(len(found),)](self._ends, self._sums, found, triton_kernels.ROOTS_BLOCK)
        return found

    def move(self, factors: Tensor, finite: Tensor) -> None:
        """θ ← θ + factor · gradient, rounded once; θ stays if `finite` does not hold."""
        from triton.language import float32

        from flatmin.core import triton_kernels

        self._find_chunks()
        self._moved[self._chunks : 2 * self._chunks].copy_(self._gradients[: self._chunks])
        arguments = (self._moved, self._chunks, factors.float().contiguous(), finite, self._type, float32, True)
        triton_kernels.move[(self._chunks,)](*arguments, self._block, **triton_kernels.LAUNCH_OPTIONS)

    def zero_unless(self, flag: Tensor) -> None:
        """The gradients ← 0 unless `flag` holds."""
        from flatmin.core import triton_kernels

        self._find_chunks()
        arguments = (self._gradients, self._chunks, flag, self._type, self._block)
        triton_kernels.zero_unless[(self._chunks,)](*arguments, **triton_kernels.LAUNCH_OPTIONS)

    def _find_chunks(self) -> None:
        """Compute the chunks' addresses from those of the gradients, on the device."""
        torch.add(self._begins.on_device[self._owners], self._offsets, out=self._gradients[: self._chunks])


class ConditionalCopy:
    """Targets ← sources if a flag on the device holds, for float32 tensors that stay where they are."""

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        from flatmin.core.triton_kernels import BLOCK

        self._table, self._chunks = _table([targets, sources], range(len(targets)), BLOCK)

    def __call__(self, flag: Tensor) -> None:
        from flatmin.core import triton_kernels

        arguments = (self._table, self._chunks, flag, triton_kernels.BLOCK)
        triton_kernels.copy_if[(self._chunks,)](*arguments, **triton_kernels.LAUNCH_OPTIONS)


def conditional_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> ConditionalCopy | None:
    """A `ConditionalCopy` for these tensors, if possible."""
    everything = [*targets, *sources]
    fits = all(t.dtype == torch.float32 and t.is_cuda for t in everything) and can_read(everything)
    if not fits or not has_gradient_kernels(torch.float32, targets[0].device) or not any(t.numel() for t in targets):
        return None
    alike = all(has_layout_of(target, source) for target, source in zip(targets, sources, strict=True))
    return ConditionalCopy(targets, sources) if alike else None


def has_gradient_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Do `GradientKernels` run there, for gradients of this dtype? On the current GPU, if Triton can compile them."""
    return _has_triton() and device.index == torch.cuda.current_device() and _compile_kernels(dtype, device)


@cache
def _compile_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Do the kernels compile? That needs a C compiler."""
    if dtype not in TRITON_TYPES:
        return False
    weight, gradient = (torch.zeros(1, dtype=kind, device=device) for kind in (torch.float32, dtype))
    yes = torch.ones((), dtype=torch.bool, device=device)
    try:
        kernels = GradientKernels([gradient], [weight])
        kernels.locate([gradient.data_ptr()])
        kernels.move(kernels.lengths(), yes)
        kernels.zero_unless(yes)
        ConditionalCopy([weight], [weight])(yes)
    except Exception as error:  # whatever is missing: plain torch is just as correct, only slower
        warnings.warn(
            f"the kernels that make eager steps fast do not run here ({type(error).__name__}: {error}); without them "
            "steps are just as correct, but slower",
            stacklevel=2,
        )
        return False
    return True


def is_plain_sgd(base: Optimizer, *also: type[SGD]) -> bool:
    """Is its step the one that `sgd` computes? That of torch's own SGD, without hooks, which a kernel would not call.

    Or of one of the classes in `also`, if the caller has changed the gradients as they would.

    With `fused=True` torch uses its own kernel, which rounds differently.
    """
    groups = base.param_groups
    return (
        type(base) in (SGD, *also)
        and not has_hooks(base)
        and not any(isinstance(value, Tensor) and value.is_cuda for group in groups for value in group.values())
        and not any(group["differentiable"] or group["fused"] for group in groups)
    )


def has_hooks(optimizer: Optimizer) -> bool:
    """Must any Python function be called around its step?"""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def has_state(base: Optimizer, params: Iterable[Tensor]) -> bool:
    """Does each of these weights have the momentum that `sgd` needs?"""
    moving = {p for group in base.param_groups if group["momentum"] for p in group["params"]}
    return all(_buffer(base, p) is not None for p in params if p in moving)


def match_momentum_layout(base: Optimizer) -> None:
    """Give each momentum the layout of its weight: a checkpoint may bring another."""
    for p, state in base.state.items():
        buffer = state.get("momentum_buffer")
        if (
            isinstance(buffer, Tensor)
            and buffer.is_cuda
            and (_in_layout_of(buffer, p) is not buffer or buffer.dtype != p.dtype)
        ):
            state["momentum_buffer"] = torch.empty_like(p, requires_grad=False).copy_(buffer)


def sgd(base: Optimizer, gradients: Mapping[Tensor, Tensor], rates: Tensor, skip: Tensor) -> None:
    """A step of the base with these gradients, unless `skip`; `rates` has a row per group (see `rates_of`)."""
    for group, rate in zip(base.param_groups, rates, strict=True):
        params = [p for p in group["params"] if p in gradients]
        aligned = [_in_layout_of(gradients[p], p) for p in params]
        buffers = [_buffer(base, p) if group["momentum"] else p for p in params]
        for kind in _by_dtype(aligned):
            _sgd(group, [[tensors[i] for i in kind] for tensors in (params, aligned, buffers)], rate, skip)


def compile_sgd(base: Optimizer, gradients: Mapping[Tensor, Tensor], rates: Tensor, skip: Tensor) -> None:
    """Compile the kernels that `sgd` will launch, without taking a step: on tensors with one element."""
    for group, rate in zip(base.param_groups, rates, strict=True):
        for dtype in {gradients[p].dtype for p in group["params"] if p in gradients}:
            theta, gradient, buffer = (torch.zeros(1, dtype=torch.float32, device=rates.device) for _ in range(3))
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
        **triton_kernels.LAUNCH_OPTIONS,
    )


def _buffer(base: Optimizer, param: Tensor) -> Any:
    return base.state.get(param, {}).get("momentum_buffer")


def _in_layout_of(tensor: Tensor, param: Tensor) -> Tensor:
    """The tensor in the memory layout of `param`: the kernels walk through memory."""
    if has_layout_of(tensor, param) and tensor.data_ptr() % ALIGNMENT_BYTES == 0:
        return tensor
    return torch.empty_like(param, dtype=tensor.dtype).copy_(tensor)


def _by_dtype(*lists: Sequence[Tensor]) -> list[list[int]]:
    """The indices of tensors whose dtypes agree in all lists: one launch per kind."""
    kinds: dict[tuple[torch.dtype, ...], list[int]] = {}
    for place, tensors in enumerate(zip(*lists, strict=True)):
        if tensors[0].numel():
            kinds.setdefault(tuple(tensor.dtype for tensor in tensors), []).append(place)
    return list(kinds.values())


def _triton_type(tensor: Tensor) -> Any:
    import triton.language as tl

    return getattr(tl, TRITON_TYPES[tensor.dtype])


# ---- tables of addresses


class Tables:
    """Memory for the tables of one capture, allocated before it.

    Memory allocated during a capture may be overwritten in every replay by kernels captured earlier.
    """

    def __init__(self, params: Sequence[Tensor], passes: int) -> None:
        from flatmin.core import triton_kernels

        chunks = sum(_chunks(p.numel(), triton_kernels.BLOCK) for p in params)
        # `lengths` for each pass, `move` and `sgd`: at most five words per chunk, and the ends of their tables
        words = (passes + 2) * (5 * chunks + 4 * len(params) + 2)
        self.memory = torch.empty(words, dtype=torch.int64, device=params[0].device)
        self.used = 0
        self.contents: list[tuple[Tensor, Tensor]] = []

    def reserve(self, content: Tensor) -> Tensor:
        """Memory for this content, which `fill` writes there."""
        place = self.memory[self.used : self.used + len(content)]
        if len(place) < len(content):
            raise RuntimeError(f"a capture's tables need more than the {len(self.memory)} numbers reserved for them")
        self.used += -(-len(content) // 2) * 2  # so that each begins at a multiple of 16 bytes
        self.contents.append((place, content))
        return place

    def fill(self) -> None:
        for place, content in self.contents:
            place.copy_(content)
        self.contents.clear()


@contextmanager
def reserved_tables(params: Sequence[Tensor], passes: int) -> Iterator[Tables | None]:
    """Around a capture of this many passes: its tables, filled at the end. They must live as long as the graph."""
    if not _has_triton():
        yield None
        return
    tables = Tables(params, passes)
    _captures.tables.append(tables)
    try:
        yield tables
    finally:
        _captures.tables.pop()
    tables.fill()


def _table(
    lists: Sequence[Sequence[Tensor]], places: Sequence[int], block: int, *, one_each: bool = False
) -> tuple[Tensor, int]:
    """The table of these lists, as triton_kernels.py describes it, on their device; and the number of chunks.

    A chunk's place is its tensor's, or with `one_each` the one after the previous chunk's.
    """
    owners, numbers, counts = _chunks_of(lists[0], block)
    rows = []
    for tensors in lists:
        begins = torch.tensor([tensor.data_ptr() for tensor in tensors], device="cpu")
        rows.append(begins[owners] + numbers * block * tensors[0].element_size())
    rows += [counts, torch.tensor(places, device="cpu")[owners] + (numbers if one_each else 0)]
    return _to_device(torch.cat(rows), lists[0][0].device), len(owners)


def _chunks_of(tensors: Sequence[Tensor], block: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each chunk: the index of its tensor, its index within that tensor, and how many numbers it has."""
    sizes = torch.tensor([tensor.numel() for tensor in tensors], device="cpu")
    counts = (sizes + block - 1) // block
    owners = torch.arange(len(sizes), device="cpu").repeat_interleave(counts)
    numbers = torch.arange(len(owners), device="cpu") - (counts.cumsum(0) - counts)[owners]
    return owners, numbers, (sizes[owners] - numbers * block).clamp(max=block)


def _to_device(content: Tensor, device: torch.device) -> Tensor:
    """Numbers from the host, copied to the device; during a capture, they arrive at its end."""
    tables = _captures.tables
    return tables[-1].reserve(content) if tables else content.to(device, non_blocking=True)


def _chunks(size: int, block: int) -> int:
    return -(-size // block)
