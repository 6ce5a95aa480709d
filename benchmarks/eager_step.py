"""A whole training step in plain PyTorch, with and without AMP: how much does the wrapper add to two passes?

PreActResNet18, batches of 50, in bfloat16 on a GPU. ERM, two passes and one update (the floor of every method with two
passes), AMP with and without `model=`, and pytorch_optimizer's SAM take turns in one process, because machines are
noisy; each turn is five steps.

    python benchmarks/eager_step.py [--turns 40] [--device cpu] [--json out/eager_step.json]
"""

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import flatmin
from flatmin_lab import models
from flatmin_lab.system.machine import facts
from machine import command, in_turns, line

STEPS, BATCH = 5, 50  # steps a turn; images a batch
WIDTH_ON_CPU = 8  # of the network: a laptop should not wait for minutes
SETTINGS: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}


class Problem:
    """A batch, new networks for it, and their loss."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.x = torch.randn(BATCH, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
        self.y = torch.randint(10, (BATCH,), device=device)

    def network(self) -> nn.Module:
        narrow = {} if self.device.type == "cuda" else {"width": WIDTH_ON_CPU}
        model = models.build("preactresnet18", **narrow).to(self.device)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # the stub does not know of it
        return model

    def backward(self, model: nn.Module) -> Tensor:
        precision = torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()
        with precision:
            loss = cross_entropy(model(self.x).float(), self.y)
        loss.backward()
        return loss


def plain(problem: Problem, *, passes: int, fused: bool) -> Callable[[], object]:
    model = problem.network()
    optimizer = SGD(model.parameters(), fused=fused or None, **SETTINGS)

    def step() -> None:
        for _ in range(passes):
            optimizer.zero_grad()
            problem.backward(model)
        optimizer.step()

    return step


def amp(problem: Problem, *, within: bool, fused: bool) -> Callable[[], object]:
    model = problem.network()
    base = SGD(model.parameters(), fused=fused or None, **SETTINGS)
    optimizer = flatmin.AMP(base, epsilon=0.1, model=model if within else None)

    def closure() -> Tensor:
        optimizer.zero_grad()
        return problem.backward(model)

    return lambda: optimizer.step(closure)


def sam(problem: Problem) -> Callable[[], object]:
    model = problem.network()
    optimizer = import_module("pytorch_optimizer").SAM(model.parameters(), SGD, rho=0.05, **SETTINGS)

    def step() -> None:
        problem.backward(model)
        optimizer.first_step(zero_grad=True)
        problem.backward(model)
        optimizer.second_step(zero_grad=True)

    return step


def measure(turns: int, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    problem = Problem(device)
    runs = {
        "ERM": plain(problem, passes=1, fused=False),
        "two passes": plain(problem, passes=2, fused=False),
        "AMP": amp(problem, within=False, fused=False),
        "AMP, model=": amp(problem, within=True, fused=False),
        "two passes, fused base": plain(problem, passes=2, fused=True),
        "AMP, fused base, model=": amp(problem, within=True, fused=True),
    }
    if find_spec("pytorch_optimizer") is None:
        print("pytorch_optimizer is not installed here: its SAM is left out\n")
    else:
        runs["pytorch_optimizer SAM"] = sam(problem)

    def repeated(step: Callable[[], object]) -> Callable[[], object]:
        return lambda: [step() for _ in range(STEPS)]

    try:
        times = in_turns({name: repeated(step) for name, step in runs.items()}, device, turns=turns, warmup_turns=2)
    finally:
        torch.backends.cudnn.benchmark = before
    rows = {name: {"ms": t[1] / STEPS, "ms_quartiles": [t[0] / STEPS, t[2] / STEPS]} for name, t in times.items()}
    return {"turns": turns, "steps_a_turn": STEPS, "rows": rows, **facts(device)}


def show(result: dict[str, Any]) -> None:
    rows = result["rows"]
    print(f"PreActResNet18, batches of {BATCH}: {result['turns']} turns of {result['steps_a_turn']} steps each")
    print(line(result), end="\n\n")
    print(f"{'':26}{'ms a step':>10}  {'quartiles':>16}{'beyond two passes':>19}")
    for name, row in rows.items():
        floor = rows["two passes, fused base" if "fused" in name else "two passes"]["ms"]
        spread = "{:.2f} .. {:.2f}".format(*row["ms_quartiles"])
        print(f"{name:26}{row['ms']:10.2f}  {spread:>16}{row['ms'] - floor:19.2f}")


if __name__ == "__main__":
    command(__doc__, measure, show, counted="turns", default=40, json_file="out/eager_step.json")
