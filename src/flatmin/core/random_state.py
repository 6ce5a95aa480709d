"""Random generators: their states, read and restored.

A step of AMP rewinds the generators of the devices, and torch's on the CPU, so that its passes draw the same masks.
Some models draw from Python's or numpy's global generator instead (Wav2Vec2 masks with numpy). Reading numpy's state
takes as long as launching ten kernels, and rewinding a generator makes other threads that draw from it draw the same
numbers twice. So a `HostWatch` checks whether the passes of a training run draw from these two at all.

A user's own generator (`numpy.random.default_rng()`) cannot be seen from here.
"""

import pickle
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

PYTHON, NUMPY = "Python's random", "numpy.random"
BESIDES_TORCH = (PYTHON, NUMPY)
FIRST_LOOKS, LOOK_EVERY, UNEVEN_STEPS = 10, 50, 3  # steps


def random_state(device: torch.device) -> Tensor:
    """The state of a device's default generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    if device.type == "cuda":
        return _cuda_generator(device).get_state()
    module = torch.get_device_module(device)
    state: Tensor = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    elif device.type == "cuda":
        _cuda_generator(device).set_state(state)
    elif device.type == "mps":
        torch.mps.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def _cuda_generator(device: torch.device) -> torch.Generator:
    """A GPU's default generator, without the overhead of torch.cuda.get_rng_state."""
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def seed_everything(seed: int) -> None:
    """Seed the generators of torch on all devices, of Python, and of numpy if it is loaded."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed)


class SharedGeneratorWarning(UserWarning):
    """Something besides the passes draws from a global generator."""


class HostRandom:
    """The states of torch's, Python's and numpy's generators on the host, as they are now; or of torch's and `others`.

    >>> before = HostRandom()
    >>> _ = random.random()
    >>> before.has_moved()
    True
    >>> before.put_back()
    >>> before.has_moved()
    False
    """

    def __init__(self, others: Iterable[str] = BESIDES_TORCH) -> None:
        self.torch = torch.get_rng_state()
        self.others = {name: _read(name) for name in others}

    def has_moved(self) -> bool:
        """Has anything been drawn from one of them since?"""
        return not torch.equal(self.torch, torch.get_rng_state()) or bool(self.moved_besides_torch())

    def moved_besides_torch(self) -> list[str]:
        """Which of Python's and numpy's have been drawn from since."""
        return [name for name, state in self.others.items() if not _same(name, state, _read(name))]

    def put_back(self) -> None:
        torch.set_rng_state(self.torch)
        if PYTHON in self.others:
            random.setstate(self.others[PYTHON])
        if self.others.get(NUMPY) is not None:
            sys.modules["numpy.random"].set_state(self.others[NUMPY])


class RandomStates:
    """The states of the host's generators and of these devices' default ones, as they are now."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._host = HostRandom()
        self._devices = {device: random_state(device) for device in devices if device.type != "cpu"}

    def put_back(self) -> None:
        self._host.put_back()
        for device, state in self._devices.items():
            set_random_state(device, state)


class HostWatch:
    """Do the passes of a training run draw from Python's or numpy's global generator?

    It checks in the first steps, and in every LOOK_EVERY-th one; once a pass was seen to draw from a generator, that
    one is rewound in every step. If it advances differently in the passes of one step, and not just once (a model may
    draw something the first time it runs), something else draws from it too, such as a thread that prepares batches:
    then it is left alone.
    """

    def __init__(self) -> None:
        self.rest = 0  # steps until the next check
        self._looks = 0
        self._drawn: list[str] = []
        self._uneven: Counter[str] = Counter()

    def before_step(self) -> HostRandom:
        return HostRandom([name for name in BESIDES_TORCH if self._uneven[name] < UNEVEN_STEPS])

    def after_clean_pass(self, before: HostRandom) -> HostRandom:
        """Neither this nor `before` will restore a generator that no pass was ever seen to draw from."""
        now = HostRandom(before.others)
        for name in tuple(now.others):
            if not _same(name, now.others[name], before.others[name]):
                self._drawn += [] if name in self._drawn else [name]
            elif name not in self._drawn:
                del now.others[name], before.others[name]
        self._looks += 1
        if self._looks >= FIRST_LOOKS and not any(self._uneven[name] < UNEVEN_STEPS for name in self._drawn):
            self.rest = LOOK_EVERY - 1
        return now

    def after_perturbed_pass(self, clean: HostRandom) -> None:
        """With the same draws, every generator is now where the clean pass left it."""
        for name in clean.moved_besides_torch():
            self._uneven[name] += 1
            if self._uneven[name] == UNEVEN_STEPS:
                warnings.warn(
                    f"{name} advanced differently in the passes of {UNEVEN_STEPS} steps, so something else draws from "
                    "it, such as a thread that prepares batches; it is no longer rewound between passes. If the model "
                    "draws from it, its masks now differ from pass to pass: let it draw from torch, or the thread from "
                    "its own generator",
                    SharedGeneratorWarning,
                    stacklevel=2,
                )


def _read(name: str) -> Any:
    """A generator's state; None if numpy is not in use."""
    if name == PYTHON:
        return random.getstate()
    return None if (numpy := sys.modules.get("numpy.random")) is None else numpy.get_state(legacy=False)


def _same(name: str, state: Any, other: Any) -> bool:
    if name == PYTHON or state is None or other is None:
        return bool(state == other)
    if not state["bit_generator"] == other["bit_generator"] == "MT19937":
        return pickle.dumps(state) == pickle.dumps(other)
    here, there = state["state"], other["state"]
    alike = here["pos"] == there["pos"] and state["has_gauss"] == other["has_gauss"]
    return alike and bool((here["key"] == there["key"]).all())
