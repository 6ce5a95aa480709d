"""A perturbed optimizer under a torch.amp.GradScaler.

In fp16 the closure multiplies the loss by the scaler's S, so gradients are S times too large: the ascent divides by S,
on the device. If `scaler.unscale_(optimizer)` was called, to clip, they are already unscaled. The scaler decides from
the last gradient alone whether to step, so an overflow in an earlier pass is passed on to it.

The scaler keeps the state of each optimizer under its id. A user passes it the wrapper, but the scaler steps the base:
`owners` are these two.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from flatmin.core.tensors import plain, widest_dtype

Owners = tuple[Optimizer, Optimizer]  # the wrapper and its base


def check_scaler_used(scaler: GradScaler | None) -> None:
    if scaler is not None and scaler._scale is None:
        raise RuntimeError(
            "the GradScaler has not scaled any loss, so gradients would be divided by a scale they do not "
            "have; call scaler.scale(loss).backward(), or leave out scaler="
        )


def inverse_scale(scaler: GradScaler | None, owners: Owners, device: torch.device) -> float | Tensor:
    """1/S, the factor that unscales the current gradients. `scaler.get_scale()` would read S back to the host."""
    if scaler is None or _unscaled(scaler, owners):
        return 1.0
    return scaler.scale(torch.ones((), device=device)).reciprocal()


def forget_unscaled(scaler: GradScaler | None, owners: Owners) -> None:
    """Before a pass: its gradients will be scaled again, so forget that earlier ones were unscaled."""
    if scaler is not None:
        for owner in _unscaled(scaler, owners):
            del scaler._per_optimizer_states[id(owner)]


def scaler_state(scaler: GradScaler | None, owners: Owners) -> dict[int, Any]:
    """What the scaler knows about the current gradients."""
    known = {} if scaler is None else scaler._per_optimizer_states
    return {id(owner): dict(known[id(owner)]) for owner in owners if id(owner) in known}


def restore_scaler_state(scaler: GradScaler | None, owners: Owners, saved: dict[int, Any]) -> None:
    if scaler is not None:
        for owner in owners:
            scaler._per_optimizer_states.pop(id(owner), None)
        scaler._per_optimizer_states.update(saved)


def step_scaled(skip: Tensor, owners: Owners, gradients: Sequence[Tensor], scaler: GradScaler) -> Tensor:
    """`scaler.step(base)`, which also skips and lowers the scale if `skip` holds; returns whether it skipped."""
    wrapper, base = owners
    known = scaler._per_optimizer_states
    if id(wrapper) in known:
        known[id(base)] = known.pop(id(wrapper))
    if _unscaled(scaler, owners):  # the scaler has already checked the gradients: correct its flags
        for found in known[id(base)]["found_inf_per_device"].values():
            torch.maximum(found, skip.to(found.device, found.dtype), out=found)  # fused kernels skip at exactly 1
    else:  # it will check them now: make one infinite
        occupied = [gradient for gradient in map(plain, gradients) if gradient.numel()]
        for gradient in sorted(occupied, key=Tensor.numel)[:1]:
            gradient.masked_fill_(skip.to(gradient.device), float("inf"))
    scaler.step(base)
    found = [flag.to(skip.device) for flag in known[id(base)]["found_inf_per_device"].values()]
    return torch.stack(found).amax() > 0 if found else skip  # a base that reads the scaler itself leaves no flag


def step_fused(base: Optimizer, scale: Tensor | None, found_inf: Tensor) -> None:
    """A step of a base whose kernels unscale and skip by themselves, with the attributes a scaler would set."""
    base.grad_scale, base.found_inf = scale, found_inf  # type: ignore[attr-defined]
    try:
        base.step()
    finally:
        del base.grad_scale, base.found_inf  # type: ignore[attr-defined]


def step_with_grad_scale(base: Optimizer, scale: Tensor | None, found_inf: Tensor) -> None:
    """The base's own step inside `scaler.step(wrapper)`, with the S (None: unscaled) and flag that the scaler set."""
    if getattr(base, "_step_supports_amp_scaling", False):
        step_fused(base, scale, found_inf)
        return
    if scale is not None:
        inverse = scale.to(widest_dtype(scale)).reciprocal().float()
        for param in (param for group in base.param_groups for param in group["params"] if param.grad is not None):
            plain(param.grad).mul_(inverse.to(param.device))
    if not found_inf.item():  # as the scaler does for an optimizer that does not know it
        base.step()


def _unscaled(scaler: GradScaler, owners: Owners) -> list[Optimizer]:
    known = scaler._per_optimizer_states
    return [owner for owner in owners if id(owner) in known and known[id(owner)]["stage"] is OptState.UNSCALED]
