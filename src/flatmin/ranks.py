"""Several ranks, one model: whose gradient the ascent climbs, and what ranks must agree on.

With R ranks, Jᵣ the loss of rank r's part of the batch and J = ΣJᵣ/R, there are two perturbations to choose from:

    one for all     Δ = Π(ζ ∇J(θ)),     from the synchronised gradient: the step of one process with the whole batch
    one a rank      Δᵣ = Π(ζ ∇Jᵣ(θ)),   from the rank's own: m-sharpness, with nothing sent during the ascent

Either way the descent is synchronised, so replicas stay equal to the last bit as long as all of them step or none does:
with a perturbation a rank, the flag "skip this step" is the only thing that must be sent besides.

Settings, and which parameters have gradients, must be the same everywhere. They are compared once, in the first step,
so that a difference becomes an error on all ranks instead of a wait that never ends.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def replicas_in(model: nn.Module | None) -> list[DistributedDataParallel]:
    """The data-parallel modules of a model: itself, mostly; inside, where it is compiled or has several."""
    return [] if model is None else [part for part in model.modules() if isinstance(part, DistributedDataParallel)]


@contextmanager
def without_sync(model: nn.Module | None) -> Iterator[None]:
    """Backward passes in here leave each rank its own gradient."""
    with ExitStack() as stack:
        for replica in replicas_in(model):
            stack.enter_context(replica.no_sync())
        yield


def several() -> bool:
    """Is this one of several ranks?"""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and _world_size() > 1


def _world_size() -> int:
    return torch.distributed.get_world_size()


def groups_of(model: nn.Module | None, params: Iterable[Tensor]) -> list[Any]:
    """The process groups over which the model's weights are replicated or spread, each once."""
    if not several():
        return []
    found = [replica.process_group for replica in replicas_in(model)]
    meshes = dict.fromkeys(param.device_mesh for param in params if hasattr(param, "device_mesh"))
    for mesh in meshes:
        found += mesh.get_all_groups()
    return [group for group in dict.fromkeys(found) if torch.distributed.get_world_size(group) > 1]


def check_layout(model: nn.Module | None, params: Sequence[Tensor], *, sync_perturbation: bool) -> None:
    """Weights may be replicated, or spread as DTensors; a perturbation a rank takes a whole model on each."""
    if not several():
        return
    if any(getattr(param, "_fsdp_flattened", False) for param in params):
        raise ValueError(
            "FullyShardedDataParallel hides which weights belong together, so that no rank knows their norm; use "
            "torch.distributed.fsdp.fully_shard instead"
        )
    if sync_perturbation:
        return
    if any(hasattr(param, "device_mesh") for param in params):
        raise ValueError(
            "sync_perturbation=False gives each rank a perturbation of the whole model, got weights that are spread "
            "over ranks; use sync_perturbation=True"
        )
    if not replicas_in(model):
        given = "None" if model is None else f"a {type(model).__name__}"
        raise ValueError(
            f"sync_perturbation=False runs the ascent under no_sync() of DistributedDataParallel, got model={given} "
            "with none in it; pass model=ddp_model, or use sync_perturbation=True"
        )


def on_any(flag: Tensor, groups: Sequence[Any]) -> Tensor:
    """Does the flag hold on any rank? A small message, on the device: nothing waits for it."""
    for group in groups:
        number = flag.float()
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, group=group)
        flag = number > 0
    return flag


def compare(mine: Mapping[str, object], groups: Sequence[Any], *, way_out: str) -> None:
    """An error, on every rank, if these things are not the same on all of them."""
    for group in groups:
        theirs: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(theirs, dict(mine), group=group)
        for name in mine:
            values = [each[name] for each in theirs]
            other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                names = [torch.distributed.get_global_rank(group, rank) for rank in (0, other)]
                raise ValueError(
                    f"all ranks must have the same {name}, got {values[0]} on rank {names[0]} and {values[other]} on "
                    f"rank {names[1]}; {way_out}"
                )


def same_on_all_ranks(number: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """A number drawn at random, as the first rank drew it, where some of these tensors are spread over ranks."""
    meshes = [tensor.device_mesh for tensor in tensors if hasattr(tensor, "device_mesh")]
    if not meshes:
        return number
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * meshes[0].ndim
    return DTensor.from_local(number, meshes[0], everywhere, run_check=True).to_local()
