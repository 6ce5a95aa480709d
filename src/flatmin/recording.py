"""One training step for inputs of one shape, as a CUDA graph.

    batch → pass at θ → norm, projection, θ + Δ aside → pass at θ + Δ → is all finite? → the base's update

The weights never move. Passes run with other tensors in their place (shadow.py): θ in the precision that a pass
computes in, then θ + Δ; so nothing is kept and put back, and when Python looks, the weights are θ. In the same way
the extra passes get buffers of their own, and draw from clones of the random generator, set before each replay to
where the clean pass begins: BatchNorm's statistics and the dropout masks are those of the clean pass.

What a scheduler moves (lr, ε, ζ) lies in device memory, and is written there before a replay where it has changed.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
from flatmin.scaling import inverse_scale
from flatmin.shadow import cast_once, in_place_of
from flatmin.shell import Group
from flatmin.snapshot import Snapshot
from flatmin.tensors import copy_
from flatmin.wrapper import Aside, Last, Wrapper, loss_in

MOVED = ("lr", "epsilon", "inner_lr")  # the values of a group that may change without a new capture
WARM = 3  # passes before a capture: compilation, cuDNN's search, memory

Gradients = dict[Tensor, Tensor]


class CannotCaptureError(RuntimeError):
    """What a step does that a CUDA graph cannot."""


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


class Workspace:
    """What all recordings of a task share: streams, memory, and the tensors that stand in for the weights."""

    def __init__(self, task: Task, inputs: Sequence[Any]) -> None:
        self.stream, self.beside = torch.cuda.Stream(task.device), torch.cuda.Stream(task.device)
        self.pool = torch.cuda.graph_pool_handle()
        wrapper = task.wrapper
        perturbed = [] if wrapper is None or wrapper._is_idle() else wrapper._perturbed_groups()
        half: set[Tensor] = set()
        if task.autocast is not None and (wrapper is None or isinstance(wrapper, AMP)):  # RMP's noise is float32
            with task.precision(), _undone(task):
                half = cast_once(task.params, task.autocast, lambda: task.loss_fn(task.model, *task.prepared(inputs)))
        self.half = {p: torch.empty_like(p, dtype=task.autocast, requires_grad=False) for p in task.params if p in half}
        moving = [p for group in perturbed for p in group["params"] if p.requires_grad]
        self.moved = {p: self.half[p] if p in self.half else torch.empty_like(p, requires_grad=False) for p in moving}
        keeps_buffers = wrapper is not None and wrapper.model is not None and wrapper._starts_clean and moving
        self.buffers = {b: torch.empty_like(b) for b in task.model.buffers()} if keeps_buffers else {}


class Recording:
    """A captured step; `replay` is the step."""

    def __init__(self, task: Task, forward: Callable[..., Any], space: Workspace, inputs: Sequence[Any]) -> None:
        self.task, self.forward, self.space = task, forward, space
        self.inputs = tree_map_only(Tensor, lambda x: torch.empty_like(x).copy_(x), tuple(inputs))
        self.groups = task.optimizer.param_groups
        self.sgd = task.scaler is None and lists.takes_sgd(task.base)
        self.inside = self.sgd or (task.scaler is None and _captures_itself(task.base))
        self.knobs = _Knobs(self.groups, task.device)
        self.rates = _Numbers(lambda: lists.rates_of(task.base), torch.float64, task.device) if self.sgd else None
        wrapper = task.wrapper
        shares_masks = wrapper is not None and wrapper.model is not None and wrapper._starts_clean
        self.origin = torch.cuda.default_generators[task.device.index or 0]
        count = wrapper.inner_iter if wrapper is not None and shares_masks and space.moved else 0
        self.clones = [self.origin.clone_state() for _ in range(count)]
        self._record()

    # ---- before

    def _record(self) -> None:
        with ExitStack() as undo:
            undo.enter_context(_undone(self.task))
            undo.enter_context(self.knobs.in_groups())
            self.space.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.space.stream):
                before = torch.get_rng_state()
                for _ in range(WARM):
                    gradients = self._passes()[2]
                if not torch.equal(before, torch.get_rng_state()):
                    raise CannotCaptureError("it draws random numbers on the CPU, which a graph would repeat")
                with _no_waiting():
                    self._passes()
                if self.rates is not None:
                    skip = torch.zeros((), dtype=torch.bool, device=self.task.device)
                    lists.rehearse_sgd(self.task.base, gradients, self.rates.there, skip)
                del gradients
            torch.cuda.synchronize(self.task.device)
            self._capture()

    def _capture(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        for clone in self.clones:
            self.graph.register_generator_state(clone)
        generator = getattr(self.task.optimizer, "generator", None)
        if generator is not None:
            self.graph.register_generator_state(generator)
        with (
            lists.bound() as self.tables,
            torch.cuda.graph(
                self.graph, pool=self.space.pool, stream=self.space.stream, capture_error_mode="thread_local"
            ),
        ):
            self._step()

    def _step(self) -> None:
        """All that the graph does; its outputs stay in memory of the graph."""
        self.result, latest, gradients = self._passes()
        wrapper, device = self.task.wrapper, self.task.device
        self.skip = torch.zeros((), dtype=torch.bool, device=device)
        measured: dict[str, Tensor] = {}
        if wrapper is not None and not wrapper._is_idle():
            self.skip = wrapper._must_skip(list(gradients.values()), self.task.scaler)
            measured = dict(wrapper._measured)
            for name, result in (("loss", self.result), ("loss_perturbed", latest)):
                measured[name] = loss_in(result)  # type: ignore[assignment]  # checked in the pass
        self.names = list(measured)
        self.measured = torch.stack([value.float() for value in measured.values()]) if measured else None
        self.gradients = gradients if self.sgd else {p: g.to(p.dtype) for p, g in gradients.items()}
        if self.rates is not None:
            lists.sgd(self.task.base, gradients, self.rates.there, self.skip)
        elif self.inside:
            self._step_base()
        if self.inside:
            self.gradients = {}

    def _passes(self) -> tuple[Any, Any, Gradients]:
        """The results of the first and of the last pass, and the last gradients."""
        task, space, wrapper = self.task, self.space, self.task.wrapper
        inputs = task.prepared(self.inputs)
        copy_((there, p) for p, there in space.half.items())
        result: Any = None
        gradients: Gradients = {}
        starts_clean = wrapper is None or wrapper._starts_clean or not space.moved
        if starts_clean:
            result, gradients = self._pass(inputs, space.half)
        latest = result
        if wrapper is None or not space.moved:
            return result, latest, gradients
        wrapper._forget_step()
        moved = {p: there for p, there in space.moved.items() if p in gradients or not starts_clean}
        copy_((there, buffer) for buffer, there in space.buffers.items())
        for n in range(wrapper.inner_iter):
            wrapper._aside = Aside(space.moved, gradients)
            wrapper._perturb(n, inverse_scale(task.scaler, wrapper._owners, task.device))
            with self._drawing_from(self.clones[n] if self.clones else None):
                latest, gradients = self._pass(inputs, {**space.half, **moved, **space.buffers})
            result = latest if result is None else result
        return result, latest, gradients

    def _pass(self, inputs: Sequence[Any], others: Mapping[Tensor, Tensor]) -> tuple[Any, Gradients]:
        params = self.task.params
        with torch.enable_grad(), in_place_of(others), self._beside():
            with self.task.precision():
                result = self.forward(*inputs)
            found = torch.autograd.grad(self.task.loss_of(result), params, allow_unused=True)
        gradients = {p: g for p, g in zip(params, found, strict=True) if g is not None}
        return tree_map_only(Tensor, Tensor.detach, result), gradients

    def _beside(self) -> AbstractContextManager[None]:
        joined = getattr(self.forward, "joined", None)
        return nullcontext() if joined is None else joined(self.space.beside)

    @contextmanager
    def _drawing_from(self, clone: torch.Generator | None) -> Iterator[None]:
        if clone is None:
            yield
            return
        own = self.origin.graphsafe_get_state()
        self.origin.graphsafe_set_state(clone)
        try:
            yield
        finally:
            self.origin.graphsafe_set_state(own)

    # ---- the step

    def replay(self, inputs: Sequence[Any]) -> Any:
        copy_inputs(self.inputs, inputs)
        self.knobs.refresh()
        if self.rates is not None:
            self.rates.refresh()
        if self.clones:
            here = self.origin.get_state()
            for clone in self.clones:
                clone.set_state(here)
        self.graph.replay()
        self._note()
        if not self.inside:
            self._step_base()
        return tree_map_only(Tensor, Tensor.clone, self.result)

    def _note(self) -> None:
        wrapper = self.task.wrapper
        if wrapper is None:
            return
        if self.measured is None:
            loss = loss_in(self.result)
            wrapper.last = Last(loss=None if loss is None else loss.clone())
            return
        values = dict(zip(self.names, self.measured.clone().unbind(), strict=True))
        wrapper.last = Last(skipped=self.skip.clone(), **values)

    @torch.no_grad()
    def _step_base(self) -> None:
        """The base's own step with the last gradients; in the graph, or after it."""
        task, wrapper = self.task, self.task.wrapper
        for p, gradient in self.gradients.items():
            p.grad = gradient
        try:
            if wrapper is not None and self.measured is not None:
                step_unless(self.skip, wrapper._owners, list(self.gradients), wrapper._theta, task.scaler)
                wrapper._forget_step()
            elif task.scaler is not None:
                task.scaler.step(task.base)
            else:
                task.base.step()
        finally:
            for p in self.gradients:
                p.grad = None


