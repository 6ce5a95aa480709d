"""scikit-learn's digits: 1,797 real handwritten digits of 8 by 8, part of the package, so nothing is downloaded.

Their 17 grey levels are scaled to 0 … 255. The set has no split of its own: a fifth of every class is the test set,
always the same fifth.
"""

import torch

from flatmin_lab.data.dataset import Dataset, Split, stratified_split
from flatmin_lab.system.optional_deps import need
from flatmin_lab.system.rng import generator


def load() -> Dataset:
    """The embedded data set, 1,438 digits for training and 359 for testing."""
    digits = need("sklearn.datasets", "the data set digits").load_digits()
    x = torch.from_numpy(digits.images).mul(255 / 16).round().to(torch.uint8)[:, None]
    y = torch.from_numpy(digits.target).long()
    train, test = stratified_split(y, share=0.2, generator=generator("digits"))
    return Dataset(
        "digits",
        Split(x[train], y[train]),
        Split(x[test], y[test]),
        [str(digit) for digit in range(10)],
        "scikit-learn",
    )
