"""How long a landscape takes: the loss of a model on a few images at every point of a plane through its weights.

Each row is one way to go through the points: one after the other in float32 (convolutions on a GPU then use TF32,
torch's default) or in bfloat16, or several points in one pass (`at_once`). A few points are timed, and the time of the
whole plane follows. The floor is the arithmetic alone, at the peak of the device where that is known.

On the CPU it is the small network for digits on 1,000 of them, on a GPU also PreActResNet18 on 1,000 images.

    python benchmarks/landscape.py [--points 41] [--device cpu] [--json out/landscape.json]
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flatmin import flatness
from flatmin_lab import models
from flatmin_lab.bench.timing import wall_seconds
from flatmin_lab.system.machine import facts
from machine import command, line

IMAGES = 1000
PEAKS = {"float32": 494e12, "bfloat16": 989e12}  # of an H200: TF32 and bfloat16, dense, by NVIDIA's data sheet
MODELS: dict[str, tuple[dict[str, int], int, list[str]]] = {  # settings, side, devices
    "convnet": ({"in_channels": 1, "width": 16}, 8, ["cpu", "cuda"]),  # as it is trained on digits
    "preactresnet18": ({"in_channels": 3}, 32, ["cuda"]),
}


def ways(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, tuple[flatness.Loss, int]]:
    """Name to (the loss, how many points at once)."""
    exact = flatness.empirical_risk(x, y)  # 500 images at a time

    def rough(model: Callable[..., Any]) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return sum((part(model) for part in exact), x.new_zeros(()))

    rows: dict[str, tuple[flatness.Loss, int]] = {"float32": (exact, 1)}
    if x.is_cuda:
        rows["bfloat16"] = (rough, 1)
    for at_once in (4, 16, 64):
        rows[f"float32, {at_once} at once"] = (exact, at_once)
    return rows


def measure(points: int, device: torch.device) -> dict[str, Any]:
    warnings.filterwarnings("ignore", message=".*performance drop.*")  # of points at once: that is what is measured
    found: list[dict[str, Any]] = []
    for name, (settings, side, devices) in MODELS.items():
        if device.type not in devices:
            continue
        torch.manual_seed(0)
        model = models.build(name, **settings).to(device).eval()
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = torch.randn(IMAGES, settings["in_channels"], side, side, device=device)
        x = x.contiguous(memory_format=torch.channels_last)
        y = torch.arange(IMAGES, device=device) % 10
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            model(x)
        for way, (loss, at_once) in ways(model, x, y).items():
            few = torch.linspace(-0.5, 0.5, 64, dtype=torch.float64)

            compute_line = partial(flatness.line, model, loss, alphas=few, at_once=at_once)
            compute_line()
            seconds = min(wall_seconds(compute_line, device) for _ in range(3)) / len(few)
            peak = PEAKS.get(way.split(",")[0]) if device.type == "cuda" else None
            floor = None if peak is None else counter.get_total_flops() / peak
            found.append({"model": name, "way": way, "point": seconds, "plane": seconds * points**2, "floor": floor})
    return {**facts(device), "threads": torch.get_num_threads(), "points": points, "pictures": IMAGES, "rows": found}


def show(result: dict[str, Any]) -> None:
    side = result["points"]
    print(f"{'':16}{'':22}{'ms a point':>12}{f's for {side} × {side}':>16}{'times the floor':>18}")
    for row in result["rows"]:
        over = "" if row["floor"] is None else f"{row['point'] / row['floor']:.1f}"
        print(f"{row['model']:16}{row['way']:22}{1e3 * row['point']:12.2f}{row['plane']:16.1f}{over:>18}")
    print(f"\n{result['pictures']} images; the best of three turns; {line(result)}")


if __name__ == "__main__":
    command(__doc__, measure, show, counted="points", default=41, json_file="out/landscape.json")
