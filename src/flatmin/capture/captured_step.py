"""A whole training step, compiled and captured as one CUDA graph.

    step = captured_step(model, loss_fn, optimizer, autocast=torch.bfloat16)
    loss = step(x, y)                  in place of a loop's forward, backward and optimizer.step

A step of a small network is hundreds of kernels of a few microseconds, and Python needs longer to ask for one than the
GPU to run it. A CUDA graph asks for all of them at once: clean pass, projection, perturbed passes and update.

The first call is an ordinary step, so that the optimizer's state exists. The second one captures; a new shape of the
inputs, a changed setting of a group (other than lr, ε and ζ), moved weights or another mode of the model capture anew.
On the CPU, and for what cannot be captured, every call is an ordinary step.
"""

import traceback
import warnings
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only

from flatmin.capture.graph import MOVED, PLAIN, REPLACED, Recording, StateMissingError, Workspace, captures_itself
from flatmin.capture.step_spec import CannotCaptureError, Task, in_a_line
from flatmin.core import multi_tensor
from flatmin.core.tensors import ORDINARY
from flatmin.optim.wrapper import what

SHAPES = 8  # recordings that are kept
WORTH = 50  # replays that a capture must have to pay
IN_VAIN = 12  # captures one after the other, none of them replayed again, after which it gives up
CHANGES = 3  # of the settings of a base whose step is in the graph, after which it is not

