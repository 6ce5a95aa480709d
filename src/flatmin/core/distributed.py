"""Several ranks, one model: whose gradient the ascent follows, and what must be equal on all ranks.

With R ranks, Jᵣ the loss of rank r's part of the batch and J = ΣJᵣ/R, there are two perturbations to choose from:

    one for all     Δ = Π(ζ ∇J(θ)),     from the synchronised gradient: the step of one process with the whole batch
    one per rank    Δᵣ = Π(ζ ∇Jᵣ(θ)),   from the rank's own: m-sharpness, with nothing sent during the ascent

Either way the descent is synchronised, so replicas stay equal to the last bit as long as all of them step or none does:
with a perturbation per rank, only the flag "skip this step" must be sent in addition.

Settings, and which parameters have gradients, must be the same on all ranks. They are compared once, in the first step,
so that a difference becomes an error on every rank instead of a deadlock. Within join(), where ranks may be absent,
they are not; then in the first step after it.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def replicas_in(model: nn.Module | None) -> list[DistributedDataParallel]:
    """The data-parallel modules of a model: usually itself; or inside it, if it is compiled or has several."""
    return [] if model is None else [part for part in model.modules() if isinstance(part, DistributedDataParallel)]


@contextmanager
def without_sync(replicas: Iterable[DistributedDataParallel]) -> Iterator[None]:
    """Inside, backward passes leave each rank its own gradient."""
    with ExitStack() as stack:
        for replica in replicas:
            stack.enter_context(replica.no_sync())
        yield


def has_several_ranks() -> bool:
    """Is this one of several ranks?"""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def process_groups_of(replicas: Iterable[DistributedDataParallel], params: Iterable[Tensor]) -> list[Any]:
    """The process groups over which the model's weights are replicated or sharded, each once."""
    if not has_several_ranks():
        return []
    found = [replica.process_group for replica in replicas]
    meshes = dict.fromkeys(param.device_mesh for param in params if hasattr(param, "device_mesh"))
    for mesh in meshes:
        found += mesh.get_all_groups()
    return [group for group in dict.fromkeys(found) if torch.distributed.get_world_size(group) > 1]


