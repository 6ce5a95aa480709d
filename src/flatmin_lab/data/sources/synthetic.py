"""Synthetic images in the shape of the paper's data sets: to check that everything runs, not to measure.

Every class is a smooth random pattern, drawn once; an image is its class's pattern, shifted, with noise. The images
depend on the name alone, so their checksum is the same everywhere.
"""

import torch
from torch.nn.functional import interpolate

from flatmin_lab.data.dataset import Dataset, Split
from flatmin_lab.system.rng import generator

SUFFIX = "-made"
CLASSES = {"svhn": 10, "cifar10": 10, "cifar100": 100}
TRAIN_IMAGES, TEST_IMAGES, SIDE = 200, 100, 32


def original_name(name: str) -> str:
    """The real data set that a synthetic one imitates; any other name is returned unchanged.

    >>> original_name("svhn-made"), original_name("digits")
    ('svhn', 'digits')
    """
    return name.removesuffix(SUFFIX)


def load(name: str) -> Dataset:
    """A synthetic data set by name: "cifar10-made" has the classes and shape of CIFAR-10.

    >>> load("cifar10-made").train
    Split(200 images of 3 × 32 × 32 on cpu)
    """
    like = original_name(name)
    draw = generator("made", like)
    coarse = torch.rand(CLASSES[like], 3, 4, 4, generator=draw, dtype=torch.float32)
    patterns = interpolate(coarse, size=(SIDE, SIDE), mode="bilinear", align_corners=True)
    train, test = _images(patterns, TRAIN_IMAGES, draw), _images(patterns, TEST_IMAGES, draw)
    return Dataset(name, train, test, [str(number) for number in range(CLASSES[like])], "generated")


def _images(patterns: torch.Tensor, count: int, draw: torch.Generator) -> Split:
    y = torch.arange(count) % len(patterns)
    shifts = torch.randint(-4, 5, (count, 2), generator=draw)
    moved = torch.stack(
        [patterns[label].roll(shift, dims=(1, 2)) for label, shift in zip(y.tolist(), shifts.tolist(), strict=True)]
    )
    noisy = 160 * moved + 95 * torch.rand(moved.shape, generator=draw, dtype=torch.float32)
    return Split(noisy.round().to(torch.uint8), y)
