"""Jobs with weights spread over ranks for test_sharded.py: fully sharded, tensor-parallel, and both at once."""

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from flatmin import AMP, RMP, RadiusScheduler, StepLog
from flatmin.ball import BALLS, NORMS, norms, project_, uniform_
from flatmin.core.tensors import plain
from tests.integrations.ranks.overflow import overflow_once, whole
from tests.support.cases import Setup, setup

BASES: dict[str, Any] = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
    "adamw": partial(AdamW, lr=1e-2),
    "adamw-foreach": partial(AdamW, lr=1e-2, foreach=True),
    "adamw-fused": partial(AdamW, lr=1e-2, fused=True),
}
FORMS = ("closure", "blocks", "micro-batches", "clipped", "less", "every second")
# where an exception may come from; before torch 2.13, FSDP2 cannot go on after one in the backward pass
FAILURES = ("loss", "backward") if hasattr(FSDPModule, "reset_iter_state") else ("loss",)


def double(model: str = "mlp") -> Setup:
    return setup(model, dtype=torch.float64)


def spread(model: nn.Module, how: str) -> None:
    ranks = dist.get_world_size()
    if how == "sharded at once":
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        return
    if how == "sharded":
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model:  # type: ignore[attr-defined]
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if how == "tensor-parallel":
        parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
        return
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])


def take_steps(case: Setup, optimizer: Any, form: str, steps: int = 4) -> None:
    half = [Setup(case.model, case.x[part::2], case.y[part::2]) for part in range(2)]
    scheduler = RadiusScheduler(optimizer, steps, start=0.25, every=2) if form == "every second" else None
    for _ in range(steps):
        if form == "closure":
            optimizer.step(case.closure(optimizer))
        elif form == "less":
            optimizer.step(case.closure(optimizer), ascent=half[0].closure(optimizer))
        elif scheduler is not None:
            optimizer.step(case.closure(optimizer), ascent=half[0].closure(optimizer))
            scheduler.step()
        elif form == "micro-batches":
            optimizer.step([part.closure(optimizer) for part in half])
        else:
            optimizer.zero_grad()
            case.loss().backward()
            for _ in range(optimizer.inner_iter):
                with optimizer.perturbed():
                    case.loss().backward()
            if form == "clipped":
                clip_grad_norm_(case.model.parameters(), 0.1)
            optimizer.step()


def train(rank: int, how: str, *, base: str = "sgd", form: str = "closure", **settings: Any) -> dict[str, Any]:
    """The whole weights after four steps, beside those of a single process. Every rank has the whole batch."""
    results, lengths = [], []
    for is_spread in (False, True):
        case = double()
        if is_spread:
            spread(case.model, how)
        optimizer = AMP(BASES[base](case.model.parameters()), **{"epsilon": 0.1, "model": case.model, **settings})
        take_steps(case, optimizer, form)
        results.append(whole(case.model.parameters()))
        lengths.append([float(n) for n in (optimizer.last.grad_norm, optimizer.last.delta_norm)])  # type: ignore[arg-type]
    return {"single": results[0], "spread": results[1], "lengths": lengths}


