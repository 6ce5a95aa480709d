"""What AMP costs compared with ERM: milliseconds per step of both on one device, and the hours of a whole training run.

Two endless runs take turns, a block of steps each, so that whatever else the machine does affects both.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch

from flatmin_lab.bench.mode_cost import CAPTURED, EAGER, GRAPH
from flatmin_lab.bench.time_estimate import Pace, endless_run, estimate_seconds, seconds_per_evaluation, take_steps
from flatmin_lab.data.dataset import Dataset
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.system.machine import facts

BLOCKS = 10  # of each run, for a median and quartiles
WARMUP_STEPS = 5  # before the first block


def measure_cost(
    recipes: Mapping[str, Recipe], data: Dataset, *, device: torch.device, steps: int = 50
) -> dict[str, Any]:
    """By method, milliseconds per step (median and quartiles over the blocks) and hours; the ratio of AMP to ERM."""
    times: dict[str, list[float]] = {method: [] for method in recipes}
    with ExitStack() as stack:
        runs = {
            method: stack.enter_context(endless_run(recipe, data, device=device)) for method, recipe in recipes.items()
        }
        for events in runs.values():
            take_steps(events, WARMUP_STEPS, device)
        for _ in range(BLOCKS):
            for method, events in runs.items():
                start = perf_counter()
                take_steps(events, steps, device)
                times[method].append((perf_counter() - start) / steps)
    found: dict[str, Any] = {}
    for method, recipe in recipes.items():
        middle = median(times[method])
        low, _, high = quantiles(times[method], n=4)
        found[method] = {
            "ms": 1000 * middle,
            "ms_quartiles": [1000 * low, 1000 * high],
            "hours": estimate_seconds(recipe, data, Pace(middle, seconds_per_evaluation(recipe, data, device=device)))
            / 3600,
        }
    first = next(iter(recipes.values()))
    known = {name: getattr(first, name) for name in ("data", "model", "epochs", "batch_size", "precision")}
    known["form"] = EAGER if device.type != "cuda" else CAPTURED if first.compile else GRAPH
    ratio = found["amp"]["ms"] / found["erm"]["ms"]
    return {**known, "methods": found, "ratio": ratio, "blocks": BLOCKS, "steps": steps, **facts(device)}
