"""Checks of the closure: its loss, its gradients, and whether it uses the GradScaler.

Every finding is a function of one `ClosureCall`, or of a few at different weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.amp import GradScaler

from flatmin.core.tensors import plain, widest_dtype
from flatmin.doctor.closure_call import ClosureCall, observe
from flatmin.doctor.finding import Finding, first_few
from flatmin.doctor.training import Training, TrainingSnapshot

SCALES = (0.9, 1.1, 1.2)  # of the weights, to look for clipping at different gradients


def check_mode(training: Training) -> Finding:
    """Is the model in training mode? Checked after a call: a closure may switch it on."""
    if training.model.training:
        return Finding("mode", "ok", "the model is in training mode")
    seen = "the model is in eval mode: BatchNorm keeps its statistics and dropout drops nothing"
    return Finding("mode", "warning", seen, "call model.train() before training")


def check_loss(call: ClosureCall) -> Finding:
    if call.is_scaled:
        return Finding(
            "loss",
            "warning",
            f"the closure returns the scaled loss, {call.loss:.4g}, so optimizer.last and logs have that one",
            "return the loss itself, and call backward() on the scaled one",
        )
    if call.loss is not None:
        return Finding("loss", "ok", f"the closure returns it: {call.loss:.4g}")
    return Finding(
        "loss",
        "warning",
        f"the closure returns {'None' if call.result is None else f'a {type(call.result).__name__} without a tensor'}, "
        "so optimizer.last has no losses, and nothing shows whether the ascent raises the loss",
        "end the closure with `return loss`, the tensor itself",
    )


def check_scaler(call: ClosureCall, scaler: GradScaler | None) -> Finding:
    used = call.scalers
    if not used and scaler is None:
        return Finding("GradScaler", "ok", "none, and the closure uses none")
    if scaler is not None and scaler in used:
        return Finding("GradScaler", "ok", f"the closure scales its loss by {scaler.get_scale():g}")
    if used:
        scale = used[0].get_scale()
        return Finding(
            "GradScaler",
            "error",
            f"the closure scales its loss by {scale:g}, but the optimizer does not get the scaler: the gradients, of "
            f"norm {call.norm:.3g}, are too large by that factor, and Δ is always at the edge of the ball",
            "write optimizer.step(closure, scaler=scaler); here, return (model, optimizer, closure, scaler)",
        )
    return Finding(
        "GradScaler",
        "error",
        "the closure does not use the scaler that is passed: Δ and the step would still be divided by its scale",
        "call scaler.scale(loss).backward() in the closure, or pass no scaler",
    )


def check_gradients_exist(call: ClosureCall, training: Training) -> Finding:
    """Does every parameter have a gradient, and a finite one?"""
    names = training.names()
    frozen = [param for param in names if not param.requires_grad]
    unused = [name for param, name in names.items() if param.requires_grad and param not in call.gradients]
    broken = [names[param] for param, gradient in call.gradients.items() if not gradient.isfinite().all()]
    zero = [names[param] for param, gradient in call.gradients.items() if not gradient.any()]
    seen = f"‖∇J‖ = {call.norm:.4g} over {len(call.gradients)} of {len(names)} tensors"
    seen += f", {len(frozen)} are frozen" if frozen else ""
    if not call.gradients:
        return Finding(
            "gradients", "error", "no parameter has a gradient after the closure", "call loss.backward() in the closure"
        )
    if broken:
        change = "look for a division by 0, a log of 0 or an overflow; in fp16 use a GradScaler"
        return Finding("gradients", "error", f"{seen}; not finite in {first_few(broken)}", change)
    if len(zero) == len(call.gradients):
        return Finding(
            "gradients", "error", f"{seen}: all are 0", "does the loss depend on the optimizer's parameters?"
        )
    if unused:
        return Finding(
            "gradients",
            "warning",
            f"{seen}; none in {first_few(unused)}",
            "use them in the loss, leave them out of the optimizer, or freeze them with requires_grad_(False)",
        )
    return Finding("gradients", "ok", seen + (f"; all 0 at these weights in {first_few(zero)}" if zero else ""))


def check_parameters(training: Training) -> Finding:
    """Does the optimizer have all parameters of the model?"""
    known = set(training.params)
    wanted = {name: param for name, param in training.model.named_parameters() if param.requires_grad}
    missing = [name for name, param in wanted.items() if param not in known]
    if not missing:
        return Finding(
            "parameters", "ok", f"the optimizer has all {len(wanted)} parameters of the model that require a gradient"
        )
    return Finding(
        "parameters",
        "warning",
        f"the optimizer lacks {len(missing)} of the model's {len(wanted)} parameters that require a gradient: "
        f"{first_few(missing)}",
        "give them to the optimizer; if they are meant to stay fixed, requires_grad_(False) saves their gradients",
    )


def observe_on_top(first: ClosureCall, training: Training) -> ClosureCall:
    """A second call of the closure, with the gradients of the first still in place."""
    for param, gradient in first.gradients.items():
        param.grad = gradient.clone()
    return observe(training, zero=False)


def check_zero_grad(first: ClosureCall, again: ClosureCall, training: Training, rounding: float) -> Finding:
    """Does the closure zero the gradients? `again` was called on top of the first, at the same weights."""
    left = [
        name for param, name in training.names().items() if param in first.gradients and _added(first, again, param)
    ]
    if first.gap(again) <= rounding or not left:
        return Finding("zero_grad", "ok", "the closure zeroes the gradients")
    return Finding(
        "zero_grad",
        "warning",
        f"a second call adds to the gradients of the first: ‖∇J‖ is {first.norm:.4g}, then {again.norm:.4g}, in "
        f"{first_few(left)}",
        "begin the closure with optimizer.zero_grad(), unless your loop calls it before every step",
    )


def _added(first: ClosureCall, again: ClosureCall, param: Tensor) -> bool:
    once, twice = (plain(call.gradients[param]).to(widest_dtype(param)) for call in (first, again))
    return bool(once.any()) and bool((twice - 2 * once).norm() < 0.1 * once.norm())


def observe_elsewhere(training: Training, snapshot: TrainingSnapshot) -> list[ClosureCall]:
    """Calls at scaled weights: the gradient of a network has a different norm at each."""
    calls = []
    for scale in SCALES:
        snapshot.put_back()
        with torch.no_grad():
            for param in training.params:
                param.mul_(scale)
        calls.append(observe(training))
    snapshot.put_back()
    return calls


def check_clipping(calls: Sequence[ClosureCall]) -> Finding:
    """Do the gradients at different weights have the same norm, or the same largest entry, to four digits?"""
    turned = all(calls[0].gap(call) > 1e-2 for call in calls[1:])
    for name, values in (("norm", [call.norm for call in calls]), ("largest entry", [call.largest for call in calls])):
        if turned and max(values) - min(values) < 1e-4 * max(values):
            return Finding(
                "clipping",
                "warning",
                f"the gradients at {len(calls)} different weights all have the same {name}, {max(values):.4g}: "
                "the closure clips them, and so clips Δ (or the loss is linear in the weights)",
                "clip after the perturbed() block, or in a hook: optimizer.base.register_step_pre_hook",
            )
    seen = ", ".join(f"{call.norm:.4g}" for call in calls)
    return Finding("clipping", "ok", f"no sign of it in the closure: ‖∇J‖ is {seen} at different weights")
