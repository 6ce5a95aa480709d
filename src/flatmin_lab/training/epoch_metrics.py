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

ALWAYS = ("loss", "error", "skipped")  # what a step that was skipped counts in too


class Broken(NamedTuple):
    """The first step whose loss is not finite: how many steps before the last one, and the loss."""

    ago: int
    loss: float


class Row(NamedTuple):
    """What a step measured, of how many pictures."""

    pictures: int
    names: Sequence[str]


class Piece(NamedTuple):
    """Steps on their way to the host: all their numbers in a row, and when they are there (None: they are)."""

    rows: Sequence[Row]
    numbers: Tensor
    there: torch.cuda.Event | None

    def has_come(self, *, wait: bool) -> bool:
        if self.there is not None and wait:
            self.there.synchronize()
        return self.there is None or self.there.query()


class Tally:
    """Means over pictures, a measure at a time."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, int]] = {}  # total, and over how many pictures
        self.pending: list[tuple[int, Mapping[str, Tensor]]] = []  # steps that the host has not asked for
        self.coming: deque[Piece] = deque()  # those that it has asked for, and not counted
        self.uncounted = 0

    def add(self, pictures: int, measured: Mapping[str, Tensor]) -> None:
        self.pending.append((pictures, measured))
        self.uncounted += 1

    def look(self, *, wait: bool = True) -> Broken | None:
        """Ask for all steps so far, and add up those that have come; what is broken stops it."""
        if self.pending:
            self.coming.append(_sent(self.pending))
            self.pending = []
        while self.coming and self.coming[0].has_come(wait=wait):
            piece = self.coming.popleft()
            numbers = iter(piece.numbers.tolist())
            for pictures, names in piece.rows:
                self.uncounted -= 1
                measured = {name: next(numbers) for name in names}
                if not math.isfinite(measured["loss"]):
                    return Broken(self.uncounted, measured["loss"])
                self._count(pictures, measured)
        return None

    def _count(self, pictures: int, measured: Mapping[str, float]) -> None:
        """A step that overflowed has no norm, and moved nothing: it counts in loss and error alone."""
        skipped = measured.get("skipped", 0.0) > 0
        for name, value in measured.items():
            if name in ALWAYS or (math.isfinite(value) and not skipped):
                total, before = self.sums.get(name, (0.0, 0))
                self.sums[name] = (total + pictures * value, before + pictures)

    def means(self) -> dict[str, float]:
        return {name: total / pictures for name, (total, pictures) in self.sums.items()}

    def load(self, sums: Mapping[str, Any]) -> None:
        self.sums = {name: (total, pictures) for name, (total, pictures) in sums.items()}


def _sent(steps: Sequence[tuple[int, Mapping[str, Tensor]]]) -> Piece:
    rows = [Row(pictures, list(measured)) for pictures, measured in steps]
    packed = torch.stack([value.float() for _, measured in steps for value in measured.values()])
    if not packed.is_cuda:
        return Piece(rows, packed, None)
    numbers = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    numbers.copy_(packed, non_blocking=True)
    there = torch.cuda.Event()
    there.record(torch.cuda.current_stream(packed.device))
    return Piece(rows, numbers, there)
