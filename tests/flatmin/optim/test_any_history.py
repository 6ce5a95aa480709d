"""Whatever a training run does and in whatever order, every step is the algorithm's, as a few plain lines compute it.

Random histories: steps with a closure, in blocks (zeroed before or after), on micro-batches, with an ascent on less;
between them changes of ε, ζ and lr, checkpoints, copies, pickles, frozen layers, exceptions and bad gradients. After
each, weights, buffers and random state are those of the reference, in float64.
"""

import copy
import pickle
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop

import flatmin

LENGTH, RUNS = 14, 24
BASES: tuple[Callable[[Any], Optimizer], ...] = (
    lambda groups: SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01),
    lambda groups: AdamW(groups, lr=0.01, amsgrad=True),
    lambda groups: RMSprop(groups, lr=0.01, centered=True),
)
STEPS = ("closure", "closure", "block", "micro-batches", "ascent", "exception", "bad gradient", "unused layer")
CHANGES = ("radius", "rate", "checkpoint", "copy", "pickle", "freeze")


class Net(nn.Module):
    """BatchNorm, dropout, and a layer that a pass may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6, bias=False)  # its gradient would be 0 but for rounding, which Adam magnifies
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.last, self.beside, self.uses_beside = nn.Linear(6, 3), nn.Linear(4, 3), True
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(torch.tanh(self.norm(self.first(x)))))
        return out + self.beside(x) if self.uses_beside else out

    def groups(self) -> list[dict[str, Any]]:
        inner = [*self.first.parameters(), *self.norm.parameters()]
        return [{"params": inner}, {"params": [*self.last.parameters(), *self.beside.parameters()]}]


class Plan:
    """What the passes of a step do: their data, and what goes wrong in which of them."""

    def __init__(self, draw: random.Random, kind: str, passes: int) -> None:
        self.batches = [torch.randn(8, 4, dtype=torch.float64) for _ in range(2 if kind == "micro-batches" else 1)]
        self.less = kind == "ascent"
        self.passes = passes
        self.bad = draw.randrange(passes) if kind == "bad gradient" else None
        self.raising = draw.randrange(passes) if kind == "exception" else None
        self.beside = [kind != "unused layer" or draw.random() < 0.5 for _ in range(passes)]

    def run(self, model: Net, number: int) -> None:
        """The forward and backward pass with that number."""
        model.uses_beside = self.beside[number]
        for x in self.batches:
            part = x[:4] if self.less and number < self.passes - 1 else x
            (model(part).square().mean() / len(self.batches)).backward()
        if self.bad == number:
            assert model.first.weight.grad is not None
            model.first.weight.grad[0, 0] = float("nan")
        if self.raising == number:
            raise ArithmeticError


def reference(model: Net, base: Optimizer, plan: Plan, settings: Sequence[tuple[float, float]], how: Any) -> None:
    """One step: N ascent steps, each projected onto the balls, then the base's at θ with the gradient at θ + Δ."""
    params = [p for group in base.param_groups for p in group["params"]]
    theta, delta = [p.detach().clone() for p in params], {p: torch.zeros_like(p) for p in params}
    finite, started, clean = True, torch.get_rng_state(), list[Tensor]()
    for n in range(plan.passes):
        if n > 0:
            for group, (radius, rate) in zip(base.param_groups, settings, strict=True):
                for p in (p for p in group["params"] if radius and finite and p.grad is not None):
                    delta[p] += rate * p.grad
            for ball, radius in balls(base, [radius for radius, _ in settings], how["ball"]):
                project([delta[p] for p in ball], radius, how["norm"])
            put(params, [at + delta[p] for p, at in zip(params, theta, strict=True)])
            put(model.buffers(), clean)
            torch.set_rng_state(torch.get_rng_state() if plan.less else started)
        base.zero_grad()
        plan.run(model, n)
        gradients = [p.grad for p in params if p.grad is not None]
        finite = finite and all(bool(gradient.isfinite().all()) for gradient in gradients)
        if n == 0:
            clean, drawn = [b.clone() for b in model.buffers()], torch.get_rng_state()
    put(model.buffers(), clean)
    torch.set_rng_state(torch.get_rng_state() if plan.less else drawn)
    put(params, theta)
    if not finite:
        put(gradients, [torch.zeros_like(gradient) for gradient in gradients])
    base.step()
    if not finite:
        put(params, theta)


def balls(base: Optimizer, radii: list[float], kind: str) -> list[tuple[list[Tensor], float]]:
    perturbed = [(group["params"], radius) for group, radius in zip(base.param_groups, radii, strict=True) if radius]
    if kind == "global":
        return [([p for params, _ in perturbed for p in params], max(radii))]
    return perturbed if kind == "group" else [([p], radius) for params, radius in perturbed for p in params]


def project(delta: list[Tensor], radius: float, norm: str) -> None:
    length = torch.stack([d.square().sum() for d in delta]).sum().sqrt()
    for d in delta:
        d.clamp_(-radius, radius) if norm == "linf" else d.mul_((radius / length).clamp(max=1))


