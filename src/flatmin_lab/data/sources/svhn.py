"""SVHN, cropped digits, from the official `train_32x32.mat` and `test_32x32.mat`.

X is (32, 32, 3, N) uint8 and y (N, 1), with the digit 0 called 10. The paper does not use the 531,131 extra images.
"""

from pathlib import Path

import numpy as np
import torch

from flatmin_lab.data.dataset import Dataset, Split
from flatmin_lab.data.formats import mat
from flatmin_lab.data.formats.official_bytes import warn_unless_official
from flatmin_lab.system.files import read_regular

FILES = ("train_32x32.mat", "test_32x32.mat")
OFFICIAL_SIZES = (73_257, 26_032)


def load(source: Path) -> Dataset:
    """From the folder that holds both files."""
    contents = {name: read_regular(source / name, max_bytes=mat.MAX_BYTES) for name in FILES}
    train, test = (_split(source / name, content) for name, content in contents.items())
    if (len(train.y), len(test.y)) == OFFICIAL_SIZES:
        warn_unless_official("svhn", contents, str(source))
    return Dataset("svhn", train, test, [str(digit) for digit in range(10)], str(source))


def _split(path: Path, file: bytes) -> Split:
    try:
        content = mat.load(file, ("X", "y"))
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(
            f"{path} cannot be read: it may be damaged or cut short ({error!s:.200}); fetch it again"
        ) from error
    if not {"X", "y"} <= content.keys():
        raise ValueError(f"{path} must hold X and y, got {', '.join(content) or 'neither'}; use the official file")
    x, y = content["X"], content["y"].reshape(-1)
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[:3] != (32, 32, 3):
        raise ValueError(f"{path}: X must be uint8 of shape (32, 32, 3, N), got {x.dtype} of shape {x.shape}")
    digits = y.astype(np.int64)
    wrong = y[(digits != y) | (digits < 0) | (digits > 10)]
    if len(wrong):
        raise ValueError(f"{path}: labels must be whole numbers 0 to 10, where 10 is the digit 0, got {wrong[0]}")
    images = torch.from_numpy(np.ascontiguousarray(x.transpose(3, 2, 0, 1)))
    return Split(images, torch.from_numpy(digits % 10))
