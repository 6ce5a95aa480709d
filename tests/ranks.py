"""What each of two gloo processes does for the tests in test_ranks.py. Each job returns what its rank saw."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from cases import METHODS, setup
from flatmin import AMP, RMP
from flatmin.ball import BALLS, NORMS, norms, project_

RANKS = 2


def train_ddp(rank: int, method: str, *, spoil: bool = False) -> dict[str, Any]:
    """Five steps of data-parallel training, each rank with its own half of the batch."""
    case = setup("conv-batchnorm")
    case.x, case.y = case.x[rank::RANKS], case.y[rank::RANKS]
    plain = case.model
    case.model = DistributedDataParallel(plain)
    torch.manual_seed(rank)  # whatever is drawn at random differs between the ranks
    optimizer = METHODS[method](SGD(case.model.parameters(), lr=0.1, momentum=0.9), model=plain)
    skipped = []
    for step in range(5):
        closure = case.closure(optimizer)
        if spoil and step == 2 and rank == 1:
            case.x = case.x * float("nan")
        optimizer.step(closure)
        if spoil and step == 2 and rank == 1:
            case.x = setup("conv-batchnorm").x[rank::RANKS]
        skipped.append(bool(optimizer.last.skipped))
    return {
        "weights": case.weights(),
        "momentum": [s["momentum_buffer"] for s in optimizer.state.values()],
        "skipped": skipped,
    }


def measure_dtensors(rank: int) -> dict[str, Any]:
    """Norms and projections of sharded, replicated and partial tensors beside those of the whole."""
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    whole = [torch.randn(5, 3), torch.randn(4), torch.randn(1, 6), torch.randn(3, 2, dtype=torch.float64)]
    layouts: list[Any] = [[Shard(0)], [Replicate()], [Shard(0)], [Shard(1)]]
    seen: dict[str, Any] = {}
    for norm in NORMS:
        spread = [distribute_tensor(t, mesh, layout) for t, layout in zip(whole, layouts, strict=True)]
        seen[f"norms-{norm}"] = (norms(spread, norm=norm), norms(whole, norm=norm))
        partial = DTensor.from_local(torch.full((3,), float(rank + 1)), mesh, [Partial()])
        seen[f"partial-{norm}"] = (norms([partial], norm=norm), norms([torch.full((3,), 3.0)], norm=norm))
        plain = [t.clone() for t in whole]
        project_([spread], [0.5], norm=norm)
        project_([plain], [0.5], norm=norm)
        seen[f"projection-{norm}"] = ([t.full_tensor() for t in spread], plain)
    return seen


def train_sharded(rank: int, inner_iter: int) -> dict[str, Any]:
    """Fully sharded weights: the whole weights after four steps, beside those of a single process."""
    results = []
    for sharded in (False, True):
        case = setup("mlp", dtype=torch.float64)
        if sharded:
            fully_shard(case.model, mesh=init_device_mesh("cpu", (RANKS,)))
        optimizer = AMP(SGD(case.model.parameters(), lr=0.1, momentum=0.9), epsilon=0.1, inner_iter=inner_iter)
        for _ in range(4):
            optimizer.step(case.closure(optimizer))
        params: list[Tensor] = list(case.model.parameters())
        results.append([p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in params])
    return {"single": results[0], "sharded": results[1]}


def train_sharded_at_random(rank: int, ball: str) -> dict[str, Any]:
    """RMP on sharded weights, one of which has no row on the second rank; each rank draws from its own seed."""
    case = setup("mlp", dtype=torch.float64)
    case.model[2] = nn.Linear(8, 1, bias=False, dtype=torch.float64)  # type: ignore[operator]
    case.y = torch.zeros_like(case.y)
    fully_shard(case.model, mesh=init_device_mesh("cpu", (RANKS,)))
    torch.manual_seed(rank)
    optimizer = RMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1, ball=ball)  # type: ignore[arg-type]
    lengths = []
    for _ in range(5):
        optimizer.step(case.closure(optimizer))
        lengths.append(float(optimizer.last.delta_norm))  # type: ignore[arg-type]
    return {"lengths": lengths}


JOBS: dict[str, Callable[[int], dict[str, Any]]] = {
    **{f"ddp-{method}": lambda rank, method=method: train_ddp(rank, method) for method in METHODS},  # type: ignore[misc]
    **{f"ddp-{method}-spoilt": lambda rank, method=method: train_ddp(rank, method, spoil=True) for method in METHODS},  # type: ignore[misc]
    "dtensors": measure_dtensors,
    **{f"rmp-{ball}": lambda rank, ball=ball: train_sharded_at_random(rank, ball) for ball in BALLS},  # type: ignore[misc]
    **{f"sharded-{n}": lambda rank, n=n: train_sharded(rank, n) for n in (1, 2)},  # type: ignore[misc]
}


def work(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    torch.save({name: job(rank) for name, job in JOBS.items()}, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()
