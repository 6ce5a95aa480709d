"""SVHN, cropped digits, from the official `train_32x32.mat` and `test_32x32.mat`.

X is (32, 32, 3, N) uint8 and y (N, 1), with the digit 0 called 10. The paper does not use the 531,131 extra pictures.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatmin_lab.data.dataset import Dataset, Split

FILES = ("train_32x32.mat", "test_32x32.mat")


def load(source: Path) -> Dataset:
    """From the folder that holds both files."""
    train, test = (_split(source / name) for name in FILES)
    return Dataset("svhn", train, test, [str(digit) for digit in range(10)], str(source))


def _split(path: Path) -> Split:
    from scipy.io import loadmat

    if not path.is_file():
        raise FileNotFoundError(f"SVHN needs {' and '.join(FILES)} in one folder; missing: {path}")
    try:
        content = loadmat(path, variable_names=["X", "y"])
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"{path} is damaged or cut short ({error}); delete it and fetch it again") from error
    if not {"X", "y"} <= content.keys():
        raise ValueError(f"{path} must hold X and y, got {', '.join(k for k in content if k[0] != '_') or 'nothing'}")
    x, y = content["X"], content["y"].reshape(-1)
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[:3] != (32, 32, 3):
        raise ValueError(f"{path}: X must be uint8 of shape (32, 32, 3, N), got {x.dtype} of shape {x.shape}")
    if y.dtype.kind not in "ui" or (y > 10).any() or (y < 0).any():
        raise ValueError(f"{path}: labels must be whole numbers 1 to 10 (10 is the digit 0), got {_wrong(y)}")
    pictures = torch.from_numpy(np.ascontiguousarray(x.transpose(3, 2, 0, 1)))
    return Split(pictures, torch.from_numpy(y.astype(np.int64) % 10))


def _wrong(y: "np.ndarray[Any, Any]") -> str:
    if y.dtype.kind not in "ui":
        return str(y.dtype)
    return str(y[(y > 10) | (y < 0)][0])
