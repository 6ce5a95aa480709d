"""The user's training: model, optimizer and closure, created again for each stage, and snapshots to return to.

What `make_training()` may return is in user_training.py. The closure is what `optimizer.step` gets; for a loop
without one, it is the loop's forward and backward pass as a function that returns the loss. A plain optimizer is
examined inside AMP, one whose `RadiusScheduler` starts late as if it had started, and a setup with batches on its first
batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from flatmin.core.copies import Copies
from flatmin.core.model_state import Snapshot
from flatmin.core.random_state import HostRandom, random_state, set_random_state
from flatmin.core.tensors import plain
from flatmin.doctor.closure_variables import networks
from flatmin.doctor.finding import Finding, during
from flatmin.doctor.user_training import MakeTraining, UserTraining, call
from flatmin.optim.amp import AMP
from flatmin.optim.perturbed import PerturbedOptimizer
from flatmin.optim.radius import radii_of, scale_radii
from flatmin.optim.update.grad_scaler import forget_unscaled

EPSILON = 0.1  # for an optimizer that is not wrapped yet
SEED = 0
MOVED = 0.1234  # to where a shared weight is moved; one that is reset does not start there


@dataclass(frozen=True)
class Training:
    """What make_training returned, with its optimizer wrapped."""

    model: nn.Module
    optimizer: PerturbedOptimizer
    closure: Callable[[], Any]
    scaler: GradScaler | None
    made: UserTraining  # all that make_training returned
    was_plain: bool
    starts_late: bool

    @property
    def base(self) -> Optimizer:
        return self.optimizer.base

    @property
    def params(self) -> list[Tensor]:
        return [param for group in self.base.param_groups for param in group["params"]]

    @property
    def trained(self) -> list[Tensor]:
        return [param for param in self.params if param.requires_grad]

    @property
    def devices(self) -> list[torch.device]:
        return list({torch.device("cpu"): None, **{param.device: None for param in self.params}})

    def names(self) -> dict[Tensor, str]:
        """The model's name for every parameter of the optimizer."""
        known: dict[Tensor, str] = {param: name for name, param in self.model.named_parameters()}
        return {param: known.get(param, f"parameter {n} of the optimizer") for n, param in enumerate(self.params)}

    def others(self) -> dict[str, nn.Module]:
        """Networks that the closure runs besides the model, such as the discriminator of a GAN."""
        own = set(map(id, self.model.modules()))
        found = {name: module for name, module in networks(self.closure).items() if id(module) not in own}
        return {name: module for name, module in found.items() if own.isdisjoint(map(id, module.modules()))}

    def buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers of the model, and of other networks."""
        own = dict(self.model.named_buffers())
        others = {f"{name}'s {key}": b for name, module in self.others().items() for key, b in module.named_buffers()}
        return {name: buffer.detach().clone() for name, buffer in {**others, **own}.items()}

    def call(self) -> Any:
        """Call the closure alone, outside a step. Existing gradients stay."""
        self._forget_unscaled()
        with torch.enable_grad(), during("calling the closure"):
            return self.closure()

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """A step as the user takes it."""
        self._forget_unscaled()
        self.optimizer.zero_grad()
        with during("optimizer.step(closure)"):
            self.optimizer.step(closure or self.closure, scaler=self.scaler)
            if self.scaler is not None:
                self.scaler.update()

    def step_base(self) -> None:
        """A step as it would be without flatmin."""
        self.base.zero_grad()
        with during("a step of the plain optimizer"):
            if self.scaler is None:
                self.base.step(self.closure)
                return
            self.call()
            known = self.scaler._per_optimizer_states
            if id(self.optimizer) in known:  # the closure unscaled what it knows as its optimizer
                known[id(self.base)] = known.pop(id(self.optimizer))
            self.scaler.step(self.base)
            self.scaler.update()

    def _forget_unscaled(self) -> None:
        """The gradients of the next call are scaled again, even if those of an earlier one were unscaled."""
        forget_unscaled(self.scaler, (self.optimizer, self.base))

    def is_idle(self) -> bool:
        return not self.optimizer.perturbs

    def wait(self) -> None:
        """Wait until the devices have finished."""
        for device in self.devices:
            if device.type != "cpu":
                torch.get_device_module(device).synchronize()


def new_training(make_training: MakeTraining) -> Training:
    """A new setup, on its first batch; the same every time, if it draws only from the usual generators."""
    made = call(make_training, SEED)
    closure = next(made.closures(), None)
    if closure is None:
        raise ValueError("the batches of make_training must not be empty, got none")
    model, optimizer, scaler = made.model, made.optimizer, made.scaler
    with during("flatmin.AMP(optimizer)"):
        if was_plain := not isinstance(optimizer, PerturbedOptimizer):
            optimizer = AMP(optimizer, epsilon=EPSILON, model=model)
        wrapped = optimizer.behind_proxy()
    starts_late = wrapped.inner_iter > 0 and not wrapped.perturbs and any(wrapped.scheduled_radii)
    if starts_late:  # make_training may have dropped its scheduler
        scale_radii(wrapped, wrapped.scheduled_radii, 1.0)
    in_use = scaler if scaler is not None and scaler.is_enabled() else None
    return Training(model, wrapped, closure, in_use, made, was_plain=was_plain, starts_late=starts_late)


@contextmanager
def preserve_generators() -> Iterator[None]:
    """The caller's random generators are restored afterwards."""
    host, module = HostRandom(), torch.cuda
    devices = list(range(module.device_count())) if module.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            host.put_back()


