"""Arithmetic on lists of tensors, without host syncs.

Python launches the kernels of a training step ahead of the GPU until something reads a number back. So the decisions
of a step ("was every gradient finite?") stay on the device as 0-dim bool tensors, and so does what depends on them:
`zero_unless_` zeroes a list unless a flag holds, `select_` overwrites one list with another if a flag holds.

`plain` looks through the wrappers of a gradient or weight (a shard of a DTensor, a sparse tensor's values, a complex
tensor's two reals) to the dense real numbers on this rank.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

# not a subclass such as DTensor; `type(t) in …` is the fast test, `….issuperset(map(type, tensors))` that for many
ORDINARY_TYPES = frozenset((Tensor, torch.nn.Parameter, torch.nn.Buffer))
STRIDED = frozenset((torch.strided,))
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def plain(tensor: Tensor) -> Tensor:
    """The dense real numbers of `tensor` on this rank; the same memory, not a copy.

    >>> plain(torch.tensor([3 + 4j]))
    tensor([[3., 4.]])
    """
    if tensor.is_sparse:
        tensor = tensor._values()
    if type(tensor) not in ORDINARY_TYPES:
        to_local = getattr(tensor, "to_local", None)  # a DTensor; by name: a build of torch may lack torch.distributed
        tensor = tensor if to_local is None else to_local()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype for arithmetic on `tensor`: its own, but float32 for half precision.

    >>> compute_dtype(torch.zeros(1, dtype=torch.bfloat16)), compute_dtype(torch.zeros(1, dtype=torch.complex128))
    (torch.float32, torch.complex128)
    """
    return torch.promote_types(tensor.dtype, torch.float32)


def moved_within(start: Tensor, delta: float | Tensor) -> Tensor:
    """Start + Δ in the dtype of `start`, each entry rounded towards it: rounded to nearest, it could leave a ball.

    >>> moved_within(torch.tensor(1.0, dtype=torch.bfloat16), 0.0078)       # to nearest it would be 1.0078125
    tensor(1., dtype=torch.bfloat16)
    """
    exact = widest_dtype(start)
    moved = (start.to(exact) + delta).to(start.dtype)
    length: float | Tensor = delta.abs() if isinstance(delta, Tensor) else abs(delta)
    too_far = (moved.to(exact) - start).abs() > length
    return torch.where(too_far, torch.nextafter(moved, start), moved)


def widest_dtype(tensor: Tensor) -> torch.dtype:
    """The widest dtype of the device, in which rounding is measured: float64, except on an Apple GPU."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def is_dense(tensor: Tensor) -> bool:
    """Do its entries fill their memory without gaps or overlap, in any order?

    >>> image = torch.zeros(2, 3, 4, 4)
    >>> is_dense(image.to(memory_format=torch.channels_last)), is_dense(image[..., :3])
    (True, False)
    """
    return tensor.is_contiguous() or in_memory_order(tensor).is_contiguous()


def written_once(tensor: Tensor) -> Tensor:
    """The same memory without repetitions: of an expanded tensor, the one that was expanded.

    >>> tensor = torch.zeros(2, 1).expand(2, 3)
    >>> written_once(tensor).shape, written_once(tensor.clone()).shape
    (torch.Size([2, 1]), torch.Size([2, 3]))
    """
    if 0 not in tensor.stride():
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def has_layout_of(tensor: Tensor, other: Tensor) -> bool:
    """Is it laid out in memory like `other`, a tensor of its shape?

    >>> image = torch.zeros(2, 3, 4, 4)
    >>> has_layout_of(image.to(memory_format=torch.channels_last), image)
    False
    """
    strides = tensor.stride(), other.stride()
    return strides[0] == strides[1] or all(
        here == there for here, there, size in zip(*strides, other.shape, strict=True) if size > 1
    )


def in_memory_order(tensor: Tensor) -> Tensor:
    """The same memory with its dimensions permuted so that the last one has the smallest stride."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def copy_(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Target ← source for each pair, in place: targets keep their storage. One launch per device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in pairs:
        targets, sources = kinds[target.device, target.dtype]
        targets.append(plain(target))
        sources.append(plain(source))
    for targets, sources in kinds.values():
        torch._foreach_copy_(targets, sources)


def zero_unless_(tensors: Iterable[Tensor], flag: Tensor) -> None:
    """Zero every tensor unless `flag` holds, in place.

    The bits, as integers, are multiplied by 0 or 1, not the numbers: 0 · nan = nan.

    >>> spoilt = torch.tensor([1.0, float("nan")])
    >>> zero_unless_([spoilt], torch.tensor(False))
    >>> spoilt
    tensor([0., 0.])
    """
    tensors = list(tensors)
    if {(type(t), t.layout, t.dtype, t.device) for t in tensors} == {
        (Tensor, torch.strided, torch.float32, flag.device)
    }:
        torch._foreach_mul_([written_once(t).view(torch.int32) for t in tensors], flag.to(torch.int32))
        return
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for numbers in map(bits, map(written_once, map(plain, tensors))):
        kinds[numbers.device, numbers.dtype].append(numbers)
    for (device, dtype), alike in kinds.items():
        torch._foreach_mul_(alike, flag.to(device, dtype))


def select_(pairs: Iterable[tuple[Tensor, Tensor]], flag: Tensor) -> None:
    """Target ← source for each pair, in place, if `flag` holds; else nothing. The sources are overwritten.

    >>> weight = torch.tensor([1.0])
    >>> select_([(weight, torch.tensor([2.0]))], torch.tensor(True))
    >>> weight
    tensor([2.])
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for target, source in pairs:
        numbers = bits(plain(target))
        kinds[numbers.device, numbers.dtype].append((numbers, bits(plain(source))))
    for (device, _), alike in kinds.items():
        targets, sources = map(list, zip(*alike, strict=True))
        select_lists(targets, sources, flag.to(device))


def select_lists(targets: list[Tensor], sources: list[Tensor], flag: Tensor) -> None:
    """The same for integers on one device."""
    if flag.device.type == "cpu":
        select_one_by_one(targets, sources, flag)
    else:
        select_at_once(targets, sources, flag)


def select_one_by_one(targets: list[Tensor], sources: list[Tensor], flag: Tensor) -> None:
    """The fewest bytes: 3 times the size. On the CPU `where` goes entry by entry, so it gets pairs as one int64."""
    for target, source in zip(targets, sources, strict=True):
        if target.is_contiguous() and source.is_contiguous() and _fits_int64(target) and _fits_int64(source):
            target, source = target.view(-1).view(torch.int64), source.view(-1).view(torch.int64)  # noqa: PLW2901
        torch.where(flag, source, target, out=target)


def select_at_once(targets: list[Tensor], sources: list[Tensor], flag: Tensor) -> None:
    """The fewest launches: target·(1 − flag) + source·flag over integers, 3 kernels in all, 7 times the size."""
    taken = flag.to(targets[0].dtype)
    torch._foreach_mul_(sources, taken)
    torch._foreach_mul_(targets, 1 - taken)
    torch._foreach_add_(targets, sources)


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def _fits_int64(tensor: Tensor) -> bool:
    return tensor.nbytes % 8 == 0 and tensor.storage_offset() * tensor.element_size() % 8 == 0
