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
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def replicas_in(model: nn.Module | None) -> list[DistributedDataParallel]:
    """The data-parallel modules of a model: itself, mostly; inside, where it is compiled or has several."""
    return [] if model is None else [part for part in model.modules() if isinstance(part, DistributedDataParallel)]


@contextmanager
def without_sync(replicas: Iterable[DistributedDataParallel]) -> Iterator[None]:
    """Backward passes in here leave each rank its own gradient."""
    with ExitStack() as stack:
        for replica in replicas:
            stack.enter_context(replica.no_sync())
        yield


def several() -> bool:
    """Is this one of several ranks?"""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def groups_of(replicas: Iterable[DistributedDataParallel], params: Iterable[Tensor]) -> list[Any]:
    """The process groups over which the model's weights are replicated or spread, each once."""
    if not several():
        return []
    found = [replica.process_group for replica in replicas]
    meshes = dict.fromkeys(param.device_mesh for param in params if hasattr(param, "device_mesh"))
    for mesh in meshes:
        found += mesh.get_all_groups()
    return [group for group in dict.fromkeys(found) if torch.distributed.get_world_size(group) > 1]


def check_layout(
    replicas: Sequence[DistributedDataParallel], params: Sequence[Tensor], *, sync_perturbation: bool
) -> None:
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
    if not replicas:
        raise ValueError(
            "sync_perturbation=False runs the ascent under no_sync() of DistributedDataParallel, got a model with none "
            "in it; pass model=ddp_model, or use sync_perturbation=True"
        )
    if any(replica.static_graph for replica in replicas):
        raise ValueError(
            "sync_perturbation=False runs the first pass under no_sync(), which DistributedDataParallel cannot do with "
            "static_graph=True; leave that out, or use sync_perturbation=True"
        )


def on_any(flag: Tensor, groups: Sequence[Any]) -> Tensor:
    """Does the flag hold on any rank? A small message, on the device: nothing waits for it."""
    for group in groups:
        number = flag.float()
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, group=group)
        flag = number > 0
    return flag


def compare(mine: Mapping[str, object], groups: Sequence[Any], *, device: torch.device, way_out: str) -> None:
    """An error, on every rank, if these things are not the same on all of them."""
    known: dict[int, dict[str, object]] = {torch.distributed.get_rank(): dict(mine)}
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # where NCCL sends from
        for group in groups:  # one after the other: then all ranks of a mesh know of all, and none leaves early
            theirs: list[Any] = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(theirs, known, group=group)
            known = {rank: things for each in theirs for rank, things in each.items()}
    (first, expected), *others = sorted(known.items())
    for rank, things in others:
        for name, value in things.items():
            if value != expected[name]:
                raise ValueError(
                    f"all ranks must have the same {name}, got {expected[name]} on rank {first} and {value} on rank "
                    f"{rank}; {way_out}"
                )


def compare_missing_gradients(
    params: Sequence[Tensor], model: nn.Module | None, groups: Sequence[Any], *, device: torch.device
) -> None:
    """An error, on every rank, if a parameter has a gradient on some of them alone."""
    names: dict[Tensor, str] = {param: name for name, param in ([] if model is None else model.named_parameters())}
    missing = [names.get(p, f"number {place}") for place, p in enumerate(params) if p.grad is None]
    compare(
        {"parameters without a gradient": missing},
        groups,
        device=device,
        way_out="use the same parameters in every rank's loss, or freeze them on every rank",
    )


def compare_gradient_norms(length: float, groups: Sequence[Any], *, device: torch.device) -> None:
    """An error, on every rank, if the gradients of replicas were not synchronised."""
    compare(
        {"‖∇J‖": f"{length:.9g}"},  # in digits: nan is nan
        groups,
        device=device,
        way_out="run the passes outside no_sync() (or use sync_perturbation=False), and only parameters of the "
        "DistributedDataParallel model",
    )


def same_on_all_ranks(number: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """A number drawn at random, as the first rank drew it, where some of these tensors are spread over ranks."""
    meshes = [tensor.device_mesh for tensor in tensors if hasattr(tensor, "device_mesh")]
    if not meshes:
        return number
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * meshes[0].ndim
    return DTensor.from_local(number, meshes[0], everywhere, run_check=True).to_local()


def generators_of_shards(tensors: Sequence[Tensor], generator: torch.Generator | None) -> dict[int, torch.Generator]:
    """For each DTensor in the list, by its place, a generator: the same for replicas, another for each shard.

    Ranks are mostly seeded alike, and would draw the same numbers for different shards.
    """
    spread = [place for place, tensor in enumerate(tensors) if hasattr(tensor, "device_mesh")]
    if not spread:
        return {}
    first = tensors[spread[0]]
    home = torch.device("cpu") if generator is None else generator.device
    drawn = torch.randint(2**62, (), generator=generator, device=home).to(first.device)
    seed = int(same_on_all_ranks(drawn, [first]))
    found = {}
    for place in spread:
        mesh, placements = tensors[place].device_mesh, tensors[place].placements  # type: ignore[attr-defined]
        cut = [where for where, how in zip(mesh.get_coordinate(), placements, strict=True) if not how.is_replicate()]
        found[place] = torch.Generator(tensors[place].device).manual_seed(hash((seed, place, *cut)) % 2**63)
    return found
