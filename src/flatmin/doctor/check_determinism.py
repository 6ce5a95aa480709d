"""Can the closure be run twice? AMP runs it N + 1 times per step, and every call must compute the same loss function.

The closure is called twice from the same state; then again with one thing as the first call left it that AMP does not
restore between two passes either: Python's and numpy's random numbers (without `model=`), or the buffers. Whatever
changes the gradient is the reason.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from inspect import getclosurevars, ismethod
from itertools import chain
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from flatmin.core.random_state import HostRandom
from flatmin.doctor.closure_call import ClosureCall, observe
from flatmin.doctor.finding import Finding, first_few
from flatmin.doctor.training import Training, TrainingSnapshot, same_bits

NAME = "closure repeats"
ROUNDING = {"cpu": 1e-6}  # the relative difference allowed between two equal calls
GPU_ROUNDING = 2e-2  # on other devices: kernels add in no fixed order, in half precision


def rounding_of(training: Training) -> float:
    return max(ROUNDING.get(device.type, GPU_ROUNDING) for device in training.devices)


def check_repeats(first: ClosureCall, training: Training, snapshot: TrainingSnapshot) -> Finding:
    """Does the closure give the same result twice? `first` was called at `snapshot`, and nothing has run since."""
    if not snapshot.has_weights():
        change = "leave optimizer.step() to the loop: a closure only zeroes gradients and runs forward and backward"
        return Finding(NAME, "error", "the closure itself changes the weights", change)
    drawn, moved, left = snapshot.host.moved_besides_torch(), training.buffers(), HostRandom()
    snapshot.put_back()
    before, counted = training.buffers(), dict(_marks(training))
    again = observe(training)
    allowed, gap = rounding_of(training), first.gap(again)
    if gap > allowed:
        return _differs(first, again, reasons(counted, dict(_marks(training))))
    shared = left.moved_besides_torch()
    if shared and training.optimizer.model is not None:
        return _shared(shared)
    if drawn and training.optimizer.model is None:  # else AMP restores them between passes
        snapshot.put_back(host=False)
        if first.gap(other := observe(training)) > allowed:
            return _differs(first, other, [f"it draws random numbers from {' and '.join(drawn)}"])
    changed = [name for name, buffer in before.items() if not same_bits(buffer, moved[name])]
    if changed:
        snapshot.put_back(buffers=False)
        if first.gap(other := observe(training)) > allowed:
            return _depends(first, other, changed)
    exact = "bit for bit" if gap == 0 else f"within {gap:.1g}, the rounding of its kernels"
    return Finding(NAME, "ok", f"two calls at the same weights give the same loss and gradients, {exact}")


def _differs(first: ClosureCall, again: ClosureCall, why: list[str]) -> Finding:
    reason = "; ".join(why) or "something is drawn or counted inside it"
    return Finding(
        NAME,
        "error",
        f"two calls at the same weights give {_both(first, again)}: {reason}",
        "draw and augment the batch once per step, before the closure: Δ must come from the data that the step uses. "
        "(With model=model, the usual generators give the same numbers in all passes.)",
    )


def _shared(names: list[str]) -> Finding:
    return Finding(
        NAME,
        "warning",
        f"{' and '.join(names)} advanced differently in two calls from the same state, but the loss is the same: "
        "something else draws from it, such as a thread that prepares batches",
        "give that thread its own generator (random.Random(), numpy.random.default_rng()): with model=model, AMP "
        "rewinds a global one between its passes as long as it attributes the draws to the model",
    )


def _depends(first: ClosureCall, again: ClosureCall, changed: list[str]) -> Finding:
    return Finding(
        NAME,
        "warning",
        f"the loss depends on buffers that a pass changes ({first_few(changed)}): {_both(first, again)}",
        "nothing if they change slowly, as in spectral normalisation; otherwise update them outside the closure",
    )


def _both(first: ClosureCall, again: ClosureCall) -> str:
    losses = "" if first.loss is None or again.loss is None else f"losses of {first.loss:.6g} and {again.loss:.6g} and "
    return f"{losses}gradients {first.gap(again):.0%} apart"


# ---- the reason: what the closure refers to, before and after a call


def reasons(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """What has changed, in words; an iterator is assumed to have advanced."""
    iterators = [name for name, mark in before.items() if mark == "iterator"]
    generators = [name for name, mark in before.items() if isinstance(mark, bytes) and after.get(name) != mark]
    counters = [name for name, mark in before.items() if isinstance(mark, Number) and after.get(name) != mark]
    causes = {"it takes from the iterator": iterators, "it draws from": generators, "it changes": counters}
    return [f"{cause} {first_few(names)}" for cause, names in causes.items() if names]


def _marks(training: Training) -> Iterator[tuple[str, object]]:
    modules = (
        (f"model.{place}.{name}".replace("..", "."), value)
        for place, module in training.model.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_")
    )
    for name, value in chain(_reached(training.closure), modules):
        parts = enumerate(value) if isinstance(value, tuple | list) else ()  # a batch
        named = ((f"{name}[{place}]", part) for place, part in parts if isinstance(part, Tensor))
        for one, of in chain([(name, value)], named):
            if (mark := _mark(of)) is not None:
                yield one, mark


def _reached(closure: Callable[..., Any]) -> Iterator[tuple[str, object]]:
    """What a function refers to: free variables, globals, bound arguments, attributes of its object."""
    while isinstance(closure, partial):
        yield from closure.keywords.items()
        yield from ((f"argument {place}", value) for place, value in enumerate(closure.args))
        closure = closure.func
    if ismethod(closure):
        yield from ((f"self.{name}", value) for name, value in getattr(closure.__self__, "__dict__", {}).items())
    try:
        found = getclosurevars(closure)
    except (TypeError, ValueError):  # not a Python function
        return
    yield from {**found.globals, **found.nonlocals}.items()


def _mark(value: object) -> object:
    """A small value that changes when the object does; None for what cannot be tracked."""
    if isinstance(value, Iterator):
        return "iterator"
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if hasattr(value, "bit_generator"):  # numpy's
        return repr(value.bit_generator.state).encode()
    if isinstance(value, random.Random):
        return repr(value.getstate()).encode()
    if isinstance(value, Tensor):  # as in `x /= 255`
        return None if value.is_inference() else value._version
    return value if isinstance(value, int | float) else None
