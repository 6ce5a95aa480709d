"""Rules for ε that need no held-out data, trained beside `auto`, which does, and beside fixed radii.

    rise-R     after each epoch ε is adjusted until L(θ + Δ) is R times L(θ), means over that epoch, by the same square
               root and within the same limits as `auto`
    rise-1-R   the same with a target that grows, in proportion to time, from 1 to R
    formula    ln ε = a + b ln(steps) + c ln(learning rate), fitted to the best fixed radii of all *other* problems;
               for each problem it is printed, and a table of fixed radii says what it is worth

Problems: digits, without and with 20 % wrong labels (the small convolutional network, 24 epochs), and the transformer
of `examples/transformer.py` (20 % wrong labels, 30 epochs). Every run is one line of a JSON file; those that are there
already are not repeated.

    python benchmarks/radius_rules.py [--seeds 10] [--problems digits-0.2 …] [--rules auto 0.25 …] [--processes 2]
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR, OneCycleLR

import flatmin
from flatmin import metrics
from flatmin_lab import models
from flatmin_lab.data import load
from flatmin_lab.data.label_noise import add_label_noise
from flatmin_lab.data.normalise import Normalisation
from flatmin_lab.system.machine import commit

sys.path.append(str(Path(__file__).parents[1]))
from examples import transformer

BATCH, FIRST, HELD_OUT, MATCHED = 50, 0.1, 0.1, 0.6
RULES = (
    *("0", "0.06", "0.12", "0.25", "0.5", "auto"),
    *("rise-1.05", "rise-1.1", "rise-1.2", "rise-1.5", "rise-2", "rise-3"),
    *("rise-1-1.2", "rise-1-1.5", "rise-1-3"),
)


@dataclass(frozen=True)
class Problem:
    """What is trained, for how long, and with which optimizer."""

    epochs: int
    data: Callable[[int], tuple[Tensor, Tensor, Tensor, Tensor]]  # of a seed: training and test images and labels
    model: Callable[[], nn.Module]
    base: Callable[[nn.Module], Optimizer]
    rate: Callable[[Optimizer, int], LRScheduler]


def digits(noise: float, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = add_label_noise(load("digits"), noise, seed=seed).data
    normalise = Normalisation.of(data.train)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
    return normalise(data.train.x[order]), data.train.y[order], normalise(data.test.x), data.test.y


def on_digits(noise: float) -> Problem:
    return Problem(
        epochs=24,
        data=lambda seed: digits(noise, seed),
        model=lambda: models.build("convnet", in_channels=1, width=16),
        base=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
        rate=lambda optimizer, steps: MultiStepLR(optimizer, [steps // 2, 3 * steps // 4]),
    )


PROBLEMS = {
    "digits-0.2": on_digits(0.2),
    "digits-0": on_digits(0.0),
    "transformer": Problem(
        epochs=30,
        data=lambda seed: transformer.digits(0.2, seed=seed),
        model=transformer.Transformer,
        base=lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01),
        rate=lambda optimizer, steps: OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps),
    ),
}


def target(rule: str, progress: float) -> float | None:
    """What L(θ + Δ) is to be, in multiples of L(θ), after this share of the training.

    >>> target("rise-2", 0.5), target("rise-1-3", 0.5), target("auto", 0.5)
    (2.0, 2.0, None)
    """
    if not rule.startswith("rise-"):
        return None
    ends = [float(part) for part in rule.split("-")[1:]]
    return ends[0] + (ends[-1] - ends[0]) * progress


def trained(name: str, rule: str, seed: int) -> dict[str, object]:
    """One run: its test error and NLL, and ε at the end."""
    torch.set_num_threads(1)
    problem = PROBLEMS[name]
    x, y, x_test, y_test = problem.data(seed)
    torch.manual_seed(seed)
    model = problem.model()
    rises = target(rule, 0.0) is not None
    epsilon: float | Literal["auto"] = "auto" if rule == "auto" else FIRST if rises else float(rule)
    optimizer = flatmin.AMP(problem.base(model), epsilon=epsilon, model=model)
    radius = flatmin.MatchedRadius(optimizer) if rises else None
    steps, kept = len(x) // BATCH, len(x) - round(HELD_OUT * len(x))
    rate = problem.rate(optimizer, problem.epochs * steps)
    for epoch in range(problem.epochs):
        model.train()
        is_held_out = rule == "auto" and epoch < round(MATCHED * problem.epochs)
        count = kept if is_held_out else len(x)
        order = torch.cat([torch.randperm(count), torch.randperm(count)])  # as many steps in every epoch
        losses = []
        for index in order.split(BATCH)[:steps]:

            def closure(index: Tensor = index) -> Tensor:
                optimizer.zero_grad()
                loss = cross_entropy(model(x[index]), y[index])
                loss.backward()
                return loss

            losses.append(float(optimizer.step(closure).detach()))
            rate.step()
        ratio = target(rule, (epoch + 1) / problem.epochs)
        if radius is not None and ratio is not None:
            radius.step(ratio * mean(losses))
        model.eval()
        if is_held_out:
            with torch.no_grad():
                optimizer.radius.step(cross_entropy(model(x[kept:]), y[kept:]))
    with torch.no_grad():
        logits = model(x_test)
    return {
        "problem": name,
        "rule": rule,
        "seed": seed,
        "test_error": float(metrics.error(logits, y_test)),
        "test_nll": float(metrics.nll(logits, y_test)),
        "epsilon": float(optimizer.param_groups[0]["epsilon"]),
    }


@dataclass(frozen=True)
class Known:
    """A problem and the best fixed radius of those tried; of several that are about equally good, their geometric mean.

    At 200 epochs that is the only one with more than one run, and with 96 epochs the largest.
    """

    name: str
    steps: int
    rate: float
    best: float


KNOWN = (
    Known("digits, 20 % wrong labels, 24 epochs", 24 * 28, 0.1, math.sqrt(0.25 * 0.5)),
    Known("digits, 20 % wrong labels, 96 epochs", 96 * 28, 0.1, 0.8),
    Known("CIFAR-10, 60 epochs", 60_000, 0.1, 0.12),
    Known("CIFAR-100, 60 epochs", 60_000, 0.1, 0.25),
    Known("CIFAR-10, 200 epochs", 200_000, 0.1, 0.5),
    Known("CIFAR-100, 200 epochs", 200_000, 0.1, 0.5),
    Known("the transformer, 30 epochs", 30 * 28, 2e-3, math.sqrt(0.06 * 0.12)),
)


def formula(problem: Known, others: Iterable[Known]) -> float:
    """The radius of a problem by the formula that fits the others best (least squares, the shortest solution)."""
    others = list(others)
    features = [[1.0, math.log(one.steps), math.log(one.rate)] for one in others]
    wanted = [[math.log(one.best)] for one in others]
    fit = torch.linalg.pinv(torch.tensor(features, dtype=torch.float64)) @ torch.tensor(wanted, dtype=torch.float64)
    own = torch.tensor([1.0, math.log(problem.steps), math.log(problem.rate)], dtype=torch.float64)
    return math.exp(float(own @ fit))


def show(runs: Sequence[dict[str, object]]) -> None:
    for name in PROBLEMS:
        print(f"\n{name:14} {'error, %':>15} {'NLL':>15}  n  last ε")
        for rule in dict.fromkeys(str(run["rule"]) for run in runs if run["problem"] == name):
            own = [run for run in runs if run["problem"] == name and run["rule"] == rule]
            error, nll, radius = (
                [float(str(run[key])) for run in own] for key in ("test_error", "test_nll", "epsilon")
            )
            spread = [stdev(values) if len(values) > 1 else 0.0 for values in (error, nll)]
            print(
                f"{rule:14} {100 * mean(error):6.2f} ± {100 * spread[0]:5.2f}  {mean(nll):6.3f} ± {spread[1]:5.3f} "
                f"{len(own):2}  {min(radius):.3f} to {max(radius):.3f}"
            )
    print("\nthe formula, fitted to the other problems, and the best fixed radius")
    for one in KNOWN:
        print(f"{one.name:40} {formula(one, (other for other in KNOWN if other is not one)):.2f}  {one.best:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--file", type=Path, default=Path("out/radius_rules.jsonl"))
    options = parser.parse_args()
    options.file.parent.mkdir(parents=True, exist_ok=True)
    runs = [json.loads(line) for line in options.file.read_text().splitlines()] if options.file.exists() else []
    there = {(run["problem"], run["rule"], run["seed"]) for run in runs}
    version = commit()
    wanted = [
        (name, rule, seed) for seed in range(options.seeds) for name in options.problems for rule in options.rules
    ]
    with ProcessPoolExecutor(options.processes) as pool, options.file.open("a") as file:
        for done in as_completed([pool.submit(trained, *one) for one in wanted if one not in there]):
            runs.append(done.result() | {"commit": version})
            file.write(json.dumps(runs[-1]) + "\n")
            file.flush()
    show(sorted(runs, key=lambda run: options.rules.index(run["rule"]) if run["rule"] in options.rules else -1))


if __name__ == "__main__":
    main()
