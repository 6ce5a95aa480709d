"""Augmentation of whole batches on their device: each image has its own random numbers, drawn beforehand.

A stage is a pure function of uint8 images x (B, C, H, W) and of numbers u (B, draws), uniform in [0, 1). Whoever
calls it makes the numbers, one row per image, so the same row gives the same image in any batch, on any device. A stage
never reads values on the host, and its shapes depend on no value: an `Augmentation` can be captured in a CUDA graph.

    augment = augmentation("cutout", data)
    augment(x, augment.draw(len(x), generator=generator).to(x.device))
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from flatmin_lab.data.augment.autoaugment import AutoAugment
from flatmin_lab.data.dataset import Dataset
from flatmin_lab.data.sources.synthetic import original_name

Kind = Literal["none", "vanilla", "vanilla_v1", "cutout", "autoaugment"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Stage(Protocol):
    """A step of an augmentation: how many random numbers an image needs, a check of the shape, and the transform."""

    @property
    def draws(self) -> int: ...
    def check(self, shape: torch.Size) -> None: ...
    def __call__(self, x: Tensor, u: Tensor) -> Tensor: ...


def to_index(u: Tensor, count: int) -> Tensor:
    """Uniform float32 numbers in [0, 1) as integers 0 … count − 1."""
    return (u * count).long()  # u ≤ 1 − 2⁻²⁴, and then u · count is rounded to less than count


@dataclass(frozen=True)
class Crop:
    """Pad with a grey level, and crop a window of the old size at a random position."""

    padding: int
    fill: int = 128
    draws: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ValueError(f"padding must be at least 0, got {self.padding}")
        if not 0 <= self.fill <= 255:
            raise ValueError(f"fill is a grey level from 0 to 255, got {self.fill}")

    def check(self, shape: torch.Size) -> None:
        pass

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        top, left = to_index(u, 2 * self.padding + 1).unbind(1)
        windows = pad(x, [self.padding] * 4, value=self.fill).unfold(2, x.shape[2], 1).unfold(3, x.shape[3], 1)
        return windows[torch.arange(len(x), device=x.device), :, top, left]


@dataclass(frozen=True)
class Flip:
    """Mirror left and right, with probability ½."""

    draws: ClassVar[int] = 1

    def check(self, shape: torch.Size) -> None:
        pass

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        return torch.where((u < 0.5)[:, :, None, None], x.flip(3), x)


@dataclass(frozen=True)
class Cutout:
    """Black out a square centred on a random pixel; what lies beyond the border is cut off."""

    length: int
    draws: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"Cutout's length must be at least 1, got {self.length}")

    def check(self, shape: torch.Size) -> None:
        if self.length > min(shape[1:]):
            raise ValueError(
                f"Cutout's length must be at most the image's side, or it could cover the whole image: "
                f"got {self.length} for images of {shape[1]} by {shape[2]}"
            )

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        def covered(u: Tensor, side: int) -> Tensor:
            start = to_index(u, side)[:, None] - self.length // 2
            place = torch.arange(side, device=x.device)
            return (place >= start) & (place < start + self.length)

        rows, columns = covered(u[:, 0], x.shape[2]), covered(u[:, 1], x.shape[3])
        return x.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0)


@dataclass(frozen=True)
class Augmentation:
    """Stages in order, each with its own columns of the random numbers.

    >>> augment = Augmentation((Flip(), Cutout(16)))
    >>> augment(torch.full((1, 3, 32, 32), 9, dtype=torch.uint8), torch.tensor([[0.9, 0.0, 0.0]])).sum() / 27
    tensor(960.)
    """

    stages: tuple[Stage, ...] = ()

    @property
    def draws(self) -> int:
        return sum(stage.draws for stage in self.stages)

    def draw(self, count: int, *, generator: torch.Generator | None = None) -> Tensor:
        """The random numbers for that many images, (count, draws), on the generator's device."""
        device = "cpu" if generator is None else generator.device
        return torch.rand(count, self.draws, generator=generator, device=device, dtype=torch.float32)

    def check(self, shape: torch.Size) -> None:
        """Raise ValueError where images of shape (C, H, W) cannot be augmented."""
        for stage in self.stages:
            stage.check(shape)

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        if x.dtype != torch.uint8 or x.ndim != 4:
            raise TypeError(f"images must be uint8 (B, C, H, W), got {x.dtype} of shape {tuple(x.shape)}")
        if u.shape != (len(x), self.draws) or u.dtype != torch.float32:
            raise ValueError(
                f"{len(x)} images need float32 random numbers of shape {(len(x), self.draws)}, "
                f"got {u.dtype} of shape {tuple(u.shape)}; make them with draw({len(x)})"
            )
        columns = u.split([stage.draws for stage in self.stages], dim=1)
        for stage, own in zip(self.stages, columns, strict=True):
            x = stage(x, own)
        return x


CROPS = {"cifar10": Crop(4), "cifar100": Crop(4), "svhn": Crop(2), "digits": Crop(1, fill=0)}
CUTOUTS = {"cifar10": Cutout(16), "cifar100": Cutout(8), "svhn": Cutout(20), "digits": Cutout(4)}
SHAPES = {"cifar10": (3, 32, 32), "cifar100": (3, 32, 32), "svhn": (3, 32, 32), "digits": (1, 8, 8)}
NOT_FLIPPED = ("svhn", "digits")  # a mirrored digit is another character, or not one at all


def augmentation(kind: Kind, data: Dataset | str) -> Augmentation:
    """The paper's augmentations, with what its published code adds: padding, fill, lengths, and no flips for digits.

    "none" does nothing, "vanilla" is crop and flip, "cutout" adds the hole, "autoaugment" adds the policy before the
    hole, on SVHN in place of the crop. "vanilla_v1" is crop and flip as in the first version of the published code:
    padded by 2 with black, where later versions pad CIFAR by 4 with grey. A user's own data set is treated
    as photographs: padded by an eighth of the side (v1: a sixteenth), with a hole of half the side, and with the
    CIFAR-10 policy.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown augmentation {kind!r}; choose from {', '.join(KINDS)}")
    name = original_name(data if isinstance(data, str) else data.name)
    name = name if isinstance(data, str) or tuple(data.train.shape) == SHAPES.get(name) else ""
    if isinstance(data, str) and data not in CROPS:
        raise ValueError(
            f"the augmentation of {data!r} is not known; choose from {', '.join(CROPS)}, "
            "or give the Dataset itself if it is one of your own"
        )
    if kind == "none":
        return Augmentation()
    if isinstance(data, Dataset) and not data.train.is_images:
        raise ValueError(f"only images can be augmented, got the points of {data.name}; use the augmentation 'none'")
    side = min(SHAPES[name][1:] if isinstance(data, str) else data.train.shape[1:])
    first_version, usual = Crop(max(side // 16, 1), fill=0), CROPS.get(name, Crop(max(side // 8, 1)))
    stages: list[Stage] = [first_version if kind == "vanilla_v1" else usual]
    if name not in NOT_FLIPPED:
        stages.append(Flip())
    if kind == "autoaugment":
        policy = AutoAugment("svhn" if name == "svhn" else "cifar10")
        stages = [policy] if name == "svhn" else [*stages, policy]
    if kind in ("cutout", "autoaugment"):
        stages.append(CUTOUTS.get(name, Cutout(max(side // 2, 1))))
    result = Augmentation(tuple(stages))
    if isinstance(data, Dataset):
        result.check(data.train.shape)
    return result
