"""The means of an epoch: what the steps measured on the device, copied to the host now and then in one transfer.

On a GPU a transfer overlaps with training: the numbers are packed there and copied to pinned memory, and a CUDA event
says when they have arrived. Progress counts what has arrived (`wait=False`); an epoch's end and a checkpoint wait for
all of it.

The host adds the numbers one by one, in the order of the steps, so a mean does not depend on when they were collected,
and a checkpoint keeps the sums to the last bit.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALWAYS_COUNTED = ("loss", "error", "skipped")  # counted for skipped steps too


class NonFiniteLoss(NamedTuple):
    """The first loss that is not finite: how many steps before the last one it was, and its value."""

    steps_ago: int
    loss: float


class StepRow(NamedTuple):
    """The names of what a step measured, and its number of images."""

    images: int
    names: Sequence[str]


class Transfer(NamedTuple):
    """Steps on their way to the host: their numbers in one tensor, and the event of their arrival (None: arrived)."""

    rows: Sequence[StepRow]
    numbers: Tensor
    arrival: torch.cuda.Event | None

    def has_arrived(self, *, wait: bool) -> bool:
        if self.arrival is not None and wait:
            self.arrival.synchronize()
        return self.arrival is None or self.arrival.query()


class EpochMetrics:
    """Means over the images of an epoch, one per metric."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, int]] = {}  # total, and number of images
        self.pending: list[tuple[int, Mapping[str, Tensor]]] = []  # steps not sent to the host yet
        self.in_flight: deque[Transfer] = deque()  # sent, and not counted yet
        self.uncounted = 0

    def add(self, images: int, measured: Mapping[str, Tensor]) -> None:
        self.pending.append((images, measured))
        self.uncounted += 1

    def collect(self, *, wait: bool = True) -> NonFiniteLoss | None:
        """Send all steps so far, and add up those that have arrived, up to the first loss that is not finite."""
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
        """A step that overflowed has no norm and moved nothing: it counts only in loss and error."""
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
