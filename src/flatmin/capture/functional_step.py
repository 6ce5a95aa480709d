"""A training step that leaves the weights in place: the form that a CUDA graph captures.

    batch → pass at θ → norm, projection, θ + Δ written elsewhere → pass at θ + Δ → all finite? → the base's update

The passes run with substitutes for the weights (weight_swap.py): θ in the precision that a pass computes in, then
θ + Δ. So nothing has to be saved and restored, and whenever Python looks, the weights are θ. In the same way the extra
passes get their own buffers, and random numbers from where the clean pass began: BatchNorm's statistics and dropout
masks are those of the clean pass. Gradients come from `torch.autograd.grad` and are not accumulated in `.grad`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from flatmin.capture.clipped_sgd import ClippedSGD, clipped
from flatmin.capture.step_spec import StepSpec, rehearsal
from flatmin.capture.weight_swap import weights_cast_once, with_substitutes
from flatmin.core import multi_tensor
from flatmin.core.capturable import CannotCaptureError
from flatmin.core.copies import Copies
from flatmin.core.random_state import random_state, set_random_state
from flatmin.core.tensors import copy_, has_layout_of, is_dense
from flatmin.optim.amp import AMP
from flatmin.optim.telemetry.step_info import Measured, loss_in
from flatmin.optim.update.grad_scaler import inverse_scale, step_scaled
from flatmin.optim.update.skip_step import step_unless
from flatmin.optim.weight_storage import Beside

Gradients = dict[Tensor, Tensor]


class SubstituteTensors:
    """Memory for the tensors that replace weights and buffers; all graphs of a step share it."""

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


def weights_only_cast(spec: StepSpec, inputs: Sequence[Any]) -> set[Tensor]:
    """The weights that a pass only casts. None for RMP, whose noise is float32."""
    if spec.autocast is None or not (spec.wrapper is None or isinstance(spec.wrapper, AMP)):
        return set()

    def forward_and_backward() -> None:
        with spec.precision():
            result = spec.loss_fn(spec.model, *batch)
        torch.autograd.grad(spec.loss_of(result), spec.params, allow_unused=True)

    with rehearsal(spec), torch.enable_grad():
        batch = spec.make_batch(inputs)
        return weights_cast_once(spec.params, spec.autocast, forward_and_backward)


def weights_reached(spec: StepSpec, inputs: Sequence[Any]) -> set[Tensor]:
    """The weights that get a gradient from backward(), as in an ordinary step."""
    with rehearsal(spec), torch.enable_grad():
        for p in spec.params:  # the loop may have left some
            p.grad = None
        batch = spec.make_batch(inputs)
        with spec.precision():
            result = spec.loss_fn(spec.model, *batch)
        spec.loss_of(result).backward()
        return {p for p in spec.params if p.grad is not None}


class PassRandom:
    """Random numbers for the extra passes: each draws from where the clean pass began."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def clean_pass_begins(self) -> None:
        """Called after the batch is made, which may draw numbers too."""
        self.start = random_state(self.device)

    @contextmanager
    def extra_pass(self, n: int) -> Iterator[None]:
        """The context of the n-th extra pass."""
        now = random_state(self.device)
        set_random_state(self.device, self.start)
        try:
            yield
        finally:
            set_random_state(self.device, now)


