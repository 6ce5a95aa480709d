"""A data set is tensors on a device: uint8 images or float points, their labels, and the names of the classes.

There are no workers and no loader: a batch is `split.x[index]`. The three sets of the paper take 185 to 306 MB each, so
they are read once and stay on the GPU. A `Dataset` has a training and a test split. For tuning, `held_out(seed)` gives
one whose test split is a tenth of the training images; final runs train on all of them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import SupportsIndex

import torch
from torch import Tensor

from flatmin_lab.system.rng import generator


@dataclass(frozen=True, repr=False)
class Split:
    """Images (N, C, H, W) uint8, or points (N, D) float32, with labels (N,) int64."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        return f"Split({len(self)} {self.kind} on {self.x.device})"

    @property
    def shape(self) -> torch.Size:
        """The shape of one image or point."""
        return self.x.shape[1:]

    @property
    def is_images(self) -> bool:
        """Images, and not points?"""
        return self.x.dtype == torch.uint8

    @property
    def kind(self) -> str:
        """What it holds, in words: "images of 3 × 32 × 32"."""
        return f"{'images' if self.is_images else 'points'} of {' × '.join(map(str, self.shape))}"

    def to(self, device: torch.device | str) -> "Split":
        """On that device; itself where it is there already."""
        x, y = self.x.to(device), self.y.to(device)
        return self if x is self.x and y is self.y else Split(x, y)

    def at(self, index: Tensor) -> "Split":
        return Split(self.x[index], self.y[index])


@dataclass(frozen=True, repr=False)
class Dataset:
    """`name`, a training and a test split, and one name per class; checked when made."""

    name: str
    train: Split
    test: Split
    names: Sequence[str]
    source: str = field(default="", compare=False)  # where it was read from

    def __post_init__(self) -> None:
        where = f"{self.name} ({self.source})" if self.source else self.name
        for which, split in (("training", self.train), ("test", self.test)):
            _check_split(where, which, split, len(self.names))
        if self.train.shape != self.test.shape:
            raise ValueError(
                f"{where}: training and test images must have one shape, "
                f"got {tuple(self.train.shape)} and {tuple(self.test.shape)}"
            )

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, train={self.train}, test={self.test}, {self.num_classes} classes)"

    @property
    def num_classes(self) -> int:
        return len(self.names)

    @property
    def in_channels(self) -> int:
        return self.train.shape[0]

    def to(self, device: torch.device | str) -> "Dataset":
        """On that device; itself where it is there already."""
        train, test = self.train.to(device), self.test.to(device)
        return self if train is self.train and test is self.test else replace(self, train=train, test=test)

    def held_out(self, seed: SupportsIndex, *, share: float = 0.1) -> "Dataset":
        """The training set in two parts: the last tenth of an order drawn by the seed becomes the test split.

        The real test set is not in it, so tuning with it never sees the test set.
        """
        kept, out = self.split_indices(seed, share=share)
        return replace(self, train=self.train.at(kept), test=self.train.at(out))

    def split_indices(self, seed: SupportsIndex, *, share: float, name: str = "held out") -> tuple[Tensor, Tensor]:
        """Indices of the training images that are kept, and of those that are held out; `name` draws another order."""
        count = round(len(self.train) * share) if 0 < share < 1 else 0
        if not 0 < count < len(self.train):
            raise ValueError(
                f"a share of {share} of {len(self.train)} training images leaves one part empty; "
                "choose a share between 0 and 1 that gives each part one"
            )
        order = torch.randperm(len(self.train), generator=generator(name, seed)).to(self.train.x.device)
        return order[:-count], order[-count:]

    @cached_property
    def checksum(self) -> str:
        """SHA-256 over types, shapes and contents: two data sets with the same effect on training have the same one."""
        digest = hashlib.sha256()
        for split in (self.train, self.test):
            for tensor in (split.x, split.y):
                digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()


def default_class_names(y_train: Tensor, y_test: Tensor, where: str) -> list[str]:
    """Names for classes that have none: 0, 1, 2, … up to the largest label."""
    low, high = int(min(y_train.min(), y_test.min())), int(max(y_train.max(), y_test.max()))
    if low != 0:
        raise ValueError(
            f"{where}: labels must start at 0, got {low} to {high}; "
            f"{'subtract ' + str(low) if low > 0 else 'count the classes from 0'}, or give the classes' names"
        )
    count = len(y_train) + len(y_test)
    if high >= count:
        raise ValueError(
            f"{where}: labels must number the classes 0, 1, 2, …, got {high} for {count} images; "
            "number the classes, or give their names"
        )
    return [str(number) for number in range(high + 1)]


def _check_split(name: str, which: str, split: Split, num_classes: int) -> None:
    """The rules that every split keeps."""
    x, y = split.x, split.y
    if len(x) != len(y):
        raise ValueError(f"{name}: every {which} image needs one label, got {len(x)} images and {len(y)} labels")
    if len(y) == 0 or x.numel() == 0:
        raise ValueError(f"{name}: the {which} split must have at least one image of at least one pixel, got none")
    if not ((x.dtype == torch.uint8 and x.ndim == 4) or (x.dtype == torch.float32 and x.ndim == 2)):
        raise ValueError(
            f"{name}: {which} data must be uint8 images (N, C, H, W) or float32 points (N, D), "
            f"got {x.dtype} of shape {tuple(x.shape)}"
        )
    if x.dtype == torch.float32 and not bool(x.isfinite().all()):
        raise ValueError(f"{name}: {which} points must be finite, got nan or infinity")
    if y.dtype != torch.int64 or y.ndim != 1:
        raise ValueError(f"{name}: {which} labels must be int64 of shape (N,), got {y.dtype} of shape {tuple(y.shape)}")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= num_classes:
        wrong = low if low < 0 else high
        raise ValueError(
            f"{name}: {which} labels must be 0 to {num_classes - 1} for {num_classes} classes, got {wrong} "
            f"(at {int((y == wrong).nonzero()[0])} of {len(y)}); number the classes from 0, or name them all"
        )


def stratified_split(labels: Tensor, *, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices of two parts, each in the old order; the second has that share of every class, rounded."""
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator)
        chosen[members[order[: round(share * len(members))]]] = True
    return (~chosen).nonzero().flatten(), chosen.nonzero().flatten()
