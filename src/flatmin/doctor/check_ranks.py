"""Several ranks must take the same step, or they drift apart, or wait for each other forever.

All findings here compare what was gathered from every rank, so all ranks find the same.
"""

from collections.abc import Sequence
from typing import Any

import torch

from flatmin.core.distributed import has_several_ranks, replicas_in
from flatmin.core.tensors import ORDINARY_TYPES, plain, widest_dtype
from flatmin.doctor.closure_call import ClosureCall
from flatmin.doctor.finding import Finding, first_few
from flatmin.doctor.training import Training

NAME = "ranks"


class OtherRankCrashError(Exception):
    """The user's code crashed on another rank."""

    def finding(self) -> Finding:
        return Finding(NAME, "error", f"the examination crashed on {self}", "the error is reported there")


def all_gather(thing: Any, *, crashed: bool = False) -> list[Any]:
    """The values of all ranks; of this one alone if there is no other.

    Every rank calls this at every stage: one that crashed says so here, so that no other waits for it.
    """
    if not has_several_ranks():
        return [thing]
    things: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(things, (crashed, thing))
    if not crashed and (others := [f"rank {rank}" for rank, (ill, _) in enumerate(things) if ill]):
        raise OtherRankCrashError(", ".join(others))
    return [found for _, found in things]


def any_rank(flag: bool) -> bool:
    """Does it hold on any rank?"""
    return any(all_gather(flag))


def settings(training: Training) -> dict[str, Any]:
    """The settings that must be the same on all ranks, and a checksum of the weights."""
    optimizer = training.optimizer
    own = {name: getattr(optimizer, name) for name in optimizer.same_on_ranks}
    groups = {
        name: [float(group[name]) for group in optimizer.param_groups if name in group]
        for name in ("epsilon", "inner_lr")
    }
    with torch.no_grad():
        whole = [plain(param) for param in training.params if type(param) in ORDINARY_TYPES]
        checksum = sum(float(numbers.to(widest_dtype(numbers)).sum()) for numbers in whole)
    kinds = {"optimizer": type(optimizer).__name__, "base": type(training.base).__name__}
    return {**kinds, **groups, **own, "model given": optimizer.model is not None, "sum of the weights": checksum}


def check_settings(all_settings: Sequence[dict[str, Any]]) -> Finding:
    apart = [
        f"{name} is {', '.join(str(there[name]) for there in all_settings)}"
        for name in all_settings[0]
        if any(there.get(name) != all_settings[0][name] for there in all_settings)
    ]
    if not apart:
        return Finding(NAME, "ok", f"{len(all_settings)} ranks have the same settings and weights")
    change = "give every rank the same settings and the same weights: passes and reductions must match"
    return Finding(NAME, "error", f"{len(all_settings)} ranks differ: {'; '.join(apart)}", change)


def gradients(call: ClosureCall, training: Training) -> dict[str, Any]:
    names = training.names()
    whole = all(type(param) in ORDINARY_TYPES for param in training.params)
    return {
        "with": sorted(names[param] for param in call.gradients),
        "norm": call.norm if whole else None,  # for shards it is already that of all ranks
        "parallel": bool(replicas_in(training.model) or replicas_in(training.optimizer.model)),
    }


def check_synchronised(every: Sequence[dict[str, Any]]) -> Finding:
    """Do the ranks have the same gradients? Each has its own batch, so only if the gradients were averaged."""
    odd = sorted(
        {name for there in every for name in there["with"]} - set.intersection(*(set(t["with"]) for t in every))
    )
    if odd:
        change = "use the same parameters on every rank, or DistributedDataParallel(find_unused_parameters=True)"
        return Finding(NAME, "error", f"{first_few(odd)} has a gradient only on some ranks", change)
    lengths = [there["norm"] for there in every if there["norm"] is not None]
    if lengths and max(lengths) - min(lengths) > 1e-4 * max(lengths):
        shown = ", ".join(f"{length:.4g}" for length in lengths)
        change = "average the gradients in the closure: call a DistributedDataParallel model, outside no_sync()"
        if every[0]["parallel"]:
            change = "the closure must call the DistributedDataParallel model, outside no_sync()"
        return Finding(NAME, "error", f"‖∇J‖ is {shown} on the ranks: each would find its own Δ", change)
    return Finding(NAME, "ok", f"{len(every)} ranks have the same settings, weights and gradients")
