"""The process around a training: its random generators, and torch's switches for determinism.

A training draws from generators of its own, although torch has one a device: they are put in place while it runs, and
the caller's come back when it yields. So what a caller draws between two records changes nothing in the training, nor
the other way round.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from flatmin.snapshot import random_state, set_random_state


class Surroundings:
    """Entered, the world is the training's; left, it is the caller's."""

    def __init__(self, device: torch.device, *, deterministic: bool) -> None:
        self.devices = drawn_from(device)
        self.deterministic = deterministic
        if deterministic and device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        self.own: dict[torch.device, Tensor] = {}

    @contextmanager
    def inside(self) -> Iterator[None]:
        outer = self._take()
        self._put(self.own)
        try:
            with _switched(self.deterministic):
                yield
        finally:
            self.own = self._take()
            self._put(outer)

    def _take(self) -> dict[torch.device, Tensor]:
        return {device: random_state(device) for device in self.devices}

    def _put(self, states: dict[torch.device, Tensor]) -> None:
        for device, state in states.items():
            set_random_state(device, state)


def drawn_from(device: torch.device) -> list[torch.device]:
    """The devices whose default generators a training on that one draws from."""
    return list({torch.device("cpu"): None, device: None})


def seed_generators(devices: Iterable[torch.device], seed: int) -> None:
    """The default generators of these devices and no others: `torch.manual_seed` would seed every GPU."""
    for device in devices:
        if device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            module = torch.get_device_module(device)
            with module.device(device):
                module.manual_seed(seed)


@contextmanager
def _switched(deterministic: bool) -> Iterator[None]:
    """Deterministic algorithms where asked for, here or before; else cuDNN may choose the fastest ones."""
    before = torch.are_deterministic_algorithms_enabled()
    warn, benchmark = torch.is_deterministic_algorithms_warn_only_enabled(), torch.backends.cudnn.benchmark
    switch = deterministic and (warn or not before)
    if switch:
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not (deterministic or before)
    try:
        yield
    finally:
        if switch:
            torch.use_deterministic_algorithms(before, warn_only=warn)
        torch.backends.cudnn.benchmark = benchmark
