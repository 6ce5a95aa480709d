"""A training step whose weights stay where they are: what a CUDA graph records of one.

    batch → pass at θ → norm, projection, θ + Δ aside → pass at θ + Δ → is all finite? → the base's update

Passes run with other tensors in the place of the weights (shadow.py): θ in the precision that a pass computes in, then
θ + Δ. So nothing is kept and put back, and whenever Python looks, the weights are θ. In the same way the extra passes
get buffers of their own, and random numbers from where the clean pass began: BatchNorm's statistics and the dropout
masks are those of the clean pass. Gradients are asked for (`torch.autograd.grad`), not added up in `.grad`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from flatmin import lists
from flatmin.guard import step_unless
from flatmin.optim import AMP
from flatmin.scaling import inverse_scale, step_scaled
from flatmin.shadow import cast_once, in_place_of
from flatmin.snapshot import Snapshot, random_state, set_random_state
from flatmin.tensors import copy_
from flatmin.wrapper import Aside, Wrapper, loss_in

Gradients = dict[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a step computes: loss_fn(model, *batch(*inputs)), and what its optimizer makes of it."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    optimizer: Optimizer
    batch: Callable[..., Sequence[Any]]
    autocast: torch.dtype | None
    scaler: GradScaler | None

    @property
    def wrapper(self) -> Wrapper | None:
        return self.optimizer if isinstance(self.optimizer, Wrapper) else None

    @property
    def base(self) -> Optimizer:
        return self.optimizer.base if isinstance(self.optimizer, Wrapper) else self.optimizer

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.params), torch.device("cpu"))

    def precision(self) -> AbstractContextManager[Any]:
        """Without autocast's cache of cast weights: they change between the passes of a step."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast, cache_enabled=False)

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


