"""Arithmetic on lists of tensors that never asks the host.

A training step on a GPU runs ahead of the Python that starts it, until something reads a number back. So the decisions
of a step ("was every gradient finite?") stay on the device as 0-dim bool tensors, and what depends on them is chosen
there: `keep_` zeroes a list unless a flag holds, `choose_` overwrites one list by another where a flag holds.

`plain` looks through the wrappers a gradient or weight may come in (a shard of a DTensor, a sparse tensor's values, a
complex tensor's two reals) to the dense real numbers that lie on this rank. `Copies` remembers tensors and puts them
back.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)

ORDINARY = (Tensor, torch.nn.Parameter, torch.nn.Buffer)  # what a thousand calls a step are about
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def plain(tensor: Tensor) -> Tensor:
    """The dense real numbers of `tensor` that lie on this rank; the same memory, not a copy.

    >>> plain(torch.tensor([3 + 4j]))
    tensor([[3., 4.]])
    """
    if tensor.is_sparse:
        tensor = tensor._values()
    if type(tensor) not in ORDINARY:
        to_local = getattr(tensor, "to_local", None)  # a DTensor; by name: a build of torch may lack torch.distributed
        tensor = tensor if to_local is None else to_local()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype for arithmetic on `tensor`: its own, but float32 for half precision.

    >>> wide(torch.zeros(1, dtype=torch.bfloat16)), wide(torch.zeros(1, dtype=torch.complex128))
    (torch.float32, torch.complex128)
    """
    return torch.promote_types(tensor.dtype, torch.float32)


def moved_within(start: Tensor, delta: float | Tensor) -> Tensor:
    """Start + Δ in the type of `start`, each number rounded towards it: rounded to the nearest, it could leave a ball.

    >>> moved_within(torch.tensor(1.0, dtype=torch.bfloat16), 0.0078)       # to the nearest it would be 1.0078125
    tensor(1., dtype=torch.bfloat16)
    """
    exact = widest(start)
    moved = (start.to(exact) + delta).to(start.dtype)
    length: float | Tensor = delta.abs() if isinstance(delta, Tensor) else abs(delta)
    too_far = (moved.to(exact) - start).abs() > length
    return torch.where(too_far, torch.nextafter(moved, start), moved)


def widest(tensor: Tensor) -> torch.dtype:
    """The dtype in which rounding is judged: float64, where the device has it; an Apple GPU has not."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def is_dense(tensor: Tensor) -> bool:
    """Do its numbers fill their memory without gaps or overlap, in whatever order?

    >>> picture = torch.zeros(2, 3, 4, 4)
    >>> is_dense(picture.to(memory_format=torch.channels_last)), is_dense(picture[..., :3])
    (True, False)
    """
    return tensor.is_contiguous() or in_memory_order(tensor).is_contiguous()


def lies_like(tensor: Tensor, other: Tensor) -> bool:
    """Are its numbers in memory in the order of those of `other`, which has its shape?

    >>> picture = torch.zeros(2, 3, 4, 4)
    >>> lies_like(picture.to(memory_format=torch.channels_last), picture)
    False
    """
    strides = tensor.stride(), other.stride()
    return strides[0] == strides[1] or all(
        here == there for here, there, size in zip(*strides, other.shape, strict=True) if size > 1
    )


def in_memory_order(tensor: Tensor) -> Tensor:
    """The same memory with its dimensions turned so that the last one has the smallest stride."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def copy_(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Target ← source for each pair, in place: a target keeps its storage. One launch a device and dtype on a GPU."""
    kinds: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in pairs:
        targets, sources = kinds[target.device, target.dtype]
        targets.append(plain(target))
        sources.append(plain(source))
    for targets, sources in kinds.values():
        torch._foreach_copy_(targets, sources)


