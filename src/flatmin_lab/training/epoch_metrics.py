"""The means of an epoch: what the steps measured on the device, brought to the host now and then in one piece.

On a GPU a piece travels while training goes on: it is packed there and copied to page-locked memory, and an event says
when it has arrived. Progress counts what has (`wait=False`), an epoch's end and a checkpoint wait for all of it.

The numbers are added up on the host one by one, in the order of the steps, so a mean does not depend on when the host
looked, and a checkpoint keeps the sums to the last bit.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALWAYS_COUNTED = ("loss", "error", "skipped")  # what a step that was skipped counts in too


class NonFiniteLoss(NamedTuple):
    """The first step whose loss is not finite: how many steps before the last one, and the loss."""

    steps_ago: int
    loss: float


class StepRow(NamedTuple):
    """What a step measured, of how many images."""

    images: int
    names: Sequence[str]


class Transfer(NamedTuple):
    """Steps on their way to the host: all their numbers in a row, and when they are there (None: they are)."""

    rows: Sequence[StepRow]
    numbers: Tensor
    arrival: torch.cuda.Event | None

    def has_arrived(self, *, wait: bool) -> bool:
        if self.arrival is not None and wait:
            self.arrival.synchronize()
        return self.arrival is None or self.arrival.query()


class EpochMetrics:
    """Means over images, a measure at a time."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, int]] = {}  # total, and over how many images
        self.pending: list[tuple[int, Mapping[str, Tensor]]] = []  # steps that the host has not asked for
        self.in_flight: deque[Transfer] = deque()  # those that it has asked for, and not counted
        self.uncounted = 0

    def add(self, images: int, measured: Mapping[str, Tensor]) -> None:
        self.pending.append((images, measured))
        self.uncounted += 1

    def collect(self, *, wait: bool = True) -> NonFiniteLoss | None:
        """Ask for all steps so far, and add up those that have come; what is broken stops it."""
        if self.pending:
            self.in_flight.append(_send(self.pending))
            self.pending = []
        while self.in_flight and self.in_flight[0].has_arrived(wait=wait):
            piece = self.in_flight.popleft()
            numbers = iter(piece.numbers.tolist())
            for images, names in piece.rows:
                self.uncounted -= 1
                measured = {name: next(numbers) for name in names}
                if not math.isfinite(measured["loss"]):
                    return NonFiniteLoss(self.uncounted, measured["loss"])
                self._count(images, measured)
        return None

    def _count(self, images: int, measured: Mapping[str, float]) -> None:
        """A step that overflowed has no norm, and moved nothing: it counts in loss and error alone."""
        skipped = measured.get("skipped", 0.0) > 0
        for name, value in measured.items():
            if name in ALWAYS_COUNTED or (math.isfinite(value) and not skipped):
                total, before = self.sums.get(name, (0.0, 0))
                self.sums[name] = (total + images * value, before + images)

    def means(self) -> dict[str, float]:
        return {name: total / images for name, (total, images) in self.sums.items()}

    def load(self, sums: Mapping[str, Any]) -> None:
        self.sums = {name: (total, images) for name, (total, images) in sums.items()}


def _send(steps: Sequence[tuple[int, Mapping[str, Tensor]]]) -> Transfer:
    rows = [StepRow(images, list(measured)) for images, measured in steps]
    packed = torch.stack([value.float() for _, measured in steps for value in measured.values()])
    if not packed.is_cuda:
        return Transfer(rows, packed, None)
    numbers = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    numbers.copy_(packed, non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record(torch.cuda.current_stream(packed.device))
    return Transfer(rows, numbers, arrival)
