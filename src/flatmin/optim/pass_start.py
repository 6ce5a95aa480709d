"""Where did the clean pass of a step begin? From there, `perturbed()` blocks draw the same dropout masks again.

The clean pass runs before the optimizer is involved, and loops differ. Two moments are known: when zero_grad() was
called, and when the model was called, which a hook on the model reports. A block starts with the random state of the
earlier one, so that what it draws before it calls the model is what the clean pass drew after zero_grad() (a loss
function that draws noise and is called twice). When the block calls the model, that gets the state that it had in the
clean pass, whatever was drawn before (a batch augmented once and run twice). So does each later call: loops that
accumulate gradients load, and may augment, the next micro-batch between two calls.
"""

from __future__ import annotations

import copyreg
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from flatmin.core.model_state import Snapshot
from flatmin.core.random_state import HostWatch

MAX_CALLS = 1000  # of the model, whose random states are kept: a loop that never steps must not fill the memory
_in_place = Counter[type[nn.Module]]()  # how many hooks the models of a class have


class PassStart:
    """The random states of a model at zero_grad() and at every call of the model in a step."""

    def __init__(self, model: nn.Module, watch: HostWatch | None) -> None:
        self._new = partial(Snapshot, model, watch=watch)
        self._zero, self._later = self._new(), self._new()
        self._calls: list[Snapshot] = []  # used again in every step: the first `_count` are of this one
        self._devices: Sequence[torch.device] = ()  # whose random states they have
        self.step_ends()

    def step_ends(self) -> None:
        self._knows_zero = self._zeroed_since = False
        self._count = 0
        self._to_replay: Iterator[Snapshot] = iter(())

    @property
    def known(self) -> Snapshot | None:
        """The earliest known moment."""
        if self._knows_zero:
            return self._zero
        return self._calls[0] if self._count else None

    def zero_grad(self, devices: Sequence[torch.device]) -> None:
        """Called before the forward pass, or after it; or that pass was abandoned, and another will begin."""
        if self._count:
            self._later.take_random(devices)
            self._zeroed_since = True
        else:
            self._zero.take_random(devices)
            self._knows_zero = True

    def forward_begins(
        self, devices: Callable[[], Sequence[torch.device]], *, has_gradients: Callable[[], bool]
    ) -> None:
        """The model is called outside a block: later calls belong to the same pass, or to the next micro-batch."""
        if self._zeroed_since and not has_gradients():  # the earlier pass was given up
            self._zero, self._later, self._knows_zero = self._later, self._zero, True
            self._count = 0
        if not self._count:
            self._devices = devices()
        if self._count < MAX_CALLS:
            if self._count == len(self._calls):
                self._calls.append(self._new())
            self._calls[self._count].take_random(self._devices)
            self._count += 1
        self._zeroed_since = False

    def clean_pass_ended(self, clean: Snapshot) -> None:
        """Generators that no pass draws from are not rewound."""
        for snapshot in (self._zero, *self._calls[: self._count]):
            snapshot.drop_others(clean)

    def block_begins(self) -> None:
        if (start := self.known) is not None:
            start.put_back_random()
        self._to_replay = iter(self._calls[: self._count])

    def forward_begins_in_block(self) -> None:
        if (call := next(self._to_replay, None)) is not None:
            call.put_back_random()


class ForwardHook:
    """Calls `begins()` before the model runs with gradients. A copied or unpickled model has no trace of it."""

    def __init__(self, model: nn.Module, begins: Callable[[], None]) -> None:
        """`begins` is a method, whose object may be deleted."""
        self._begins = weakref.WeakMethod(begins)
        handle, kind = model.register_forward_pre_hook(self), type(model)
        _in_place[kind] += 1
        if kind not in copyreg.dispatch_table:
            copyreg.pickle(kind, _reduce_without_hooks)
        self._end = weakref.finalize(begins.__self__, _end_hook, handle, kind)  # type: ignore[attr-defined]

    def __call__(self, model: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or _in_backward_pass():
            return
        begins = self._begins()
        if begins is not None and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            begins()

    def remove(self) -> None:
        self._end()

    def __reduce__(self) -> tuple[Any, ...]:
        """For models that reduce themselves: a method of an empty dict, which returns the inputs as they are."""
        return getattr, ({}, "get")


def _end_hook(handle: RemovableHandle, kind: type[nn.Module]) -> None:
    """Without a hook a model needs no reducer: one that stayed would keep a class made in a function alive forever."""
    handle.remove()
    _in_place[kind] -= 1
    if _in_place[kind]:
        return
    del _in_place[kind]
    if copyreg.dispatch_table.get(kind) is _reduce_without_hooks:
        del copyreg.dispatch_table[kind]


def _in_backward_pass() -> bool:
    """There, activation checkpointing runs the model again, and takes care of the random states itself."""
    return torch._C._current_graph_task_id() != -1


def _reduce_without_hooks(model: nn.Module) -> Any:
    """How pickle and copy take a model of this class apart: as ever, but without a `ForwardHook`.

    So a file of a whole model needs no more than it does without flatmin, and loads with weights_only=True too.
    """
    reduced: Any = model.__reduce_ex__(4)
    hooks = model.__dict__.get("_forward_pre_hooks", {})
    rest = OrderedDict((key, hook) for key, hook in hooks.items() if not isinstance(hook, ForwardHook))
    if len(rest) == len(hooks) or len(reduced) < 3 or "_forward_pre_hooks" not in reduced[2]:
        return reduced  # no such hook, or a class with a state of its own
    return (*reduced[:2], {**reduced[2], "_forward_pre_hooks": rest}, *reduced[3:])
