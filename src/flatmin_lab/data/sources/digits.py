"""scikit-learn's digits: 1,797 real handwritten digits of 8 by 8, part of the package, so nothing is downloaded.

Their 17 grey levels are scaled to 0 … 255. The set has no split of its own: a fifth of every class is the test set,
always the same fifth.
"""

from functools import cache

import torch
from torch import Tensor

from flatmin_lab.data.dataset import Dataset, Split, stratified_split
from flatmin_lab.system.optional_deps import need
from flatmin_lab.system.rng import generator


@cache
def all_digits() -> tuple[Tensor, Tensor]:
    """Every image and label, parsed once in a process."""
    digits = need("sklearn.datasets", "the data set digits").load_digits()
    x = torch.from_numpy(digits.images).mul(255 / 16).round().to(torch.uint8)[:, None]
    return x, torch.from_numpy(digits.target).long()


def load() -> Dataset:
    """The embedded data set, 1,438 digits for training and 359 for testing."""
    x, y = all_digits()
    train, test = stratified_split(y, share=0.2, generator=generator("digits"))
    return Dataset(
        "digits",
        Split(x[train], y[train]),
        Split(x[test], y[test]),
        [str(digit) for digit in range(10)],
        "scikit-learn",
    )