class TrainingSnapshot:
    """A training's weights, buffers and random generators as they are now; also those of other networks."""

    def __init__(self, training: Training) -> None:
        every = nn.ModuleList([training.model, *training.others().values()])
        self._params, self._trained = list(dict.fromkeys([*training.params, *every.parameters()])), training.trained
        self.weights: Copies[Tensor] = Copies()
        self.weights.take({param: param for param in self._params})
        self._buffers = Snapshot(every)
        self._buffers.take_buffers()
        self.host = HostRandom()
        self._random = {device: random_state(device) for device in training.devices}

    def put_back(self, *, buffers: bool = True, host: bool = True) -> None:
        """Restore them; without `host`, Python's and numpy's generators stay as they are."""
        self.weights.put_back({param: param for param in self._params})
        if buffers:
            self._buffers.put_back_buffers()
        if host:
            self.host.put_back()
        for device, state in self._random.items():
            set_random_state(device, state)

    def has_weights(self) -> bool:
        """Are the weights that are trained still the same, bit for bit?"""
        return all(same_bits(param, self.weights[param]) for param in self._trained)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal bit for bit, even where both are nan."""
    pair = [plain(tensor.detach()).contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*pair)


def keeps_trained_weights(make_training: MakeTraining, one: Training, other: Training) -> bool:
    """Do all calls return the same weights in memory, and does none of them reset what was trained meanwhile?"""
    there = set(map(id, other.params))
    shared = next((param for param in one.params if param.requires_grad and id(param) in there), None)
    if shared is None:
        return False
    before = shared.detach().clone()
    try:
        with torch.no_grad():
            shared.fill_(MOVED)  # as training might
        moved = shared.detach().clone()
        again = new_training(make_training)
        return any(param is shared for param in again.params) and same_bits(shared, moved)
    finally:
        with torch.no_grad():
            shared.copy_(before)


def check_make_training(one: Training, other: Training, *, keeps_weights: bool = False) -> Finding:
    """Do two calls of make_training give equal weights? `keeps_weights`: those of a training go into the next one."""
    optimizer = one.optimizer
    given = "" if optimizer.model is None else ", model=model"
    kind = f"{type(optimizer).__name__} around {type(one.base).__name__}"
    if one.was_plain:
        kind = f"{type(one.base).__name__}, examined as flatmin.AMP(optimizer, epsilon={EPSILON}{given})"
    if one.starts_late:
        kind += f", examined with ε = {max(radii_of(optimizer)):g}, as after its start"
    count = sum(param.numel() for param in one.params)
    seen = f"{kind}; {count:,} parameters in {len(one.params)} tensors"
    if keeps_weights:
        return Finding(
            "set-up",
            "error",
            f"{seen}; every call of make_training() returns the same model as trained so far, and no new one",
            "create the model, or reset its weights, inside make_training: every stage, and every run of a comparison, "
            "must start anew",
        )
    pairs = list(zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=False))
    apart = sum(not same_bits(*pair) for pair in pairs if all(isinstance(value, Tensor) for value in pair))
    if not apart and len(one.params) == len(other.params):
        return Finding("set-up", "ok", f"{seen}; two calls of make_training() give the same weights")
    return Finding(
        "set-up",
        "warning",
        f"{seen}; two calls of make_training() give different weights ({apart} of {len(pairs)} tensors differ), "
        "although the generators of torch, Python and numpy are seeded before each",
        "draw the weights from these generators, or from your own seed; until then ε = 0 cannot be compared",
    )
