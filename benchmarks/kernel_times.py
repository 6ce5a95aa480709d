"""Where the time of a step goes: its kernels by kind, one model alone and four at once.

The steps are those of `flatmin bench` (PreActResNet18, batches of 50, bf16), on a GPU compiled and captured, recorded
by torch's profiler. "In a row" is what the kernels would take one after the other; several streams run them beside
each other, so it may be more than the step takes. On a CPU the steps are plain, and torch's operators stand for
kernels.

    python benchmarks/kernel_times.py [--steps 20] [--device cpu] [--json out/kernel_times.json]
"""

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from flatmin_lab.bench.contenders import ConcurrentContenders, build_contender
from flatmin_lab.bench.timing import wall_seconds
from flatmin_lab.bench.workload import Workload, random_images
from flatmin_lab.data.augment.transforms import augmentation
from flatmin_lab.data.normalise import Normalisation
from flatmin_lab.system.machine import facts
from machine import command, line

KINDS = {  # the first that the name of a kernel, or an operator, contains
    "weight gradients of convolutions": r"wgrad",
    "input gradients of convolutions": r"dgrad",
    "gradients of convolutions": r"convolution_backward",
    "convolutions": r"fprop|conv|xmma|implicit_gemm",
    "normalisation, ReLU and the like, fused": r"triton_",
    "normalisation": r"batch_norm",
    "the optimizer's": r"multi_tensor|sgd|foreach",
    "copies": r"memcpy|memset|copy",
    "others": r"",
}
AT_ONCE = {"cuda": (1, 4), "cpu": (1,)}
SHOWN = 12  # of the longest kernels
WARMUP_STEPS = 5


def measure(steps: int, device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    torch.backends.cudnn.benchmark = on_gpu
    split = random_images(device, 50_000 if on_gpu else 1_000)
    crop_and_flip = augmentation("vanilla", "cifar10")
    workload = Workload.build(
        "preactresnet18", split, Normalisation.of(split), batch_size=50, augment=crop_and_flip, precision="bf16"
    )
    rows = [_row(workload, method, count, steps) for count in AT_ONCE[device.type] for method in ("erm", "amp")]
    return {**facts(device), "threads": torch.get_num_threads(), "steps": steps, "rows": rows}


def _row(workload: Workload, method: str, count: int, steps: int) -> dict[str, Any]:
    """`count` models at once: milliseconds of a step of each, in all and by kind."""
    device = workload.device
    form = "compiled" if device.type == "cuda" else "eager"
    contenders = [build_contender(workload, method, form) for _ in range(count)]
    run: Any = contenders[0]
    if count > 1:
        run = ConcurrentContenders(contenders, [torch.cuda.Stream(device) for _ in contenders])
    run(WARMUP_STEPS)
    for contender in contenders:
        contender.check(form)
    seconds = min(wall_seconds(partial(run, steps), device) for _ in range(3))
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as recorded:
        run(steps)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    times, launches = _kernels(recorded.events() or (), device)
    per_step = 1e-3 / (steps * count)  # from microseconds
    kinds: dict[str, list[float]] = {kind: [0.0, 0.0] for kind in KINDS}
    for name, microseconds in times.items():
        kind = kinds[_kind(name)]
        kind[0] += microseconds * per_step
        kind[1] += launches[name] / (steps * count)
    longest = [[name, microseconds * per_step] for name, microseconds in times.most_common(SHOWN)]
    whole = 1e3 * seconds / (steps * count)
    return {"method": method, "at_once": count, "ms": whole, "kinds": kinds, "longest": longest}


def _kernels(events: Sequence[Any], device: torch.device) -> tuple[Counter[str], Counter[str]]:
    """Microseconds and launches of each kernel, by its name."""
    times, launches = Counter[str](), Counter[str]()
    for event in events:
        if device.type == "cuda" and event.device_type != DeviceType.CUDA:
            continue
        if "#" in event.name:  # torch's mark around an optimizer's step, which is no kernel
            continue
        times[event.name] += event.time_range.elapsed_us() if device.type == "cuda" else event.self_cpu_time_total
        launches[event.name] += 1
    return times, launches


def _kind(name: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))


def show(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        in_a_row = sum(time for time, _ in row["kinds"].values())
        beside = "" if row["at_once"] == 1 else f", {row['at_once']} models at once, of each"
        print(f"{row['method']}{beside}: {row['ms']:.3f} ms a step; its kernels in a row {in_a_row:.3f} ms")
        for kind, (time, launches) in row["kinds"].items():
            if launches:
                print(f"  {kind:42}{time:9.3f} ms{time / in_a_row:7.0%}{launches:9.1f} launches")
        for name, time in row["longest"]:
            print(f"    {time:8.4f} ms  {name[:100]}")
    print(f"\n{result['steps']} steps; {line(result)}")


if __name__ == "__main__":
    command(__doc__, measure, show, counted="steps", default=20, json_file="out/kernel_times.json")
