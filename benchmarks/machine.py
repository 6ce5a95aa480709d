"""What every benchmark needs: contenders that take turns, and a command line."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

from flatmin_lab.bench.timing import wall_seconds


def in_turns(
    runs: Mapping[str, Callable[[], object]], device: torch.device, *, turns: int, warmup_turns: int = 5
) -> dict[str, tuple[float, float, float]]:
    """Lower quartile, median and upper quartile in ms of each; they take turns, because machines are noisy."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + warmup_turns):
        for name, work in runs.items():
            seconds = wall_seconds(work, device)
            if turn >= warmup_turns:
                times[name].append(1e3 * seconds)
    return {name: (parts[0], parts[1], parts[2]) for name, parts in ((n, quantiles(t, n=4)) for n, t in times.items())}


def line(result: Mapping[str, Any]) -> str:
    return f"{result['hardware']}, {result['threads']} threads, torch {result['torch']}, commit {result['commit']}"


def command(
    doc: str | None,
    measure: Callable[[int, torch.device], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
    *,
    counted: str,
    default: int,
    json_file: str,
) -> None:
    """The command line of a benchmark: how many of what is `counted`, on which device, and where the numbers go."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(f"--{counted}", type=int, default=default, dest="count")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path, default=Path(json_file))
    arguments = parser.parse_args()
    if arguments.count < 2:
        parser.error(f"--{counted} must be at least 2, got {arguments.count}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device, but there is none")
    result = measure(arguments.count, torch.device(arguments.device))
    show(result)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=2) + "\n")
