"""What augmentation costs: whole batches at once on their device, against a loop over PIL images.

Both get the same images and the same random numbers and give the same result (but for a grey level here and there in
AutoAugment's shears), and take turns in one process. The floor is a copy of the batch: every image must be read and
written once. AutoAugment sends every image through all operations of its policy, because a branch on what was drawn
would make the host wait for the device; a loop does only the one or two that were drawn. So on a CPU a small batch
costs about as much either way, and a large one less.

    python benchmarks/data_path.py [--turns 20] [--device cpu] [--json out/data_path.json]
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

import pillow_loop
from flatmin_lab.data import Augmentation, AutoAugment, Crop, Cutout, Flip, augmentation
from flatmin_lab.system.machine import facts
from machine import command, in_turns, line

ROWS: dict[str, Augmentation] = {
    "crop": Augmentation((Crop(4),)),
    "flip": Augmentation((Flip(),)),
    "cutout": Augmentation((Cutout(16),)),
    "autoaugment, cifar10": Augmentation((AutoAugment("cifar10"),)),
    "autoaugment, svhn": Augmentation((AutoAugment("svhn"),)),
    "all, cifar10": augmentation("autoaugment", "cifar10"),
    "all, svhn": augmentation("autoaugment", "svhn"),
}
SIZES = (50, 500)


def images(count: int) -> Tensor:
    """Smooth colours with some noise: what matters here is that the histograms are full, as in photographs."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 5, 5, generator=generator)
    smooth = interpolate(coarse, size=(32, 32), mode="bicubic").clamp(0, 1) * 235
    return (smooth + 20 * torch.rand(count, 3, 32, 32, generator=generator)).to(torch.uint8)


def captured(work: Callable[[], object]) -> Callable[[], object]:
    """The same kernels as one CUDA graph: without the launches, which are most of the time of a small batch."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def measure(turns: int, device: torch.device) -> dict[str, Any]:
    rows = []
    for size in SIZES:
        x = images(size)
        here = x.to(device)
        for name, augment in ROWS.items():
            u = augment.draw(size, generator=torch.Generator().manual_seed(1))
            runs: dict[str, Callable[[], object]] = {
                "ours": partial(augment, here, u.to(device)),
                "pillow": partial(pillow_loop.augment, augment, x.to(memory_format=torch.channels_last), u),
                "copy": here.clone,
            }
            if device.type == "cuda":
                runs["graph"] = captured(runs["ours"])
            times = in_turns(runs, device, turns=turns, warmup_turns=2)
            rows.append({"batch": size, "name": name, **{which: list(parts) for which, parts in times.items()}})
    return {"turns": turns, "rows": rows, **facts(device)}


def show(result: dict[str, Any]) -> None:
    print(f"ms a batch: median of {result['turns']} (quartiles), in turns")
    print(line(result), end="\n\n")
    print(f"{'':33}{'flatmin':>24}{'PIL loop':>26}{'ratio':>8}{'a copy':>9}")
    for row in result["rows"]:
        cells = {
            which: f"{row[which][1]:.2f} ({row[which][0]:.2f} .. {row[which][2]:.2f})" for which in ("ours", "pillow")
        }
        ratio = row["pillow"][1] / row["ours"][1]
        graph = f"   in a CUDA graph {row['graph'][1]:.3f}" if "graph" in row else ""
        print(
            f"{row['name'] + ', batch ' + str(row['batch']):33}{cells['ours']:>24}{cells['pillow']:>26}"
            f"{ratio:7.1f}x{row['copy'][1]:9.3f}{graph}"
        )


if __name__ == "__main__":
    command(__doc__, measure, show, counted="turns", default=20, json_file="out/data_path.json")
