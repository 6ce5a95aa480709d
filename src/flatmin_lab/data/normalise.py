"""Normalisation: (x − mean) / std, channel by channel, with the training set's own mean and standard deviation.

Or with two numbers that are given, the same for all channels.

Images are divided by 255 first, so both are numbers between 0 and 1. The statistics are sums of integers, exact in any
order and on any device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flatmin_lab.data.dataset import Split


@dataclass(frozen=True, eq=False)  # tensors have no truth value, and torch.export of torch 2.11 compares them
class Normalisation:
    """`mean` and standard deviation `std`: a number per channel, on the data's device."""

    mean: Tensor  # (C,)
    std: Tensor  # (C,)

    @staticmethod
    def of(split: Split) -> "Normalisation":
        """The statistics of a split. A channel that never varies keeps its scale."""
        if not isinstance(split, Split):
            raise TypeError(f"Normalisation.of takes a Split such as data.train, got {type(split).__name__}")
        if split.is_images:
            mean, variance = _image_statistics(split.x)
        else:
            mean, variance = split.x.double().mean(dim=0), split.x.double().var(dim=0, correction=0)
        std = torch.where(variance > 0, variance, 1.0).sqrt()
        return Normalisation(mean.float(), std.float())

    @staticmethod
    def fixed(mean: float, std: float, *, like: Split) -> "Normalisation":
        """These two numbers in every channel of the split.

        0.5 and 0.5 map pixels to −1 … 1, as the first version of the paper's published code does for SVHN.
        """
        if not std > 0:
            raise ValueError(f"the standard deviation must be above 0, got {std}")
        channels = like.shape[0]
        return Normalisation(*(torch.full((channels,), number, device=like.x.device) for number in (mean, std)))

    def __call__(self, x: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """uint8 images or float points, normalised; in `dtype`, computed in float32."""
        if x.dtype != torch.uint8 and not x.is_floating_point():
            raise TypeError(
                f"inputs must be uint8 images, or floating-point images from 0 to 1 or points, got {x.dtype}; for "
                "pixels from 0 to 255, use x.to(torch.uint8)"
            )
        mean, std = self._statistics_like(x)
        unit = x.float() / 255 if x.dtype == torch.uint8 else x
        return ((unit - mean) / std).to(dtype)

    def undo(self, x: Tensor) -> Tensor:
        """Back to images with values from 0 to 1, or to points."""
        mean, std = self._statistics_like(x)
        return x.float() * std + mean

    def _statistics_like(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, shaped to broadcast over x's channels."""
        view = (-1, *[1] * (x.ndim - 2))
        return self.mean.view(view), self.std.view(view)


def _image_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of x/255 from a count of each of the 256 grey levels, without a float copy of the data."""
    levels = torch.arange(256, device=x.device)
    counts = torch.stack([_level_counts(x[:, channel]) for channel in range(x.shape[1])])
    n = x.numel() // x.shape[1]
    total, squares = (counts * levels).sum(dim=1), (counts * levels**2).sum(dim=1)
    # n² · variance in integers: nothing cancels
    spread = [n * int(square) - int(one) ** 2 for one, square in zip(total, squares, strict=True)]
    mean = total.double() / (255 * n)
    variance = torch.tensor([number / (255 * n) ** 2 for number in spread], dtype=torch.float64, device=x.device)
    return mean, variance


def _level_counts(channel: Tensor, *, part: int = 4096) -> Tensor:
    return torch.stack([torch.bincount(piece.flatten(), minlength=256) for piece in channel.split(part)]).sum(dim=0)