Key = tuple[Any, ...]  # what a recording is for: structure and kinds of the inputs, settings, flags


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
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {what(scaler)}")
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
    """A training step; `captured` tells whether the last one was the replay of a graph, `reason` why none can be."""

    def __init__(self, task: Task, *, compile: bool, capture: bool = True) -> None:  # noqa: A002
        self.task, self._asked = task, (compile, capture)
        self.captured = False
        self.say: Callable[[str], None] = _warn  # who hears why a step is not captured, or not compiled
        self.reset()

    def reset(self) -> None:
        """Forget what was captured, and what could not be; the next call is an ordinary step."""
        self._forget()
        self.compile, capture = self._asked
        self._failure = None if capture else "it was asked not to be"
        self._with_state: list[Tensor] | None = None
        self._in_vain = self._changes = self._captures = self._replays = 0

    @property
    def reason(self) -> str | None:
        """Why the step is not captured; None where it is, or will be."""
        if self._failure is None and self.task.device.type != "cuda":
            return "the weights are not on a CUDA device"
        return self._failure

    def _forget(self) -> None:
        self._recordings: dict[Key, Recording] = {}
        self._space: Workspace | None = None
        self._addresses: list[int] | None = None
        self._modules: list[nn.Module] = []
        self._suits = False  # are the weights such as our kernel for SGD takes?

    def __call__(self, *inputs: Any) -> Any:
        self.captured = False
        recording = None if self.reason is not None or self._is_new() else self._recording_if_any(inputs)
        if recording is None:
            return self._ordinary(inputs)
        self.captured = True
        return self._replayed(recording, inputs)

    def _recording_if_any(self, inputs: Sequence[Any]) -> Recording | None:
        """None: this step is an ordinary one, and perhaps all to come."""
        try:
            return self._recording(inputs)
        except StateMissingError as error:
            _let_go(error)
        except torch.OutOfMemoryError:  # no fault of the step's: with room again, it can be captured
            self._forget()
            raise
        except Exception as error:
            self._forget()
            why = in_a_line(error)
            if self.compile and _is_the_compilers(error):  # the next call will capture what is not compiled
                self.compile, message = False, f"this step cannot be compiled, and is captured as it is: {why}"
            else:
                self._failure, message = why, f"this step cannot be captured in a CUDA graph, and runs eagerly: {why}"
            _let_go(error)
            self.say(message)
        except BaseException:  # Ctrl-C in the middle of a capture
            self._forget()
            raise
        return None

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

        if task.wrapper is not None:
            result = task.wrapper.step(closure, scaler=scaler)
        elif isinstance(optimizer, LBFGS):
            result = optimizer.step(closure)
        else:  # so that hooks before the step see its gradients, as they do after a graph
            result = closure()
            optimizer.step() if scaler is None else scaler.step(optimizer)
        self._with_state = [p for p in task.params if task.base.state.get(p)]
        for p in task.params:
            p.grad = None
        return tree_map_only(Tensor, Tensor.detach, result)

    def _is_new(self) -> bool:
        """Must an ordinary step come first, which makes the optimizer's state?"""
        known = self._with_state
        return known is None or not all(self.task.base.state.get(p) for p in known)

    # ---- with one

    def _recording(self, inputs: Sequence[Any]) -> Recording:
        """The one for these inputs and settings, captured now if there is none."""
        task = self.task
        if task.wrapper is not None:
            task.wrapper._check_groups()
        if self._found_addresses() != self._addresses:  # then no graph is worth anything
            self._look()
        key = self._key(inputs)
        if key not in self._recordings and self._by_torch() and self._only_settings_changed(key):
            self._changes += 1
            if self._changes > CHANGES:  # of a schedule that moves more than lr: the base steps after the graph
                self._look()
                key = self._key(inputs)
        recording = self._recordings.pop(key, None)
        if recording is None:
            recording = self._captured(inputs)
        else:
            self._in_vain = 0
            self._replays += 1
        self._recordings[key] = recording  # last: the first one is the one not used for longest
        return recording

    def _captured(self, inputs: Sequence[Any]) -> Recording:
        """A new one, unless there were too many for what they were used."""
        self._in_vain += 1
        self._captures += 1
        if self._in_vain > IN_VAIN:
            raise CannotCaptureError(f"shapes or settings were new in each of {IN_VAIN} calls")
        if self._captures > IN_VAIN + self._replays // WORTH:
            raise CannotCaptureError(
                f"{self._captures - 1} captures for {self._replays} replays: more shapes than the {SHAPES} it keeps"
            )
        if self._space is None:
            self._space = Workspace(self.task)
        while len(self._recordings) >= SHAPES:
            del self._recordings[next(iter(self._recordings))]
        where = {"by_kernel": self._takes_sgd(), "by_torch": self._by_torch()}
        return Recording(self.task, self._forward(), self._space, inputs, **where)

    def _look(self) -> None:
        """At what the graphs to come will stand on."""
        self._forget()
        self._check()
        multi_tensor.lay_out_momentum(self.task.base)
        self._modules = self.task.modules()
        self._suits = multi_tensor.suit([p for group in self.task.base.param_groups for p in group["params"]])
        self._addresses = self._found_addresses()

    def _replayed(self, recording: Recording, inputs: Sequence[Any]) -> Any:
        """The step, and around it the hooks of the wrapper; those of a base are called in its own step."""
        wrapper = self.task.wrapper
        if wrapper is None:
            return recording.replay(inputs)
        for before in wrapper._optimizer_step_pre_hooks.values():
            before(wrapper, (), {})
        result = recording.replay(inputs)
        for after in wrapper._optimizer_step_post_hooks.values():
            after(wrapper, (), {})
        return result

    def _check(self) -> None:
        task = self.task
        tensors: list[Tensor] = [*task.params, *task.model.parameters(), *task.model.buffers()]
        if any(tensor.device != task.device for tensor in tensors):
            raise CannotCaptureError("weights and buffers are not all on one device")
        if any(type(tensor) not in ORDINARY for tensor in tensors):
            raise CannotCaptureError("some weights or buffers are of a class of their own (sharded, quantised)")
        if any(isinstance(module, DistributedDataParallel) for module in task.model.modules()):
            raise CannotCaptureError("gradients of DistributedDataParallel meet in hooks that a graph does not call")
        if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in task.params):
            raise CannotCaptureError("a weight has a hook after its gradient is added up, which a graph does not call")
        addresses = [p.data_ptr() for p in {*task.params, *task.model.parameters()} if p.numel()]
        if len(set(addresses)) < len(addresses):
            raise CannotCaptureError("two weights share memory; give the modules one nn.Parameter instead")
        if isinstance(task.base, LBFGS):
            raise CannotCaptureError("LBFGS calls its closure as often as it likes")

    def _forward(self) -> Callable[..., Any]:
        """A function of the inputs, compiled if asked for."""
        model, loss_fn = self.task.model, self.task.loss_fn

        def forward(*inputs: Any) -> Any:
            return loss_fn(model, *inputs)

        if not self.compile:
            return forward
        from flatmin.capture import compiler

        return compiler.Compiled(forward)

    def _found_addresses(self) -> list[int]:
        """Where all that a graph reads and writes lies."""
        task = self.task
        tensors = [p for group in task.optimizer.param_groups for p in group["params"]]
        for module in self._modules:
            tensors += [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        if self._has_base_inside():
            tensors += [v for state in task.base.state.values() for v in state.values() if isinstance(v, Tensor)]
        return [REPLACED[0], *(tensor.data_ptr() for tensor in tensors)]

    def _takes_sgd(self) -> bool:
        return self._suits and self.task.scaler is None and multi_tensor.is_plain_sgd(self.task.base)

    def _by_torch(self) -> bool:
        return self._changes <= CHANGES and captures_itself(self.task)

    def _has_base_inside(self) -> bool:
        """Is the base's update in the graph, by our kernel or by torch's? Else its settings and state are its own."""
        return self._takes_sgd() or self._by_torch()

    def _only_settings_changed(self, key: Key) -> bool:
        return any((*other[:2], other[3]) == (*key[:2], key[3]) for other in self._recordings)

    def _key(self, inputs: Sequence[Any]) -> Key:
        """All else that a graph holds fast."""
        optimizer, base = self.task.optimizer, self.task.base
        leaves, shape = tree_flatten(tuple(inputs))
        moved = (*MOVED, "momentum", "weight_decay", "dampening") if self._takes_sgd() else MOVED
        inside = self._has_base_inside()
        settings = [
            (key, _fixed(value, moves=key in moved))
            for group in optimizer.param_groups
            for key, value in group.items()
            if (inside and key not in ("params", "param_names")) or key in MOVED
        ]
        flags = [p.requires_grad for group in optimizer.param_groups for p in group["params"]]
        modes = [module.training for module in self._modules]
        own = [getattr(optimizer, name, None) for name in ("inner_iter", "ball", "norm")]
        around = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        return (
            shape,
            tuple(map(_kind, leaves)),
            tuple(settings),
            (*flags, *modes, *own, multi_tensor.has_hooks(base), around),
        )


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)  # where the step is called


def _let_go(error: BaseException) -> None:
    """Of the tensors that a pass had on another stream: they keep nodes of autograd alive, which belong there."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


def _is_the_compilers(error: Exception) -> bool:
    """Did torch.compile fail, and not what it compiled?"""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException | ImportError)


def _as_they_are(*inputs: Any) -> Sequence[Any]:
    return inputs


def _kind(leaf: Any) -> Any:
    """Of an input, what a graph holds fast."""
    if isinstance(leaf, Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
    if not isinstance(leaf, PLAIN):
        raise CannotCaptureError(
            f"an input is an object of type {type(leaf).__name__}; give tensors and numbers, in tuples, lists and dicts"
        )
    return type(leaf), leaf


def _fixed(value: Any, *, moves: bool) -> Any:
    """Of a group's value, what a graph holds fast: for one that moves, whether it is 0."""
    if isinstance(value, Tensor):
        return value.data_ptr() if value.is_cuda else moves or repr(value)
    if moves and isinstance(value, Real):
        return value == 0
    return repr(value)
