"""A few real steps, watched from inside: what each pass starts from, and what the step leaves.

The closure is wrapped to look at the weights, the buffers and the random generators of every pass; a hook of the base
looks at the weights that it is about to move, which must be θ again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatmin.ball import combine, norms
from flatmin.core.model_state import random_state
from flatmin.core.tensors import plain, wide
from flatmin.doctor.finding import Finding, few
from flatmin.doctor.training import SetUp, same_bits
from flatmin.optim.step_info import Last

STEPS = 5


@dataclass(frozen=True)
class Step:
    """One step, in numbers."""

    passes: int
    same_masks: bool  # every pass began with the same random state
    counted: dict[str, tuple[int, int]]  # integer buffers: how much the first pass added, how much the step
    changed: list[str]  # buffers that are not as the first pass left them
    came_back: bool | None  # θ, bit for bit and in its storage, when the base stepped; None: it did not
    moved: float  # ‖(θ + Δ) − θ‖ as the last pass saw it
    last: dict[str, float | None]


def watch(set_up: SetUp, count: int = STEPS) -> list[Step]:
    return [_watched(set_up) for _ in range(count)]


def _watched(set_up: SetUp) -> Step:
    theta = [param.detach().clone() for param in set_up.params]
    places = [plain(param).data_ptr() for param in set_up.params]
    start, clean = set_up.buffers(), dict[str, Tensor]()
    states: list[list[Tensor]] = []
    moved, returned = [0.0], list[bool]()

    def closure() -> Any:
        states.append([random_state(device) for device in set_up.devices])
        moved.append(_distance(set_up, theta))
        result = set_up.closure()
        if not clean:
            clean.update(set_up.buffers())
        return result

    def at_base(*_: object) -> None:
        same = all(same_bits(*pair) for pair in zip(set_up.params, theta, strict=True))
        returned.append(same and places == [plain(param).data_ptr() for param in set_up.params])

    hook = set_up.base.register_step_pre_hook(at_base)
    try:
        set_up.step(closure)
    finally:
        hook.remove()
    end = set_up.buffers()
    return Step(
        passes=len(states),
        same_masks=all(torch.equal(*pair) for entry in states for pair in zip(entry, states[0], strict=True)),
        counted={name: (int(clean[name]) - count, int(end[name]) - count) for name, count in _counts(start)},
        changed=[name for name, buffer in clean.items() if not same_bits(buffer, end[name])],
        came_back=returned[0] if returned else None,
        moved=moved[-1],
        last=_numbers(set_up.optimizer.last),
    )


def _distance(set_up: SetUp, theta: Sequence[Tensor]) -> float:
    pairs = zip(set_up.params, theta, strict=True)
    apart = [(now.detach().to(wide(now)) - then.to(wide(then))) for now, then in pairs]
    return float(combine(norms(apart, norm=set_up.optimizer.norm), norm=set_up.optimizer.norm))


def _counts(buffers: dict[str, Tensor]) -> Iterator[tuple[str, int]]:
    """The buffers that are one whole number, as BatchNorm's count of batches."""
    for name, buffer in buffers.items():
        if buffer.numel() == 1 and not buffer.is_floating_point() and not buffer.is_complex():
            yield name, int(buffer)


def _numbers(last: Last) -> dict[str, float | None]:
    return {name: None if value is None else float(value.float().mean()) for name, value in vars(last).items()}


def _model_given(set_up: SetUp, example: str) -> str:
    """How to hand over the model, or more of it."""
    kind = type(set_up.optimizer).__name__
    if set_up.optimizer.model is None:
        return f"flatmin.{kind}(base, epsilon=…, model=model): {example}"
    given = type(set_up.optimizer.model).__name__
    return f"model= is a {given} that lacks a part of the model: give the whole model"


def counted_once(steps: Sequence[Step], set_up: SetUp) -> Finding:
    """Are BatchNorm's statistics, and all other buffers, those of the clean pass?"""
    first = steps[0]
    if not first.changed:
        once = next((name for name, (one, _) in first.counted.items() if one), None)
        seen = "no buffer changes in a pass" if once is None else f"a step counts as one pass, as in {once}"
        return Finding("BatchNorm", "ok", seen)
    name, (one, all_) = next(
        ((name, pair) for name, pair in first.counted.items() if pair[0] != pair[1]), (first.changed[0], (0, 0))
    )
    seen = f"{name} grows by {all_} in a step and by {one} in a pass; " if all_ != one else ""
    return Finding(
        "BatchNorm",
        "warning",
        f"{seen}{len(first.changed)} buffers are not those of the clean pass: {few(first.changed)}",
        _model_given(set_up, "then buffers are those of the clean pass"),
    )


def same_masks(steps: Sequence[Step], set_up: SetUp) -> Finding:
    """Does every pass of a step draw the same dropout masks?"""
    if all(step.same_masks for step in steps):
        seen = (
            "a step has one pass" if steps[0].passes == 1 else "all passes of a step begin with the same random state"
        )
        return Finding("dropout", "ok", seen)
    off = sum(not step.same_masks for step in steps)
    return Finding(
        "dropout",
        "warning",
        f"in {off} of {len(steps)} steps the passes draw different random numbers (masks, or data), so Δ climbs one "
        "loss and the step descends another",
        _model_given(set_up, "then all passes draw the same masks"),
    )


def restored(steps: Sequence[Step]) -> Finding:
    known = [step.came_back for step in steps if step.came_back is not None]
    if not known:
        return Finding("θ comes back", "cannot tell", "the base took no step", "see the findings about gradients")
    if all(known):
        return Finding("θ comes back", "ok", f"bit for bit and in its place, in {len(known)} of {len(known)} steps")
    return Finding(
        "θ comes back",
        "error",
        f"in {known.count(False)} of {len(known)} steps the base did not start from θ",
        "does the closure, or a hook, write into the weights?",
    )


def survives(steps: Sequence[Step], set_up: SetUp) -> Finding:
    """Is θ + Δ as far from θ as Δ is long, after rounding to the weights' precision?"""
    dtypes = ", ".join(sorted({str(param.dtype).removeprefix("torch.") for param in set_up.params}))
    pairs = [(step.moved, step.last["delta_norm"]) for step in steps]
    shares = sorted(moved / length for moved, length in pairs if length)
    if not shares:
        return Finding("rounding", "cannot tell", "Δ is 0", "see the findings about gradients")
    share = shares[len(shares) // 2]
    seen = f"weights in {dtypes}: of Δ's length {share:.1%} is left in θ + Δ"
    if 0.5 < share < 2:  # rounding up and down evens out in the loss, as long as most of Δ is there
        return Finding("rounding", "ok", seen)
    return Finding(
        "rounding",
        "warning",
        f"{seen}, the rest is rounding",
        "keep the weights in float32 and compute in half precision under torch.autocast; or a larger ε",
    )


JUDGES: tuple[Callable[[Sequence[Step], SetUp], Finding], ...] = (
    counted_once,
    same_masks,
    lambda steps, _: restored(steps),
    survives,
)
