"""How many threads of the CPU a run computes with: one where the network is small, unless told otherwise.

Threads of a small network wait for each other more than they compute, and for long if something else uses the cores.
Milliseconds of a step of SGD, two cores of an AMD EPYC shared with other work, torch 2.13, commit d90c15d:

    GFLOP a forward pass                       1 thread        2 threads
    0.15  convnet,  50 images of 8 × 8         9.2 to 11.2     10.9 to 151.8     5 medians of 40 steps, least to most
    0.61  convnet,  50 images of 16 × 16       31.5 to 38.6    82.0 to 118.1     5 of 15 steps
    0.60  convnet, 200 images of 8 × 8         34.9            23.5              the least of 3 of 50 steps
    3.5   resnet18, 50 images of 8 × 8         162             101               the least of 3 of 6 steps

So below 1 GFLOP in the forward pass of a batch a second thread gained a third at best, and cost more than a factor of
ten: there a run has one. Above that, it has torch's own number. The rule counts work, not time: a recipe gets the same
answer on every machine. The work of a built-in network is counted; for any other network, which may compile itself, it
is the most that its weights can compute (`most_flops`). Told otherwise means `threads=` (--threads), or OMP_NUM_THREADS
or MKL_NUM_THREADS in the environment.

A different number of threads sums in a different order: the same run up to rounding, not bit for bit. So a resumed run
computes with the number it started with if this process has that many, and says so if it has not.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

SMALL_FLOPS = 1e9  # of a batch's forward pass, below which a run has one thread
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # environment variables: whoever sets one has decided


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Torch with that many threads, and with as many as before when the block ends."""
    before = torch.get_num_threads()
    if threads != before:  # setting them, even to the same number, is not free
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if threads != before:
            torch.set_num_threads(before)


class FlopCount(TorchDispatchMode):
    """Counts the floating-point operations of what runs inside: of matrix products, convolutions and attention.

    For built-in networks alone: what torch.compile meets under such a mode it never compiles again.

    >>> with FlopCount() as counted:
    ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> counted.flops
    48
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out


def most_flops(parameters: int, shape: Sequence[int]) -> float:
    """What the forward pass of an input takes at most: a product and a sum for every weight at every pixel.

    >>> most_flops(100, (3, 8, 8)), most_flops(100, (2,))
    (12800.0, 200.0)
    """
    return 2.0 * parameters * math.prod(shape[1:])


def choose_threads(asked: int | None, *, flops: float, on_cpu: bool, began_with: int | None = None) -> int:
    """The number of threads for a run whose forward pass over a batch takes so many floating-point operations."""
    here = torch.get_num_threads()
    if asked is not None:
        return asked
    if any(os.environ.get(name) for name in VARIABLES) or not on_cpu:
        return here
    if began_with is not None and began_with <= here:
        return began_with
    return 1 if flops < SMALL_FLOPS else here