def log_spread_loss(rank: int) -> dict[str, Any]:
    """A loss that is left as a DTensor: the automatic radius and the log see the number."""
    found = []
    for is_spread in (False, True):
        case = double()
        if is_spread:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel(use_local_output=False)}
            parallelize_module(case.model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
        optimizer = AMP(SGD(case.model.parameters(), lr=0.1), epsilon="auto", model=case.model)
        lines: list[dict[str, float]] = []

        def closure(case: Setup = case, optimizer: AMP = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = case.model(case.x).square().mean()
            loss.backward()
            return loss

        with StepLog(optimizer, lambda step, numbers, lines=lines: lines.append(numbers), every=3):
            for _ in range(3):
                loss = optimizer.step(closure)
            factor = optimizer.radius.step(loss.detach() + 0.1)
        found.append([factor, *(lines[0].values() if rank == 0 else [])])
    return {"whole": found[0], "spread": found[1]}


def skip_together(rank: int, base: str, scaled: bool) -> dict[str, Any]:
    """A gradient on the last rank's shard alone that is not finite, in the clean pass of the second step."""
    case = setup()
    spread(case.model, "sharded")
    optimizer = AMP(BASES[base](case.model.parameters()), epsilon=0.1, model=case.model)
    return overflow_once(case, optimizer, scaled=scaled)


def fail(*_: object) -> Any:
    raise OSError


def restore(rank: int, how: str, within: str) -> dict[str, Any]:
    """An exception in the perturbed pass: shards come back bit for bit, in their own memory, and training goes on."""
    case = double()
    spread(case.model, how)
    optimizer = AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1, model=case.model)
    params = [p.to_local() for p in case.model.parameters() if isinstance(p, DTensor)]
    before, places = [p.clone() for p in params], [p.data_ptr() for p in params]
    hidden, calls = list[Tensor](), 0
    case.model[1].register_forward_hook(lambda *given: hidden.append(given[-1]))  # type: ignore[index]

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = case.loss()
        if calls == 2 and within == "loss":
            fail()
        if calls == 2:
            hidden[-1].register_hook(fail)
        loss.backward()
        return loss

    with suppress(OSError):
        optimizer.step(closure)
    now = [p.to_local() for p in case.model.parameters() if isinstance(p, DTensor)]
    back = all(torch.equal(a, b) for a, b in zip(now, before, strict=True))
    for _ in range(2):
        optimizer.step(closure)
    twin = double()
    single = AMP(SGD(twin.model.parameters(), lr=0.1), epsilon=0.1)
    take_steps(twin, single, "closure", steps=2)
    return {
        "back": back and len(before) > 0,
        "in_place": [p.data_ptr() for p in now] == places,
        "single": twin.weights(),
        "spread": whole(case.model.parameters()),
    }


def measure(rank: int) -> dict[str, Any]:
    """Norms and projections of sharded, replicated and partial tensors beside those of the whole."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    tensors = [torch.randn(5, 3), torch.randn(4), torch.randn(1, 6), torch.randn(3, 2, dtype=torch.float64)]
    layouts: list[Any] = [[Shard(0)], [Replicate()], [Shard(0)], [Shard(1)]]
    seen: dict[str, Any] = {}
    for norm in NORMS:
        cut = [distribute_tensor(t, mesh, layout) for t, layout in zip(tensors, layouts, strict=True)]
        seen[f"norms-{norm}"] = (norms(cut, norm=norm), norms(tensors, norm=norm))
        partial_sums = DTensor.from_local(torch.full((3,), float(rank + 1)), mesh, [Partial()])
        total = float(ranks * (ranks + 1) / 2)
        seen[f"partial-{norm}"] = (norms([partial_sums], norm=norm), norms([torch.full((3,), total)], norm=norm))
        expected = [t.clone() for t in tensors]
        project_([cut], [0.5], norm=norm)
        project_([expected], [0.5], norm=norm)
        seen[f"projection-{norm}"] = (whole(cut), expected)
    return seen


def messages(rank: int) -> dict[str, Any]:
    """How many times ranks talk to each other for the norms of a list: not once for each tensor."""
    from torch.distributed.tensor.debug import CommDebugMode  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = [distribute_tensor(torch.randn(8, 2), mesh, [Shard(0)]) for _ in range(20)]
    with CommDebugMode() as talk:
        norms(tensors)
    return {"count": talk.get_total_counts()}


def disagree(rank: int) -> dict[str, Any]:
    """ε is another one on the last rank of a mesh of two dimensions: all get an error, and no one waits."""
    case = double()
    spread(case.model, "both")
    epsilon = 0.2 if rank == dist.get_world_size() - 1 else 0.1
    optimizer = AMP(SGD(case.model.parameters(), lr=0.1), epsilon=epsilon, model=case.model)
    try:
        optimizer.step(case.closure(optimizer))
    except ValueError as error:
        return {"message": str(error)}
    return {"message": ""}


def draw(rank: int) -> dict[str, Any]:
    """Noise for weights that are cut over ranks, and for ones that are whole on each; all ranks are seeded alike."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = [distribute_tensor(torch.zeros(8, 3), mesh, [how]) for how in (Shard(0), Replicate(), Shard(1))]
    torch.manual_seed(0)
    uniform_(weights, 1.0)
    first = whole(weights)
    uniform_(weights, 1.0)
    return {"noise": first, "again": whole(weights), "here": plain(weights[1])}


def train_at_random(rank: int, ball: str) -> dict[str, Any]:
    """RMP on sharded weights, one of which has no row on the second rank; each rank draws from its own seed."""
    case = double()
    case.model[2] = nn.Linear(8, 1, bias=False, dtype=torch.float64)  # type: ignore[operator]
    case.y = torch.zeros_like(case.y)
    fully_shard(case.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    torch.manual_seed(rank)  # ranks may be seeded alike or not
    optimizer = RMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1, ball=ball)  # type: ignore[arg-type]
    lengths = []
    for _ in range(5):
        optimizer.step(case.closure(optimizer))
        lengths.append(float(optimizer.last.delta_norm))  # type: ignore[arg-type]
    return {"lengths": lengths}


def refuse(rank: int, what: str) -> dict[str, Any]:
    case = double()
    if what == "apart":
        spread(case.model, "sharded")
    else:
        case.model = FullyShardedDataParallel(
            case.model, use_orig_params=what == "older", device_id=torch.device("cpu")
        )
    optimizer = AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1, sync_perturbation=what != "apart")
    try:
        optimizer.step(case.closure(optimizer))
    except ValueError as error:
        return {"message": str(error)}
    return {"message": ""}


