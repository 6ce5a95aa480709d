"""What a training step computes: loss_fn(model, *batch(*inputs)), and the optimizer's step with its gradient.

A `StepSpec` holds the parts of a step. In a `rehearsal` block they can run without leaving a trace: buffers, random
states and gradients are restored at its end. A capture warms up in one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from flatmin.core.capturable import CannotCaptureError
from flatmin.core.model_state import Snapshot
from flatmin.core.random_state import HostRandom
from flatmin.optim.perturbed import PerturbedOptimizer
from flatmin.optim.telemetry.step_info import loss_in


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """The parts of a training step."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    optimizer: Optimizer
    batch: Callable[..., Sequence[Any]]
    ascent: Callable[..., Sequence[Any]] | None = None  # from the batch: loss_fn's inputs for the ascent
    autocast: torch.dtype | None
    scaler: GradScaler | None

    @property
    def wrapper(self) -> PerturbedOptimizer | None:
        return self.optimizer if isinstance(self.optimizer, PerturbedOptimizer) else None

    @property
    def base(self) -> Optimizer:
        return self.optimizer.base if isinstance(self.optimizer, PerturbedOptimizer) else self.optimizer

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    @property
    def device(self) -> torch.device:
        params = (p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad)
        return next((p.device for p in params), torch.device("cpu"))

    def precision(self) -> AbstractContextManager[Any]:
        return autocast_to(self.autocast, self.device)

    def make_batch(self, inputs: Sequence[Any]) -> Sequence[Any]:
        with self.precision():
            return _checked("batch", self.batch(*inputs))

    def make_ascent(self, batch: Sequence[Any]) -> Sequence[Any]:
        """The loss function's inputs for the ascent; those of the batch, if there are no others."""
        if self.ascent is None:
            return batch
        with self.precision():
            return _checked("ascent", self.ascent(*batch))

    def loss_of(self, result: object) -> Tensor:
        loss = loss_in(result)
        if loss is None:
            raise TypeError(
                'loss_fn must return the loss as a tensor, as a dict\'s "loss", or as the first tensor of a tuple, '
                f"got {type(result).__name__}"
            )
        return loss if self.scaler is None else self.scaler.scale(loss)

    def modules(self) -> list[nn.Module]:
        """Every module that a step may run."""
        roots = [part for part in (self.model, self.loss_fn, self.batch, self.ascent) if isinstance(part, nn.Module)]
        return list(dict.fromkeys(module for root in roots for module in root.modules()))

    def generator(self) -> torch.Generator | None:
        """The generator that the optimizer draws from, if it has one besides the device's default."""
        found: torch.Generator | None = vars(self.optimizer).get("generator")
        return found


def _checked(name: str, made: Any) -> Sequence[Any]:
    if isinstance(made, Tensor):
        raise TypeError(
            f"{name} must return the inputs of loss_fn as a tuple, got a tensor of shape {tuple(made.shape)}; write "
            "`return (x,)` for a single one"
        )
    inputs: Sequence[Any] = made
    return inputs


def autocast_to(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """Autocast to this dtype, or as set outside, without caching cast weights, which change between passes."""
    kind = device.type
    if dtype is None and not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, dtype=dtype or torch.get_autocast_dtype(kind), cache_enabled=False)


@contextmanager
def rehearsal(spec: StepSpec) -> Iterator[None]:
    """Whatever runs inside, buffers and random states are restored, and no gradients are left behind.

    A buffer must be the same tensor afterwards: a graph would not see one that replaced it.
    """
    modules, host = spec.modules(), HostRandom()
    places = [(module._buffers, name) for module in modules for name in module._buffers]
    buffers = [here[name] for here, name in places]
    before = Snapshot(nn.ModuleList(modules))
    before.take_random([spec.device])
    before.take_buffers()
    own = spec.generator()
    drawn = None if own is None else own.get_state()
    try:
        yield
        if any(here.get(name) is not buffer for (here, name), buffer in zip(places, buffers, strict=True)):
            raise CannotCaptureError("it replaces a buffer by a new tensor; write into the old one instead")
    finally:
        for (here, name), buffer in zip(places, buffers, strict=True):
            here[name] = buffer
        before.put_back_buffers()
        before.put_back_random()
        host.put_back()
        if own is not None and drawn is not None:
            own.set_state(drawn)
        for p in spec.params:
            p.grad = None
        if spec.wrapper is not None:
            spec.wrapper.forget_step()
