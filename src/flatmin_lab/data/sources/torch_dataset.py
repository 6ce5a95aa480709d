"""Any `torch.utils.data.Dataset` of (image, label), read into tensors once, and from a cache the next time.

    data = from_torch(train, test, name="mine", cache="data/mine.npz")

An image is a PIL image, a uint8 array or tensor, or floats from 0 to 1 (which is what ToTensor makes): tensors with
the channels first, arrays with the channels last. A float vector is a point. Random transforms do not belong in the
data set: reading it once would freeze them, so a data set whose items differ between two reads is refused. For
augmentation there is `flatmin_lab.data.augment.transforms`.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatmin_lab.data.dataset import Dataset, Split, default_class_names
from flatmin_lab.data.sources import npz
from flatmin_lab.data.sources.image_folder import GREY_MODES, check_eight_bits
from flatmin_lab.system.files import atomic_write

PROBES = 16
SPLITS = ("train", "test")


def from_torch(
    train: Any, test: Any, *, name: str, names: Sequence[str] | None = None, cache: Path | str | None = None
) -> Dataset:
    """Both splits; class names from `names`, from the data sets' `classes`, or numbers.

    The cache is rebuilt when the length of the data set or one of 16 items spread over it has changed; after a smaller
    change, delete it.
    """
    if names is None:
        _check_same_classes(train, test)
    probes = [_probe(split, which) for split, which in ((train, "training"), (test, "test"))]
    seen = hashlib.sha256("".join(probes).encode()).hexdigest()
    path = None if cache is None else Path(cache).expanduser()
    kept = None if path is None or not path.exists() else _cached(path, seen)
    splits = kept or (_read(train), _read(test))
    found = names or _classes_of(train) or default_class_names(splits[0].y, splits[1].y, name)
    data = Dataset(name, splits[0], splits[1], [str(one) for one in found], str(path or type(train).__name__))
    if path is not None and kept is None:
        _write(path, seen, splits)
    return data


def _check_same_classes(train: Any, test: Any) -> None:
    """Raise where a label has two names: torchvision's ImageFolder numbers the folders that it finds in each split."""
    ours, theirs = _classes_of(train), _classes_of(test)
    if ours and theirs and ours != theirs:
        odd = [str(name) for name in (*ours, *theirs) if name not in ours or name not in theirs]
        problem = f"only one has {', '.join(odd[:4])}" if odd else "they have them in another order"
        raise ValueError(
            f"both splits must have the same `classes`, or a label means another class in each, but {problem}; "
            "number the classes of both alike, or give names= if they are"
        )


def _classes_of(split: Any) -> list[Any]:
    """A list or an array of names; empty if it has none."""
    classes = getattr(split, "classes", None)
    return [] if classes is None else list(classes)


def _item(split: Any, index: int) -> tuple[Tensor, int]:
    if not hasattr(split, "__getitem__"):
        raise TypeError(
            f"the data set must give its items by index, got a {type(split).__name__}; pass the data set itself"
        )
    item = split[index]
    if not isinstance(item, tuple | list) or len(item) != 2:
        got = f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__
        raise TypeError(f"the data set must give pairs (image, label), got {got} at {index}")
    return _image(item[0], index), _label(item[1], index)


def _label(y: Any, index: int) -> int:
    single = isinstance(y, Tensor | np.ndarray | np.generic) and np.prod(y.shape) == 1
    value = y.item() if single else y
    if isinstance(value, bool) or not isinstance(value, int):
        kind = "" if isinstance(value, int | float | str) else f" ({type(value).__name__})"
        raise TypeError(
            f"a label must be one whole number, got {value!r:.60}{kind} at {index}; number the classes from 0"
        )
    return value