def check_layout(
    replicas: Sequence[DistributedDataParallel], params: Sequence[Tensor], *, sync_perturbation: bool
) -> None:
    """Weights may be replicated, or sharded as DTensors; a perturbation per rank needs the whole model on each."""
    if not has_several_ranks():
        return
    if any(getattr(param, "_fsdp_flattened", False) for param in params):
        raise ValueError(
            "FullyShardedDataParallel hides which weights belong together, so no rank knows their norm; use "
            "torch.distributed.fsdp.fully_shard instead"
        )
    if sync_perturbation:
        return
    if any(hasattr(param, "device_mesh") for param in params):
        raise ValueError(
            "sync_perturbation=False gives each rank a perturbation of the whole model, got weights that are sharded "
            "across ranks; use sync_perturbation=True"
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


def is_joining(replicas: Iterable[DistributedDataParallel]) -> bool:
    """Is this within join()? Then a rank may have no data, and only answers the messages of the others' passes.

    torch keeps the mark when the block is left, until `join(enable=False)`.
    """
    configs = [replica._join_config for replica in replicas]
    return any(config.enable and not config.throw_on_early_termination for config in configs)


def check_join(replicas: Iterable[DistributedDataParallel], base: object, *, sync_perturbation: bool) -> None:
    """The messages of a step must be those that join() answers."""
    if not is_joining(replicas):
        return
    if not sync_perturbation:
        raise ValueError(
            "under join() a rank without data answers only the messages of DistributedDataParallel, got "
            "sync_perturbation=False, which sends another; use sync_perturbation=True, or as many batches on every "
            "rank and `with model.join(enable=False):`"
        )
    if hasattr(base, "_join_config"):
        raise ValueError(
            f"under join() a rank without data answers one pass for each step of {type(base).__name__}, got a "
            "perturbed step, which has several; use another base, or as many batches on every rank and "
            "`with model.join(enable=False):`"
        )


def drop_gathered_weights(model: nn.Module | None) -> None:
    """After an exception in a pass: FSDP2 may still have its whole weights and gradients, and would use them again."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if model is None or fsdp is None:  # not imported: nothing is sharded
        return
    done = set[int]()
    for part in model.modules():
        if not isinstance(part, fsdp.FSDPModule) or id(part) in done:
            continue
        for param in part.parameters():
            param.grad = None
        if hasattr(part, "reset_iter_state"):  # with all modules inside it
            part.reset_iter_state()
            done.update(map(id, part.modules()))
        else:  # torch before 2.13
            part.reshard()


def any_rank(flag: Tensor, groups: Sequence[Any]) -> Tensor:
    """Does the flag hold on any rank? Sent from device to device: the host does not wait."""
    for group in groups:
        number = flag.float()
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, group=group)
        flag = number > 0
    return flag


def all_ranks() -> list[Any]:
    return [torch.distributed.group.WORLD]


def numbers_of_ranks(numbers: Tensor) -> Tensor:
    """A row for each rank, of which there are several. Every rank must call this with as many."""
    rows = [torch.empty_like(numbers) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(rows, numbers)
    return torch.stack(rows)


def mean_of_ranks(numbers: Tensor, groups: Sequence[Any]) -> Tensor:
    """The means of these numbers over all ranks that share the model."""
    for group in groups:
        numbers = numbers / torch.distributed.get_world_size(group)
        torch.distributed.all_reduce(numbers, group=group)
    return numbers


def check_same(mine: Mapping[str, object], groups: Sequence[Any], *, device: torch.device, way_out: str) -> None:
    """Raises on every rank if these values are not the same on all of them."""
    known: dict[int, dict[str, object]] = {torch.distributed.get_rank(): dict(mine)}
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # where NCCL sends from
        for group in groups:  # one by one: then every rank of a mesh knows all values, and none leaves early
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


def check_missing_gradients(
    params: Sequence[Tensor], model: nn.Module | None, groups: Sequence[Any], *, device: torch.device
) -> None:
    """Raises on every rank if a parameter has a gradient on only some of them."""
    names: dict[Tensor, str] = {param: name for name, param in ([] if model is None else model.named_parameters())}
    missing = [names.get(p, f"number {place}") for place, p in enumerate(params) if p.grad is None]
    check_same(
        {"parameters without a gradient": missing},
        groups,
        device=device,
        way_out="use the same parameters in every rank's loss, or freeze them on every rank",
    )


def check_gradient_norms(length: float, groups: Sequence[Any], *, device: torch.device, ascends: bool) -> None:
    """Raises on every rank if the gradients of replicas, of the ascent or of the step, were not synchronised."""
    of_ascent = (
        "run the passes outside no_sync() (or use sync_perturbation=False), and only parameters of the "
        "DistributedDataParallel model"
    )
    of_step = (
        "run the last pass outside no_sync(), and only parameters of the DistributedDataParallel model; if each rank "
        "should step with its own gradient (LocalSGD averages the weights instead), give model=ddp_model.module"
    )
    found = {"‖∇J‖": f"{length:.9g}"}  # in digits: nan is nan
    check_same(found, groups, device=device, way_out=of_ascent if ascends else of_step)


def broadcast_over_mesh(number: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """A random number, as the first rank drew it, if any of these tensors are sharded across ranks."""
    meshes = [tensor.device_mesh for tensor in tensors if hasattr(tensor, "device_mesh")]
    if not meshes:
        return number
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * meshes[0].ndim
    return DTensor.from_local(number, meshes[0], everywhere, run_check=True).to_local()


def generators_of_shards(tensors: Sequence[Tensor], generator: torch.Generator | None) -> dict[int, torch.Generator]:
    """A generator for each DTensor, by its index in the list: the same for replicas, a different one for each shard.

    Ranks are usually seeded alike, and would otherwise draw the same numbers for different shards.
    """
    spread = [place for place, tensor in enumerate(tensors) if hasattr(tensor, "device_mesh")]
    if not spread:
        return {}
    first = tensors[spread[0]]
    home = torch.device("cpu") if generator is None else generator.device
    drawn = torch.randint(2**62, (), generator=generator, device=home).to(first.device)
    seed = int(broadcast_over_mesh(drawn, [first]))
    found = {}
    for place in spread:
        mesh, placements = tensors[place].device_mesh, tensors[place].placements  # type: ignore[attr-defined]
        cut = [where for where, how in zip(mesh.get_coordinate(), placements, strict=True) if not how.is_replicate()]
        found[place] = torch.Generator(tensors[place].device).manual_seed(hash((seed, place, *cut)) % 2**63)
    return found
