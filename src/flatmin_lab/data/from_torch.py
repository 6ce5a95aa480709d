"""Any `torch.utils.data.Dataset` of (picture, label), read once into tensors, and from a cache the next time.

    data = from_torch(train, test, name="mine", cache="data/mine.npz")

A picture is a PIL image, a uint8 array or tensor, or a float tensor with values from 0 to 1 (which is what ToTensor
makes); a float vector is a point. Random transforms do not belong in the data set: they would be frozen by the reading,
so one that answers differently the second time is refused. Augmentation is `flatmin_lab.data.augment`.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatmin_lab.data import npz
from flatmin_lab.data.dataset import Dataset, Split


def from_torch(
    train: Any, test: Any, *, name: str, names: Sequence[str] | None = None, cache: Path | str | None = None
) -> Dataset:
    """Both splits; class names from `names`, from the data set's `classes`, or numbers. The cache follows the data."""
    probes = [_probe(split, which) for split, which in ((train, "training"), (test, "test"))]
    seen = hashlib.sha256("".join(probes).encode()).hexdigest()
    path = None if cache is None else Path(cache)
    splits = None if path is None or not path.exists() else _cached(path, seen)
    if splits is None:
        splits = _read(train), _read(test)
        if path is not None:
            _write(path, seen, splits)
    top = int(max(splits[0].y.max(), splits[1].y.max())) + 1
    found = names or getattr(train, "classes", None) or [str(number) for number in range(top)]
    return Dataset(name, splits[0], splits[1], [str(one) for one in found], str(path or type(train).__name__))


def _item(split: Any, index: int) -> tuple[Tensor, int]:
    item = split[index]
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise TypeError(f"the data set must give pairs (picture, label), got {type(item).__name__} at {index}")
    return _picture(item[0], index), int(item[1])


def _picture(x: Any, index: int) -> Tensor:
    """A picture as uint8 (C, H, W), or a point as float32 (D,)."""
    if hasattr(x, "convert") and hasattr(x, "mode"):  # a PIL image
        x = np.array(x if x.mode in ("L", "RGB") else x.convert("RGB"))
    if isinstance(x, np.ndarray):
        array = torch.from_numpy(np.array(x))
        x = array.permute(2, 0, 1) if array.ndim == 3 and array.dtype == torch.uint8 else array
    if not isinstance(x, Tensor):
        raise TypeError(f"a picture must be a PIL image, an array or a tensor, got {type(x).__name__} at {index}")
    return _as_uint8(x, index)


def _as_uint8(x: Tensor, index: int) -> Tensor:
    if x.is_floating_point() and x.ndim == 1:
        return x.float()
    if x.ndim == 2:
        x = x[None]
    if x.ndim == 3 and x.is_floating_point():
        if not bool(((x >= 0) & (x <= 1)).all()):
            raise ValueError(
                f"a float picture must have values from 0 to 1, got {x.min():g} to {x.max():g} at {index}; "
                "pass the data set without normalisation"
            )
        x = (x * 255).round().to(torch.uint8)
    if x.ndim != 3 or x.dtype != torch.uint8:
        raise ValueError(f"a picture must be uint8 (C, H, W), got {x.dtype} of shape {tuple(x.shape)} at {index}")
    return x


def _probe(split: Any, which: str) -> str:
    """A fingerprint from the number of items and three of them, each read twice."""
    try:
        count = len(split)
    except TypeError as error:
        raise TypeError(f"the {which} set must know its length; make a list of an iterable data set first") from error
    if count == 0:
        raise ValueError(f"the {which} set must have at least one picture, got none")
    text = str(count)
    for index in (0, count // 2, count - 1):
        first, again = _item(split, index), _item(split, index)
        if not torch.equal(first[0], again[0]) or first[1] != again[1]:
            raise ValueError(
                f"item {index} of the {which} set differs from one reading to the next: it has a random transform, "
                "which reading once would freeze. Pass the data set without it and augment batches instead"
            )
        text += f" {first[1]} {hashlib.sha256(first[0].contiguous().numpy().data).hexdigest()}"
    return text


def _read(split: Any) -> Split:
    items = [_item(split, index) for index in range(len(split))]
    shapes = {tuple(x.shape): index for index, (x, _) in enumerate(items)}
    if len(shapes) > 1:
        (one, first), (two, second), *_ = shapes.items()
        raise ValueError(f"all pictures must have one shape, got {one} at {first} and {two} at {second}")
    return Split(torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items]))


def _cached(path: Path, seen: str) -> tuple[Split, Split] | None:
    """What the cache holds; None where the data set has changed since."""
    arrays = npz.read(path, npz.KEYS, optional=("probe",))
    if "probe" not in arrays:
        raise ValueError(f"{path} is a data set of its own, not a cache; choose another place for the cache")
    if str(arrays["probe"]) != seen:
        return None
    pairs = [(torch.from_numpy(arrays[f"x_{which}"]), torch.from_numpy(arrays[f"y_{which}"])) for which in _SPLITS]
    return Split(*pairs[0]), Split(*pairs[1])


_SPLITS = ("train", "test")


def _write(path: Path, seen: str, splits: tuple[Split, Split]) -> None:
    """Beside, then renamed: a reader sees a whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {f"x_{which}": split.x.numpy() for which, split in zip(_SPLITS, splits, strict=True)}
    labels = {f"y_{which}": split.y.numpy() for which, split in zip(_SPLITS, splits, strict=True)}
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            np.savez(file, allow_pickle=False, probe=np.array(seen), **arrays, **labels)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
