"""The state of a model besides its weights, saved and restored: buffers, random generators, train or eval mode.

A step of AMP runs the model N + 1 times on one batch. Each forward pass updates BatchNorm's running statistics and
draws dropout masks, so without care the statistics would mix those at θ with those at θ + Δ, and a step would ascend
one network's loss and descend another's. A `Snapshot` holds a model's buffers and the states of the random generators
at one moment and restores them: buffers by copying in place (no attribute of a module is touched, so nothing that
torch.compile guards on changes), generators by setting their state (random_state.py). A buffer that a pass has replaced
gets a new tensor, and one that cannot be overwritten as a whole is written to only if a pass has written to it.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, methodcaller
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flatmin.core.copies import Copies
from flatmin.core.random_state import HostRandom, HostWatch, random_state, set_random_state
from flatmin.core.tensors import ORDINARY_TYPES, written_once

_CHILDREN, _VALUES = attrgetter("_modules"), methodcaller("values")

Place = tuple[int, str]  # of a buffer: the id of its module, and its name there


class Snapshot:
    """A model's buffers and some devices' random states, as they were at the last `take_buffers` and `take_random`.

    >>> norm = nn.BatchNorm1d(1)
    >>> snapshot = Snapshot(norm)
    >>> snapshot.take_buffers()
    >>> _ = norm(torch.tensor([[1.0], [3.0]]))
    >>> snapshot.put_back_buffers()
    >>> norm.running_mean, norm.num_batches_tracked
    (tensor([0.]), tensor(0))
    """

    def __init__(self, model: nn.Module, *, watch: HostWatch | None = None) -> None:
        """`watch` decides which generators of the host to save besides torch's; without one, all of them."""
        self.model = model
        self._watch = watch
        self._buffers: Copies[Place] = Copies()
        self._places: _BufferPlaces | None = None  # as they were when the buffers were taken
        self._ids: dict[Place, int] = {}  # of the buffers themselves
        self._empty: list[Place] = []  # where there was none then
        self._are_taken = False
        self._special: dict[Place, _SpecialBuffer] = {}
        self._torch: Tensor | None = None
        self._random: dict[torch.device, Tensor] = {}
        self._host: HostRandom | None = None

    def take(self, devices: Iterable[torch.device], *, since: "Snapshot | None" = None) -> None:
        """Save the buffers, and the random states of these devices and the host. `since`: see `take_random`."""
        self.take_random(devices, since=since)
        self.take_buffers()

    def put_back(self) -> None:
        self.put_back_buffers()
        self.put_back_random()

    def taken_buffers(self) -> list[tuple[Tensor, Tensor]]:
        """The buffers that are there now, each with what it was when it was taken."""
        if self._places is None or not self._are_taken:
            return []
        held, copies = self._places.held(), self._buffers
        return [(now, copies[place]) for place, now in held.items() if now is not None and place in copies]

    def take_buffers(self) -> None:
        if self._places is None or not self._places.are_current():
            self._places = _BufferPlaces(self.model)
        self._buffers.forget()
        self._are_taken = False  # until it is done: if memory runs out below, nothing is ever put back
        if self._special or not self._buffers.take_again(self._places.buffers()):
            self._take_anew(self._places)
        self._are_taken = True

    def _take_anew(self, places: "_BufferPlaces") -> None:
        held, earlier = places.held(), self._special
        buffers = {place: buffer for place, buffer in held.items() if _is_initialised(buffer)}
        self._ids = {place: id(buffer) for place, buffer in buffers.items()}
        self._empty = [place for place, buffer in held.items() if buffer is None]
        self._special = {
            place: _SpecialBuffer(buffer, earlier.get(place))
            for place, buffer in buffers.items()
            if _is_special(buffer)
        }
        self._buffers.take({place: buffer for place, buffer in buffers.items() if place not in self._special})

    def put_back_buffers(self) -> None:
        """In place; where another tensor is now, which may be anybody's, a new one takes its place."""
        places = self._places
        if places is None or not self._are_taken:
            return
        if not self._special and self._buffers.put_back_again(places.buffers()):
            return
        copies = self._buffers
        there = {
            place: now
            for place, now in places.held().items()
            if now is not None and place in copies and id(now) == self._ids[place] and now.shape == copies[place].shape
        }
        copies.put_back(there)
        new = {self._ids[place]: copies[place].clone() for place in copies if place not in there}  # shared as before
        places.put(
            {
                **dict.fromkeys(self._empty),
                **{place: special.put_back() for place, special in self._special.items()},
                **{place: new[self._ids[place]] for place in copies if place not in there},
            }
        )

    def take_random(self, devices: Iterable[torch.device], *, since: "Snapshot | None" = None) -> None:
        """`since`: the snapshot before the clean pass, if this is the one after it."""
        watch, self._torch = self._watch, torch.get_rng_state()
        if watch is None:
            self._host = HostRandom()
        elif since is None:
            self._host = None if watch.rest else watch.before_step()
        elif since._host is not None:
            self._host = watch.after_clean_pass(since._host)
        else:
            self._host, watch.rest = None, max(watch.rest - 1, 0)
        self._random = {device: random_state(device) for device in devices if device.type != "cpu"}

    def drop_others(self, later: "Snapshot") -> None:
        """Besides torch's, restore no generator of the host that `later` does not restore."""
        known = {} if later._host is None else later._host.others
        if self._host is not None:
            self._host.others = {name: state for name, state in self._host.others.items() if name in known}

    def check_replay(self) -> None:
        """Called after a perturbed pass, before this snapshot of the clean one is restored."""
        if self._watch is not None and self._host is not None and self._host.others:
            self._watch.after_perturbed_pass(self._host)

    def put_back_random(self) -> None:
        if self._torch is not None:
            torch.set_rng_state(self._torch)
        if self._host is not None:
            self._host.put_back()
        for device, state in self._random.items():
            set_random_state(device, state)


