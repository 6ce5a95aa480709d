"""Arithmetic on lists of tensors, without host syncs.

Python launches the kernels of a training step ahead of the GPU, until something reads a number back. So the decisions
of a step ("was every gradient finite?") stay on the device as 0-dim bool tensors, and so does what depends on them:
`zero_unless_` zeroes a list unless a flag holds, `select_` overwrites one list with another if a flag holds.

`plain` looks through the wrappers of a gradient or weight (a shard of a DTensor, a sparse tensor's values, a complex
tensor's two reals) to the dense real numbers on this rank. `Copies` keeps copies of tensors and restores them.
"""

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)

# not a subclass such as DTensor; `type(t) in …` is the fast test, `….issuperset(map(type, tensors))` that of many
ORDINARY_TYPES = frozenset((Tensor, torch.nn.Parameter, torch.nn.Buffer))
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
    """Start + Δ in the dtype of `start`, each number rounded towards it: rounded to nearest, it could leave a ball.

    >>> moved_within(torch.tensor(1.0, dtype=torch.bfloat16), 0.0078)       # to nearest it would be 1.0078125
    tensor(1., dtype=torch.bfloat16)
    """
    exact = widest_dtype(start)
    moved = (start.to(exact) + delta).to(start.dtype)
    length: float | Tensor = delta.abs() if isinstance(delta, Tensor) else abs(delta)
    too_far = (moved.to(exact) - start).abs() > length
    return torch.where(too_far, torch.nextafter(moved, start), moved)


def widest_dtype(tensor: Tensor) -> torch.dtype:
    """The widest dtype of the device, in which rounding is measured: float64, but not on an Apple GPU."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def is_dense(tensor: Tensor) -> bool:
    """Do its numbers fill their memory without gaps or overlap, in whatever order?

    >>> image = torch.zeros(2, 3, 4, 4)
    >>> is_dense(image.to(memory_format=torch.channels_last)), is_dense(image[..., :3])
    (True, False)
    """
    return tensor.is_contiguous() or in_memory_order(tensor).is_contiguous()


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
    """Target ← source for each pair, in place: a target keeps its storage. On a GPU, a launch per device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in pairs:
        targets, sources = kinds[target.device, target.dtype]
        targets.append(plain(target))
        sources.append(plain(source))
    for targets, sources in kinds.values():
        torch._foreach_copy_(targets, sources)


def zero_unless_(tensors: Iterable[Tensor], flag: Tensor) -> None:
    """Zero every tensor unless `flag` holds, in place.

    The bits are multiplied by 0 or 1 as integers, not the numbers: 0 · nan = nan.

    >>> spoilt = torch.tensor([1.0, float("nan")])
    >>> zero_unless_([spoilt], torch.tensor(False))
    >>> spoilt
    tensor([0., 0.])
    """
    tensors = list(tensors)
    if {(type(t), t.layout, t.dtype, t.device) for t in tensors} == {
        (Tensor, torch.strided, torch.float32, flag.device)
    }:
        torch._foreach_mul_([t.view(torch.int32) for t in tensors], flag.to(torch.int32))
        return
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for bits in map(_bits, map(plain, tensors)):
        kinds[bits.device, bits.dtype].append(bits)
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
        bits = _bits(plain(target))
        kinds[bits.device, bits.dtype].append((bits, _bits(plain(source))))
    for (device, _), alike in kinds.items():
        targets, sources = map(list, zip(*alike, strict=True))
        _select_lists(targets, sources, flag.to(device))


def _select_lists(targets: list[Tensor], sources: list[Tensor], flag: Tensor) -> None:
    """The same for integers on one device."""
    if flag.device.type == "cpu":
        select_one_by_one(targets, sources, flag)
    else:
        select_at_once(targets, sources, flag)


def select_one_by_one(targets: list[Tensor], sources: list[Tensor], flag: Tensor) -> None:
    """The fewest bytes: 3 times the size. On the CPU `where` goes number by number, so it gets pairs as one int64."""
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


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def _fits_int64(tensor: Tensor) -> bool:
    return tensor.nbytes % 8 == 0 and tensor.storage_offset() * tensor.element_size() % 8 == 0


