"""A data set in one `.npz` file: x_train, y_train, x_test, y_test, and optionally the class names.

Images are uint8 (N, H, W), (N, H, W, C) or (N, C, H, W); points are floats (N, D). Labels are integers from 0.
`names` is an array of strings; without it the classes are called 0, 1, 2, …

A file of 8 MB can unpack to 8 GB: what the arrays take is added up from their headers before one of them is read.
"""

import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatmin_lab.data.dataset import Dataset, Split, default_class_names

KEYS = ("x_train", "y_train", "x_test", "y_test")
CHANNELS = (1, 3, 4)
MAX_BYTES = 1 << 32  # of all arrays, unless the file itself is as large
Array = np.ndarray[tuple[int, ...], np.dtype[Any]]


def load(path: Path) -> Dataset:
    arrays = read(path, KEYS, optional=("names",))
    y_train, y_test = (_labels(arrays[key], f"{path}: {key}") for key in ("y_train", "y_test"))
    names = (
        _names(arrays["names"], f"{path}: names")
        if "names" in arrays
        else default_class_names(y_train, y_test, str(path))
    )
    if len(names) < 2:
        raise ValueError(f"{path} must have at least two classes, got labels that are all 0: is y_train filled in?")
    train = Split(_images(arrays["x_train"], f"{path}: x_train"), y_train)
    test = Split(_images(arrays["x_test"], f"{path}: x_test"), y_test)
    return Dataset(path.stem, train, test, names, str(path))


def load_test_images(path: Path) -> Tensor:
    """x_test alone, for which the file needs no labels."""
    x = _images(read(path, ("x_test",))["x_test"], f"{path}: x_test")
    if x.is_floating_point() and not bool(x.isfinite().all()):
        raise ValueError(f"{path}: points must be finite, got nan or infinity in x_test")
    return x


def read(path: Path, keys: tuple[str, ...], *, optional: tuple[str, ...] = ()) -> dict[str, Array]:
    """The named arrays of the file; never a pickle."""
    with _as_value_error(path), path.open("rb") as file, np.load(file, allow_pickle=False) as content:
        there = list(content)
        wanted = [key for key in (*keys, *optional) if key in there]
        total = sum(_checked_size(content.zip, key) for key in wanted)
    if total > max(MAX_BYTES, path.stat().st_size):
        raise ValueError(
            f"the arrays of {path} must take at most {MAX_BYTES >> 30} GiB, got {total / (1 << 30):.1f} GiB packed "
            f"into {path.stat().st_size} bytes; save them with np.savez, which does not pack them, or save fewer"
        )
    with _as_value_error(path), path.open("rb") as file, np.load(file, allow_pickle=False) as content:
        arrays = {key: np.asarray(content[key]) for key in wanted}
    missing = [key for key in keys if key not in arrays]
    if missing:
        raise ValueError(
            f"{path} must hold {', '.join(keys)}; missing: {', '.join(missing)}, found: {', '.join(there) or 'nothing'}"
        )
    return arrays


@contextmanager
def _as_value_error(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(
            f"{path} is not an intact .npz file of plain arrays ({error!s:.200}); delete it and make it again"
        ) from error


def _checked_size(content: zipfile.ZipFile, key: str) -> int:
    """Bytes of an array: what its header announces is what its member holds, no more is read of it."""
    name = key if key in content.namelist() else f"{key}.npy"
    with content.open(name) as member:
        version = np.lib.format.read_magic(member)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(member)
        held = content.getinfo(name).file_size - member.tell()
    if dtype.hasobject:
        raise ValueError(
            f"{key} holds Python objects, which are never loaded: save {key}.astype(int), or (str) for names"
        )
    if min(shape, default=0) < 0 or prod(shape) * dtype.itemsize != held:
        raise ValueError(f"{key} has {dtype} of shape {shape}, which do not fit its {held} bytes")
    return held


def _images(x: Array, what: str) -> Tensor:
    """uint8 images as (N, C, H, W), floats of two dimensions as points."""
    if x.dtype.kind == "f" and x.ndim == 2:
        return torch.from_numpy(x.astype(np.float32))
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        raise ValueError(
            f"{what}: images must be uint8 of shape (N, H, W), (N, H, W, C) or (N, C, H, W), points floats of shape "
            f"(N, D), got {x.dtype} of shape {x.shape}; float images of 0 to 1 become uint8 with "
            "(255 * x).round().astype('uint8')"
        )
    if x.ndim == 3:
        x = x[:, None]
    elif _channels_last(x.shape, what):
        x = x.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(x))


def _channels_last(shape: tuple[int, ...], what: str) -> bool:
    """Are the channels last? In tiny images both positions are possible: then the one that leaves a square image."""
    first, last = shape[1] in CHANNELS, shape[3] in CHANNELS
    if first and last and (shape[2] == shape[3]) != (shape[1] == shape[2]):
        first, last = shape[2] == shape[3], shape[1] == shape[2]
    if first == last:
        raise ValueError(
            f"{what}: images need 1, 3 or 4 channels, second or last, but in shape {shape} "
            f"{'both' if first else 'neither'} could be them; use (N, C, H, W)"
        )
    return last


def _names(names: Array, what: str) -> list[str]:
    if names.ndim != 1 or names.dtype.kind not in "US":
        raise ValueError(f"{what}: names must be strings of shape (K,), got {names.dtype} of shape {names.shape}")
    if names.dtype.kind == "U" and names.dtype.itemsize:
        codes = np.frombuffer(names.astype(names.dtype.newbyteorder("=")).tobytes(), np.uint32)
        if ((codes > sys.maxunicode) | ((codes >= 0xD800) & (codes < 0xE000))).any():
            raise ValueError(
                f"{what}: names must be valid Unicode, got numbers that are not characters; save them again"
            )
    return [name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in names.tolist()]


def _labels(y: Array, what: str) -> Tensor:
    if y.dtype.kind not in "ui":
        raise ValueError(f"{what}: labels must be whole numbers, got {y.dtype}")
    if y.size == 0:
        raise ValueError(f"{what}: there must be at least one label, got none")
    if y.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{what}: labels must number the classes 0, 1, 2, …, got {y.max()}")
    return torch.from_numpy(y.reshape(-1).astype(np.int64))
