"""Time and memory of steps: contenders take turns, a block of steps each.

A machine is noisy over seconds: it warms up, others use it. So every contender has a block in every round, and the
median and quartiles over the rounds are reported. One model's block is timed by events on the device, several models'
by the wall clock from idle to idle, because their streams run concurrently.

The memory of a step is the rise of the allocator's peak while it is taken. The memory of a graph does not show there:
it is reserved once, when the graph is captured, so all of it is added. cuBLAS's workspaces are not counted.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import quantiles
from time import perf_counter
from typing import NamedTuple

import torch

from flatmin.core.messages import one_line

MAX_BLOCK_SECONDS = 0.25  # unless a single step takes longer
MIB = 2**20
NO_GRAPH_POOL = (0, 0)  # the id of memory that no graph has reserved
TORCH_STREAMS = 32  # that torch has on a device and hands out in turn

TakeSteps = Callable[[int], None]  # takes that many steps


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds from idle to idle."""
    synchronize(device)
    start = perf_counter()
    work()
    synchronize(device)
    return perf_counter() - start


def device_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds on the device's current stream; on the CPU, of the wall clock."""
    if device.type != "cuda":
        return wall_seconds(work, device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / 1e3


@dataclass
class Runner:
    """A contender being timed: `models` models step together, in blocks of `steps`."""

    take: TakeSteps
    steps: int
    models: int = 1
    times: list[float] = field(default_factory=list)  # ms per step and model, one value per block
    failed: str | None = None

    def run(self, device: torch.device) -> None:
        clock = device_seconds if self.models == 1 else wall_seconds
        seconds = clock(lambda: self.take(self.steps), device)
        self.times.append(1e3 * seconds / (self.steps * self.models))


def block_length(take: TakeSteps, device: torch.device, *, most: int) -> int:
    """How many steps fit into `MAX_BLOCK_SECONDS`, at least one; judged by a single step."""
    take(1)
    one = wall_seconds(lambda: take(1), device)
    return max(1, min(most, int(MAX_BLOCK_SECONDS / one)))


def run_rounds(runners: Mapping[str, Runner], device: torch.device, *, rounds: int) -> None:
    """A block of each, round after round; a contender that fails is out, and the others continue."""
    for _ in range(rounds):
        for runner in runners.values():
            if runner.failed is not None:
                continue
            try:
                runner.run(device)
            except Exception as error:
                runner.failed = failure_reason(error)


def summary(times: list[float]) -> dict[str, float | list[float]]:
    """The median and the quartiles.

    >>> summary([1.0, 2.0, 3.0, 4.0, 5.0])
    {'ms': 3.0, 'ms_quartiles': [2.0, 4.0]}
    """
    low, middle, high = quantiles(times, n=4, method="inclusive")
    return {"ms": middle, "ms_quartiles": [low, high]}


def failure_reason(error: Exception) -> str:
    """The error in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return one_line(error)


# ---- memory


class Memory(NamedTuple):
    """In bytes: what is allocated, and what graphs have reserved beyond that."""

    allocated: int
    graph_reserved: int


def memory_in_use(device: torch.device) -> Memory:
    if device.type != "cuda":
        return Memory(0, 0)
    torch.cuda.synchronize(device)
    here = device.index if device.index is not None else torch.cuda.current_device()
    pools = [
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == here and tuple(segment.get("segment_pool_id", NO_GRAPH_POOL)) != NO_GRAPH_POOL
    ]
    return Memory(torch.cuda.memory_allocated(device), sum(pools))


def peak_mib_since(before: Memory, take: TakeSteps, device: torch.device, *, steps: int = 3) -> float | None:
    """Peak MiB of these steps, including everything allocated since `before`; None on the CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    take(steps)
    after = memory_in_use(device)
    rise = torch.cuda.max_memory_allocated(device) - before.allocated
    return (rise + after.graph_reserved - before.graph_reserved) / MIB


def use_cublas_on_all_streams(device: torch.device, dtype: torch.dtype) -> None:
    """Make cuBLAS allocate its workspaces on every stream, in forward and backward passes, before anything is measured.

    It keeps some MiB for each stream that it has worked on; they would be charged to the first contender there.
    """
    if device.type != "cuda":
        return
    for stream in [torch.cuda.current_stream(device), *(torch.cuda.Stream(device) for _ in range(TORCH_STREAMS))]:
        with torch.cuda.stream(stream):
            layer = torch.nn.Linear(64, 64, device=device, dtype=dtype)
            layer(torch.ones(64, 64, device=device, dtype=dtype)).sum().backward()
        torch.cuda.synchronize(device)


def free_mib(device: torch.device) -> float:
    """MiB that are free for a new graph."""
    release_memory(device)
    return torch.cuda.mem_get_info(device)[0] / MIB


def release_memory(device: torch.device) -> None:
    """Return unused memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
