"""A whole training step, compiled and captured as one CUDA graph.

    step = captured_step(model, loss_fn, optimizer, autocast=torch.bfloat16)
    loss = step(x, y)                  in place of a loop's forward, backward and optimizer.step

A step of a small network is a thousand kernels of a few microseconds, and Python needs longer to ask for one than the
GPU to run it. A CUDA graph asks for all of them at once: clean pass, projection, perturbed passes and update.

The first call is an ordinary step, so that the optimizer's state exists. The second one captures; a new shape of the
inputs, a changed setting of a group (other than lr, ε and ζ), moved weights or another mode of the model capture anew.
On the CPU, and for what cannot be captured, every call is an ordinary step.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only

from flatmin.passes import Task
from flatmin.recording import MOVED, CannotCaptureError, Recording, Workspace
from flatmin.shell import what

SHAPES = 8  # recordings that are kept


def captured_step(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    *,
    autocast: torch.dtype | None = None,
    compile: bool = True,  # noqa: A002
    batch: Callable[..., Sequence[Any]] | None = None,
    scaler: GradScaler | None = None,
    capture: bool = True,
) -> "CapturedStep":
    """A function that takes one training step: `loss = step(*inputs)`, for any model and any torch optimizer.

    loss_fn     loss_fn(model, *inputs) is the loss, or a dict with "loss", or a tuple whose first tensor is the loss
    optimizer   AMP, RMP, or any optimizer of torch
    autocast    the type of a torch.autocast around every pass, such as torch.bfloat16
    compile     use torch.compile for the passes, where they are captured
    batch       batch(*inputs) makes what loss_fn is given; it runs once a step, as part of the graph
    scaler      a GradScaler for fp16: the base then steps after the graph, and `scaler.update()` is still yours
    capture     False: every call is an ordinary step, to compare with

    What comes back is what loss_fn returned in the clean pass, in tensors of its own. Gradients are not left behind.
    Modules and loss function must not change what they do from call to call, other than through their tensors and
    `train()` or `eval()`: a graph repeats what it saw (`reset()` makes it look again).

    >>> model = nn.Linear(2, 1)
    >>> _ = nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
    >>> step = captured_step(model, lambda model, x: model(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1))
    >>> step(torch.ones(1, 2)), step(torch.ones(1, 2)), step.captured         # on the CPU
    (tensor(2.), tensor(1.7000), False)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {what(model)}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {what(optimizer)}")
    for name, function in (("loss_fn", loss_fn), ("batch", batch)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function, got {what(function)}")
    if autocast is not None and not isinstance(autocast, torch.dtype):
        raise TypeError(f"autocast must be a torch.dtype such as torch.bfloat16, or None, got {what(autocast)}")
    task = Task(
        model=model,
        loss_fn=loss_fn,
        optimizer=optimizer,
        batch=batch or _as_they_are,
        autocast=autocast,
        scaler=scaler if scaler is not None and scaler.is_enabled() else None,
    )
    return CapturedStep(task, compile=compile, capture=capture)


class CapturedStep:
    """A training step; `captured` tells whether the last one was the replay of a graph, `reason` why not."""

    def __init__(self, task: Task, *, compile: bool, capture: bool = True) -> None:  # noqa: A002
        self.task, self.compile = task, compile
        self.captured = False
        self.reason: str | None = None
        if not capture:
            self.reason = "it was asked not to be"
        elif task.device.type != "cuda":
            self.reason = "the weights are not on a CUDA device"
        self.reset()

    def reset(self) -> None:
        """Forget what was captured; the next call is an ordinary step."""
        self._recordings: dict[Any, Recording] = {}
        self._space: Workspace | None = None
        self._addresses: list[int] | None = None
        self._with_state: list[Tensor] | None = None

    def __call__(self, *inputs: Any) -> Any:
        self.captured = False
        if self.reason is not None or self._is_new():
            return self._ordinary(inputs)
        key = self._key(inputs)
        if key not in self._recordings and not self._try(key, inputs):
            return self._ordinary(inputs)
        self.captured = True
        if self.task.wrapper is not None:
            self.task.wrapper._check_groups()
        return self._recordings[key].replay(inputs)

    # ---- without a graph

    def _ordinary(self, inputs: Sequence[Any]) -> Any:
        task, optimizer, scaler = self.task, self.task.optimizer, self.task.scaler
        made = task.prepared(inputs)

        def closure() -> Any:
            optimizer.zero_grad()
            with torch.enable_grad(), task.precision():
                result = task.loss_fn(task.model, *made)
            task.loss_of(result).backward()
            return result

        if scaler is None:
            result = optimizer.step(closure)
        elif task.wrapper is not None:
            result = task.wrapper.step(closure, scaler=scaler)
        else:
            result = closure()
            scaler.step(optimizer)
        self._with_state = [p for p in task.params if task.base.state.get(p)]
        return tree_map_only(Tensor, Tensor.detach, result)

    def _is_new(self) -> bool:
        """Must an ordinary step come first, which makes the optimizer's state?"""
        known = self._with_state
        return known is None or not all(self.task.base.state.get(p) for p in known)

    # ---- with one

    def _try(self, key: Any, inputs: Sequence[Any]) -> bool:
        """Capture a step for these inputs; if that is impossible, say so once and for all."""
        try:
            self._check()
            if self._space is None:
                self._space = Workspace(self.task, inputs)
            if len(self._recordings) >= SHAPES:
                del self._recordings[next(iter(self._recordings))]
            self._recordings[key] = Recording(self.task, self._forward(), self._space, inputs)
        except Exception as error:
            self.reset()
            self._with_state = []
            self.reason = str(error).strip().partition("\n")[0] or type(error).__name__
            message = f"this step cannot be captured in a CUDA graph, and runs eagerly: {self.reason}"
            warnings.warn(message, stacklevel=3)
            return False
        return True

    def _check(self) -> None:
        task = self.task
        device, params = task.device, task.params
        tensors: list[Tensor] = [*params, *task.model.parameters(), *task.model.buffers()]
        if any(tensor.device != device for tensor in tensors):
            raise CannotCaptureError("weights and buffers are not all on one device")
        if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
            raise CannotCaptureError("some weights or buffers are of a class of their own (sharded, quantised)")
        if isinstance(task.base, LBFGS):
            raise CannotCaptureError("LBFGS calls its closure as often as it likes")

    def _forward(self) -> Callable[..., Any]:
        """A function of the inputs, compiled if asked for."""
        model, loss_fn = self.task.model, self.task.loss_fn

        def forward(*inputs: Any) -> Any:
            return loss_fn(model, *inputs)

        if not self.compile:
            return forward
        from flatmin import overlap

        return overlap.Compiled(forward)

    def _key(self, inputs: Sequence[Any]) -> Any:
        """All that a graph holds fast, but for addresses: if those have changed, no graph is worth anything."""
        task = self.task
        tensors = [*task.params, *task.model.buffers(), *_state_tensors(task.base)]
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses != self._addresses:
            with_state = self._with_state
            self.reset()
            self._addresses, self._with_state = addresses, with_state
        leaves, shape = tree_flatten(tuple(inputs))
        settings = [
            (key, _fixed(key, value))
            for group in task.optimizer.param_groups
            for key, value in group.items()
            if key != "params"
        ]
        modes = tuple(module.training for module in task.model.modules())
        return (shape, tuple(map(_kind, leaves)), tuple(settings), modes, _settings(task.optimizer))


def _as_they_are(*inputs: Any) -> Sequence[Any]:
    return inputs


def _state_tensors(base: Optimizer) -> list[Tensor]:
    return [value for state in base.state.values() for value in state.values() if isinstance(value, Tensor)]


def _kind(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)


def _fixed(key: str, value: Any) -> Any:
    """Of a group's value, what a graph holds fast."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if key in MOVED:
        return key == "epsilon" and value == 0
    return value


def _settings(optimizer: Optimizer) -> Any:
    return tuple(getattr(optimizer, name, None) for name in ("inner_iter", "ball", "norm"))
