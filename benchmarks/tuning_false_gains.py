"""How often a tuning says "better than ERM" where there is nothing to gain.

Simulated: 12 trials and ERM are wrong on each of 100 images with the same probability, 10 % on average, so the best of
the 12 is better by chance alone. Trained: an MLP on digits with 40 % wrong labels, 24 epochs; the five trials are AMP
with ε of 0.0005 to 0.002, at least a hundred times smaller than the default: in effect ERM five more times.

Counted are the chosen trials that pass for better, with the correction for the choice of the best and without.

    python benchmarks/tuning_false_gains.py [--seeds 20] [--json out/tuning_false_gains.json]
"""

import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from flatmin_lab.data import load
from flatmin_lab.recipes.defaults import default_recipe
from flatmin_lab.runs.folder import read_image_scores
from flatmin_lab.system.machine import facts
from flatmin_lab.training.loop import train
from flatmin_lab.tuning.erm_comparison import compare
from flatmin_lab.tuning.search_space import Measure
from machine import command, line

REPEATS, IMAGES, TRIALS, SHARE = 400, 100, 12, 0.1
RADII = (0.0005, 0.0007, 0.001, 0.0014, 0.002)
SHARED: dict[str, Any] = {"model": "mlp", "epochs": 24, "batch_size": 100, "validation": True, "label_noise": 0.4}


def simulated() -> Iterator[list[Tensor]]:
    """ERM's errors, then those of the trials."""
    for seed in range(REPEATS):
        random = torch.Generator().manual_seed(seed)
        hardness = torch.rand(IMAGES, generator=random) * 2 * SHARE
        yield [(torch.rand(IMAGES, generator=random) < hardness).to(torch.uint8) for _ in range(TRIALS + 1)]


def trained(seeds: int) -> Iterator[dict[str, list[Tensor]]]:
    """By measure, ERM's scores, then those of the trials."""
    data = load("digits")
    methods: list[dict[str, Any]] = [{"method": "erm"}]
    methods += [{"method": "amp", "settings": {"epsilon": epsilon}} for epsilon in RADII]
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as place:
            folders = [Path(place) / str(number) for number in range(len(methods))]
            for folder, method in zip(folders, methods, strict=True):
                deque(train(default_recipe("digits", data, **SHARED, **method), data, seed=seed, folder=folder), 0)
            yield {
                measure: [found for folder in folders if (found := read_image_scores(folder, measure)) is not None]
                for measure in get_args(Measure)
            }


def counted(scores: list[list[Tensor]]) -> dict[str, int]:
    corrected, uncorrected = 0, 0
    for erm, *trials in scores:
        known = dict(enumerate(trials))
        best = min(known, key=lambda number: float(known[number].double().mean()))
        corrected += compare(erm, known, chosen=best).is_better
        uncorrected += compare(erm, {best: known[best]}, chosen=best).is_better
    return {"of": len(scores), "corrected": corrected, "uncorrected": uncorrected}


def measure(seeds: int, device: torch.device) -> dict[str, Any]:
    runs = list(trained(seeds))
    rows = {"simulated, error": counted(list(simulated()))}
    rows |= {f"trained, {name}": counted([scores[name] for scores in runs]) for name in get_args(Measure)}
    return {**facts(device), "rows": rows}


def show(result: Mapping[str, Any]) -> None:
    print(line(result))
    for name, row in result["rows"].items():
        print(f"{name:18} {row['corrected']:4} of {row['of']}, without the correction {row['uncorrected']}")


if __name__ == "__main__":
    command(__doc__, measure, show, counted="seeds", default=20, json_file="out/tuning_false_gains.json")
