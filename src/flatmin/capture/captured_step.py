"""A whole training step, compiled and captured as one CUDA graph.

    step = captured_step(model, loss_fn, optimizer, autocast=torch.bfloat16)
    loss = step(x, y)                  replaces a loop's forward, backward and optimizer.step

A step of a small network is hundreds of kernels of a few microseconds each, and Python takes longer to launch one than
the GPU takes to run it. A CUDA graph launches them all at once: clean pass, projection, perturbed passes and update.

The first call is an ordinary step, which creates the optimizer's state. The second one captures. A new input shape, a
changed group setting (other than lr, ε and ζ), moved weights or a switch between train and eval mode cause a new
capture. On the CPU, and for steps that cannot be captured, every call is an ordinary step.
"""

import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only

from flatmin.capture.clipped_sgd import ClippedSGD
from flatmin.capture.cuda_graph import (
    LEAF_TYPES,
    SCHEDULED,
    CapturedGraph,
    StateMissingError,
    Workspace,
    can_torch_capture,
)
from flatmin.capture.step_spec import StepSpec
from flatmin.core import multi_tensor
from flatmin.core.capturable import GENERATOR_REPLACEMENTS, CannotCaptureError
from flatmin.core.messages import describe, one_line
from flatmin.core.tensors import ORDINARY_TYPES
from flatmin.optim.amp import AMP
from flatmin.optim.perturbed import PerturbedOptimizer

MAX_GRAPHS = 8  # kept at a time, one per kind of input; each has its own memory
CAPTURE_MIN_REPLAYS = 50  # per capture, on average: with fewer, capturing costs more than replaying saves
MAX_UNUSED_CAPTURES = 12  # in a row, none of them replayed; then every step runs eagerly
MAX_SETTING_CHANGES = 3  # of the base's settings; after that its step is no longer part of the graph

Key = tuple[Any, ...]  # what a graph was captured for: structure and types of the inputs, settings, flags