def prepared(base: str, *, is_spread: bool) -> tuple[Setup, AMP, StepLR]:
    case = double()
    if is_spread:
        spread(case.model, "sharded")
    optimizer = AMP(BASES[base](case.model.parameters()), epsilon=0.1, model=case.model)
    return case, optimizer, StepLR(optimizer, 2)


def state_of(case: Setup, optimizer: AMP, scheduler: StepLR) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(case.model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "scheduler": scheduler}


def save(rank: int, base: str, folder: str) -> dict[str, Any]:
    """Three steps, then a checkpoint."""
    case, optimizer, scheduler = prepared(base, is_spread=True)
    for _ in range(3):
        optimizer.step(case.closure(optimizer))
        scheduler.step()
    optimizer.param_groups[0]["epsilon"] = 0.05
    save_checkpoint(state_of(case, optimizer, scheduler), checkpoint_id=str(Path(folder) / base))
    return {}


def load(rank: int, base: str, folder: str, *, is_spread: bool = True) -> dict[str, Any]:
    """The checkpoint, on however many ranks there are now, and three steps more."""
    case, optimizer, scheduler = prepared(base, is_spread=is_spread)
    with torch.no_grad():
        for param in case.model.parameters():
            param.zero_()
    optimizer.param_groups[0]["epsilon"] = 7.0
    state = state_of(case, optimizer, scheduler)
    load_checkpoint(state, checkpoint_id=str(Path(folder) / base))
    set_state_dict(case.model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    epsilon = optimizer.param_groups[0]["epsilon"]
    for _ in range(3):
        optimizer.step(case.closure(optimizer))
        scheduler.step()
    return {"weights": whole(case.model.parameters()), "epsilon": epsilon}


def uninterrupted(base: str) -> list[Tensor]:
    case, optimizer, scheduler = prepared(base, is_spread=False)
    for step in range(6):
        if step == 3:
            optimizer.param_groups[0]["epsilon"] = 0.05
        optimizer.step(case.closure(optimizer))
        scheduler.step()
    return case.weights()


def jobs(ranks: int, folder: Path) -> dict[str, Any]:
    """Two ranks save; they and then four load what they saved. Four ranks can be cut along two dimensions."""
    both_numbers = {
        "measure": measure,
        "sharded-sgd": partial(train, how="sharded"),
        "skip-sgd-False": partial(skip_together, base="sgd", scaled=False),
        **{f"load-{base}": partial(load, base=base, folder=str(folder)) for base in BASES},
    }
    if ranks == 4:
        return {
            **both_numbers,
            **{f"both-{n}": partial(train, how="both", inner_iter=n) for n in (1, 2)},
            "disagree": disagree,
            "draw": draw,
        }
    return {
        **{f"save-{base}": partial(save, base=base, folder=str(folder)) for base in BASES},
        **both_numbers,
        "messages": messages,
        "spread loss": log_spread_loss,
        **{f"rmp-{ball}": partial(train_at_random, ball=ball) for ball in BALLS},
        **{
            f"{how}-{form}-{n}": partial(train, how=how, form=form, inner_iter=n)
            for how in ("sharded", "tensor-parallel")
            for form in FORMS
            for n in (1, 2)
        },
        **{f"sharded-{base}": partial(train, how="sharded", base=base) for base in BASES},
        "sharded-tensor": partial(train, how="sharded", ball="tensor"),
        "sharded-linf": partial(train, how="sharded", norm="linf", epsilon=0.01),
        **{
            f"skip-{base}-{scaled}": partial(skip_together, base=base, scaled=scaled)
            for base in BASES
            for scaled in (False, True)
        },
        **{
            f"restore-{how}-{within}": partial(restore, how=how, within=within)
            for how in ("sharded", "sharded at once")
            for within in FAILURES
        },
        **{f"refuse-{what}": partial(refuse, what=what) for what in ("apart", "older", "flat")},
    }
