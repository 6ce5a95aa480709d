"""A few real steps, observed from inside: what each pass starts from, and what the step leaves behind.

The closure is wrapped to record the weights, the buffers and the random generators of every pass; a hook of the base
checks the weights that it is about to update, which must be θ again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatmin.ball import combine, norms
from flatmin.core.random_state import random_state
from flatmin.core.tensors import compute_dtype, plain
from flatmin.doctor.finding import Finding, first_few
from flatmin.doctor.training import Training, same_bits
from flatmin.optim.telemetry.step_info import Last

STEPS = 5  # enough for a median


@dataclass(frozen=True)
class ObservedStep:
    """What was observed in one step."""

    passes: int
    same_masks: bool  # every pass began with the same random state
    counted: dict[str, tuple[int, int]]  # integer buffers: what the first pass added, and the whole step
    changed: list[str]  # buffers that are not as the first pass left them
    written: list[str]  # weights that are not trained, and that a later pass wrote to
    came_back: bool | None  # was θ restored, bit for bit and in place, for the base's step? None: it took none
    moved: float  # ‖(θ + Δ) − θ‖ as the last pass saw it
    last: dict[str, float | None]


def observe_steps(training: Training, count: int = STEPS) -> list[ObservedStep]:
    return [_observe_step(training) for _ in range(count)]


def _observe_step(training: Training) -> ObservedStep:
    theta = [param.detach().clone() for param in training.trained]
    places = [plain(param).data_ptr() for param in training.trained]
    start, clean = training.buffers(), dict[str, Tensor]()
    states: list[list[Tensor]] = []
    moved, returned, written = [0.0], list[bool](), list[str]()
    frozen = _frozen(training)

    def closure() -> Any:
        states.append([random_state(device) for device in training.devices])
        moved.append(_distance(training, theta))
        lengths = norms(list(frozen.values()))
        result = training.closure()
        if len(states) > 1:
            pairs = zip(frozen, lengths, norms(list(frozen.values())), strict=True)
            written.extend(name for name, one, other in pairs if not same_bits(one, other))
        if not clean:
            clean.update(training.buffers())
        return result

    def at_base(*_: object) -> None:
        same = all(same_bits(*pair) for pair in zip(training.trained, theta, strict=True))
        returned.append(same and places == [plain(param).data_ptr() for param in training.trained])

    hook = training.base.register_step_pre_hook(at_base)
    try:
        training.step(closure)
    finally:
        hook.remove()
    end = training.buffers()
    return ObservedStep(
        passes=len(states),
        same_masks=all(torch.equal(*pair) for entry in states for pair in zip(entry, states[0], strict=True)),
        counted={name: (int(clean[name]) - count, int(end[name]) - count) for name, count in _counts(start)},
        changed=[name for name, buffer in clean.items() if not same_bits(buffer, end[name])],
        written=list(dict.fromkeys(written)),
        came_back=returned[0] if returned else None,
        moved=moved[-1],
        last=_numbers(training.optimizer.last),
    )


def _frozen(training: Training) -> dict[str, Tensor]:
    """The model's weights that the optimizer does not train."""
    trained = set(map(id, training.trained))
    weights = training.model.named_parameters()
    return {name: param for name, param in weights if id(param) not in trained and param.is_floating_point()}


def _distance(training: Training, theta: Sequence[Tensor]) -> float:
    pairs = zip(training.trained, theta, strict=True)
    apart = [(now.detach().to(compute_dtype(now)) - then.to(compute_dtype(then))) for now, then in pairs]
    return float(combine(norms(apart, norm=training.optimizer.norm), norm=training.optimizer.norm))


def _counts(buffers: dict[str, Tensor]) -> Iterator[tuple[str, int]]:
    """The buffers that are a single integer, such as BatchNorm's count of batches."""
    for name, buffer in buffers.items():
        if buffer.numel() == 1 and not buffer.is_floating_point() and not buffer.is_complex():
            yield name, int(buffer)


def _numbers(last: Last) -> dict[str, float | None]:
    known = {name: value for name, value in vars(last).items() if name != "epsilon"}
    return {name: None if value is None else float(value.float().mean()) for name, value in known.items()}


def _model_given(training: Training, example: str) -> str:
    """How to pass the model, or all of it."""
    kind = type(training.optimizer).__name__
    if training.optimizer.model is None:
        return f"flatmin.{kind}(base, epsilon=…, model=model): {example}"
    given = type(training.optimizer.model).__name__
    return f"model= is a {given} that lacks a part of the model: give the whole model"


def check_buffers(steps: Sequence[ObservedStep], training: Training) -> Finding:
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
    change = _model_given(training, "then buffers are those of the clean pass")
    own = dict(training.model.named_buffers())
    if training.optimizer.model is not None and not any(name in own for name in first.changed):
        others = [name for name in training.others() if any(one.startswith(f"{name}'s ") for one in first.changed)]
        written = ", ".join(name if name.replace(".", "").isidentifier() else "…" for name in others)
        change = f"give all networks that the closure runs: model=torch.nn.ModuleList([model, {written}])"
    return Finding(
        "BatchNorm",
        "warning",
        f"{seen}{len(first.changed)} buffers are not those of the clean pass: {first_few(first.changed)}",
        change,
    )


def check_masks(steps: Sequence[ObservedStep], training: Training) -> Finding:
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
        _model_given(training, "then all passes draw the same masks"),
    )


def check_restored(steps: Sequence[ObservedStep]) -> Finding:
    known = [step.came_back for step in steps if step.came_back is not None]
    if not known:
        return Finding("θ comes back", "cannot tell", "the base took no step", "see the findings about gradients")
    written = steps[-1].written
    if all(known) and written:
        return Finding(
            "θ comes back",
            "warning",
            f"every pass writes to weights that the optimizer does not train, also at θ + Δ: {first_few(written)}",
            "update them once per step, outside the closure: after optimizer.step(), for example",
        )
    if all(known):
        return Finding("θ comes back", "ok", f"bit for bit and in place, in {len(known)} of {len(known)} steps")
    return Finding(
        "θ comes back",
        "error",
        f"in {known.count(False)} of {len(known)} steps the base did not start from θ",
        "does the closure, or a hook, write into the weights?",
    )


def check_rounding(steps: Sequence[ObservedStep], training: Training) -> Finding:
    """Is θ + Δ as far from θ as Δ is long, after rounding to the weights' precision?"""
    dtypes = ", ".join(sorted({str(param.dtype).removeprefix("torch.") for param in training.params}))
    pairs = [(step.moved, step.last["delta_norm"]) for step in steps]
    shares = sorted(moved / length for moved, length in pairs if length)
    if not shares:
        return Finding("rounding", "cannot tell", "Δ is 0", "see the findings about gradients")
    share = shares[len(shares) // 2]
    seen = f"weights in {dtypes}: {share:.1%} of Δ's length is left in θ + Δ"
    if 0.5 < share < 2:  # rounding up and down cancels in the loss, as long as most of Δ is left
        return Finding("rounding", "ok", seen)
    return Finding(
        "rounding",
        "warning",
        f"{seen}, the rest is rounding",
        "keep the weights in float32 and compute in half precision under torch.autocast; or use a larger ε",
    )


STEP_CHECKS: tuple[Callable[[Sequence[ObservedStep], Training], Finding], ...] = (
    check_buffers,
    check_masks,
    lambda steps, _: check_restored(steps),
    check_rounding,
)
