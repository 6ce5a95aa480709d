"""A training step whose weights stay where they are: what a CUDA graph records of one.

    batch → pass at θ → norm, projection, θ + Δ aside → pass at θ + Δ → is all finite? → the base's update

Passes run with other tensors in the place of the weights (weight_swap.py): θ in the precision that a pass computes
in, then θ + Δ. So nothing is kept and put back, and whenever Python looks, the weights are θ. In the same way the extra
passes get buffers of their own, and random numbers from where the clean pass began: BatchNorm's statistics and the
dropout masks are those of the clean pass. Gradients are asked for (`torch.autograd.grad`), not added up in `.grad`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from flatmin.capture.step_spec import Task, undone
from flatmin.capture.weight_swap import cast_once, in_place_of
from flatmin.core import multi_tensor
from flatmin.core.model_state import random_state, set_random_state
from flatmin.core.tensors import copy_, is_dense, lies_like
from flatmin.optim.amp import AMP
from flatmin.optim.grad_scaler import inverse_scale, step_scaled
from flatmin.optim.skip_step import step_unless
from flatmin.optim.step_info import loss_in
from flatmin.optim.weight_storage import Beside

Gradients = dict[Tensor, Tensor]


class StandIns:
    """Memory for the tensors that take the place of weights and buffers; all recordings of a task share it."""

    def __init__(self) -> None:
        self._memory: dict[tuple[Tensor, torch.dtype], Tensor] = {}

    def of(self, tensors: Iterable[Tensor], *, dtype: torch.dtype | None = None) -> dict[Tensor, Tensor]:
        found = {}
        for tensor in tensors:
            key = (tensor, dtype or tensor.dtype)
            if key not in self._memory:
                self._memory[key] = torch.empty_like(tensor, dtype=dtype, requires_grad=False)
            found[tensor] = self._memory[key]
        return found


def only_cast(task: Task, inputs: Sequence[Any]) -> set[Tensor]:
    """The weights that a pass does nothing with but cast them. Not for RMP, whose noise is float32."""
    if task.autocast is None or not (task.wrapper is None or isinstance(task.wrapper, AMP)):
        return set()

    def forth_and_back() -> None:
        with task.precision():
            result = task.loss_fn(task.model, *made)
        torch.autograd.grad(task.loss_of(result), task.params, allow_unused=True)

    with undone(task), torch.enable_grad():
        made = task.prepared(inputs)
        return cast_once(task.params, task.autocast, forth_and_back)


class Masks:
    """Random numbers for extra passes, each from where the clean pass began."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def clean_pass_begins(self) -> None:
        """Here, after the batch, which may draw as well."""
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

    `result` is what the loss function returned in the clean pass, `measured` what the optimizer notes of a step that
    perturbs, `skip` whether a gradient was not finite, `gradients` the last ones, if the base has still to step.
    """

    result: Any
    measured: dict[str, Tensor]
    skip: Tensor
    gradients: Gradients

    def __init__(
        self,
        task: Task,
        forward: Callable[..., Any],
        others: StandIns,
        inputs: Sequence[Any],
        *,
        masks: Masks,
        rates: Tensor | None = None,
        base_too: bool = True,
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.task, self.forward, self.inputs, self.masks = task, forward, inputs, masks
        self.half = others.of(only_cast(task, inputs), dtype=task.autocast)
        wrapper = task.wrapper
        self.perturbs = wrapper is not None and not wrapper._is_idle()
        groups = wrapper._perturbed_groups() if wrapper is not None and self.perturbs else []
        moving = [p for group in groups for p in group["params"] if p.requires_grad]
        # θ + Δ of a weight that is only cast goes to the same memory
        self.moved = {
            **others.of(p for p in moving if p not in self.half),
            **{p: self.half[p] for p in moving if p in self.half},
        }
        self.as_if_once = self.perturbs and wrapper is not None and wrapper._shares_a_step()
        within = wrapper.model if wrapper is not None and self.as_if_once else None
        self.buffers = {} if within is None else others.of(within.buffers())
        self.rates, self.base_too, self.around, self.compiled = rates, base_too, around, compiled

    def step(self) -> None:
        """The whole step; without the base's part, if that is not to be had here."""
        gradients = self.run()
        self.gradients = {}
        if self.rates is not None:
            multi_tensor.sgd(self.task.base, gradients, self.rates, self.skip)
            return
        self.gradients = {p: gradient.to(p.dtype) for p, gradient in gradients.items()}
        if self.base_too:
            self.step_base()
            self.gradients = {}

    def run(self) -> Gradients:
        """All but the base's step, which changes nothing but buffers and random states; the last gradients."""
        self.result, latest, gradients = self._passes()
        wrapper, device = self.task.wrapper, self.task.device
        self.skip = torch.zeros((), dtype=torch.bool, device=device)
        self.measured = {}
        if wrapper is not None and self.perturbs:
            self.skip = wrapper._must_skip(list(gradients.values()), self.task.scaler)
            losses = {"loss": loss_in(self.result), "loss_perturbed": loss_in(latest)}
            self.measured = {**wrapper._measured, **{name: loss for name, loss in losses.items() if loss is not None}}
        return gradients

    def _passes(self) -> tuple[Any, Any, Gradients]:
        """The results of the first and of the last pass, and the last gradients."""
        task, wrapper = self.task, self.task.wrapper
        made = task.prepared(self.inputs)
        self.masks.clean_pass_begins()
        _copy_beside(self.half)
        result: Any = None
        gradients: Gradients = {}
        starts_clean = wrapper is None or wrapper._starts_clean or not self.perturbs
        if starts_clean:
            result, gradients = self._pass(made, self.half)
        if wrapper is None or not self.perturbs:
            return result, result, gradients
        wrapper._forget_step()
        moved = {p: there for p, there in self.moved.items() if p in gradients or not starts_clean}
        _copy_beside(self.buffers)
        for n in range(wrapper.inner_iter):
            storage = Beside(self.moved, gradients, self.compiled)
            wrapper._storage = storage
            wrapper._perturb(n, inverse_scale(task.scaler, wrapper._owners, task.device))
            storage.gradients = gradients = {}  # the next ones may have their memory
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
        gradients = _apart({p: gradient for p, gradient in zip(params, found, strict=True) if gradient is not None})
        return tree_map_only(Tensor, Tensor.detach, result), gradients

    @torch.no_grad()
    def step_base(self) -> Tensor | None:
        """The base's own step with the last gradients, unless one of them was not finite; whether it was skipped."""
        task, wrapper = self.task, self.task.wrapper
        params = [p for group in task.base.param_groups for p in group["params"]]
        for p in params:  # of all: what someone left in `.grad` is not of this step
            p.grad = self.gradients.get(p)
        try:
            if wrapper is not None and self.perturbs:
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
            for p in params:
                p.grad = None
        return None


@torch.no_grad()
def _copy_beside(others: Mapping[Tensor, Tensor]) -> None:
    copy_((there, here) for here, there in others.items())


def _apart(gradients: Gradients) -> Gradients:
    """Each in memory of its own, in the order of its weight's, as backward() leaves it in `.grad`.

    Autograd may hand out one tensor for two weights, one number for many, or another order.
    """
    seen: set[int] = set()
    for p, gradient in gradients.items():
        if not gradient.is_sparse:
            memory = gradient.untyped_storage().data_ptr()
            if memory in seen or not (lies_like(gradient, p) if is_dense(p) else gradient.is_contiguous()):
                gradients[p] = torch.empty_like(p, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
            seen.add(memory)
    return gradients
