"""Copies of tensors, kept from step to step and restored: θ, a model's buffers.

Most steps copy the same tensors as the step before. So the lists that torch copies at once are kept, and on a GPU the
launches are recorded (recorded_launches.py).
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from flatmin.core.multi_tensor import ConditionalCopy, conditional_copy
from flatmin.core.recorded_launches import NO_RESULTS, RecordedLaunches, Results
from flatmin.core.tensors import ORDINARY_TYPES, STRIDED, bits, copy_, is_dense, plain, select_lists

Key = TypeVar("Key", bound=Hashable)

_LAYOUT, _DTYPE = attrgetter("layout"), attrgetter("dtype")  # a comprehension takes twice as long


class Copies(Generic[Key]):
    """Copies of tensors by key (a name, or the tensor itself), in memory that is reused from step to step.

    Most steps copy the same tensors as the step before. So the lists that torch copies at once are kept too, and reused
    (`take_again`, `put_back_again`) until a tensor is replaced or its layout changes.

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
    def take_again(self, tensors: Sequence[Tensor]) -> bool:
        """Copy these if they are those of the last `take`, unmoved and with the same layout; False if not."""
        lists = self._lists
        if lists is None or self._held or not lists.are_of(tensors):
            return False
        lists.take(tensors)
        self._held = lists.copies
        return True

    def holds_just(self, tensors: Sequence[Tensor]) -> bool:
        """Are these all the tensors that were taken, unmoved and with the same layout?"""
        lists = self._lists
        return lists is not None and self._held is lists.copies and lists.are_of(tensors)

    @torch.no_grad()
    def put_back_again(self, tensors: Sequence[Tensor], *, flag: Tensor | None = None) -> bool:
        """Restore all of these at once, on the device if `flag` holds; False if they are not those that were taken.

        With a flag the copies are overwritten.
        """
        if self._lists is None or not self.holds_just(tensors):
            return False
        self._lists.put_back(tensors, flag)
        return True

    @torch.no_grad()
    def take(self, tensors: Mapping[Key, Tensor]) -> None:
        first = not self._held
        copies = {key: self._allocate(key, tensor) for key, tensor in tensors.items()}
        copy_((copies[key], tensor) for key, tensor in tensors.items())
        # last: if memory runs out above, nothing that was not copied is ever restored
        self._held = copies if first else {**self._held, **copies}
        if first:
            of = list(tensors.values())
            self._lists = None if layout(of) is None else _CopyLists(of, copies)

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
        """Drop all copies; keep the memory of the last ones, and free what was not used since the last call."""
        if self._held:
            self._memory, self._held = dict(self._held), {}


class _CopyLists(Generic[Key]):
    """Copies of ordinary tensors, in lists of one device and dtype each; the tensors themselves are not held."""

    def __init__(self, tensors: Sequence[Tensor], copies: dict[Key, Tensor]) -> None:
        self.copies = copies
        self.dense = all(map(is_dense, tensors))
        self._ids, self._memory = list(map(id, tensors)), _memory(tensors)
        kinds: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[int]]] = defaultdict(lambda: ([], []))
        for place, (tensor, copy) in enumerate(zip(tensors, copies.values(), strict=True)):
            ours, places = kinds[tensor.device, tensor.dtype]
            ours.append(plain(copy))
            places.append(place)
        self._kinds = [(ours, places, dtype.is_complex) for (_, dtype), (ours, places) in kinds.items()]
        device, *others = {device for device, _ in kinds} or {torch.device("cpu")}
        self._gpu = device.index if device.type == "cuda" and not others else None  # None: launched one by one
        self._take, self._put_back = RecordedLaunches(), RecordedLaunches()
        self._conditional: dict[int, ConditionalCopy | None] = {}

    def are_of(self, tensors: Sequence[Tensor]) -> bool:
        """Are the copies of these tensors, unmoved and with the same layout?"""
        return self._ids == list(map(id, tensors)) and self._memory == _memory(tensors)

    def take(self, tensors: Sequence[Tensor]) -> None:
        if self._gpu is None or self._gpu != torch.cuda.current_device():
            self._copy(tensors)
        else:
            self._take.run(None, lambda _: self._copy(tensors))

    def _copy(self, tensors: Sequence[Tensor]) -> Results:
        for ours, theirs in self._pairs(tensors):
            torch._foreach_copy_(ours, theirs)
        return NO_RESULTS

    def put_back(self, tensors: Sequence[Tensor], flag: Tensor | None) -> None:
        if self._gpu is None or self._gpu != torch.cuda.current_device():
            self._copy_back(tensors, flag)
        else:
            key = None if flag is None else flag.data_ptr()
            self._put_back.run(key, lambda _: self._copy_back(tensors, flag))

    def _copy_back(self, tensors: Sequence[Tensor], flag: Tensor | None) -> Results:
        for place, (ours, theirs) in enumerate(self._pairs(tensors)):
            if flag is None:
                torch._foreach_copy_(theirs, ours)
            elif (conditional := self._conditional_copy(place, ours, theirs)) is not None:
                conditional(flag)
            else:
                select_lists(list(map(bits, theirs)), list(map(bits, ours)), flag.to(theirs[0].device))
        return NO_RESULTS

    def _conditional_copy(self, place: int, ours: list[Tensor], theirs: list[Tensor]) -> ConditionalCopy | None:
        """A kernel that reads only the flag unless it holds: hardly any optimizer step has to be undone."""
        if self._gpu is None or self._gpu != torch.cuda.current_device():
            return None
        if place not in self._conditional and not torch.cuda.is_current_stream_capturing():  # it needs the host
            self._conditional[place] = conditional_copy(theirs, ours)
        return self._conditional.get(place)

    def _pairs(self, tensors: Sequence[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Lists of copies, each with the list of tensors they are copies of."""
        found = []
        for ours, places, is_complex in self._kinds:
            theirs = list(map(tensors.__getitem__, places))
            found.append((ours, list(map(torch.view_as_real, theirs)) if is_complex else theirs))
        return found


def _memory(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """What can change in the address and layout of ordinary tensors. Called seven times per step."""
    numbers, strides = map(Tensor.numel, tensors), map(Tensor.stride, tensors)
    return (*map(Tensor.data_ptr, tensors), *numbers, *strides, *map(_DTYPE, tensors))


Layout = tuple[Any, ...]


def layout(tensors: Sequence[Tensor]) -> Layout | None:
    """The addresses of these tensors (first), and their layout; None if some are not ordinary tensors.

    >>> weight = torch.zeros(2, 3)
    >>> layout([weight]) == layout([weight.view(2, 3)]), layout([weight]) == layout([weight.view(3, 2)])
    (True, False)
    """
    if not (ORDINARY_TYPES.issuperset(map(type, tensors)) and STRIDED.issuperset(map(_LAYOUT, tensors))):
        return None
    sizes, strides = map(Tensor.size, tensors), map(Tensor.stride, tensors)
    return (*map(Tensor.data_ptr, tensors), *sizes, *strides, *map(_DTYPE, tensors))
