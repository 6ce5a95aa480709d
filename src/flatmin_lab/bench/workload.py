"""What the steps of a benchmark work on: images of CIFAR-10's size in batches, and new models of one kind.

The data set is on the device. A step gets the indices of its images and their random numbers, and gathers, crops,
flips and normalises the images itself.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatmin.capture import autocast_to
from flatmin_lab import models
from flatmin_lab.data.augment.transforms import Augmentation
from flatmin_lab.data.batches import Batches
from flatmin_lab.data.dataset import Split
from flatmin_lab.data.normalise import Normalisation
from flatmin_lab.system.rng import generator_devices, seed_generators
from flatmin_lab.training.learner import AUTOCAST

SHAPE, CLASSES, IMAGES = (3, 32, 32), 10, 50_000  # CIFAR-10's
DISTINCT_BATCHES = 16  # the steps cycle through them


def random_images(device: torch.device, count: int = IMAGES) -> Split:
    """A data set of CIFAR-10's size, all of it random."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randint(0, 256, (count, *SHAPE), generator=generator, device=device, dtype=torch.uint8)
    return Split(x, torch.randint(0, CLASSES, (count,), generator=generator, device=device))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What all contenders for one model and batch size share."""

    model: str
    batches: Batches
    inputs: Sequence[tuple[Tensor, Tensor]]  # indices of images, and their random numbers
    precision: str

    @staticmethod
    def build(
        model: str, split: Split, normalise: Normalisation, *, batch_size: int, augment: Augmentation, precision: str
    ) -> "Workload":
        batches = Batches(split=split, batch_size=batch_size, normalise=normalise, augment=augment)
        order, u = batches.plan(0)
        parts = range(0, len(split) - batch_size + 1, batch_size)[:DISTINCT_BATCHES]
        inputs = [(order[at : at + batch_size], u[at : at + batch_size]) for at in parts]
        return Workload(model=model, batches=batches, inputs=inputs, precision=precision)

    @property
    def device(self) -> torch.device:
        return self.batches.split.x.device

    def batch(self, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.batches.at(index, u)
        return x.to(memory_format=torch.channels_last), y

    def new_model(self) -> nn.Module:
        """A model with the same initial weights every time."""
        seed_generators(generator_devices(self.device), 0)
        made = models.build(self.model, num_classes=CLASSES, **models.settings_for(self.model, SHAPE))
        return made.to(self.device).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload, no-any-return]

    def autocast(self) -> AbstractContextManager[Any]:
        """Autocast as in captured_step."""
        return autocast_to(AUTOCAST.get(self.precision), self.device)
