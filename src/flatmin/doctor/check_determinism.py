"""Can the closure be run twice? AMP runs it N + 1 times per step, and every call must compute the same loss function.

The closure is called twice from the same state; then again with one thing as the first call left it that AMP does not
restore between two passes either: Python's and numpy's random numbers (without `model=`), or the buffers. Whatever
changes the gradient is the reason.
"""

import random
from collections.abc import Iterator
from itertools import chain
from numbers import Number

import torch
from torch import Tensor

from flatmin.core.random_state import HostRandom
from flatmin.doctor.closure_call import ClosureCall, observe
from flatmin.doctor.closure_variables import variables
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
    before, counted, held = training.buffers(), dict(_marks(training)), _tensors(training)
    again = observe(training)
    allowed, gap = rounding_of(training), first.gap(again)
    if gap > allowed:
        why, now = reasons(counted, dict(_marks(training))), _tensors(training)
        replaced = [name for name, tensor in held.items() if now.get(name) is not tensor]
        return _carries_over(first, again, replaced) if replaced and not why else _differs(first, again, why)
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


def _carries_over(first: ClosureCall, again: ClosureCall, replaced: list[str]) -> Finding:
    return Finding(
        NAME,
        "error",
        f"two calls at the same weights give {_both(first, again)}: it replaces {first_few(replaced)}, or something is "
        "drawn or counted inside it",
        "every pass of a step must start from the same batch and the same hidden state: draw and set them before the "
        "closure, and carry on what its first call left",
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
    return ((name, mark) for name, value in _seen(training) if (mark := _mark(value)) is not None)


def _tensors(training: Training) -> dict[str, Tensor]:
    """Held here, so that no other tensor gets the same address. Single numbers, such as a loss, are left out."""
    return {name: value for name, value in _seen(training) if isinstance(value, Tensor) and value.ndim}


def _seen(training: Training) -> Iterator[tuple[str, object]]:
    """What the closure refers to, and the attributes of the modules; of tuples and lists, also their tensors."""
    modules = (
        (f"model.{place}.{name}".replace("..", "."), value)
        for place, module in training.model.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_")
    )
    for name, value in chain(variables(training.closure), modules):
        yield name, value
        parts = enumerate(value) if isinstance(value, tuple | list) else ()  # a batch, a hidden state
        yield from ((f"{name}[{place}]", part) for place, part in parts if isinstance(part, Tensor))


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
