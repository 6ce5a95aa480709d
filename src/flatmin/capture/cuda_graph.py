"""A training step for inputs of one shape, as a CUDA graph.

functional_step.py has the arithmetic; here it runs a few times to warm up, inside a rehearsal, and is then captured.
What a scheduler changes (lr, ε, ζ) is in device memory, and is updated before a replay if it has changed. A graph draws
from the random generator as eager code would; for the extra passes it has clones of the generator, which before each
replay are set to where the clean pass begins.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from flatmin.capture.functional_step import FunctionalStep, Gradients, PassRandom, SubstituteTensors
from flatmin.capture.step_spec import StepSpec, rehearsal
from flatmin.core import multi_tensor
from flatmin.core.capturable import CannotCaptureError, capturable_generator, no_host_sync
from flatmin.core.copies import Copies
from flatmin.core.packed_tensors import PackedTensors
from flatmin.core.random_state import HostRandom
from flatmin.core.recorded_launches import DeviceNumbers
from flatmin.optim.perturbed import PerturbedOptimizer
from flatmin.optim.telemetry.step_info import Last, loss_in
from flatmin.optim.wrapper import Group

# what inputs and results may consist of, besides tuples, lists and dicts
LEAF_TYPES = (Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
SCHEDULED = ("lr", "epsilon", "inner_lr")  # the group settings that may change without a new capture
WARMUP_STEPS = 3  # before a capture, for compilation, cuDNN's autotuning and memory


class StateMissingError(RuntimeError):
    """The optimizer has no state yet for a weight that got a gradient: an ordinary step will create it."""


class Workspace:
    """What all graphs of a step share: streams, memory, and substitutes for the weights."""

    def __init__(self, spec: StepSpec) -> None:
        self.stream, self.side_stream = torch.cuda.Stream(spec.device), torch.cuda.Stream(spec.device)
        self.pool = torch.cuda.graph_pool_handle()
        self.substitutes = SubstituteTensors()
        self.theta: Copies[Tensor] = Copies()  # for a base's step that may have to be undone
        if spec.wrapper is not None:
            spec.wrapper.release_theta()  # which ordinary steps used


class CapturedGraph:
    """A captured step; `replay` runs it."""

    def __init__(
        self,
        spec: StepSpec,
        forward: Callable[..., Any],
        space: Workspace,
        inputs: Sequence[Any],
        *,
        by_kernel: bool,
        by_torch: bool,
    ) -> None:
        """The base's step is part of the graph if our kernel can do it, or torch can capture it."""
        self.spec, self.space = spec, space
        self.inputs = tree_map_only(Tensor, partial(_own_memory, device=spec.device), tuple(inputs))
        self.scheduled = _ScheduledSettings(spec.optimizer, spec.device)
        self.rates: DeviceNumbers | None = None
        if by_kernel:  # our own, for SGD
            self.rates = DeviceNumbers(multi_tensor.rates_of(spec.base), torch.float64, spec.device)
        self.inside = by_kernel or by_torch
        shares = spec.wrapper is not None and spec.wrapper.shares_clean_state and spec.ascent is None
        count = spec.wrapper.inner_iter if spec.wrapper is not None and shares else 0
        self.pass_random = _GraphPassRandom(spec.device, count)
        overlapped, compiled = getattr(forward, "overlapped", None), getattr(forward, "compiled", None)
        self.functional_step = FunctionalStep(
            spec,
            forward,
            space.substitutes,
            self.inputs,
            theta=space.theta,
            pass_random=self.pass_random,
            rates=None if self.rates is None else self.rates.on_device,
            with_base=self.inside,
            compiled=compiled,
            around=nullcontext if overlapped is None else partial(overlapped, space.side_stream),
        )
        with rehearsal(spec), self.scheduled.in_groups():
            try:
                self._warm_up()
            finally:  # before anything is restored
                torch.cuda.synchronize(spec.device)
            self._capture()
        # memory that the graph writes to, and that the optimizer might otherwise free
        self.held = [*space.theta.memory(), *([] if spec.wrapper is None else spec.wrapper.memory())]

    def _warm_up(self) -> None:
        self.space.stream.wait_stream(torch.cuda.current_stream(self.spec.device))
        with torch.cuda.stream(self.space.stream):
            self._run()  # compiles, which may draw random numbers
            host = HostRandom()
            for _ in range(WARMUP_STEPS - 1):
                gradients = self._run()
            _check_result(self.functional_step.result, self.spec.device)
            if host.has_moved():
                raise CannotCaptureError("it draws random numbers on the CPU, and a graph would repeat them")
            with no_host_sync():
                self._run()
            if self.rates is not None:
                if not multi_tensor.has_state(self.spec.base, gradients):
                    raise StateMissingError
                skip = torch.zeros((), dtype=torch.bool, device=self.spec.device)
                multi_tensor.compile_sgd(self.spec.base, gradients, self.rates.on_device, skip)

    def _run(self) -> Gradients:
        self.pass_random.step_begins()
        return self.functional_step.run()

    def _capture(self) -> None:
        spec, space = self.spec, self.space
        self.graph = torch.cuda.CUDAGraph()
        own = [] if (generator := spec.generator()) is None else [generator]
        for generator in (*self.pass_random.clones, *own):
            self.graph.register_generator_state(generator)
        passes = 1 if spec.wrapper is None else spec.wrapper.inner_iter + 1
        with ExitStack() as around:
            for generator in (self.pass_random.origin, *own):
                around.enter_context(capturable_generator(generator, spec.device))
            self.tables = around.enter_context(multi_tensor.reserved_tables(spec.params, passes))
            graph = torch.cuda.graph(
                self.graph, pool=space.pool, stream=space.stream, capture_error_mode="thread_local"
            )
            around.enter_context(graph)
            self.functional_step.step()
            self.leaves, self.shape = tree_flatten(self.functional_step.result)
            handed = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
            if self.functional_step.perturbs:
                handed += [*self.functional_step.measured.values(), self.functional_step.skip]
            self.packed = PackedTensors(handed)

    @torch.no_grad()
    def replay(self, inputs: Sequence[Any]) -> Any:
        for here, given in zip(tree_leaves(self.inputs), tree_leaves(tuple(inputs)), strict=True):
            if isinstance(here, Tensor):
                here.copy_(given)  # one by one: for a few large tensors torch's foreach takes ten times as long
        self.scheduled.refresh()
        if self.rates is not None:
            self.rates.write(multi_tensor.rates_of(self.spec.base))
        self.pass_random.step_begins()
        self.graph.replay()
        skipped = None if self.inside else self.functional_step.step_base()
        fresh = self.packed.unpack()
        leaves = [fresh.pop(0) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        result = tree_unflatten(leaves, self.shape)
        if (wrapper := self.spec.wrapper) is not None:
            wrapper.last = self._last(wrapper, result, fresh, skipped)
        return result

    def _last(self, wrapper: PerturbedOptimizer, result: Any, fresh: Sequence[Tensor], skipped: Tensor | None) -> Last:
        if not self.functional_step.perturbs:
            return Last(loss=loss_in(result), skipped=skipped, epsilon=0.0)
        measured = dict(zip(self.functional_step.measured, fresh[:-1], strict=True))
        return Last(skipped=fresh[-1], epsilon=wrapper.perturbed_groups()[0]["epsilon"], **measured)


class _GraphPassRandom(PassRandom):
    """A graph cannot rewind a generator, but it can draw from another: a clone for each extra pass."""

    def __init__(self, device: torch.device, count: int) -> None:
        super().__init__(device)
        self.origin = torch.cuda.default_generators[device.index or 0]
        self.clones = [self.origin.clone_state() for _ in range(count)]
        self.start_offset = self.ahead = 0  # ahead: how much the batch draws before the clean pass begins

    def step_begins(self) -> None:
        """Set the clones to where the clean pass will begin."""
        if not self.clones:
            return
        start, self.start_offset = self.origin.get_state(), self.origin.get_offset()
        for clone in self.clones:
            clone.set_state(start)
            if self.ahead:
                clone.set_offset(self.start_offset + self.ahead)

    def clean_pass_begins(self) -> None:
        if self.clones and not torch.cuda.is_current_stream_capturing():
            self.ahead = self.origin.get_offset() - self.start_offset

    @contextmanager
    def extra_pass(self, n: int) -> Iterator[None]:
        own = self.origin.graphsafe_get_state()
        self.origin.graphsafe_set_state(self.clones[n])
        try:
            yield
        finally:
            self.origin.graphsafe_set_state(own)


class _ScheduledSettings:
    """What a scheduler changes, as device scalars that replace the numbers in the groups during a capture.

    A radius of 0 stays a number, because it means a different step; tensors on the device stay as they are.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        groups = optimizer.param_groups
        params = [p for group in groups for p in group["params"]]
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32
        self.optimizer = optimizer  # not its groups: loading a checkpoint makes new ones
        self.places = [
            (i, key) for i, group in enumerate(groups) for key in SCHEDULED if _is_number(key, group.get(key))
        ]
        self.values = DeviceNumbers(self._read(), dtype, device)

    @property
    def _groups(self) -> list[Group]:
        return self.optimizer.param_groups

    def refresh(self) -> None:
        self.values.write(self._read())

    def _read(self) -> list[float]:
        return [float(self._groups[i][key]) for i, key in self.places]

    @contextmanager
    def in_groups(self) -> Iterator[None]:
        own = [self._groups[i][key] for i, key in self.places]
        for (i, key), scalar in zip(self.places, self.values.on_device, strict=True):
            self._groups[i][key] = scalar
        try:
            yield
        finally:
            for (i, key), value in zip(self.places, own, strict=True):
                self._groups[i][key] = value


def _is_number(key: str, value: Any) -> bool:
    """Is it read on the host? A CPU tensor is: a graph would keep its value at capture."""
    if isinstance(value, Tensor):
        return value.device.type == "cpu"
    return isinstance(value, Real) and not (key == "epsilon" and value == 0)


def _own_memory(given: Tensor, *, device: torch.device) -> Tensor:
    """The graph's own memory for an input. A CPU scalar is moved to the device, where it means the same."""
    if given.device != device and given.dim():
        raise CannotCaptureError(f"an input is on {given.device}, but the weights are on {device}; move it there first")
    there = torch.empty_like(given.detach(), device=device).copy_(given.detach())
    return there.requires_grad_(given.requires_grad)


def _check_result(result: Any, device: torch.device) -> None:
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor) and leaf.device != device:
            raise CannotCaptureError(f"loss_fn returns a tensor on {leaf.device}, but the weights are on {device}")
        if not isinstance(leaf, LEAF_TYPES):
            raise CannotCaptureError(
                f"loss_fn returns an object of type {type(leaf).__name__}; return tensors in dicts, tuples and lists"
            )


def can_torch_capture(spec: StepSpec) -> bool:
    """Can torch capture the base's step, with lr as a tensor? Not with hooks: a graph does not run Python again."""
    base = spec.base
    if spec.scaler is not None or multi_tensor.has_hooks(base):
        return False
    in_torch = type(base).__module__.startswith("torch.optim.")
    return in_torch and all(group.get("capturable", group.get("fused")) for group in base.param_groups)