class _BufferPlaces:
    """Where a model's buffers are. Used three times per step; `named_buffers` takes fifty times as long."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[nn.Module] = []
        seen, ahead = set[int](), list[nn.Module | None]([model])
        while ahead:
            module = ahead.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            self._modules.append(module)
            ahead.extend(module._modules.values())
        self._children = self._ids_of_children()

    def are_current(self) -> bool:
        """Are the model's modules still the same?"""
        return self._children == self._ids_of_children()

    def _ids_of_children(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(_VALUES, map(_CHILDREN, self._modules)))))

    def buffers(self) -> list[Tensor]:
        """The buffers that are there now."""
        return [b for module in self._modules for b in module._buffers.values() if b is not None]

    def held(self) -> dict[Place, Tensor | None]:
        """What is there now, by place."""
        return {(id(module), name): buffer for module in self._modules for name, buffer in module._buffers.items()}

    def put(self, buffers: Mapping[Place, Tensor | None]) -> None:
        """Put these where they belong, unless the place is gone."""
        modules = {id(module): module for module in self._modules}
        for (module, name), buffer in buffers.items():
            held = modules[module]._buffers
            if name in held and held[name] is not buffer:
                held[name] = buffer


def _is_initialised(buffer: Tensor | None) -> TypeGuard[Tensor]:
    return buffer is not None and not is_lazy(buffer)


def _is_special(buffer: Tensor) -> bool:
    """Can it not be overwritten as a whole? Sparse, expanded, conjugated and inference tensors cannot.

    >>> _is_special(torch.zeros(2)), _is_special(torch.zeros(1).expand(2)), _is_special(torch.eye(2).to_sparse())
    (False, True, True)
    """
    if type(buffer) not in ORDINARY_TYPES:
        return False
    if buffer.layout != torch.strided or buffer.is_inference() or buffer.is_conj() or buffer.is_neg():
        return True
    return written_once(buffer) is not buffer


class _SpecialBuffer:
    """A buffer that is restored only if a pass has written to it, as its version tells."""

    def __init__(self, buffer: Tensor, earlier: "_SpecialBuffer | None") -> None:
        self._buffer = buffer
        self._version = None if buffer.is_inference() else buffer._version
        self._content: Tensor | None
        if earlier is not None and earlier._buffer is buffer and earlier._version == self._version:
            self._content = earlier._content
        else:
            self._content = None if self._version is None else _numbers(buffer).detach().clone()

    @torch.no_grad()
    def put_back(self) -> Tensor:
        if self._content is not None and self._buffer._version != self._version:
            _numbers(self._buffer).copy_(self._content)
            self._version = self._buffer._version
        return self._buffer


def _numbers(buffer: Tensor) -> Tensor:
    return written_once(buffer) if buffer.layout == torch.strided else buffer


# ---- train and eval mode


@contextmanager
def eval_mode(model: object) -> Iterator[None]:
    """Every module in eval mode; afterwards, even after an exception, each has its former mode again.

    >>> model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(1).eval())
    >>> with eval_mode(model):
    ...     [module.training for module in model.modules()]
    [False, False, False]
    >>> [module.training for module in model.modules()]
    [True, True, False]
    """
    modes = [(module, module.training) for module in model.modules()] if isinstance(model, nn.Module) else []
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def eval_mode_with_gradients(model: object) -> Iterator[None]:
    """Eval mode with gradients: cuDNN's recurrent networks have none there, so torch's own kernels run instead."""
    recurrent = isinstance(model, nn.Module) and any(isinstance(module, nn.RNNBase) for module in model.modules())
    cudnn = torch.backends.cudnn
    enabled = cudnn.enabled
    try:
        cudnn.enabled = enabled and not recurrent
        with torch.inference_mode(False), torch.enable_grad(), eval_mode(model):
            yield
    finally:
        cudnn.enabled = enabled
