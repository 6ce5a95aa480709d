"""The state of a model besides its weights, saved and restored: buffers, random generators, train or eval mode.

A step of AMP runs the model N + 1 times on one batch. Each forward pass updates BatchNorm's running statistics and
draws dropout masks, so without care the statistics would mix those at θ with those at θ + Δ, and a step would ascend
one network's loss and descend another's. A `Snapshot` holds a model's buffers and the states of the random generators
at one moment and restores them: buffers by copying in place (no attribute of a module is touched, so nothing that
torch.compile guards on changes), generators by setting their state (random_state.py).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, methodcaller

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

from flatmin.core.copies import Copies
from flatmin.core.random_state import HostRandom, HostWatch, random_state, set_random_state

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
        self._places = _BufferPlaces(model)  # as they were when the buffers were taken
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

    def take_buffers(self) -> None:
        if not self._places.are_current():
            self._places = _BufferPlaces(self.model)
        self._buffers.forget()
        if not self._buffers.take_again(self._places.buffers()):
            self._buffers.take(self._places.named())

    def put_back_buffers(self) -> None:
        if not self._buffers.put_back_again(self._places.buffers()):
            self._buffers.put_back(self._places.named())

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

    def named(self) -> dict[Place, Tensor]:
        """The buffers by place, without uninitialised ones."""
        return {
            (id(module), name): buffer
            for module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None and not isinstance(buffer, UninitializedBuffer)
        }


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