class StandIns:
    """The tensors that take the place of weights and buffers, made when they are first asked for.

    `half` has θ of the weights that a pass would only cast; θ + Δ of such a weight goes to the same memory.
    """

    def __init__(self, task: Task, inputs: Sequence[Any]) -> None:
        cast: set[Tensor] = set()
        if task.autocast is not None and (
            task.wrapper is None or isinstance(task.wrapper, AMP)
        ):  # RMP's noise is float32
            with undone(task), task.precision():
                made = task.prepared(inputs)
                cast = cast_once(task.params, task.autocast, lambda: task.loss_fn(task.model, *made))
        self.half = {p: torch.empty_like(p, dtype=task.autocast, requires_grad=False) for p in task.params if p in cast}
        self._others = dict(self.half)

    def of(self, tensors: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        for tensor in tensors:
            if tensor not in self._others:
                self._others[tensor] = torch.empty_like(tensor, requires_grad=False)
        return {tensor: self._others[tensor] for tensor in tensors}


class Masks:
    """Random numbers for extra passes, each from where the clean pass began."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rewind()

    def rewind(self) -> None:
        """The clean pass begins here."""
        self.start = random_state(self.device)

    @contextmanager
    def drawn_again(self, n: int) -> Iterator[None]:
        """The n-th extra pass."""
        now = random_state(self.device)
        set_random_state(self.device, self.start)
        try:
            yield
        finally:
            set_random_state(self.device, now)


class Passes:
    """A step of a task, pass by pass; what it leaves for the world outside are its attributes.

    `result` is what the loss function returned in the clean pass, `measured` what the optimizer noted, `names` of it,
    `skip` whether a gradient was not finite, `gradients` those of the last pass, where the base has still to step.
    """

    result: Any
    measured: Tensor | None
    names: list[str]
    skip: Tensor
    gradients: Gradients

    def __init__(
        self,
        task: Task,
        forward: Callable[..., Any],
        others: StandIns,
        *,
        masks: Masks,
        rates: Tensor | None = None,
        base_too: bool = True,
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.task, self.forward, self.masks, self.half = task, forward, masks, others.half
        wrapper = task.wrapper
        groups = [] if wrapper is None or wrapper._is_idle() else wrapper._perturbed_groups()
        self.moved = others.of([p for group in groups for p in group["params"] if p.requires_grad])
        self.as_if_once = bool(self.moved) and wrapper is not None and wrapper.shares_a_step()
        self.buffers = others.of(list(task.model.buffers())) if self.as_if_once else {}
        self.rates, self.base_too, self.around, self.compiled = rates, base_too, around, compiled

    def step(self, inputs: Sequence[Any]) -> None:
        """The whole step; without the base's part, if that is not to be had here."""
        gradients = self.run(inputs)
        self.gradients = {}
        if self.rates is not None:
            lists.sgd(self.task.base, gradients, self.rates, self.skip)
            return
        self.gradients = {p: gradient.to(p.dtype) for p, gradient in gradients.items()}
        if self.base_too:
            self.step_base()
            self.gradients = {}

    def run(self, inputs: Sequence[Any]) -> Gradients:
        """All but the base's step, which changes nothing but buffers and random states; the last gradients."""
        self.result, latest, gradients = self._passes(inputs)
        wrapper, device = self.task.wrapper, self.task.device
        self.skip = torch.zeros((), dtype=torch.bool, device=device)
        measured: dict[str, Tensor] = {}
        if wrapper is not None and self.moved:
            wrapper._aside = Aside(self.moved, gradients, self.compiled)
            self.skip = wrapper._must_skip(list(gradients.values()), self.task.scaler)
            losses = {"loss": loss_in(self.result), "loss_perturbed": loss_in(latest)}
            measured = {**wrapper._measured, **{name: loss for name, loss in losses.items() if loss is not None}}
        self.names = list(measured)
        self.measured = torch.stack([value.float() for value in measured.values()]) if measured else None
        return gradients

    def _passes(self, inputs: Sequence[Any]) -> tuple[Any, Any, Gradients]:
        """The results of the first and of the last pass, and the last gradients."""
        task, wrapper = self.task, self.task.wrapper
        made = task.prepared(inputs)
        copy_((there, p) for p, there in self.half.items())
        result: Any = None
        gradients: Gradients = {}
        starts_clean = wrapper is None or wrapper._starts_clean or not self.moved
        if starts_clean:
            result, gradients = self._pass(made, self.half)
        if wrapper is None or not self.moved:
            return result, result, gradients
        wrapper._forget_step()
        moved = {p: there for p, there in self.moved.items() if p in gradients or not starts_clean}
        copy_((there, buffer) for buffer, there in self.buffers.items())
        for n in range(wrapper.inner_iter):
            wrapper._aside = Aside(self.moved, gradients, self.compiled)
            wrapper._perturb(n, inverse_scale(task.scaler, wrapper._owners, task.device))
            with self.masks.drawn_again(n) if self.as_if_once else nullcontext():
                latest, gradients = self._pass(made, {**self.half, **moved, **self.buffers})
            result = latest if result is None else result
        return result, latest, gradients

    def _pass(self, inputs: Sequence[Any], others: Mapping[Tensor, Tensor]) -> tuple[Any, Gradients]:
        params = self.task.params
        with torch.enable_grad(), in_place_of(others), self.around():
            with self.task.precision():
                result = self.forward(*inputs)
            found = torch.autograd.grad(self.task.loss_of(result), params, allow_unused=True)
        gradients = {p: gradient for p, gradient in zip(params, found, strict=True) if gradient is not None}
        return tree_map_only(Tensor, Tensor.detach, result), gradients

    @torch.no_grad()
    def step_base(self) -> Tensor | None:
        """The base's own step with the last gradients, unless one of them was not finite; whether it was skipped."""
        task, wrapper = self.task, self.task.wrapper
        for p, gradient in self.gradients.items():
            p.grad = gradient
        try:
            if wrapper is not None and self.moved:
                step_unless(self.skip, wrapper._owners, list(self.gradients), wrapper._theta, task.scaler)
                wrapper._theta.forget()
                return self.skip
            if task.scaler is None:
                task.base.step()
            elif wrapper is not None:
                return step_scaled(self.skip, wrapper._owners, [], task.scaler)
            else:
                task.scaler.step(task.base)
        finally:
            for p in self.gradients:
                p.grad = None
        return None


@contextmanager
def undone(task: Task) -> Iterator[None]:
    """Whatever runs inside, the model's buffers and the random states come back, and no gradients are left."""
    before = Snapshot(task.model)
    before.take_random([task.device])
    before.take_buffers()
    try:
        yield
    finally:
        before.put_back_buffers()
        before.put_back_random()
        for p in task.params:
            p.grad = None
        if task.wrapper is not None:
            task.wrapper._aside = None
            task.wrapper._forget_step()