def keep_(tensors: Iterable[Tensor], flag: Tensor) -> None:
    """Zero every tensor unless `flag` holds, in place.

    The bits are multiplied by 0 or 1 as integers, not the numbers: 0 · nan = nan.

    >>> spoilt = torch.tensor([1.0, float("nan")])
    >>> keep_([spoilt], torch.tensor(False))
    >>> spoilt
    tensor([0., 0.])
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for bits in map(_bits, map(plain, tensors)):
        kinds[bits.device, bits.dtype].append(bits)
    for (device, dtype), alike in kinds.items():
        torch._foreach_mul_(alike, flag.to(device, dtype))


def choose_(pairs: Iterable[tuple[Tensor, Tensor]], flag: Tensor) -> None:
    """Target ← source for each pair, in place, where `flag` holds; else nothing. The sources are used up.

    >>> weight = torch.tensor([1.0])
    >>> choose_([(weight, torch.tensor([2.0]))], torch.tensor(True))
    >>> weight
    tensor([2.])
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for target, source in pairs:
        bits = _bits(plain(target))
        kinds[bits.device, bits.dtype].append((bits, _bits(plain(source))))
    for (device, _), alike in kinds.items():
        (choose_one_by_one if device.type == "cpu" else choose_at_once)(alike, flag.to(device))


def choose_one_by_one(pairs: Iterable[tuple[Tensor, Tensor]], flag: Tensor) -> None:
    """The fewest bytes: 3 sizes. `where` goes integer by integer on the CPU, so two floats are taken for one."""
    for target, source in pairs:
        if target.is_contiguous() and source.is_contiguous() and _is_even(target) and _is_even(source):
            target, source = target.view(-1).view(torch.int64), source.view(-1).view(torch.int64)  # noqa: PLW2901
        torch.where(flag, source, target, out=target)


def choose_at_once(pairs: Iterable[tuple[Tensor, Tensor]], flag: Tensor) -> None:
    """The fewest launches: target·(1 − flag) + source·flag over integers, 3 kernels for all tensors, 7 sizes."""
    targets, sources = map(list, zip(*pairs, strict=True))
    taken = flag.to(targets[0].dtype)
    torch._foreach_mul_(sources, taken)
    torch._foreach_mul_(targets, 1 - taken)
    torch._foreach_add_(targets, sources)


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def _is_even(tensor: Tensor) -> bool:
    return tensor.nbytes % 8 == 0 and tensor.storage_offset() * tensor.element_size() % 8 == 0


class Copies(Generic[Key]):
    """Copies of tensors by name (or by the tensor itself), whose memory is kept from one step to the next.

    >>> copies, weight = Copies(), torch.tensor([1.0])
    >>> copies.take({"weight": weight})
    >>> _ = weight.add_(1)
    >>> copies.put_back({"weight": weight})
    >>> weight
    tensor([1.])
    """

    def __init__(self) -> None:
        self._held: dict[Key, Tensor] = {}
        self._rooms: dict[Key, Tensor] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def __getitem__(self, key: Key) -> Tensor:
        return self._held[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._held)

    def nbytes(self) -> int:
        """The memory it holds, in use or not."""
        return sum(plain(room).nbytes for room in self._rooms.values())

    def room(self, key: Key, like: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of the shape of `like` to write the copy into."""
        self._held[key] = self._room(key, like, dtype)
        return self._held[key]

    def _room(self, key: Key, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The memory of last time where it still fits: fresh pages cost the CPU more than the copy itself."""
        dtype = like.dtype if dtype is None else dtype
        room = self._rooms.get(key)
        fits = (like.shape, like.stride(), dtype, like.device)
        if room is None or (room.shape, room.stride(), room.dtype, room.device) != fits:
            room = self._rooms[key] = torch.empty_like(like, dtype=dtype, requires_grad=False)
        return room

    @torch.no_grad()
    def take(self, tensors: Mapping[Key, Tensor]) -> None:
        rooms = {key: self._room(key, tensor) for key, tensor in tensors.items()}
        copy_((rooms[key], tensor) for key, tensor in tensors.items())
        self._held.update(rooms)  # last: should memory run out above, nothing that was not copied is ever put back

    @torch.no_grad()
    def put_back(self, tensors: Mapping[Key, Tensor]) -> None:
        """Into the tensors given, in place; one that has since appeared or changed its shape stays as it is."""
        known = {key: tensor for key, tensor in tensors.items() if key in self._held}
        copy_((tensor, self[key]) for key, tensor in known.items() if tensor.shape == self[key].shape)

    def rooms(self) -> Iterable[Tensor]:
        return {**self._rooms, **self._held}.values()

    def release(self) -> None:
        """Hold nothing, and keep no memory."""
        self._held, self._rooms = {}, {}

    def forget(self) -> None:
        """Hold nothing; keep the memory of what was held last, let go of what was not used since the last call."""
        self._rooms = self._held or self._rooms
        self._held = {}