def copy_inputs(targets: Any, sources: Any) -> None:
    leaves = torch.utils._pytree.tree_leaves
    pairs = zip(leaves(targets), leaves(tuple(sources)), strict=True)
    copy_((target, source) for target, source in pairs if isinstance(target, Tensor))


class _Numbers:
    """Numbers of the host in device memory, copied there where they have changed."""

    def __init__(self, read: Callable[[], Any], dtype: torch.dtype, device: torch.device) -> None:
        self.read = read
        self.here = read()
        self.there = torch.tensor(self.here, dtype=dtype, device=device)

    def refresh(self) -> None:
        now = self.read()
        if now != self.here:
            self.there.copy_(torch.tensor(now, dtype=self.there.dtype), non_blocking=True)
            self.here = now


class _Knobs:
    """What a scheduler moves, as device scalars that can stand in the groups during a capture.

    A radius of 0 stays as it is, because it means another step; so does what is a tensor already.
    """

    def __init__(self, groups: Sequence[Group], device: torch.device) -> None:
        params = [p for group in groups for p in group["params"]]
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32
        self.places = [(group, key) for group in groups for key in MOVED if _is_number(key, group.get(key))]
        self.values = _Numbers(lambda: [float(group[key]) for group, key in self.places], dtype, device)

    def refresh(self) -> None:
        self.values.refresh()

    @contextmanager
    def in_groups(self) -> Iterator[None]:
        own = [group[key] for group, key in self.places]
        for (group, key), scalar in zip(self.places, self.values.there, strict=True):
            group[key] = scalar
        try:
            yield
        finally:
            for (group, key), value in zip(self.places, own, strict=True):
                group[key] = value


def _is_number(key: str, value: object) -> bool:
    return isinstance(value, int | float) and not (key == "epsilon" and value == 0)


def _captures_itself(base: Optimizer) -> bool:
    """Can torch capture its step, with lr as a tensor? Hooks are Python, which a graph does not run again."""
    if base._optimizer_step_pre_hooks or base._optimizer_step_post_hooks:
        return False
    in_torch = type(base).__module__.startswith("torch.optim.")
    return in_torch and all(group.get("capturable") or group.get("fused") for group in base.param_groups)


@contextmanager
def _undone(task: Task) -> Iterator[None]:
    """Whatever runs inside, the model's buffers, random states and gradients are as before (gradients: none)."""
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


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Raises where the host would wait for the device: there a capture would break off, and leave a mess."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "synchronization debug mode is a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            raise CannotCaptureError("it reads a number back from the device, to decide or to print") from error
        finally:
            torch.cuda.set_sync_debug_mode(before)