@torch.no_grad()
def put(tensors: Iterable[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


class History:
    """A model with its AMP, and the same model with the base alone."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.draw = random.Random(seed)
        self.how: dict[str, Any] = {
            "ball": self.draw.choice(["global", "group", "tensor"]),
            "norm": self.draw.choice(["l2", "linf"]),
        }
        self.inner_iter, self.make_base = self.draw.choice([1, 1, 2, 3]), self.draw.choice(BASES)
        self.model = Net()
        self.other = copy.deepcopy(self.model)
        self.optimizer, self.base = self.make_amp(0.2), self.make_base(self.other.groups())
        self.events: list[str] = []
        self.is_watched = True

    def make_amp(self, epsilon: float) -> flatmin.AMP:
        base = self.make_base(self.model.groups())
        return flatmin.AMP(base, epsilon=epsilon, inner_iter=self.inner_iter, model=self.model, **self.how)

    def change(self, kind: str) -> None:
        if kind == "radius":
            first, second = self.draw.choice([0.2, 0.05, 0.5, 0.0]), self.draw.choice([0.2, 0.1, 0.0])
            if self.how["ball"] == "global" and first and second:
                second = first
            for group, radius in zip(self.optimizer.param_groups, (first, second), strict=True):
                group["epsilon"], group["inner_lr"] = radius, self.draw.choice([0.5, 1.0, 3.0])
        elif kind == "rate":
            rate = self.draw.choice([0.01, 0.05])
            for group in (*self.optimizer.param_groups, *self.base.param_groups):
                group["lr"] = rate
        elif kind == "checkpoint":
            saved = copy.deepcopy(self.optimizer.state_dict())
            self.optimizer = self.make_amp(0.9)
            self.optimizer.load_state_dict(saved)
        elif kind == "freeze":
            for model in (self.model, self.other):
                model.last.requires_grad_(not model.last.weight.requires_grad)
        else:
            both = self.model, self.optimizer
            self.model, self.optimizer = copy.deepcopy(both) if kind == "copy" else pickle.loads(pickle.dumps(both))

    def step(self, kind: str) -> None:
        radii = [group["epsilon"] for group in self.optimizer.param_groups]
        passes = 1 + self.inner_iter if any(radii) else 1
        if kind in ("bad gradient", "exception") and (passes == 1 or not radii[0]):
            kind = "closure"  # ε = 0: the base's own step, which checks nothing
        plan, before = Plan(self.draw, kind, passes), torch.get_rng_state()
        in_blocks = kind in ("block", "micro-batches") or (
            kind not in ("closure", "ascent") and self.draw.random() < 0.5
        )
        with suppress(ArithmeticError):
            self.in_blocks(plan) if in_blocks else self.with_closure(plan)
        if plan.raising == 0 and in_blocks:
            self.optimizer.zero_grad()  # as a loop must that gives up a batch
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        self.expect(plan, in_blocks=in_blocks)
        assert torch.equal(after, torch.get_rng_state())
        if plan.bad is not None:
            assert self.optimizer.last.skipped

    def with_closure(self, plan: Plan) -> None:
        numbers, self.is_watched = iter(range(plan.passes)), False

        def closure() -> None:
            self.optimizer.zero_grad()
            plan.run(self.model, next(numbers))

        self.optimizer.step(closure, ascent=closure if plan.less and plan.passes > 1 else None)

    def in_blocks(self, plan: Plan) -> None:
        """The loop zeroes before its step or after it; the first pass after a closure is not watched otherwise."""
        where = self.draw.choice(["before", "after"]) if self.is_watched else "before"
        if where == "before":
            self.optimizer.zero_grad()
        else:
            self.model.zero_grad()
        plan.run(self.model, 0)
        for number in range(1, plan.passes):
            self.is_watched = True
            with self.optimizer.perturbed():
                plan.run(self.model, number)
        self.optimizer.step()
        if where == "after":
            self.optimizer.zero_grad()

    def expect(self, plan: Plan, *, in_blocks: bool) -> None:
        """What the other model does in the same step."""
        if plan.raising is not None:  # before the blocks, a clean pass is the loop's own
            if in_blocks:
                with suppress(ArithmeticError):
                    plan.run(self.other, 0)
            return
        groups = self.optimizer.param_groups
        reference(self.other, self.base, plan, [(group["epsilon"], group["inner_lr"]) for group in groups], self.how)

    def run(self) -> None:
        for _ in range(LENGTH):
            self.events.append(self.draw.choice((*STEPS, *CHANGES)))
            self.change(self.events[-1]) if self.events[-1] in CHANGES else self.step(self.events[-1])
            pairs = zip(self.model.state_dict().values(), self.other.state_dict().values(), strict=True)
            assert all(torch.allclose(one, other, rtol=0, atol=1e-9) for one, other in pairs), self.events


@pytest.mark.parametrize("seed", range(RUNS))
def test_every_step_of_every_history_is_the_algorithm_s(seed: int) -> None:
    History(seed).run()
