"""What a training step computes: loss_fn(model, *batch(*inputs)), and what its optimizer makes of it.

A `Task` holds the parts. `undone` is a block in which they can be run for a look, and nothing is left of it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from flatmin.core.model_state import HostRandom, Snapshot
from flatmin.optim.perturbed import PerturbedOptimizer
from flatmin.optim.step_info import loss_in


class CannotCaptureError(RuntimeError):
    """What a step does that a CUDA graph cannot."""


def in_a_line(error: BaseException) -> str:
    """What it says, without the pages that torch adds.

    >>> in_a_line(ValueError("no\\nand a trace")), in_a_line(MemoryError())
    ('no', 'MemoryError')
    """
    return str(error).strip().partition("\n")[0] or type(error).__name__


@dataclass(frozen=True, kw_only=True)
class Task:
    """The parts of a step."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    optimizer: Optimizer
    batch: Callable[..., Sequence[Any]]
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
        return computing_in(self.autocast, self.device)

    def prepared(self, inputs: Sequence[Any]) -> Sequence[Any]:
        with self.precision():
            return self.batch(*inputs)

    def loss_of(self, result: object) -> Tensor:
        loss = loss_in(result)
        if loss is None:
            raise TypeError(
                'loss_fn must return the loss as a tensor, a dict with "loss", or a tuple whose first tensor it is, '
                f"got {type(result).__name__}"
            )
        return loss if self.scaler is None else self.scaler.scale(loss)

    def modules(self) -> list[nn.Module]:
        """All that a step may run."""
        roots = [part for part in (self.model, self.loss_fn, self.batch) if isinstance(part, nn.Module)]
        return list(dict.fromkeys(module for root in roots for module in root.modules()))

    def generator(self) -> torch.Generator | None:
        """One that the optimizer draws from, beside the device's default one."""
        return getattr(self.optimizer, "generator", None)


def computing_in(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """Autocast to that type, or as it is here, without its cache of cast weights: they change between passes."""
    kind = device.type
    if dtype is None and not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, dtype=dtype or torch.get_autocast_dtype(kind), cache_enabled=False)


@contextmanager
def undone(task: Task) -> Iterator[None]:
    """Whatever runs inside, buffers and random states come back, and no gradients are left.

    A buffer must be the same tensor afterwards: a graph knows nothing of one that took its place.
    """
    modules, host = task.modules(), HostRandom()
    places = [(module._buffers, name) for module in modules for name in module._buffers]
    buffers = [here[name] for here, name in places]
    before = Snapshot(nn.ModuleList(modules))
    before.take_random([task.device])
    before.take_buffers()
    own = task.generator()
    drawn = None if own is None else own.get_state()
    try:
        yield
        if any(here.get(name) is not buffer for (here, name), buffer in zip(places, buffers, strict=True)):
            raise CannotCaptureError("it puts a new tensor in the place of a buffer; write into the old one instead")
    finally:
        for (here, name), buffer in zip(places, buffers, strict=True):
            here[name] = buffer
        before.put_back_buffers()
        before.put_back_random()
        host.put_back()
        if own is not None and drawn is not None:
            own.set_state(drawn)
        for p in task.params:
            p.grad = None
        if task.wrapper is not None:
            task.wrapper._store_in_place()
            task.wrapper._forget_step()
