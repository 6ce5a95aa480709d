"""What a perturbing optimizer and a torch.amp.GradScaler tell each other.

Under fp16 the closure multiplies the loss by the scaler's S, so gradients come S times too large: the ascent divides by
S, on the device. Where `scaler.unscale_(optimizer)` was called, to clip, they are in their own size already. The scaler
decides whether to step by looking at the last gradient alone, so it is told of an earlier pass that overflowed.

The scaler keeps what it knows of an optimizer under the optimizer's id. A user speaks of the wrapper, the scaler steps
the base: `owners` are the two.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from flatmin.core.tensors import plain

Owners = tuple[Optimizer, Optimizer]  # the wrapper and its base


def check_in_use(scaler: GradScaler | None) -> None:
    if scaler is not None and scaler._scale is None:
        raise RuntimeError(
            "a GradScaler was passed that has scaled no loss, so gradients would be divided by a scale they do not "
            "have; call scaler.scale(loss).backward(), or leave out scaler="
        )


def inverse_scale(scaler: GradScaler | None, owners: Owners, device: torch.device) -> float | Tensor:
    """1/S, by which the present gradients are to be multiplied. `scaler.get_scale()` would read S back to the host."""
    if scaler is None or _unscaled(scaler, owners):
        return 1.0
    return scaler.scale(torch.ones((), device=device)).reciprocal()


def new_gradients_come(scaler: GradScaler | None, owners: Owners) -> None:
    """The next pass brings gradients that are scaled again: what was unscaled before does not count for them."""
    if scaler is not None:
        for owner in _unscaled(scaler, owners):
            del scaler._per_optimizer_states[id(owner)]


def notes_of(scaler: GradScaler | None, owners: Owners) -> dict[int, Any]:
    """What the scaler knows of the present gradients."""
    known = {} if scaler is None else scaler._per_optimizer_states
    return {id(owner): dict(known[id(owner)]) for owner in owners if id(owner) in known}


def put_back_notes(scaler: GradScaler | None, owners: Owners, notes: dict[int, Any]) -> None:
    if scaler is not None:
        for owner in owners:
            scaler._per_optimizer_states.pop(id(owner), None)
        scaler._per_optimizer_states.update(notes)


def step_scaled(skip: Tensor, owners: Owners, gradients: Sequence[Tensor], scaler: GradScaler) -> Tensor:
    """`scaler.step(base)`, which skips the step and lowers the scale where `skip` holds too; whether it did."""
    wrapper, base = owners
    known = scaler._per_optimizer_states
    if id(wrapper) in known:
        known[id(base)] = known.pop(id(wrapper))
    if _unscaled(scaler, owners):  # the scaler has looked already: correct what it noted
        for found in known[id(base)]["found_inf_per_device"].values():
            torch.maximum(found, skip.to(found.device, found.dtype), out=found)  # fused kernels skip at exactly 1
    else:  # it will look now: show it an infinite gradient
        occupied = [gradient for gradient in map(plain, gradients) if gradient.numel()]
        for gradient in sorted(occupied, key=Tensor.numel)[:1]:
            gradient.masked_fill_(skip.to(gradient.device), float("inf"))
    scaler.step(base)
    found = [flag.to(skip.device) for flag in known[id(base)]["found_inf_per_device"].values()]
    return torch.stack(found).amax() > 0 if found else skip  # a base that asks the scaler itself leaves no flag


def step_fused(base: Optimizer, scale: Tensor | None, found_inf: Tensor) -> None:
    """The step of a base whose kernels unscale and skip by themselves, told as a scaler tells it."""
    base.grad_scale, base.found_inf = scale, found_inf  # type: ignore[attr-defined]
    try:
        base.step()
    finally:
        del base.grad_scale, base.found_inf  # type: ignore[attr-defined]


def step_as_told(base: Optimizer, scale: Tensor | None, found_inf: Tensor) -> None:
    """The base's own step inside `scaler.step(wrapper)`: S (None: unscaled) and the flag are what the scaler left."""
    if getattr(base, "_step_supports_amp_scaling", False):
        step_fused(base, scale, found_inf)
        return
    if scale is not None:
        inverse = scale.double().reciprocal().float()
        for param in (param for group in base.param_groups for param in group["params"] if param.grad is not None):
            plain(param.grad).mul_(inverse.to(param.device))
    if not found_inf.item():  # as the scaler asks, of an optimizer that does not know it
        base.step()


def _unscaled(scaler: GradScaler, owners: Owners) -> list[Optimizer]:
    known = scaler._per_optimizer_states
    return [owner for owner in owners if id(owner) in known and known[id(owner)]["stage"] is OptState.UNSCALED]
