"""Data-parallel jobs for test_replicated.py: what each rank saw. `RANKS` comes from the process group."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from flatmin import AMP, MatchedRadius
from tests.integrations.ranks.overflow import overflow_once
from tests.support.cases import METHODS, Setup, setup

STEPS = 4


def own_part(case: Setup, rank: int) -> Setup:
    """The rank's part of the batch of twelve."""
    ranks = dist.get_world_size()
    return Setup(case.model, case.x[rank::ranks], case.y[rank::ranks])


def twelve(model: str = "mlp", dtype: torch.dtype | None = torch.float64) -> Setup:
    case = setup(model, dtype=dtype)
    torch.manual_seed(5)
    return Setup(case.model, torch.randn(12, 6).to(case.x.dtype), torch.randint(0, 3, (12,)))


def train(rank: int, method: str, *, spoil: bool = False) -> dict[str, Any]:
    """Five steps, each rank with its own part of the batch; with `spoil`, one of nan on the last rank alone."""
    case = own_part(twelve("conv-batchnorm", None), rank)
    good = case.x
    case.model = DistributedDataParallel(case.model)
    torch.manual_seed(rank)  # whatever is drawn at random differs between the ranks
    optimizer = METHODS[method](SGD(case.model.parameters(), lr=0.1, momentum=0.9), model=case.model)
    skipped = []
    for step in range(5):
        bad = spoil and step == 2 and rank == dist.get_world_size() - 1
        case.x = good * float("nan") if bad else good
        optimizer.step(case.closure(optimizer))
        skipped.append(bool(optimizer.last.skipped))
    return {
        "weights": case.weights(),
        "momentum": [state["momentum_buffer"] for state in optimizer.state.values()],
        "skipped": skipped,
    }


def train_matched(rank: int) -> dict[str, Any]:
    """A radius that is matched with a held-out loss: the same on all ranks, and as in one process."""
    whole, case = twelve(), own_part(twelve(), rank)
    single = AMP(SGD(whole.model.parameters(), lr=0.1, momentum=0.9), epsilon=0.1, model=whole.model)
    case.model = DistributedDataParallel(case.model)
    optimizer = AMP(SGD(case.model.parameters(), lr=0.1, momentum=0.9), epsilon=0.1, model=case.model)
    radii = MatchedRadius(single), MatchedRadius(optimizer)
    factors: list[list[float]] = [[], []]
    for beyond in (1.0, -1.0, 0.05):
        for mine, setting, radius, found in zip((single, optimizer), (whole, case), radii, factors, strict=True):
            for _ in range(STEPS):
                mine.step(setting.closure(mine))
            found.append(radius.step(float(single.last.loss_perturbed or 0) + beyond))
    assert len(set(factors[0])) == 3
    alone, together = (torch.tensor(found).round(decimals=4) for found in factors)  # of losses in float32
    return {"weights": [*case.weights(), together], "expected": [*whole.weights(), alone]}


def match_unseen(rank: int, given: str) -> dict[str, Any]:
    """Gradients are averaged where the optimizer does not see it, as in loops with Fabric; or each rank has its own."""
    case = own_part(twelve(), rank)
    plain = case.model
    case.model = DistributedDataParallel(plain)
    optimizer = AMP(SGD(plain.parameters(), lr=0.1), epsilon="auto", model=None if given == "none" else plain)
    for _ in range(3):
        optimizer.step(case.closure(optimizer))
        if given == "diverged":
            next(plain.parameters()).data.fill_(float("nan"))
        optimizer.radius.step(1.5 + rank)
    radius = torch.tensor(optimizer.param_groups[0]["epsilon"], dtype=torch.float64)
    return {"weights": [radius], "radius": float(radius)}


