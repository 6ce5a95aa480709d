"""The state of a model besides its weights: buffers, random generators, train or eval mode. Saved and restored.

A step of AMP runs the model N + 1 times on one batch. Each forward pass updates BatchNorm's running statistics and
draws dropout masks, so without care the statistics would mix those of θ with those of θ + Δ, and a step would climb one
network's loss and descend another's. A `Snapshot` holds a model's buffers and the states of the random generators
(torch's, and Python's and numpy's, which some models and augmentations draw from) at one moment and restores them:
buffers by copying in place (no attribute of a module is touched, so nothing that torch.compile guards on changes),
generators by setting their state.

A CUDA graph repeats a number that was drawn on the host for ever, so a step that draws any must not be captured:
`HostRandom` finds out. A user's own generator (`numpy.random.default_rng()`) cannot be seen from here.
"""

import pickle
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

from flatmin.core.tensors import Copies

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

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._buffers: Copies[Place] = Copies()
        self._places = _BufferPlaces(model)
        self._random: dict[torch.device, Tensor] = {}
        self._host: HostRandom | None = None

    def take(self, devices: Iterable[torch.device], *, since: "Snapshot | None" = None) -> None:
        """The buffers, and the random states of these devices and the host. `since`: see `take_random`."""
        self.take_random(devices, since=since)
        self.take_buffers()

    def put_back(self) -> None:
        self.put_back_buffers()
        self.put_back_random()

    def take_buffers(self) -> None:
        self._places = _BufferPlaces(self.model)
        self._buffers.forget()
        buffers = self._places.buffers()
        if not self._buffers.take_again(buffers):
            self._buffers.take(self._places.named(buffers))

    def put_back_buffers(self) -> None:
        buffers = self._places.buffers()
        if not self._buffers.put_back_again(buffers):
            self._buffers.put_back(self._places.named(buffers))

    def take_random(self, devices: Iterable[torch.device], *, since: "Snapshot | None" = None) -> None:
        """`since`: an earlier snapshot, which is restored before this one."""
        self._host = HostRandom(since=None if since is None else since._host)
        self._random = {device: random_state(device) for device in devices if device.type != "cpu"}

    def put_back_random(self) -> None:
        if self._host is not None:
            self._host.put_back()
        for device, state in self._random.items():
            set_random_state(device, state)


class _BufferPlaces:
    """Where a model's buffers are. Found twice a step; `named_buffers` takes five times as long."""

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[int, str, dict[str, Tensor | None]]] = []
        seen, ahead = set[int](), list[nn.Module | None]([model])
        while ahead:
            module = ahead.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            ahead.extend(module._modules.values())
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._places.append((id(module), name, module._buffers))

    def buffers(self) -> list[Tensor | None]:
        """Those that are there now."""
        return [here.get(name) for _, name, here in self._places]

    def named(self, buffers: Sequence[Tensor | None]) -> dict[Place, Tensor]:
        """By place; without those that have no numbers yet."""
        named = zip(self._places, buffers, strict=True)
        return {place[:2]: b for place, b in named if b is not None and not isinstance(b, UninitializedBuffer)}


def random_state(device: torch.device) -> Tensor:
    """The state of a device's default generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    module = torch.get_device_module(device)
    state: Tensor = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
        return
    module = torch.get_device_module(device)
    if device.type == "mps":
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, device)


# ---- the host's random generators


class HostRandom:
    """The states of torch's, Python's and numpy's generators on the host, as they are now.

    >>> before = HostRandom()
    >>> _ = random.random()
    >>> before.has_moved()
    True
    >>> before.put_back()
    >>> before.has_moved()
    False
    """

    def __init__(self, *, since: "HostRandom | None" = None) -> None:
        """`since`: an earlier state. If numpy has drawn nothing since, neither will set it back: that is slow."""
        self.torch, self.python = torch.get_rng_state(), random.getstate()
        self.numpy = None if (numpy := _numpy_random()) is None else numpy.get_state(legacy=False)
        self._sets_numpy = self.numpy is not None
        if since is not None and _same(self.numpy, since.numpy):
            self._sets_numpy = since._sets_numpy = False

    def has_moved(self) -> bool:
        """Has anything been drawn from one of them since?"""
        return not torch.equal(self.torch, torch.get_rng_state()) or bool(self.moved_besides_torch())

    def moved_besides_torch(self) -> list[str]:
        """The names of those of Python's and numpy's that were drawn from since."""
        now = HostRandom()
        python = ["Python's random"] if self.python != now.python else []
        numpy = ["numpy.random"] if self.numpy is not None and not _same(self.numpy, now.numpy) else []
        return python + numpy

    def put_back(self) -> None:
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        if self._sets_numpy:
            _numpy_random().set_state(self.numpy)


def _same(state: Any, other: Any) -> bool:
    """Are these states of numpy's generator equal?"""
    if state is None or other is None or not state["bit_generator"] == other["bit_generator"] == "MT19937":
        return pickle.dumps(state) == pickle.dumps(other)
    here, there = state["state"], other["state"]
    alike = here["pos"] == there["pos"] and state["has_gauss"] == other["has_gauss"]
    return alike and bool((here["key"] == there["key"]).all())


def _numpy_random() -> Any:
    return sys.modules.get("numpy.random")


# ---- train and eval mode


@contextmanager
def eval_mode(model: object) -> Iterator[None]:
    """Every module in eval mode; afterwards, even after an exception, each is back in the mode it had.

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
    """Eval mode with gradients: cuDNN's recurrent networks have none in it, so torch's own kernels run instead."""
    recurrent = isinstance(model, nn.Module) and any(isinstance(module, nn.RNNBase) for module in model.modules())
    cudnn = torch.backends.cudnn
    enabled = cudnn.enabled
    try:
        cudnn.enabled = enabled and not recurrent
        with torch.inference_mode(False), torch.enable_grad(), eval_mode(model):
            yield
    finally:
        cudnn.enabled = enabled
