"""AutoAugment for a whole batch on its device: each image has its own sub-policy; no branch, no copy to the host.

An image draws five numbers: its sub-policy, and for each of the two operations whether it is applied and with which
sign. They give a row number; every row of a stage has its own map of source pixels, table of grey levels and factor,
computed once per device and image size (operations.py), and the last row does nothing. So all images pass through the
same operations, most of which leave most of them unchanged, and the shapes never depend on what was drawn: all of it
can be captured in a CUDA graph after one call outside.
"""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flatmin_lab.data.augment import operations
from flatmin_lab.data.augment.operations import (
    BLENDS,
    FACTORS,
    FILL,
    GEOMETRIC,
    LEVELS,
    OPERATIONS,
    SHEARS,
    SIGNED,
    TABLES,
)
from flatmin_lab.data.augment.policies import POLICIES, SubPolicy


@dataclass(frozen=True)
class AutoAugment:
    """The stage: `AutoAugment("cifar10")(x, u)` for uint8 images (B, 3, H, W) and u of shape (B, 5) in [0, 1)."""

    policy: str | tuple[SubPolicy, ...] = "cifar10"
    draws: ClassVar[int] = 5

    def __post_init__(self) -> None:
        if isinstance(self.policy, str) and self.policy not in POLICIES:
            raise ValueError(f"unknown AutoAugment policy {self.policy!r}; choose from {', '.join(POLICIES)}")
        if not self.pairs or not isinstance(self.pairs, tuple):
            raise ValueError(f"a policy must be a tuple of at least one pair of operations, got {self.policy!r}")
        for operation in (operation for pair in self.pairs for operation in pair):
            if operation.name not in OPERATIONS:
                raise ValueError(f"unknown operation {operation.name!r}; choose from {', '.join(OPERATIONS)}")
            if operation.level not in range(LEVELS):
                raise ValueError(f"the level of {operation.name} must be 0 to {LEVELS - 1}, got {operation.level}")
            if not 0 <= operation.probability <= 1:
                raise ValueError(
                    f"the probability of {operation.name} must be between 0 and 1, got {operation.probability}"
                )

    @property
    def pairs(self) -> tuple[SubPolicy, ...]:
        return POLICIES[self.policy] if isinstance(self.policy, str) else self.policy

    def check(self, shape: torch.Size) -> None:
        if shape[0] != 3:
            raise ValueError(
                f"AutoAugment needs 3 colour channels, got images with {shape[0]}; "
                "use 'vanilla' or 'cutout' for these, or turn them into RGB"
            )
        if min(shape[1:]) < 3:
            raise ValueError(
                f"AutoAugment needs images of at least 3 by 3, got {shape[1]} by {shape[2]}; use 'vanilla' for these"
            )

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        self.check(x.shape[1:])
        size = (x.shape[2], x.shape[3])
        choice = (u[:, 0] * len(self.pairs)).long()
        for half in (0, 1):
            stage = _stage(self.pairs, half, size, x.device)
            row = 2 * choice + (u[:, 2 + 2 * half] < 0.5)
            done = u[:, 1 + 2 * half] < stage.probability[choice]
            x = stage(x, torch.where(done, row, 2 * len(self.pairs)))
        return x


