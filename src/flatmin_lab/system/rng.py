"""A run's own random state and torch's determinism switches, and generators that are seeded by their purpose.

torch has one default generator a device. A training run swaps in its own states while it computes, and the caller's
come back when it yields. So what a caller draws between two events changes nothing in the run, and the run changes
nothing that the caller draws.

On a GPU a run owns the state object too, not only its values: a CUDA graph draws from the state that it was captured
with, and two runs that shared one would write to it from two streams.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from operator import index
from typing import SupportsIndex

import torch
from torch import Tensor

from flatmin.core.random_state import HostRandom, random_state, set_random_state

State = Tensor | torch.Generator


class RandomScope:
    """In `active()`, default generators, current GPU and determinism switches are the run's; outside, the caller's."""

    def __init__(self, device: torch.device, *, deterministic: bool, with_host: bool = False) -> None:
        """`with_host`: Python's and numpy's global generators too, which only the user's own code draws from."""
        self.device, self.devices = device, generator_devices(device)
        self.deterministic, self.with_host = deterministic, with_host
        if deterministic and device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        self.own: dict[torch.device, State] = {}
        self.own_host: HostRandom | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        current = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with current, self._own_host_generators(), self._own_generators(), _determinism(self.deterministic):
            yield

    @contextmanager
    def _own_host_generators(self) -> Iterator[None]:
        """Begun before the others and ended after them: it puts the caller's CPU generator of torch back, too."""
        if not self.with_host:
            yield
            return
        outer = HostRandom()
        if self.own_host is not None:
            self.own_host.put_back()
        try:
            yield
        finally:
            self.own_host = HostRandom()
            outer.put_back()

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        outer = {device: _state(device) for device in self.devices}
        for device in self.devices:
            _set_state(device, self.own[device] if self.own else _private_copy(device, outer[device]))
        try:
            yield
        finally:
            self.own = {device: _state(device) for device in self.devices}
            for device, state in outer.items():
                _set_state(device, state)


def _generator(device: torch.device) -> torch.Generator:
    torch.cuda.init()
    default: torch.Generator = torch.cuda.default_generators[
        torch.cuda.current_device() if device.index is None else device.index
    ]
    return default


def _state(device: torch.device) -> State:
    """The state of the device's default generator: on a GPU itself, elsewhere its values."""
    return _generator(device).graphsafe_get_state() if device.type == "cuda" else random_state(device)


def _set_state(device: torch.device, state: State) -> None:
    if isinstance(state, Tensor):
        set_random_state(device, state)
    else:
        _generator(device).graphsafe_set_state(state)


def _private_copy(device: torch.device, state: State) -> State:
    """A state of its own with the same values."""
    return state if isinstance(state, Tensor) else state.clone_state()


def generator_devices(device: torch.device) -> list[torch.device]:
    """The devices whose default generators a run on that device draws from."""
    return list({torch.device("cpu"): None, device: None})


def seed_generators(devices: Iterable[torch.device], seed: int) -> None:
    """Seed the default generators of these devices alone: `torch.manual_seed` would seed every GPU."""
    for device in devices:
        if device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            module = torch.get_device_module(device)
            with module.device(device):
                module.manual_seed(seed)


@contextmanager
def _determinism(deterministic: bool) -> Iterator[None]:
    """Deterministic algorithms where the run or the caller asks for them; else cuDNN may pick the fastest."""
    before = torch.are_deterministic_algorithms_enabled()
    warn, benchmark = torch.is_deterministic_algorithms_warn_only_enabled(), torch.backends.cudnn.benchmark
    switch = deterministic and (warn or not before)
    if switch:
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not (deterministic or before)
    limit = torch.backends.cudnn.benchmark_limit
    if limit is not None:  # where there is cuDNN: try all algorithms, not the first ten
        torch.backends.cudnn.benchmark_limit = 0
    try:
        yield
    finally:
        if switch:
            torch.use_deterministic_algorithms(before, warn_only=warn)
        torch.backends.cudnn.benchmark = benchmark
        if limit is not None:
            torch.backends.cudnn.benchmark_limit = limit


# ---- generators that depend on their purpose alone


def generator(*what: str | SupportsIndex) -> torch.Generator:
    """A CPU generator seeded by a hash of its purpose.

    >>> [int(torch.randint(100, (), generator=generator("order", 0, epoch))) for epoch in (1, 2, 1)]
    [24, 64, 24]
    """
    words = [word if isinstance(word, str) else str(index(word)) for word in what]
    digest = hashlib.blake2b("\0".join(words).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
