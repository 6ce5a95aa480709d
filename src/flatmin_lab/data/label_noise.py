"""Label noise: a share of the training labels is replaced at random, so that memorising them does harm.

The test labels stay correct. Which labels are replaced, and with what, depends on the seed alone, so every method gets
the same ones.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flatmin_lab.data.dataset import Dataset, Split
from flatmin_lab.system.rng import generator


class NoisyDataset(NamedTuple):
    data: Dataset
    wrong: Tensor  # indices of the replaced labels in the training split, on its device


def add_label_noise(data: Dataset, share: float, *, seed: int) -> NoisyDataset:
    """Replace that share of the training labels, rounded, each with one of the other classes, all equally likely."""
    if not 0 <= share < 1:
        raise ValueError(f"the share of wrong labels must be at least 0 and below 1, got {share}")
    if share == 0:
        return NoisyDataset(data, torch.zeros(0, dtype=torch.long, device=data.train.y.device))
    if data.num_classes < 2:
        raise ValueError(f"wrong labels need at least two classes, got {data.num_classes}")
    count = len(data.train)
    draws = generator("noise", seed)
    wrong = torch.randperm(count, generator=draws)[: round(share * count)]
    shift = torch.randint(1, data.num_classes, (len(wrong),), generator=draws)
    device = data.train.y.device
    wrong, shift = wrong.to(device), shift.to(device)
    y = data.train.y.clone()
    y[wrong] = (y[wrong] + shift) % data.num_classes
    return NoisyDataset(replace(data, train=Split(data.train.x, y)), wrong)