class Copies(Generic[Key]):
    """Copies of tensors by key (a name, or the tensor itself), in memory that is reused from step to step.

    Most steps copy what the step before did. So the lists that torch copies at once are kept too, and serve again
    (`take_again`, `put_back_again`) until a tensor is another one or is laid out otherwise.

    >>> copies, weight = Copies(), torch.tensor([1.0])
    >>> copies.take({"weight": weight})
    >>> _ = weight.add_(1)
    >>> copies.put_back({"weight": weight})
    >>> weight
    tensor([1.])
    """

    def __init__(self) -> None:
        self._held: dict[Key, Tensor] = {}
        self._memory: dict[Key, Tensor] = {}
        self._lists: _CopyLists[Key] | None = None  # of the last `take` that began with no copies

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def __getitem__(self, key: Key) -> Tensor:
        return self._held[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._held)

    def are_dense(self) -> bool:
        """Are all tensors that were taken dense? False if that is not known."""
        return self._lists is not None and self._held is self._lists.copies and self._lists.dense

    def nbytes(self) -> int:
        """The memory it holds, in use or not."""
        return sum(plain(memory).nbytes for memory in self._memory.values())

    def allocate(self, key: Key, like: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of the shape of `like`, to write the copy into."""
        if self._lists is not None and self._held is self._lists.copies:
            self._held = dict(self._held)
        self._held[key] = self._allocate(key, like, dtype)
        return self._held[key]

    def _allocate(self, key: Key, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The memory of the last step if it still fits: new pages cost the CPU more than the copy itself."""
        dtype = like.dtype if dtype is None else dtype
        memory = self._memory.get(key)
        fits = (like.shape, like.stride(), dtype, like.device)
        if memory is None or (memory.shape, memory.stride(), memory.dtype, memory.device) != fits:
            memory = self._memory[key] = torch.empty_like(like, dtype=dtype, requires_grad=False)
        return memory

    @torch.no_grad()
    def take_again(self, tensors: Sequence[Tensor | None]) -> bool:
        """Copy these if they are those of the last `take`, where and as they were; False: they are not."""
        lists = self._lists
        if lists is None or self._held or lists.layout != _layout(tensors):
            return False
        for ours, theirs in lists.pairs(tensors):
            torch._foreach_copy_(ours, theirs)
        self._held = lists.copies
        return True

    def holds_just(self, tensors: Sequence[Tensor | None]) -> bool:
        """Are these the tensors that were taken, all of them, where and as they were?"""
        lists = self._lists
        return lists is not None and self._held is lists.copies and lists.layout == _layout(tensors)

    @torch.no_grad()
    def put_back_again(self, tensors: Sequence[Tensor | None], *, flag: Tensor | None = None) -> bool:
        """Restore all of these at once, on the device if `flag` holds; False: they are not those that were taken.

        With a flag the copies are overwritten.
        """
        if self._lists is None or not self.holds_just(tensors):
            return False
        for ours, theirs in self._lists.pairs(tensors):
            if flag is None:
                torch._foreach_copy_(theirs, ours)
            else:
                _select_lists(list(map(_bits, theirs)), list(map(_bits, ours)), flag.to(theirs[0].device))
        return True

    @torch.no_grad()
    def take(self, tensors: Mapping[Key, Tensor]) -> None:
        first = not self._held
        copies = {key: self._allocate(key, tensor) for key, tensor in tensors.items()}
        copy_((copies[key], tensor) for key, tensor in tensors.items())
        # last: if memory runs out above, nothing that was not copied is ever put back
        self._held = copies if first else {**self._held, **copies}
        if first:
            layout = _layout(tensors.values())
            self._lists = None if layout is None else _CopyLists(tensors, copies, layout)

    @torch.no_grad()
    def put_back(self, tensors: Mapping[Key, Tensor]) -> None:
        """Restore these tensors, in place; one that is new, or has changed its shape, stays as it is."""
        known = {key: tensor for key, tensor in tensors.items() if key in self._held}
        copy_((tensor, self[key]) for key, tensor in known.items() if tensor.shape == self[key].shape)

    def memory(self) -> Iterable[Tensor]:
        return {**self._memory, **self._held}.values()

    def release(self) -> None:
        """Drop all copies, and their memory."""
        self._held, self._memory, self._lists = {}, {}, None

    def forget(self) -> None:
        """Drop all copies; keep the memory of those held last, and free what was not used since the last call."""
        if self._held:
            self._memory, self._held = dict(self._held), {}


class _CopyLists(Generic[Key]):
    """Copies of ordinary tensors, in lists of one device and dtype each; the tensors themselves are not held."""

    def __init__(self, tensors: Mapping[Key, Tensor], copies: dict[Key, Tensor], layout: list[tuple[Any, ...]]) -> None:
        self.copies, self.layout = copies, layout
        kinds: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[int]]] = defaultdict(lambda: ([], []))
        for place, (key, tensor) in enumerate(tensors.items()):
            ours, places = kinds[tensor.device, tensor.dtype]
            ours.append(plain(copies[key]))
            places.append(place)
        self._kinds = [(ours, places, dtype.is_complex) for (_, dtype), (ours, places) in kinds.items()]
        self.dense = all(map(is_dense, tensors.values()))

    def pairs(self, tensors: Sequence[Any]) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Lists of copies, and of those of these tensors that they are of."""
        found = []
        for ours, places, is_complex in self._kinds:
            theirs = list(map(tensors.__getitem__, places))
            found.append((ours, list(map(torch.view_as_real, theirs)) if is_complex else theirs))
        return found


def _layout(tensors: Collection[Tensor | None]) -> list[tuple[Any, ...]] | None:
    """Which tensors these are, where, and how they lie in memory; None if some are not ordinary ones."""
    if not ORDINARY_TYPES.issuperset(map(type, tensors)):
        return None
    return [(id(t), t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors]  # type: ignore[union-attr]
