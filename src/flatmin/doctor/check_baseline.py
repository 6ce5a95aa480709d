"""The optimizer with flatmin and without it: the same bits at ε = 0, and the extra cost of a step."""

from statistics import median
from time import perf_counter
from typing import Any

from torch import Tensor

from flatmin.core.tensors import plain
from flatmin.doctor.check_ranks import any_rank
from flatmin.doctor.finding import Finding
from flatmin.doctor.training import Training, new_training, same_bits
from flatmin.doctor.user_training import MakeTraining
from flatmin.optim.amp import AMP

STEPS = 3  # compared bit for bit at ε = 0
TIMED_STEPS = 5  # of each kind, alternating; the medians are reported


def check_epsilon_zero(make_training: MakeTraining) -> Finding:
    """Is AMP with ε = 0 the base optimizer, bit for bit, in weights, buffers and state?"""
    name = "ε = 0"
    plainly, idle = _after(make_training, wrapped=False), _after(make_training, wrapped=True)
    apart = _apart(plainly, idle)
    if not any_rank(bool(apart)):
        return Finding(
            name,
            "ok",
            f"{STEPS} steps with ε = 0 equal those of the plain optimizer, bit for bit ({len(plainly)} tensors)",
        )
    if any_rank(bool(_apart(plainly, _after(make_training, wrapped=False)))):
        return Finding(
            name,
            "cannot tell",
            f"two runs of {STEPS} steps with the plain optimizer differ from each other",
            "make_training() must give the same weights and data every time; on a GPU, call "
            "torch.use_deterministic_algorithms(True)",
        )
    return Finding(
        name,
        "error",
        f"{STEPS} steps with ε = 0 differ from the optimizer's own in {len(apart)} of {len(plainly)} tensors",
        "does the closure, or a hook, check whether it runs inside flatmin?",
    )


def _after(make_training: MakeTraining, *, wrapped: bool) -> list[Any]:
    """Copies of weights, buffers and the optimizer's state after a few steps, in the host's memory."""
    training = new_training(make_training)
    for group in training.optimizer.param_groups:
        group["epsilon"] = 0.0
    for _ in range(STEPS):
        training.step() if wrapped else training.step_base()
    states = [training.base.state.get(param, {}) for param in training.params]
    kept = [value for state in states for _, value in sorted(state.items(), key=lambda item: str(item[0]))]
    return [_copied(value) for value in (*training.params, *training.model.buffers(), *kept)]


def _copied(value: Any) -> Any:
    """Of a tensor, the part on this rank: the next training may reuse the model's memory."""
    return plain(value.detach()).to("cpu", copy=True) if isinstance(value, Tensor) else value


def _apart(one: list[Any], other: list[Any]) -> list[int]:
    if len(one) != len(other):
        return list(range(len(one)))
    return [n for n, pair in enumerate(zip(one, other, strict=True)) if not _same(*pair)]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def measure_cost(training: Training) -> Finding:
    """The time of a step relative to the base alone, its passes, and the memory it keeps."""
    wrapped, plainly = [], []
    for _ in range(TIMED_STEPS):  # alternating; the steps observed before have warmed everything up
        wrapped.append(_seconds(training, wrapped=True))
        plainly.append(_seconds(training, wrapped=False))
    ours, theirs = median(wrapped), median(plainly)
    optimizer = training.optimizer
    passes = optimizer.inner_iter + isinstance(optimizer, AMP)
    kept = sum(plain(tensor).nbytes for tensor in optimizer.memory())
    params = sum(plain(param).nbytes for param in training.params)
    return Finding(
        "cost",
        "ok",
        f"{ours / theirs:.2f} times a step of {type(training.base).__name__} ({1000 * ours:.4g} and "
        f"{1000 * theirs:.4g} ms, medians of {TIMED_STEPS}) for {passes} passes; extra memory: "
        f"{kept / max(params, 1):.2g} times the parameters ({kept / 2**20:.3g} MiB)",
        "on a GPU, flatmin.captured_step makes it one CUDA graph" if params and training.params[0].is_cuda else "",
    )


def _seconds(training: Training, *, wrapped: bool) -> float:
    training.wait()
    start = perf_counter()
    if wrapped:
        training.step()
    else:
        training.step_base()
    training.wait()
    return perf_counter() - start
