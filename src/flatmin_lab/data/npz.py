"""A data set in one `.npz` file: x_train, y_train, x_test, y_test, and the class names if you like.

Pictures are uint8 (N, H, W), (N, H, W, C) or (N, C, H, W); points are floats (N, D). Labels are whole numbers from 0.
`names` is an array of strings; without it the classes are called 0, 1, 2, …
"""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatmin_lab.data.dataset import Dataset, Split

KEYS = ("x_train", "y_train", "x_test", "y_test")
Array = np.ndarray[tuple[int, ...], np.dtype[Any]]


def load(path: Path) -> Dataset:
    arrays = read(path, KEYS, optional=("names",))
    y_train, y_test = (_labels(arrays[key], f"{path}: {key}") for key in ("y_train", "y_test"))
    names = [str(name) for name in arrays["names"]] if "names" in arrays else None
    if names is None:
        names = [str(number) for number in range(int(max(y_train.max(), y_test.max())) + 1)]
    train = Split(pictures(arrays["x_train"], f"{path}: x_train"), y_train)
    test = Split(pictures(arrays["x_test"], f"{path}: x_test"), y_test)
    return Dataset(path.stem, train, test, names, str(path))


def read(path: Path, keys: tuple[str, ...], *, optional: tuple[str, ...] = ()) -> dict[str, Array]:
    """The named arrays of the file; never a pickle."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
            there = list(content)
            arrays = {key: content[key] for key in (*keys, *optional) if key in there}
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is not a whole .npz file of plain arrays ({error}); write it again") from error
    missing = [key for key in keys if key not in arrays]
    if missing:
        raise ValueError(
            f"{path} must hold {', '.join(keys)}; missing: {', '.join(missing)}, there: {', '.join(there) or 'nothing'}"
        )
    return arrays


def pictures(x: Array, what: str) -> Tensor:
    """uint8 pictures as (N, C, H, W), floats of two dimensions as points."""
    if x.dtype.kind == "f" and x.ndim == 2:
        return torch.from_numpy(x.astype(np.float32))
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        raise ValueError(
            f"{what}: pictures must be uint8 of shape (N, H, W), (N, H, W, C) or (N, C, H, W), points floats of shape "
            f"(N, D), got {x.dtype} of shape {x.shape}"
        )
    if x.ndim == 3:
        x = x[:, None]
    elif x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        x = x.transpose(0, 3, 1, 2)
    elif x.shape[1] not in (1, 3, 4):
        raise ValueError(f"{what}: pictures need 1, 3 or 4 channels, second or last, got shape {x.shape}")
    return torch.from_numpy(np.ascontiguousarray(x))


def _labels(y: Array, what: str) -> Tensor:
    if y.dtype.kind not in "ui":
        raise ValueError(f"{what}: labels must be whole numbers, got {y.dtype}")
    if y.size == 0:
        raise ValueError(f"{what}: there must be at least one label, got none")
    return torch.from_numpy(y.reshape(-1).astype(np.int64))