def match_own(rank: int) -> dict[str, Any]:
    """Each rank trains another network, of another dtype, for another number of epochs: nobody waits for anybody."""
    case = own_part(twelve(), rank)
    if rank == 0:
        case.x = case.x.float()
        case.model = torch.nn.Sequential(case.model, torch.nn.Linear(3, 3)).float()
    optimizer = AMP(SGD(case.model.parameters(), lr=1e-6), epsilon="auto", inner_lr=1e3, model=case.model)
    for _ in range(1 + rank):
        optimizer.step(case.closure(optimizer))
        assert optimizer.radius.step(1e6) == 3
    return {"weights": [torch.ones(1)], "radius": optimizer.param_groups[0]["epsilon"]}


def match_early(rank: int) -> dict[str, Any]:
    """Networks of their own from the same seed, which are evaluated once before any training."""
    case = own_part(twelve(), rank)
    optimizer = AMP(SGD(case.model.parameters(), lr=1e-6), epsilon="auto", inner_lr=1e3, model=case.model)
    assert optimizer.radius.step(1.0) == 1
    optimizer.step(case.closure(optimizer))
    return {"weights": [torch.ones(1)], "factor": optimizer.radius.step(1e6 if rank == 0 else -1e6)}


def match_in_pairs(rank: int) -> dict[str, Any]:
    """Every two ranks share a model, which the optimizer is not told: of two, all do."""
    case = own_part(twelve(), rank)
    pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    plain = case.model
    with torch.no_grad():
        next(plain.parameters()).add_(rank // 2)
    case.model = DistributedDataParallel(plain, process_group=pairs[rank // 2])
    optimizer = AMP(SGD(plain.parameters(), lr=1e-6), epsilon="auto", inner_lr=1e3)
    optimizer.step(case.closure(optimizer))
    message, factor = "", 0.0
    try:
        factor = optimizer.radius.step(1e6)
    except ValueError as error:
        message = str(error)
        optimizer.model = case.model
        factor = optimizer.radius.step(1e6)  # nothing was lost
    return {"weights": [torch.ones(1)], "message": message, "factor": factor}


def match_without_losses(rank: int) -> dict[str, Any]:
    """The closure of one rank does not return its loss: all of them hear of it."""
    case = own_part(twelve(), rank)
    case.model = DistributedDataParallel(case.model)
    optimizer = AMP(SGD(case.model.parameters(), lr=0.1), epsilon="auto", model=case.model)
    closure = case.closure(optimizer)
    optimizer.step(closure if rank == 0 else lambda: closure() and None)
    message = ""
    try:
        optimizer.radius.step(1e6)
    except ValueError as error:
        message = str(error)
    assert optimizer.radius.step(1e6, losses=(1.0, 2.0)) == 3  # nothing was lost
    return {"weights": case.weights(), "message": message}


def match_after_join(rank: int) -> dict[str, Any]:
    """Under join() the first rank has no batch at all; then all match the radius, with the losses of the others."""
    case = own_part(twelve(), rank)
    case.model = model = DistributedDataParallel(case.model)
    optimizer = AMP(SGD(model.parameters(), lr=0.1), epsilon=0.1, model=model)
    optimizer.step(case.closure(optimizer))
    radius = MatchedRadius(optimizer)
    with model.join():
        for _ in range(2 if rank else 0):
            optimizer.step(case.closure(optimizer))
    assert radius.step(100.0) == 3.0
    assert radius.step(100.0) == 1.0  # no rank has had a step since
    return {"weights": [*case.weights(), torch.tensor(optimizer.param_groups[0]["epsilon"])]}


def join_without_data(rank: int) -> dict[str, Any]:
    """Under join() from the first step on, the first rank has no batch at all: the others train without it.

    Their gradients are smaller by its share, as torch averages over all ranks.
    """
    whole, ranks = twelve(), dist.get_world_size()
    others, share = torch.arange(12) % ranks != 0, (ranks - 1) / ranks
    alone, case = Setup(whole.model, whole.x[others], whole.y[others]), own_part(twelve(), rank)
    single = AMP(SGD(alone.model.parameters(), lr=0.1 * share), epsilon=0.1, inner_lr=share)
    case.model = model = DistributedDataParallel(case.model)
    optimizer = AMP(SGD(model.parameters(), lr=0.1), epsilon=0.1, model=model)
    with model.join():
        for _ in range(2 if rank else 0):
            optimizer.step(case.closure(optimizer))
    for _ in range(2):
        single.step(alone.closure(single))
    torch.testing.assert_close(list(case.weights()), list(alone.weights()))
    optimizer.sync_perturbation = False
    with model.join(throw_on_early_termination=True):  # there no rank goes on without another: nothing is refused
        optimizer.step(case.closure(optimizer))
    return {"weights": case.weights()}


def train_as_one(rank: int, inner_iter: int, **options: Any) -> dict[str, Any]:
    """One perturbation for all: the same as one process with the whole batch."""
    whole = twelve()
    single = AMP(SGD(whole.model.parameters(), lr=0.1, momentum=0.9), epsilon=0.1, inner_iter=inner_iter)
    for _ in range(STEPS):
        single.step(whole.closure(single))
    case = own_part(twelve(), rank)
    case.model = DistributedDataParallel(case.model, **options)
    optimizer = AMP(
        SGD(case.model.parameters(), lr=0.1, momentum=0.9), epsilon=0.1, inner_iter=inner_iter, model=case.model
    )
    for _ in range(STEPS):
        optimizer.step(case.closure(optimizer))
    return {"weights": case.weights(), "expected": whole.weights()}


BASES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (AdamW, {"lr": 0.01}),
    "adamw-fused": (AdamW, {"lr": 0.01, "fused": True}),
}


def zero(case: Setup, base: str = "sgd", **settings: Any) -> AMP:
    """AMP around a base whose state is distributed over the ranks; the model of `case` becomes a replicated one."""
    if not isinstance(case.model, DistributedDataParallel):
        case.model = DistributedDataParallel(case.model)
    kind, options = BASES[base]
    inner = ZeroRedundancyOptimizer(case.model.parameters(), optimizer_class=kind, **options)
    return AMP(inner, epsilon=0.1, model=case.model, **settings)


def zero_as_one(rank: int, base: str, form: str) -> dict[str, Any]:
    """ZeRO-1 with one perturbation for all, beside one process with the whole batch and the plain base."""
    whole = twelve()
    kind, options = BASES[base]
    single = AMP(kind(whole.model.parameters(), **options), epsilon=0.1)
    case = own_part(twelve(), rank)
    optimizer = zero(case, base)
    for _ in range(STEPS):
        single.step(whole.closure(single))
        if form == "closure":
            optimizer.step(case.closure(optimizer))
            continue
        optimizer.zero_grad()
        case.loss().backward()
        with optimizer.perturbed():
            case.loss().backward()
        optimizer.step()
    return {"weights": case.weights(), "expected": whole.weights()}


def zero_apart(rank: int) -> dict[str, Any]:
    case = own_part(twelve(), rank)
    optimizer = zero(case, sync_perturbation=False)
    for _ in range(STEPS):
        optimizer.step(case.closure(optimizer))
    return {"weights": case.weights(), "expected": each_on_its_own(1, dist.get_world_size())}


def zero_skips(rank: int, scaled: bool) -> dict[str, Any]:
    case = own_part(twelve("mlp", None), rank)
    return overflow_once(case, zero(case, sync_perturbation=False), scaled=scaled)


def zero_resumes(rank: int) -> dict[str, Any]:
    """Two steps, a checkpoint with an ε of its own, two more; beside two from the checkpoint."""
    case = own_part(twelve(), rank)
    optimizer = zero(case)
    optimizer.param_groups[0]["epsilon"] = 0.25
    for step in range(STEPS):
        if step == STEPS // 2:
            optimizer.consolidate_state_dict(to=0)  # type: ignore[attr-defined]
            saved = [deepcopy(optimizer.state_dict()) if rank == 0 else None]
            weights = deepcopy(case.model.state_dict())
        optimizer.step(case.closure(optimizer))
    expected = case.weights()
    dist.broadcast_object_list(saved, src=0)
    assert saved[0] is not None
    case.model.load_state_dict(weights)  # the same replicas: new ones sum gradients in another order at first
    resumed = zero(case)
    resumed.load_state_dict(saved[0])
    for _ in range(STEPS // 2):
        resumed.step(case.closure(resumed))
    return {"expected": expected, "weights": case.weights(), "epsilon": resumed.param_groups[0]["epsilon"]}


def zero_overlaps(rank: int) -> dict[str, Any]:
    """The error of a base that steps within the backward pass."""
    case = own_part(twelve(), rank)
    model = DistributedDataParallel(case.model)
    base = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=SGD, overlap_with_ddp=True, lr=0.1)
    message = ""
    try:
        AMP(base, epsilon=0.1, model=model)
    except ValueError as error:
        message = str(error)
    return {"message": message, "weights": case.weights()}


def each_on_its_own(inner_iter: int, ranks: int) -> list[Tensor]:
    """By hand, in one process: every rank's Δᵣ from its own gradient, then a step with the mean gradient."""
    case = twelve()
    params = list(case.model.parameters())
    base = SGD(params, lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        theta, total = case.weights(), [torch.zeros_like(p) for p in params]
        for rank in range(ranks):
            delta = [torch.zeros_like(p) for p in params]
            x, y = case.x[rank::ranks], case.y[rank::ranks]
            for n in range(inner_iter + 1):
                with torch.no_grad():
                    for p, start, d in zip(params, theta, delta, strict=True):
                        p.copy_(start + d)
                gradient = torch.autograd.grad(Setup(case.model, x, y).loss(), params)
                if n < inner_iter:
                    delta = [d + g for d, g in zip(delta, gradient, strict=True)]
                    length = torch.cat([d.flatten() for d in delta]).norm()
                    delta = [d * min(1.0, 0.1 / float(length)) for d in delta]
            total = [t + g / ranks for t, g in zip(total, gradient, strict=True)]
        with torch.no_grad():
            for p, start, gradient_mean in zip(params, theta, total, strict=True):
                p.copy_(start)
                p.grad = gradient_mean
        base.step()
    return case.weights()


def train_apart(rank: int, inner_iter: int, form: str) -> dict[str, Any]:
    """A perturbation a rank, beside the same by hand."""
    case = own_part(twelve(), rank)
    case.model = model = DistributedDataParallel(case.model)
    base = SGD(case.model.parameters(), lr=0.1, momentum=0.9)
    optimizer = AMP(base, epsilon=0.1, inner_iter=inner_iter, model=model, sync_perturbation=False)
    for _ in range(STEPS):
        if form == "closure":
            optimizer.step(case.closure(optimizer))
            continue
        optimizer.zero_grad()
        with model.no_sync():
            case.loss().backward()
        for _ in range(inner_iter):
            with optimizer.perturbed():
                case.loss().backward()
        optimizer.step()
    assert optimizer.last.grad_norm is not None
    return {
        "weights": case.weights(),
        "expected": each_on_its_own(inner_iter, dist.get_world_size()),
        "grad_norm": optimizer.last.grad_norm,
    }


def train_micro_batches(rank: int, sync: bool) -> dict[str, Any]:
    """Two micro-batches on every rank, each with its own perturbation; apart, that is twice as many ranks."""
    ranks = dist.get_world_size()
    case = twelve()
    model = DistributedDataParallel(case.model)
    optimizer = AMP(SGD(model.parameters(), lr=0.1, momentum=0.9), epsilon=0.1, model=model, sync_perturbation=sync)

    def closure_of(part: int) -> Callable[[], Tensor]:
        return Setup(model, case.x[part :: 2 * ranks], case.y[part :: 2 * ranks]).closure(optimizer)

    for _ in range(STEPS):
        optimizer.step([closure_of(rank), closure_of(rank + ranks)])
    return {"weights": case.weights(), "expected": each_on_its_own(1, 2 * ranks)}


def skip_together(rank: int, scaled: bool, base: str) -> dict[str, Any]:
    """A perturbation a rank, and an ascent that overflows on the last rank alone: its descent is sound."""
    case = own_part(twelve("mlp", None), rank)
    case.model = model = DistributedDataParallel(case.model)
    inner = SGD(model.parameters(), lr=0.1) if base == "sgd" else AdamW(model.parameters(), lr=0.1, fused=True)
    optimizer = AMP(inner, epsilon=0.1, model=model, sync_perturbation=False)
    return overflow_once(case, optimizer, scaled=scaled)


class Two(nn.Module):
    """Two heads, of which a rank may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def forward(self, x: Tensor, head: int) -> Tensor:
        out: Tensor = self.heads[head](self.body(x).tanh())
        return out


def use_one_head(rank: int, sync: bool, unused_everywhere: bool) -> dict[str, Any]:
    case = own_part(twelve("mlp", None), rank)
    torch.manual_seed(0)
    model = DistributedDataParallel(Two(), find_unused_parameters=True)
    optimizer = AMP(SGD(model.parameters(), lr=0.1), epsilon=0.1, model=model, sync_perturbation=sync)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(case.x, 0 if unused_everywhere else rank % 2), case.y)
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
    return {"weights": [p.detach().clone() for p in model.parameters()]}


def statistics(rank: int) -> dict[str, Any]:
    """BatchNorm's buffers with weights that stay: after AMP with a perturbation a rank, beside those of plain DDP."""
    seen = []
    for perturbed in (False, True):
        case = own_part(twelve("conv-batchnorm", None), rank)
        case.model = DistributedDataParallel(case.model)
        optimizer: Any = SGD(case.model.parameters(), lr=0.0)
        if perturbed:
            optimizer = AMP(optimizer, epsilon=0.1, model=case.model, sync_perturbation=False)
        for _ in range(STEPS):
            optimizer.step(case.closure(optimizer))
        seen.append(case.buffers())
    return {"plain": seen[0], "amp": seen[1]}


def idle(rank: int, form: str, *, sync: bool) -> dict[str, Any]:
    """ε = 0: the base's own steps, with synchronised gradients; these lie in buckets that are written anew."""
    seen = []
    for wrapped in (False, True):
        case = own_part(twelve(), rank)
        case.model = model = DistributedDataParallel(case.model, gradient_as_bucket_view=True)
        optimizer: Any = SGD(model.parameters(), lr=0.1)
        if wrapped:
            optimizer = AMP(optimizer, epsilon=0.0, model=model, sync_perturbation=sync)
        for _ in range(STEPS):
            if form == "closure" or not wrapped:
                optimizer.step(case.closure(optimizer))
                continue
            optimizer.zero_grad()
            with nullcontext() if sync else model.no_sync():
                case.loss().backward()
            with optimizer.perturbed():
                (case.loss() * (100 if sync else 1)).backward()  # the clean pass counts, if it was synchronised
            optimizer.step()
        seen.append(case.weights())
    return {"plain": seen[0], "amp": seen[1]}


def disagree(rank: int, on: str) -> dict[str, Any]:
    """The errors of each rank, which tries twice, and whether its weights stayed."""
    case = own_part(twelve("mlp", None), rank)
    case.model = model = DistributedDataParallel(case.model, static_graph=on == "static")
    params = [nn.Parameter(torch.zeros(3)), *model.parameters()]
    wrong: dict[str, dict[str, Any]] = {
        "epsilon": {"epsilon": 0.1 * (rank + 1)},
        "idle": {"epsilon": 0.1 * min(rank, 1)},
        "inner_iter": {"inner_iter": rank + 1},
        "replicas": {"model": model.module, "sync_perturbation": False},
        "static": {"sync_perturbation": False},
        "local": {"sync_perturbation": False},
        "join": {"sync_perturbation": False},
        "outside": {},
    }
    base: Any = SGD(params, lr=0.1)
    if on == "join-zero":
        base = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=SGD, lr=0.1)
    optimizer = AMP(base, **{"epsilon": 0.1, "model": model, **wrong.get(on, {})})
    before, messages = case.weights(), []

    def closure() -> Tensor:
        optimizer.zero_grad()
        with model.no_sync() if on == "local" else nullcontext():
            loss = case.loss()
            if on == "gradients" and rank == 0:
                loss = loss + params[0].sum()
            if on == "outside":  # a parameter that nobody synchronises
                loss = loss + (rank + 1) * params[0].sum()
            loss.backward()
        return loss

    for _ in range(2):
        try:
            with model.join(enable=on.startswith("join")):
                optimizer.step(closure)
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    stayed = all(torch.equal(a, b) for a, b in zip(case.weights(), before, strict=True))
    for group in optimizer.param_groups:
        group["epsilon"] = 0.1
    optimizer.inner_iter, optimizer.sync_perturbation, on = 1, True, ""
    with model.join(enable=False):
        optimizer.step(closure)  # nothing is lost after an error
    return {"messages": messages, "stayed": stayed, "weights": case.weights()}


WRONG = ("epsilon", "idle", "inner_iter", "gradients", "replicas", "static", "local", "outside", "join", "join-zero")
JOBS: dict[str, Any] = {
    **{f"ddp-{method}": partial(train, method=method) for method in METHODS},
    **{f"spoilt-{method}": partial(train, method=method, spoil=True) for method in METHODS},
    **{f"as-one-{n}": partial(train_as_one, inner_iter=n) for n in (1, 2)},
    "as-one-matched": train_matched,
    **{f"matched-unseen-{given}": partial(match_unseen, given=given) for given in ("none", "plain", "diverged")},
    "matched-own": match_own,
    "matched-early": match_early,
    "matched-pairs": match_in_pairs,
    "matched-without-losses": match_without_losses,
    "matched-after-join": match_after_join,
    "join-without-data": join_without_data,
    "as-one-views": partial(train_as_one, inner_iter=1, gradient_as_bucket_view=True),
    "as-one-static": partial(train_as_one, inner_iter=1, static_graph=True),
    **{
        f"apart-{n}-{form}": partial(train_apart, inner_iter=n, form=form)
        for n in (1, 2)
        for form in ("closure", "blocks")
    },
    **{
        f"as-one-zero-{base}-{form}": partial(zero_as_one, base=base, form=form)
        for base in BASES
        for form in ("closure", "blocks")
    },
    "apart-zero": zero_apart,
    **{f"skip-zero-{scaled}": partial(zero_skips, scaled=scaled) for scaled in (False, True)},
    "zero-resumes": zero_resumes,
    "zero-overlaps": zero_overlaps,
    "micro-apart": partial(train_micro_batches, sync=False),
    "micro-as-one": partial(train_micro_batches, sync=True),
    **{
        f"skip-{base}-{scaled}": partial(skip_together, scaled=scaled, base=base)
        for base in ("sgd", "adamw-fused")
        for scaled in (False, True)
    },
    **{
        f"unused-{sync}-{everywhere}": partial(use_one_head, sync=sync, unused_everywhere=everywhere)
        for sync in (True, False)
        for everywhere in (True, False)
    },
    "statistics": statistics,
    **{
        f"idle-{form}-{sync}": partial(idle, form=form, sync=sync)
        for form in ("closure", "blocks")
        for sync in (True, False)
    },
    **{f"disagree-{on}": partial(disagree, on=on) for on in WRONG},
}