def captured_step(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    *,
    autocast: torch.dtype | None = None,
    compile: bool = True,  # noqa: A002
    batch: Callable[..., Sequence[Any]] | None = None,
    ascent: Callable[..., Sequence[Any]] | None = None,
    scaler: GradScaler | None = None,
    capture: bool = True,
) -> "CapturedStep":
    """A function that takes one training step: `loss = step(*inputs)`, for any model and any torch optimizer.

    loss_fn     loss_fn(model, *inputs) returns the loss, a dict with "loss", or a tuple whose first tensor is the loss
    optimizer   AMP, RMP, or any torch optimizer
    autocast    run every pass under torch.autocast with this dtype, such as torch.bfloat16
    compile     use torch.compile for the captured passes
    batch       batch(*inputs) makes loss_fn's inputs; it runs once per step, as part of the graph
    ascent      ascent(*batch) makes loss_fn's inputs for AMP's ascent from the step's, such as part of the images
    scaler      a GradScaler for fp16: the base then steps after the graph; call `scaler.update()` yourself
    capture     False: every call is an ordinary step, for comparison

    The step returns what loss_fn returned in the clean pass (with `ascent`: in the pass at θ + Δ, the only one with all
    inputs), if captured in new tensors, and leaves no gradients behind.
    The modules and the loss function must do the same in every call, except for what depends on their tensors and on
    `train()` or `eval()`: a graph repeats what was captured (`reset()` discards it).

    >>> model = nn.Linear(2, 1)
    >>> _ = nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
    >>> step = captured_step(model, lambda model, x: model(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1))
    >>> step(torch.ones(1, 2)), step(torch.ones(1, 2)), step.captured         # on the CPU
    (tensor(2.), tensor(1.7000), False)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {describe(model)}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {describe(optimizer)}")
    for name, function in (("loss_fn", loss_fn), ("batch", batch), ("ascent", ascent)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function, got {describe(function)}")
    if autocast is not None and not isinstance(autocast, torch.dtype):
        raise TypeError(f"autocast must be a torch.dtype such as torch.bfloat16, or None, got {describe(autocast)}")
    if ascent is not None and not isinstance(optimizer, AMP):
        raise TypeError(f"ascent needs a flatmin.AMP, whose Δ comes from it, got {describe(optimizer)}; leave it out")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {describe(scaler)}")
    spec = StepSpec(
        model=model,
        loss_fn=loss_fn,
        optimizer=optimizer.behind_proxy() if isinstance(optimizer, PerturbedOptimizer) else optimizer,
        batch=batch or _unchanged,
        ascent=ascent,
        autocast=autocast,
        scaler=scaler if scaler is not None and scaler.is_enabled() else None,
    )
    return CapturedStep(spec, compile=compile, capture=capture)


class CapturedStep:
    """A training step: `captured` tells whether the last call replayed a graph, `reason` why none can be captured."""

    def __init__(self, spec: StepSpec, *, compile: bool, capture: bool = True) -> None:  # noqa: A002
        self.spec, self._requested = spec, (compile, capture)
        self.captured = False
        self.say: Callable[[str], None] = _warn  # gets the reason if a step is not captured, or not compiled
        self.reset()

    def reset(self) -> None:
        """Discard all graphs, and all reasons not to capture; the next call is an ordinary step."""
        self._forget()
        self.compile, capture = self._requested
        self._failure = None if capture else "capture=False was given"
        self._with_state: list[Tensor] | None = None
        self._unused_captures = self._setting_changes = self._captures = self._replays = 0

    @property
    def reason(self) -> str | None:
        """Why the step is not captured; None if it is, or will be."""
        if self._failure is None and self.spec.device.type != "cuda":
            return "the weights are not on a CUDA device"
        return self._failure

    def _forget(self) -> None:
        self._graphs: dict[Key, CapturedGraph] = {}
        self._space: Workspace | None = None
        self._addresses: list[int] | None = None
        self._modules: list[nn.Module] = []
        self._fits_sgd_kernel = False  # can our SGD kernel update all weights?

    def __call__(self, *inputs: Any) -> Any:
        self.captured = False
        graph = None if self.reason is not None or self._needs_ordinary_step() else self._graph_or_none(inputs)
        if graph is None:
            return self._ordinary_step(inputs)
        self.captured = True
        return self._replay(graph, inputs)

    def _graph_or_none(self, inputs: Sequence[Any]) -> CapturedGraph | None:
        """The graph for these inputs; None if this step, and perhaps every later one, runs eagerly."""
        try:
            return self._graph_for(inputs)
        except StateMissingError as error:
            _free_frames(error)
        except torch.OutOfMemoryError:  # not the step's fault: with more memory it can be captured
            self._forget()
            raise
        except Exception as error:
            self._forget()
            why = one_line(error)
            if self.compile and _is_compiler_error(error):  # the next call captures it uncompiled
                self.compile, message = False, f"this step cannot be compiled and is captured uncompiled: {why}"
            else:
                self._failure, message = why, f"this step cannot be captured in a CUDA graph and runs eagerly: {why}"
            _free_frames(error)
            self.say(message)
        except BaseException:  # Ctrl-C in the middle of a capture
            self._forget()
            raise
        return None

    # ---- without a graph

    def _ordinary_step(self, inputs: Sequence[Any]) -> Any:
        spec, optimizer, scaler = self.spec, self.spec.optimizer, self.spec.scaler
        batch = spec.make_batch(inputs)

        def closure(inputs: Sequence[Any] = batch) -> Any:
            optimizer.zero_grad()
            with torch.enable_grad(), spec.precision():
                result = spec.loss_fn(spec.model, *inputs)
            spec.loss_of(result).backward()
            return result

        if spec.wrapper is not None:
            less = None
            if spec.ascent is not None and spec.wrapper.perturbs:
                less = partial(closure, spec.make_ascent(batch))
            result = spec.wrapper.step(closure, scaler=scaler, ascent=less)
        elif isinstance(optimizer, LBFGS):
            result = optimizer.step(closure)
        else:  # so that step pre-hooks see the gradients, as they do after a graph
            result = closure()
            optimizer.step() if scaler is None else scaler.step(optimizer)
        self._with_state = [p for p in spec.params if spec.base.state.get(p)]
        for p in spec.params:
            p.grad = None
        return tree_map_only(Tensor, Tensor.detach, result)

    def _needs_ordinary_step(self) -> bool:
        """Is any of the optimizer's state still missing, which an ordinary step creates?"""
        known = self._with_state
        return known is None or not all(self.spec.base.state.get(p) for p in known)

    # ---- with a graph

    def _graph_for(self, inputs: Sequence[Any]) -> CapturedGraph:
        """The graph for these inputs and settings, captured now if there is none."""
        spec = self.spec
        if spec.wrapper is not None:
            spec.wrapper.check_groups()
        if self._current_addresses() != self._addresses:  # then every graph is stale
            self._prepare_capture()
        key = self._key(inputs)
        if key not in self._graphs and self._uses_torch_capture() and self._only_settings_changed(key):
            self._setting_changes += 1
            if self._setting_changes > MAX_SETTING_CHANGES:  # a schedule changes more than lr: step the base outside
                self._prepare_capture()
                key = self._key(inputs)
        graph = self._graphs.pop(key, None)
        if graph is None:
            graph = self._capture(inputs)
        else:
            self._unused_captures = 0
            self._replays += 1
        self._graphs[key] = graph  # last: the first is the least recently used
        return graph

    def _capture(self, inputs: Sequence[Any]) -> CapturedGraph:
        """A new graph, unless earlier ones were replayed too rarely to be worth it."""
        self._unused_captures += 1
        self._captures += 1
        if self._unused_captures > MAX_UNUSED_CAPTURES:
            raise CannotCaptureError(f"shapes or settings were new in each of {MAX_UNUSED_CAPTURES} calls")
        if self._captures > MAX_UNUSED_CAPTURES + self._replays // CAPTURE_MIN_REPLAYS:
            raise CannotCaptureError(
                f"{self._captures - 1} captures for {self._replays} replays: more shapes than the {MAX_GRAPHS} kept"
            )
        if self._space is None:
            self._space = Workspace(self.spec)
        while len(self._graphs) >= MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        where = {"by_kernel": self._uses_sgd_kernel(), "by_torch": self._uses_torch_capture()}
        return CapturedGraph(self.spec, self._forward(), self._space, inputs, **where)

    def _prepare_capture(self) -> None:
        """Discard all graphs, and note the weights, buffers and modules that new ones will be captured with."""
        self._forget()
        self._check()
        multi_tensor.match_momentum_layout(self.spec.base)
        self._modules = self.spec.modules()
        self._fits_sgd_kernel = multi_tensor.can_update(
            [p for group in self.spec.base.param_groups for p in group["params"]]
        )
        self._addresses = self._current_addresses()

    def _replay(self, graph: CapturedGraph, inputs: Sequence[Any]) -> Any:
        """The step, with the wrapper's hooks around it; the base calls its own hooks."""
        wrapper = self.spec.wrapper
        if wrapper is None:
            return graph.replay(inputs)
        for before in wrapper._optimizer_step_pre_hooks.values():
            before(wrapper, (), {})
        result = graph.replay(inputs)
        for after in wrapper._optimizer_step_post_hooks.values():
            after(wrapper, (), {})
        return result

    def _check(self) -> None:
        spec = self.spec
        tensors: list[Tensor] = [*spec.params, *spec.model.parameters(), *spec.model.buffers()]
        if any(tensor.device != spec.device for tensor in tensors):
            raise CannotCaptureError("weights and buffers are not all on one device")
        if any(type(tensor) not in ORDINARY_TYPES for tensor in tensors):
            raise CannotCaptureError("some weights or buffers are of a tensor subclass (sharded, quantised)")
        if any(isinstance(module, DistributedDataParallel) for module in spec.model.modules()):
            raise CannotCaptureError("DistributedDataParallel averages gradients in hooks, which a graph does not call")
        if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in spec.params):
            raise CannotCaptureError("a weight has a post-accumulate-grad hook, which a graph does not call")
        addresses = [p.data_ptr() for p in {*spec.params, *spec.model.parameters()} if p.numel()]
        if len(set(addresses)) < len(addresses):
            raise CannotCaptureError("two weights share memory; give the modules one nn.Parameter instead")
        if isinstance(spec.base, LBFGS):
            raise CannotCaptureError("LBFGS calls its closure a varying number of times")

    def _forward(self) -> Callable[..., Any]:
        """The loss as a function of the inputs, compiled if requested."""
        model, loss_fn = self.spec.model, self.spec.loss_fn

        def forward(*inputs: Any) -> Any:
            return loss_fn(model, *inputs)

        if not self.compile:
            return forward
        from flatmin.capture import compiler

        return compiler.CompiledForward(forward)

    def _current_addresses(self) -> list[int]:
        """The addresses of everything that a graph reads or writes."""
        spec = self.spec
        tensors = [p for group in spec.optimizer.param_groups for p in group["params"]]
        for module in self._modules:
            tensors += [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        if self._has_base_in_graph():
            tensors += [v for state in spec.base.state.values() for v in state.values() if isinstance(v, Tensor)]
        return [GENERATOR_REPLACEMENTS[0], *(tensor.data_ptr() for tensor in tensors)]

    def _uses_sgd_kernel(self) -> bool:
        return (
            self._fits_sgd_kernel and self.spec.scaler is None and multi_tensor.is_plain_sgd(self.spec.base, ClippedSGD)
        )

    def _uses_torch_capture(self) -> bool:
        return self._setting_changes <= MAX_SETTING_CHANGES and can_torch_capture(self.spec)

    def _has_base_in_graph(self) -> bool:
        """Is the base's update in the graph, by our kernel or torch's? If not, graphs ignore its settings and state."""
        return self._uses_sgd_kernel() or self._uses_torch_capture()

    def _only_settings_changed(self, key: Key) -> bool:
        return any((*other[:2], other[3]) == (*key[:2], key[3]) for other in self._graphs)

    def _key(self, inputs: Sequence[Any]) -> Key:
        """Everything that a capture fixes besides addresses."""
        optimizer, base = self.spec.optimizer, self.spec.base
        leaves, shape = tree_flatten(tuple(inputs))
        moved = (*SCHEDULED, "momentum", "weight_decay", "dampening") if self._uses_sgd_kernel() else SCHEDULED
        inside = self._has_base_in_graph()
        settings = [
            (key, _setting_key(value, moves=key in moved))
            for group in optimizer.param_groups
            for key, value in group.items()
            if (inside and key not in ("params", "param_names")) or key in SCHEDULED
        ]
        flags = [p.requires_grad for group in optimizer.param_groups for p in group["params"]]
        modes = [module.training for module in self._modules]
        own = () if self.spec.wrapper is None else self.spec.wrapper.step_settings
        around = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        return (
            shape,
            tuple(map(_input_key, leaves)),
            tuple(settings),
            (*flags, *modes, *own, multi_tensor.has_hooks(base), getattr(base, "clip_norm", None), around),
        )


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)  # where the step is called


def _free_frames(error: BaseException) -> None:
    """Release the tensors in its frames, which belong to another stream and keep autograd nodes alive."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


def _is_compiler_error(error: Exception) -> bool:
    """Did torch.compile fail, rather than the code it compiled?"""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException | ImportError)


def _unchanged(*inputs: Any) -> Sequence[Any]:
    return inputs


def _input_key(leaf: Any) -> Any:
    """What a capture fixes about an input."""
    if isinstance(leaf, Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
    if not isinstance(leaf, LEAF_TYPES):
        raise CannotCaptureError(
            f"an input is an object of type {type(leaf).__name__}; pass tensors and numbers, in tuples, lists and dicts"
        )
    return type(leaf), leaf


def _setting_key(value: Any, *, moves: bool) -> Any:
    """What a capture fixes about a group's setting: if it may change, only whether it is 0."""
    if isinstance(value, Tensor):
        return value.data_ptr() if value.is_cuda else moves or repr(value)
    if moves and isinstance(value, Real):
        return value == 0
    return repr(value)