@dataclass(frozen=True)
class _Stage:
    """One of the two operations of every sub-policy: two rows each (the signs), then the row that does nothing."""

    names: frozenset[str]
    probability: Tensor  # (P,)
    is_a: dict[str, Tensor]  # name -> (R,) bool
    places: tuple[Tensor, ...]  # (R, H·W): four if a row shears, else only the nearest
    weights: tuple[Tensor, ...]  # (R, H·W) each, as many
    levels: Tensor  # (R, 256) uint8
    factor: Tensor  # (R,)

    def __call__(self, x: Tensor, row: Tensor) -> Tensor:
        if self.names & set(GEOMETRIC):
            x = self._move(x, row)
        if self.names & set(TABLES):
            x = self._look_up(x, row)
        if self.names & set(BLENDS):
            x = self._blend(x, row)
        return x

    def _move(self, x: Tensor, row: Tensor) -> Tensor:
        flat = pad(x.flatten(2), (0, 1), value=FILL)
        if not self.names & set(SHEARS):
            place = self.places[0].index_select(0, row)[:, None].expand(-1, x.shape[1], -1)
            return flat.gather(2, place).view_as(x)
        # Pillow truncates. The small number keeps integers from being truncated to the one below, as float32 would do
        # in even areas, where the weights sum to 1 − 6e-8, and as Pillow's doubles do now and then
        total = torch.full_like(x, 1e-4, dtype=torch.float32).flatten(2)
        flat, found = flat.float(), torch.empty_like(total)
        place, weight = (table.new_empty(len(row), table.shape[1]) for table in (self.places[0], self.weights[0]))
        # into the same memory each time: on a CPU, allocating costs more than the arithmetic
        for places, weights in zip(self.places, self.weights, strict=True):
            torch.index_select(places, 0, row, out=place)
            torch.index_select(weights, 0, row, out=weight)
            torch.gather(flat, 2, place[:, None].expand(-1, x.shape[1], -1), out=found)
            total.addcmul_(found, weight[:, None])
        return operations.to_uint8(total).view_as(x)

    def _look_up(self, x: Tensor, row: Tensor) -> Tensor:
        old = x.flatten(2).long()
        table = self.levels.index_select(0, row)[:, None].expand(-1, x.shape[1], -1)
        for name in ("contrast", "autocontrast", "equalize"):
            if name in self.names:
                table = torch.where(self.is_a[name][row][:, None, None], self._table(name, x, old, row), table)
        return table.gather(2, old).view_as(x)

    def _table(self, name: str, x: Tensor, old: Tensor, row: Tensor) -> Tensor:
        """The new grey levels where they depend on the image: (B, 3, 256), or (B, 1, 256) for all channels."""
        if name == "contrast":
            return operations.contrast(operations.grey(x), self.factor[row])
        if name == "autocontrast":
            return operations.autocontrast(x.flatten(2).amin(dim=2), x.flatten(2).amax(dim=2))
        one = torch.ones((), dtype=torch.int32, device=x.device).expand_as(old)
        counts = torch.zeros(*old.shape[:2], 256, dtype=torch.int32, device=x.device).scatter_add_(2, old, one)
        return operations.equalize(counts)

    def _blend(self, x: Tensor, row: Tensor) -> Tensor:
        """Colour and sharpness; all other rows blend with the factor 1, which is x whatever the other image is."""
        dull = operations.smooth(x) if "sharpness" in self.names else operations.grey(x).float()
        if {"sharpness", "color"} <= self.names:  # a lerp by 0 or 1 chooses, in place
            dull.lerp_(operations.grey(x).float(), self.is_a["color"][row].float()[:, None, None, None])
        blends = self.is_a["color"] | self.is_a["sharpness"]
        return operations.blend(x, dull, torch.where(blends, self.factor, 1.0)[row][:, None, None, None])


class _Row(NamedTuple):
    name: str
    places: Tensor
    weights: Tensor
    levels: Tensor
    factor: float


def _row(name: str, amount: float, size: tuple[int, int]) -> _Row:
    moving = name if name in GEOMETRIC else "translate_x"
    places, weights = operations.places(moving, amount if name in GEOMETRIC else 0.0, *size)
    return _Row(name, places, weights, operations.levels(name, amount), 1 + amount if name in FACTORS else 1.0)


@cache
def _stage(pairs: tuple[SubPolicy, ...], half: int, size: tuple[int, int], device: torch.device) -> _Stage:
    """The tables of a stage, on the device; cached, because a captured graph cannot copy them there."""
    chosen = [pair[half] for pair in pairs]
    rows = []
    for operation in chosen:
        amount = operations.magnitude(operation.name, operation.level)
        mirrored = -amount if operation.name in SIGNED else amount
        rows += [_row(operation.name, amount, size), _row(operation.name, mirrored, size)]
    rows.append(_row("nothing", 0.0, size))
    names = frozenset(operation.name for operation in chosen if operation.probability > 0)
    taps = range(4) if names & set(SHEARS) else (1,)  # the second place is the nearest one
    return _Stage(
        names=names,
        probability=torch.tensor([operation.probability for operation in chosen]).to(device),
        is_a={name: torch.tensor([row.name == name for row in rows]).to(device) for name in OPERATIONS},
        places=tuple(torch.stack([row.places[tap] for row in rows]).to(device) for tap in taps),
        weights=tuple(torch.stack([row.weights[tap] for row in rows]).to(device) for tap in taps),
        levels=torch.stack([row.levels for row in rows]).to(device),
        factor=torch.tensor([row.factor for row in rows]).to(device),
    )