class FunctionalStep:
    """A step, pass by pass; its outputs are its attributes.

    `result` is what the loss function returned in the clean pass; `measured` is what the optimizer measured in a step
    that perturbs; `skip` tells whether a gradient was not finite; `gradients` are the last ones, if the base has yet to
    step.
    """

    result: Any
    measured: dict[str, Tensor]
    skip: Tensor
    gradients: Gradients

    def __init__(
        self,
        spec: StepSpec,
        forward: Callable[..., Any],
        substitutes: SubstituteTensors,
        inputs: Sequence[Any],
        *,
        theta: Copies[Tensor],
        pass_random: PassRandom,
        rates: Tensor | None = None,
        with_base: bool = True,
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.spec, self.forward, self.inputs, self.pass_random = spec, forward, inputs, pass_random
        self.theta = theta  # for a base whose step must be undone to skip it
        self.reached = weights_reached(spec, inputs)
        self.half = substitutes.of(weights_only_cast(spec, inputs), dtype=spec.autocast)
        wrapper = spec.wrapper
        self.perturbs = wrapper is not None and wrapper.perturbs
        groups = wrapper.perturbed_groups() if wrapper is not None and self.perturbs else []
        moving = [p for group in groups for p in group["params"] if p.requires_grad]
        # θ + Δ of a weight that is only cast uses the same memory
        self.moved = {
            **substitutes.of(p for p in moving if p not in self.half),
            **{p: self.half[p] for p in moving if p in self.half},
        }
        self.shares_clean_state = self.perturbs and wrapper is not None and wrapper.shares_clean_state
        self.shares_random = self.shares_clean_state and spec.ascent is None  # with less data, masks have another shape
        within = wrapper.model if wrapper is not None and self.shares_clean_state else None
        self.buffers = {} if within is None else substitutes.of(within.buffers())
        self.rates, self.with_base, self.around, self.compiled = rates, with_base, around, compiled

    def step(self) -> None:
        """The whole step; without the base's part if `with_base` is false."""
        gradients = self.run()
        self.gradients = {}
        if self.rates is not None:
            multi_tensor.sgd(self.spec.base, gradients, self.rates, self.skip)
            return
        self.gradients = {p: gradient.to(p.dtype) for p, gradient in gradients.items()}
        if self.with_base:
            self.step_base()
            self.gradients = {}

    def run(self) -> Gradients:
        """Run all but the base's step; changes only buffers and random states. Returns the last gradients."""
        measured = Measured()
        self.result, latest, gradients = self._run_passes(measured)
        self._check_reached(gradients)
        wrapper, device = self.spec.wrapper, self.spec.device
        self.skip = torch.zeros((), dtype=torch.bool, device=device)
        self.measured = {}
        if wrapper is not None and self.perturbs:
            storage = Beside(self.moved, gradients, self.compiled)
            self.skip = wrapper.must_skip(list(gradients.values()), self.spec.scaler, storage, measured)
            losses = {"loss": loss_in(self.result), "loss_perturbed": loss_in(latest)}
            if self.spec.ascent is not None:  # the pass at θ had less data
                self.result, losses["loss"] = latest, None
            self.measured = {**measured.numbers, **{name: loss for name, loss in losses.items() if loss is not None}}
        base = self.spec.base
        if self.rates is not None and isinstance(base, ClippedSGD):  # otherwise its own step clips
            gradients = clipped(gradients, base.clip_norm)
        return gradients

    def _check_reached(self, gradients: Gradients) -> None:
        if self.perturbs and not gradients:
            raise CannotCaptureError("no weight got a gradient")
        if not self.reached <= gradients.keys():  # autograd.grad does not look into such a pass, and would skip it
            raise CannotCaptureError(
                "some weights get a gradient only from a backward pass within the backward pass, or not in every call; "
                "with torch.utils.checkpoint, give it use_reentrant=False"
            )

    def _run_passes(self, measured: Measured) -> tuple[Any, Any, Gradients]:
        """The results of the first and the last pass, and the last gradients."""
        spec, wrapper = self.spec, self.spec.wrapper
        batch = spec.make_batch(self.inputs)
        less = spec.make_ascent(batch) if self.perturbs else batch
        self.pass_random.clean_pass_begins()
        _fill(self.half)
        result: Any = None
        gradients: Gradients = {}
        starts_clean = wrapper is None or wrapper.starts_clean or not self.perturbs
        if starts_clean:
            result, gradients = self._pass(less, self.half)
        if wrapper is None or not self.perturbs:
            return result, result, gradients
        moved = {p: there for p, there in self.moved.items() if p in gradients or not starts_clean}
        for n in range(wrapper.inner_iter):
            _fill(self.buffers)
            storage = Beside(self.moved, gradients, self.compiled)
            wrapper.perturb(n, inverse_scale(spec.scaler, wrapper.owners, spec.device), storage, measured)
            storage.gradients = gradients = {}  # free them: the next gradients may use their memory
            inputs = batch if n + 1 == wrapper.inner_iter else less
            with self.pass_random.extra_pass(n) if self.shares_random else nullcontext():
                latest, gradients = self._pass(inputs, {**self.half, **moved, **self.buffers})
            result = latest if result is None else result
        return result, latest, gradients

    def _pass(self, inputs: Sequence[Any], substitutes: Mapping[Tensor, Tensor]) -> tuple[Any, Gradients]:
        params = self.spec.params
        with torch.enable_grad(), with_substitutes(substitutes), self.around():
            with self.spec.precision():
                result = self.forward(*inputs)
            found = torch.autograd.grad(self.spec.loss_of(result), params, allow_unused=True)
        gradients = _separate({p: gradient for p, gradient in zip(params, found, strict=True) if gradient is not None})
        return tree_map_only(Tensor, Tensor.detach, result), gradients

    @torch.no_grad()
    def step_base(self) -> Tensor | None:
        """The base's own step with the last gradients, unless one is not finite; returns whether it was skipped."""
        spec, wrapper = self.spec, self.spec.wrapper
        params = [p for group in spec.base.param_groups for p in group["params"]]
        for p in params:  # all of them: a gradient left over in `.grad` is not this step's
            p.grad = self.gradients.get(p)
        try:
            if wrapper is not None and self.perturbs:
                step_unless(self.skip, wrapper.owners, list(self.gradients), self.theta, spec.scaler)
                return self.skip
            if spec.scaler is None:
                spec.base.step()
            elif wrapper is not None:
                return step_scaled(self.skip, wrapper.owners, [], spec.scaler)
            else:
                spec.scaler.step(spec.base)
        finally:  # even if this raises, the next step must not restore this θ
            self.theta.forget()
            for p in params:
                p.grad = None
        return None


@torch.no_grad()
def _fill(substitutes: Mapping[Tensor, Tensor]) -> None:
    copy_((there, here) for here, there in substitutes.items())


def _separate(gradients: Gradients) -> Gradients:
    """Each gradient in its own memory, in its weight's layout, as backward() leaves it in `.grad`.

    Autograd may return one tensor for two weights, an expanded number, or another layout.
    """
    seen: set[int] = set()
    for p, gradient in gradients.items():
        if gradient.is_conj():
            gradients[p] = gradient.resolve_conj()
        elif not gradient.is_sparse:
            memory = gradient.untyped_storage().data_ptr()
            if memory in seen or not (has_layout_of(gradient, p) if is_dense(p) else gradient.is_contiguous()):
                gradients[p] = torch.empty_like(p, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
            seen.add(memory)
    return gradients
