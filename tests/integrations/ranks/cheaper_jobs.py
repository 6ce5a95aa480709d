"""Data-parallel jobs for test_cheaper.py: an ascent on less data, and steps that are not perturbed; what each rank saw.

With R ranks, Jᵣ the loss of rank r's part of the batch and Aᵣ that of what it ascends on:

    one for all     Δ = Π(ζ ∇ΣAᵣ/R)        a perturbed step:   θ ← base.step(θ, Σ∇Jᵣ(θ + Δ)/R)
    one per rank    Δᵣ = Π(ζ ∇Aᵣ)          any other:          θ ← base.step(θ, Σ∇Jᵣ(θ)/R)
"""

import io
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from flatmin import AMP, RadiusScheduler
from tests.integrations.ranks.overflow import overflow_once
from tests.integrations.ranks.replicated_jobs import own_part, twelve
from tests.support.cases import tensors_in

STEPS, EVERY_STEP = 8, range(8)
LATE: dict[str, Any] = {"start": 0.5, "every": 2}  # of these steps
PERTURBED = (4, 6)  # by that schedule
SAVED_AFTER = 5  # between the two
EPSILON = 0.1


def ascent_rows(rank: int, less: str) -> slice:
    """Which rows of its part a rank ascends on: as many on every rank, or other ones and another number of them."""
    return slice(2) if less == "alike" else slice(rank % 2, 1 + 2 * (rank % 2))


