"""The means of an epoch: what the steps measured on the device, brought to the host now and then in one piece.

The numbers are added up on the host one by one, in the order of the steps, so a mean does not depend on when the host
looked, and a checkpoint keeps the sums to the last bit.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALWAYS = ("loss", "error", "skipped")  # what a step that was skipped counts in too


class Broken(NamedTuple):
    """The first step whose loss is not finite: how many steps before the last one, and the loss."""

    ago: int
    loss: float


class Tally:
    """Means over pictures, a measure at a time."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, int]] = {}  # total, and over how many pictures
        self.pending: list[tuple[int, Mapping[str, Tensor]]] = []  # steps that the host has not looked at

    def add(self, pictures: int, measured: Mapping[str, Tensor]) -> None:
        self.pending.append((pictures, measured))

    def look(self) -> Broken | None:
        """Wait for the device, and add up; what is broken stops it."""
        if not self.pending:
            return None
        pending, self.pending = self.pending, []
        names = list(pending[0][1])
        rows = torch.stack([torch.stack([m[name].float() for name in names]) for _, m in pending]).tolist()
        for number, ((pictures, _), row) in enumerate(zip(pending, rows, strict=True)):
            measured = dict(zip(names, row, strict=True))
            if not math.isfinite(measured["loss"]):
                return Broken(len(rows) - 1 - number, measured["loss"])
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