def _image(x: Any, index: int) -> Tensor:
    """An image as uint8 (C, H, W), or a point as float32 (D,)."""
    channels_last = isinstance(x, np.ndarray)
    if hasattr(x, "convert") and hasattr(x, "mode"):  # a PIL image
        x, channels_last = (
            np.array(x.convert("L" if check_eight_bits(x.mode, f"item {index}") in GREY_MODES else "RGB")),
            True,
        )
    if isinstance(x, np.ndarray):
        x = torch.from_numpy(np.array(x))
    if not isinstance(x, Tensor):
        raise TypeError(f"an image must be a PIL image, an array or a tensor, got {type(x).__name__} at {index}")
    x = torch.as_tensor(x).detach().cpu()
    if x.ndim == 1 and x.is_floating_point():
        if not bool(x.isfinite().all()):
            raise ValueError(f"a point must be finite, got nan or infinity at {index}")
        point: Tensor = x.float()
        return point
    return _as_uint8(_channels_first(x, index, last=channels_last), index)


def _channels_first(x: Tensor, index: int, *, last: bool) -> Tensor:
    if x.ndim == 2:
        return x[None]
    places = (2, 0) if last else (0, 2)
    for place in places if x.ndim == 3 else ():
        if x.shape[place] in npz.CHANNELS:
            return x.movedim(place, 0)
    raise ValueError(
        f"an image must have 1, 3 or 4 channels, first in a tensor and last in an array, "
        f"got shape {tuple(x.shape)} at {index}"
    )


def _as_uint8(x: Tensor, index: int) -> Tensor:
    if x.is_floating_point():
        if not bool(((x >= 0) & (x <= 1)).all()):
            raise ValueError(
                f"a float image must have values from 0 to 1, got {x.min():g} to {x.max():g} at {index}; "
                "pass the data set without normalisation"
            )
        return (x * 255).round().to(torch.uint8)
    if x.dtype != torch.uint8:
        raise ValueError(f"an image must be uint8, or floats from 0 to 1, got {x.dtype} at {index}; convert it first")
    return x


def _probe(split: Any, which: str) -> str:
    """A fingerprint from the number of items and some of them, each read twice."""
    try:
        count = len(split)
    except TypeError as error:
        raise TypeError(f"the {which} set must know its length; turn an iterable data set into a list first") from error
    if count == 0:
        raise ValueError(f"the {which} set must have at least one image, got none")
    text = str(count)
    for index in sorted({number * (count - 1) // (PROBES - 1) for number in range(PROBES)}):
        first, again = _item(split, index), _item(split, index)
        if first[1] != again[1] or first[0].shape != again[0].shape or not torch.equal(first[0], again[0]):
            raise ValueError(
                f"item {index} of the {which} set differs from one reading to the next: it has a random transform, "
                "which reading once would freeze. Pass the data set without it and augment batches instead"
            )
        content = hashlib.sha256(first[0].contiguous().numpy().data).hexdigest()
        text += f" {first[1]} {first[0].dtype} {tuple(first[0].shape)} {content}"
    return text


def _read(split: Any) -> Split:
    items = [_item(split, index) for index in range(len(split))]
    shapes = {tuple(x.shape): index for index, (x, _) in enumerate(items)}
    if len(shapes) > 1:
        (one, first), (two, second), *_ = shapes.items()
        raise ValueError(
            f"all images must have one shape, got {one} at {first} and {two} at {second}; resize them in the data set"
        )
    return Split(torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items]))


def _cached(path: Path, seen: str) -> tuple[Split, Split] | None:
    """The splits in the cache; None where the data set has changed since."""
    arrays = npz.read(path, npz.KEYS, optional=("probe",))
    if "probe" not in arrays:
        raise ValueError(f"{path} is a data set of its own, not a cache; choose another place for the cache")
    if str(arrays["probe"]) != seen:
        return None
    train, test = (
        Split(torch.from_numpy(arrays[f"x_{which}"]), torch.from_numpy(arrays[f"y_{which}"])) for which in SPLITS
    )
    return train, test


def _write(path: Path, seen: str, splits: tuple[Split, Split]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {f"x_{which}": split.x.numpy() for which, split in zip(SPLITS, splits, strict=True)}
    labels = {f"y_{which}": split.y.numpy() for which, split in zip(SPLITS, splits, strict=True)}
    with atomic_write(path) as file:
        np.savez(file, allow_pickle=False, probe=np.array(seen), **arrays, **labels)
