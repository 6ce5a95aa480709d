"""One call of the closure, outside a step: what it returned, what gradients it left, and which scalers it used."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.amp import GradScaler

from flatmin.ball import combine, norms
from flatmin.doctor.training import Training
from flatmin.optim.telemetry.step_info import loss_in

MAX_HALVINGS = 24  # of the scale: from the usual start, 2¹⁶, to far below 1


@dataclass(frozen=True)
class ClosureCall:
    """What one call of the closure did."""

    result: Any
    loss: float | None
    gradients: dict[Tensor, Tensor]  # copies, dense
    scalers: list[GradScaler]  # used in the call
    is_scaled: bool  # the returned loss is a scaler's output

    @property
    def norm(self) -> float:
        return float(combine(norms(list(self.gradients.values()))))

    @property
    def largest(self) -> float:
        return float(combine(norms(list(self.gradients.values()), norm="linf"), norm="linf"))

    def is_finite(self) -> bool:
        return self.norm < float("inf")  # nan is not

    def gap(self, other: "ClosureCall") -> float:
        """The relative difference of two calls, in their gradients or their losses. 0: equal bit for bit."""
        if self.gradients.keys() != other.gradients.keys():
            return float("inf")
        apart = [other.gradients[param] - gradient for param, gradient in self.gradients.items()]
        between = _share(float(combine(norms(apart))), self.norm)
        if self.loss is None or other.loss is None:
            return between
        return max(between, _share(abs(self.loss - other.loss), abs(self.loss)))


def _share(part: float, whole: float) -> float:
    return 0.0 if part == 0 else part / whole if whole else float("inf")


def observe(training: Training, *, zero: bool = True) -> ClosureCall:
    if zero:
        training.optimizer.zero_grad()
    with _scalers_used() as (scalers, outputs):
        result = training.call()
    loss = loss_in(result)
    gradients = {param: dense(param.grad) for param in training.params if param.grad is not None}
    number = None if loss is None else float(loss.detach().float().mean())
    return ClosureCall(result, number, gradients, scalers, any(loss is output for output in outputs))


def dense(gradient: Tensor) -> Tensor:
    return gradient.detach().to_dense() if gradient.is_sparse else gradient.detach().clone()


def settle_scale(training: Training) -> None:
    """Take steps until the gradients do not overflow: a scale starts high, and the first steps halve it."""
    for _ in range(MAX_HALVINGS if training.scaler is not None else 0):
        call = observe(training)
        if call.is_finite() or training.scaler not in call.scalers:
            return
        training.step()


@contextmanager
def _scalers_used() -> Iterator[tuple[list[GradScaler], list[object]]]:
    """The enabled scalers whose `scale` is called inside, and what they returned."""
    seen, outputs_seen = list[GradScaler](), list[object]()
    scale = GradScaler.scale

    def watched(self: GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if self.is_enabled():
            outputs_seen.append(scaled)
            if self not in seen:
                seen.append(self)
        return scaled

    GradScaler.scale = watched  # type: ignore[method-assign]
    try:
        yield seen, outputs_seen
    finally:
        GradScaler.scale = scale  # type: ignore[method-assign]
