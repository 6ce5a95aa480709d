"""Batches of a split: a random order and the random numbers of the augmentation, both fixed by (seed, epoch).

    batches = Batches(split=data.train, batch_size=50, normalise=Normalisation.of(data.train), augment=augment, seed=0)
    for x, y in batches.epoch(3): ...

The plan of an epoch is made on the CPU and copied to the data's device once. So an epoch can start at any batch
(`start=`), it is the same on every device, and every method with that seed sees the same images.

Some images may be held out for the first epochs. These epochs have as many batches as the others: images that are
trained on fill the places of those that are not.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from flatmin_lab.data.augment.transforms import Augmentation
from flatmin_lab.data.dataset import Split
from flatmin_lab.data.normalise import Normalisation
from flatmin_lab.system.rng import generator

HELP = {
    "split": "use data.train or data.test of a Dataset; make one from a torch data set with from_torch",
    "normalise": "make one with Normalisation.of(data.train)",
    "augment": 'make one with augmentation("vanilla", data), or leave it out',
}


class Plan(NamedTuple):
    """An epoch, or part of one: the order of the images and their random numbers, on the data's device."""

    order: Tensor  # (N,)
    u: Tensor  # (N, draws)


class HeldOut(NamedTuple):
    """Images that the first epochs do not train on."""

    indices: Tensor
    epochs: int  # how many of them


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Augmented, normalised, shuffled batches; the last one is smaller if the size does not divide the set."""

    split: Split
    batch_size: int
    normalise: Normalisation
    augment: Augmentation = field(default_factory=Augmentation)
    seed: int = 0
    dtype: torch.dtype = torch.float32
    held_out: HeldOut | None = None

    def __post_init__(self) -> None:
        for name, kind in (("split", Split), ("normalise", Normalisation), ("augment", Augmentation)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(
                    f"{name} must be a {kind.__name__}, got {type(getattr(self, name)).__name__}; {HELP[name]}"
                )
        if self.batch_size not in range(1, len(self.split) + 1):
            raise ValueError(
                f"the batch size must be from 1 to the {len(self.split)} images of the split, got {self.batch_size}"
            )
        if self.augment.stages and not self.split.is_images:
            raise ValueError("only images can be augmented, got points; use the augmentation 'none'")
        self.augment.check(self.split.shape)

    def __len__(self) -> int:
        return math.ceil(len(self.split) / self.batch_size)

    def plan(self, epoch: int) -> Plan:
        device, count = self.split.x.device, len(self.split)
        order = torch.randperm(count, generator=generator("order", self.seed, epoch))
        if self.held_out is not None and epoch < self.held_out.epochs:
            order = self._filled(order[~torch.isin(order, self.held_out.indices.cpu())], epoch)
        u = self.augment.draw(count, generator=generator("augment", self.seed, epoch))
        return Plan(order.to(device), u.to(device))

    def _filled(self, order: Tensor, epoch: int) -> Tensor:
        """As long as the split: the images of an order, then some of them again."""
        again = torch.randperm(len(order), generator=generator("order again", self.seed, epoch))
        rounds = math.ceil(len(self.split) / len(order)) - 1
        return torch.cat([order, order[again].repeat(rounds)])[: len(self.split)]

    def at(self, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """The batch of these images with these random numbers: work on the device alone, its shape fixed by `index`."""
        x = self.split.x[index]
        if self.split.is_images:  # points have no augmentation
            x = self.augment(x, u)
        return self.normalise(x, dtype=self.dtype), self.split.y[index]

    def parts(self, number: int, *, start: int = 0) -> Iterator[Plan]:
        """The plan of an epoch batch by batch, from batch `start` on: what `at` makes each batch from."""
        if not 0 <= start <= len(self):
            raise ValueError(f"start must be one of the {len(self)} batches of an epoch, got {start}")
        plan = self.plan(number)
        for begin in range(start * self.batch_size, len(self.split), self.batch_size):
            part = slice(begin, begin + self.batch_size)
            yield Plan(plan.order[part], plan.u[part])

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch, from batch `start` on."""
        for part in self.parts(number, start=start):
            yield self.at(*part)


def in_order(
    split: Split, normalise: Normalisation, *, batch_size: int = 500, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Tensor, Tensor]]:
    """The images in their stored order, normalised, not augmented: for evaluation."""
    for x, y in zip(split.x.split(batch_size), split.y.split(batch_size), strict=True):
        yield normalise(x, dtype=dtype), y