class Replica:
    """The rank's part of the batch in float64, and an AMP on a DistributedDataParallel model.

    `less` is None for steps without an ascent of its own; `micro_batches` are accumulated under no_sync().
    """

    def __init__(
        self,
        rank: int,
        *,
        less: str | None = "alike",
        schedule: dict[str, Any] | None = None,
        micro_batches: int = 1,
        scaled: bool = False,
        zero: bool = False,
        ddp: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        case = own_part(twelve(), rank)
        self.x, self.y, self.micro_batches = case.x, case.y, micro_batches
        self.rows = None if less is None else ascent_rows(rank, less)
        self.model = DistributedDataParallel(case.model, **(ddp or {}))
        self.sent = 0  # how often gradients were
        if ddp is None:
            self.model.register_comm_hook(None, self._send)
        self.zero, self.schedule, self.settings = zero, schedule, settings
        self.scaler = GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        self.prepare()

    def _send(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        self.sent += 1
        return allreduce_hook(self.model.process_group, bucket)

    def prepare(self) -> None:
        """A new optimizer, and its scheduler."""
        params, options = self.model.parameters(), {"lr": 0.1, "momentum": 0.9}
        base = ZeroRedundancyOptimizer(params, SGD, **options) if self.zero else SGD(params, **options)  # type: ignore[arg-type]
        self.optimizer = AMP(base, **{"epsilon": EPSILON, "model": self.model, **self.settings})
        self.scheduler = None
        if self.schedule is not None:
            self.scheduler = RadiusScheduler(self.optimizer, **{"total_steps": STEPS, **self.schedule})

    def closure(self, rows: slice | None = None, micro_batches: int = 1) -> Callable[[], Tensor]:
        x, y = (whole[rows or slice(None)].chunk(micro_batches) for whole in (self.x, self.y))

        def run() -> Tensor:
            self.optimizer.zero_grad()
            total = torch.zeros((), dtype=torch.float64)
            for number, (inputs, labels) in enumerate(zip(x, y, strict=True), 1):
                with nullcontext() if number == len(x) else self.model.no_sync():
                    loss = cross_entropy(self.model(inputs), labels) / len(x)
                    self.scaler.scale(loss).backward()
                total += loss.detach()
            return total

        return run

    def whole(self) -> Callable[[], Tensor]:
        return self.closure(micro_batches=self.micro_batches)

    def step(self, ascent: Callable[[], Tensor] | None = None) -> None:
        if ascent is None and self.rows is not None:
            ascent = self.closure(self.rows)
        self.optimizer.step(self.whole(), ascent=ascent, scaler=self.scaler)
        self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def state(self) -> list[Tensor]:
        """The weights and the base's momentum."""
        return [*self.weights(), *(tensor.clone() for tensor in tensors_in(self.optimizer.base))]


def by_hand(
    *, less: str, sync: bool, inner_iter: int = 1, perturbed: Collection[int] = EVERY_STEP, steps: int = STEPS
) -> list[Tensor]:
    """The weights after these steps in one process, without a line of flatmin."""
    case, ranks = twelve(), range(dist.get_world_size())
    params = list(case.model.parameters())
    base = SGD(params, lr=0.1, momentum=0.9)

    def gradient(at: list[Tensor], team: Collection[int], which: str | None) -> list[Tensor]:
        """∇ΣJᵣ/|team| there, or of what they ascend on."""
        with torch.no_grad():
            for p, value in zip(params, at, strict=True):
                p.copy_(value)
        losses = []
        for rank in team:
            rows = slice(None) if which is None else ascent_rows(rank, which)
            x, y = (whole[rank :: len(ranks)][rows] for whole in (case.x, case.y))
            losses.append(cross_entropy(case.model(x), y))
        return list(torch.autograd.grad(torch.stack(losses).mean(), params))

    for step in range(steps):
        theta, total = case.weights(), [torch.zeros_like(p) for p in params]
        teams: list[Collection[int]] = [ranks] if sync else [[rank] for rank in ranks]
        for team in teams:  # these have one Δ
            delta = [torch.zeros_like(p) for p in params]
            for _ in range(inner_iter if step in perturbed else 0):
                ascent = gradient([t + d for t, d in zip(theta, delta, strict=True)], team, less)
                delta = [d + g for d, g in zip(delta, ascent, strict=True)]
                length = float(torch.cat([d.flatten() for d in delta]).norm())
                delta = [d * min(1.0, EPSILON / length) for d in delta]
            found = gradient([t + d for t, d in zip(theta, delta, strict=True)], team, None)
            total = [t + g / len(teams) for t, g in zip(total, found, strict=True)]
        with torch.no_grad():
            for p, start, mean in zip(params, theta, total, strict=True):
                p.copy_(start)
                p.grad = mean
        base.step()
    return case.weights()


def train(
    rank: int, *, sync: bool, less: str = "alike", inner_iter: int = 1, late: bool = False, **more: Any
) -> dict[str, Any]:
    """Beside the same by hand, and how often each step sent gradients."""
    settings = {"inner_iter": inner_iter, "sync_perturbation": sync, "schedule": LATE if late else None, **more}
    replica, sent = Replica(rank, less=less, **settings), []
    for _ in EVERY_STEP:
        before = replica.sent
        replica.step()
        sent.append(replica.sent - before)
    perturbed = PERTURBED if late else EVERY_STEP
    expected = by_hand(less=less, sync=sync, inner_iter=inner_iter, perturbed=perturbed)
    return {"weights": replica.weights(), "expected": expected, "sent": sent, "scale": replica.scaler.get_scale()}


def by_turns(rank: int, *, sync: bool, scaled: bool, less: str | None) -> dict[str, Any]:
    """All weights and momenta of every step: with a schedule, and with the base's own steps in the idle ones' place."""
    seen = []
    for scheduled in (True, False):
        schedule = LATE if scheduled else None
        replica, states = Replica(rank, less=less, schedule=schedule, scaled=scaled, sync_perturbation=sync), []
        for step in EVERY_STEP:
            if scheduled or step in PERTURBED:
                replica.step()
            elif scaled:
                replica.whole()()
                replica.scaler.step(replica.optimizer.base)
                replica.scaler.update()
            else:
                replica.optimizer.base.step(replica.whole())  # type: ignore[arg-type]
            states += replica.state()
        seen.append(states)
    return {"amp": seen[0], "plain": seen[1]}


def resume(rank: int, *, sync: bool) -> dict[str, Any]:
    """A checkpoint between two perturbed steps, and what follows it; beside an optimizer that has loaded it."""
    replica = Replica(rank, less="of its own", schedule=LATE, sync_perturbation=sync)
    file = io.BytesIO()
    for step in EVERY_STEP:
        if step == SAVED_AFTER:
            parts = replica.model, replica.optimizer, replica.scheduler
            torch.save([part.state_dict() for part in parts if part is not None], file)
        replica.step()
    expected = replica.state()
    file.seek(0)
    replica.prepare()  # the same replicas: new ones sum gradients in another order at first
    for part, saved in zip((replica.model, replica.optimizer, replica.scheduler), torch.load(file), strict=True):
        assert part is not None
        part.load_state_dict(saved)
    radii = []
    for _ in range(SAVED_AFTER, STEPS):
        radii.append(replica.optimizer.param_groups[0]["epsilon"])
        replica.step()
    return {"expected": expected, "weights": replica.state(), "radii": radii}


def skip_together(rank: int, *, scaled: bool) -> dict[str, Any]:
    """A perturbation a rank, and an ascent on less that overflows on the last rank alone."""
    case = own_part(twelve("mlp", None), rank)
    case.model = model = DistributedDataParallel(case.model)
    optimizer = AMP(SGD(model.parameters(), lr=0.1), epsilon=EPSILON, model=model, sync_perturbation=False)
    return overflow_once(case, optimizer, scaled=scaled, less=True)


def statistics(rank: int, *, sync: bool) -> dict[str, Any]:
    """BatchNorm's buffers with weights that stay: those of plain DDP on what the ascent sees."""
    seen = []
    for perturbed in (False, True):
        case = own_part(twelve("conv-batchnorm", None), rank)
        model = DistributedDataParallel(case.model)
        base = SGD(model.parameters(), lr=0.0)
        optimizer = AMP(base, epsilon=EPSILON, model=model, sync_perturbation=sync)

        def run(rows: slice, case: Any = case, model: Any = model, optimizer: AMP = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(case.x[rows]), case.y[rows])
            loss.backward()
            return loss

        for _ in EVERY_STEP:
            if perturbed:
                optimizer.step(partial(run, slice(None)), ascent=partial(run, slice(2)))
            else:
                base.step(partial(run, slice(2)))  # type: ignore[arg-type]
        seen.append(case.buffers())
    return {"plain": seen[0], "amp": seen[1]}


def match(rank: int, lacking: str) -> dict[str, Any]:
    """An automatic radius of which every second step has an ascent on less, on all ranks or on one.

    At first nothing has been perturbed; then the losses are lacking; then all ranks give theirs, and go on.
    """
    replica = Replica(rank, less="of its own", schedule=LATE, epsilon="auto")
    if lacking == "on the first" and rank != 0:
        replica.rows = None
    radius, factors, message = replica.optimizer.radius, [], ""
    ranks = torch.arange(dist.get_world_size(), dtype=torch.float64)
    loss, perturbed, new = 1 + 0.1 * ranks, 1.2 + 0.3 * ranks, 1.3 + 0.2 * ranks
    mine = float(loss[rank]), float(perturbed[rank])
    for _ in range(PERTURBED[0]):
        replica.step()
    factors.append(radius.step(new[rank]))
    replica.step()
    before = radius.radii
    try:
        radius.step(new[rank], losses=mine if lacking == "on the others" and rank == 0 else None)
    except ValueError as error:
        message = str(error)
    stayed = radius.radii == before
    replica.step()
    factors.append(radius.step(new[rank], losses=mine))
    found = list(radius.radii)
    replica.step()
    assert replica.optimizer.last.epsilon == found[0]
    rise, gap = perturbed.mean() - loss.mean(), new.mean() - loss.mean()
    return {
        "weights": [*replica.weights(), torch.tensor([*factors, *found])],
        "message": message,
        "stayed": stayed,
        "factors": factors,
        "expected": [1.0, float((gap / rise).sqrt())],
        "grows_to": found[0],
    }


OTHER: dict[str, dict[str, Any]] = {  # on the last rank; each has the same ε in the first step
    "every": {"every": 3},
    "start": {"start": 0.25},
    "total_steps": {"total_steps": STEPS + 4},
    "growth": {"growth": "linear"},
}


def disagree(rank: int, on: str) -> dict[str, Any]:
    """The error of each rank, in which step, and whether its weights stayed; then they agree, and go on."""
    is_last = rank == dist.get_world_size() - 1
    schedule: dict[str, Any] | None = {**LATE, **(OTHER.get(on, {}) if is_last else {})}
    if on == "absent":
        schedule = None if is_last else {**LATE, "start": 0.0}
    replica = Replica(rank, schedule=schedule, epsilon=0.2 if on == "radius" and is_last else EPSILON)

    def local() -> Tensor:
        with replica.model.no_sync():
            return replica.closure(slice(2))()

    message, begun, before = "", 0, replica.weights()
    try:
        for begun in EVERY_STEP:  # noqa: B007  # the last of them
            before = replica.weights()
            replica.step(local if on == "local ascent" else None)
    except ValueError as error:
        message = str(error)
    stayed = all(torch.equal(a, b) for a, b in zip(replica.weights(), before, strict=True))
    replica.schedule, replica.settings = LATE, {}
    replica.prepare()
    for _ in EVERY_STEP:
        replica.step()  # nothing is lost after an error
    return {"message": message, "step": begun, "stayed": stayed, "weights": replica.weights()}


BOTH = {"as-one": True, "apart": False}
JOBS: dict[str, Any] = {
    **{
        f"{name}-{less}-{n}": partial(train, sync=sync, less=less, inner_iter=n)
        for name, sync in BOTH.items()
        for less in ("alike", "of its own")
        for n in (1, 2)
    },
    **{f"{name}-micro-batches": partial(train, sync=sync, micro_batches=3) for name, sync in BOTH.items()},
    **{f"{name}-scaled": partial(train, sync=sync, scaled=True) for name, sync in BOTH.items()},
    **{f"{name}-zero": partial(train, sync=sync, zero=True) for name, sync in BOTH.items()},
    **{
        f"{name}-late-{n}": partial(train, sync=sync, less="of its own", inner_iter=n, late=True)
        for name, sync in BOTH.items()
        for n in (1, 2)
    },
    **{f"{name}-late-scaled": partial(train, sync=sync, late=True, scaled=True) for name, sync in BOTH.items()},
    **{
        f"{name}-late-micro-batches": partial(train, sync=sync, late=True, micro_batches=3)
        for name, sync in BOTH.items()
    },
    "as-one-late-views": partial(train, sync=True, late=True, ddp={"gradient_as_bucket_view": True}),
    "as-one-late-static": partial(train, sync=True, late=True, ddp={"static_graph": True}),
    **{
        f"turns-{name}-{less}-{scaled}": partial(by_turns, sync=sync, scaled=scaled, less=less)
        for name, sync in BOTH.items()
        for less in (None, "of its own")
        for scaled in (False, True)
    },
    **{f"resume-{name}": partial(resume, sync=sync) for name, sync in BOTH.items()},
    **{f"skip-{scaled}": partial(skip_together, scaled=scaled) for scaled in (False, True)},
    **{f"statistics-{name}": partial(statistics, sync=sync) for name, sync in BOTH.items()},
    **{
        f"match-{lacking}": partial(match, lacking=lacking)
        for lacking in ("everywhere", "on the first", "on the others")
    },
    **{f"disagree-{on}": partial(disagree, on=on) for on in (*OTHER, "absent", "radius", "local ascent")},
}
