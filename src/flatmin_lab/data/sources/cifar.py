"""CIFAR-10 and CIFAR-100 from the official files: the python or the binary version, unpacked or as the `.tar.gz`.

    cifar-10-batches-py/   data_batch_1 … 5, test_batch, batches.meta     or cifar-10-python.tar.gz
    cifar-10-batches-bin/  data_batch_1.bin … 5, test_batch.bin           or cifar-10-binary.tar.gz
    cifar-100-python/      train, test, meta                              or cifar-100-python.tar.gz
    cifar-100-binary/      train.bin, test.bin, fine_label_names.txt      or cifar-100-binary.tar.gz

An image is 3072 bytes, the red plane first; CIFAR-100 is read with its 100 fine labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flatmin_lab.data.dataset import Dataset, Split
from flatmin_lab.data.formats import safe_pickle, tar
from flatmin_lab.data.formats.official_bytes import warn_unless_official

PIXELS = 3 * 32 * 32
OFFICIAL_SIZES = (50_000, 10_000)
CIFAR10_NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@dataclass(frozen=True)
class Layout:
    """One official version: folder, archive and files."""

    folder: str
    archive: str
    train: Sequence[str]
    test: str
    meta: str

    @property
    def binary(self) -> bool:
        return self.test.endswith(".bin")

    def split(self, files: Mapping[str, bytes], names: Sequence[str], label: str, where: str) -> Split:
        parts = [self._part(files[name], f"{where}/{name}", label) for name in names]
        counts = {name: len(y) for name, (_, y) in zip(names, parts, strict=True)}
        if len(set(counts.values())) > 1:
            raise ValueError(
                f"{where}: the training batches must have the same number of images, got {counts}; "
                "one of them is cut short: unpack or fetch it again"
            )
        return Split(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))

    def _part(self, content: bytes, what: str, label: str) -> tuple[Tensor, Tensor]:
        return _from_binary(content, what, label) if self.binary else _from_pickle(content, what, label)

    def names(self, content: bytes | None, key: str, where: str) -> list[str]:
        if content is None:
            return []
        if self.binary:
            return content.decode("utf-8", errors="replace").split()
        found = safe_pickle.load(content, f"{where}/{self.meta}").get(key, [])
        listed = found if isinstance(found, list) else []
        names = [name.decode("latin1") if isinstance(name, bytes) else name for name in listed]
        return [name for name in names if isinstance(name, str)]


FIVE = [f"data_batch_{number}" for number in range(1, 6)]
LAYOUTS = {
    "cifar10": [
        Layout("cifar-10-batches-py", "cifar-10-python.tar.gz", FIVE, "test_batch", "batches.meta"),
        Layout(
            "cifar-10-batches-bin",
            "cifar-10-binary.tar.gz",
            [f"{n}.bin" for n in FIVE],
            "test_batch.bin",
            "batches.meta.txt",
        ),
    ],
    "cifar100": [
        Layout("cifar-100-python", "cifar-100-python.tar.gz", ["train"], "test", "meta"),
        Layout("cifar-100-binary", "cifar-100-binary.tar.gz", ["train.bin"], "test.bin", "fine_label_names.txt"),
    ],
}


def load(name: str, source: Path, layout: Layout) -> Dataset:
    """`cifar10` or `cifar100` from a folder or archive of that layout."""
    files = tar.read(source, layout.folder, [*layout.train, layout.test], optional=[layout.meta])
    label, key, count = ("labels", "label_names", 10) if name == "cifar10" else ("fine_labels", "fine_label_names", 100)
    where = str(source)
    names = layout.names(files.pop(layout.meta, None), key, where)
    if len(names) != count:
        names = CIFAR10_NAMES if name == "cifar10" else [str(number) for number in range(count)]
    train, test = (layout.split(files, part, label, where) for part in (layout.train, [layout.test]))
    if source.is_dir() and (len(train.y), len(test.y)) == OFFICIAL_SIZES:
        warn_unless_official(layout.folder, files, where)
    return Dataset(name, train, test, names, where)


def _from_pickle(content: bytes, what: str, label: str) -> tuple[Tensor, Tensor]:
    batch = safe_pickle.load(content, what)
    for key in ("data", label):
        if key not in batch:
            there = ", ".join(map(repr, batch)) or "nothing"
            raise ValueError(f"{what} must hold 'data' and {label!r}, got {there:.200}; use the official file")
    x, labels = batch["data"], batch[label]
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != PIXELS:
        shape = f"{x.dtype} of shape {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
        raise ValueError(f"{what}: the data must be uint8 of shape (N, {PIXELS}), got {shape}")
    if not isinstance(labels, list) and not (isinstance(labels, np.ndarray) and labels.ndim == 1):
        raise ValueError(f"{what}: the labels must be a list of whole numbers below 2³¹; use the official file")
    if len(labels) != len(x):  # before they are listed: each byte of an array would become a pointer
        raise ValueError(f"{what}: every image needs one label, got {len(x)} images and {len(labels)} labels")
    labels = labels.tolist() if isinstance(labels, np.ndarray) else labels
    if not all(type(y) is int and abs(y) < 1 << 31 for y in labels):
        raise ValueError(f"{what}: the labels must be a list of whole numbers below 2³¹; use the official file")
    return _images(x), torch.tensor(labels, dtype=torch.int64)


def _from_binary(content: bytes, what: str, label: str) -> tuple[Tensor, Tensor]:
    """Records of the label (of the coarse one before it in CIFAR-100) and the pixels."""
    head = 1 if label == "labels" else 2
    if not content or len(content) % (head + PIXELS):
        raise ValueError(
            f"{what} must be whole records of {head + PIXELS} bytes, got {len(content)} bytes; "
            "it is cut short or of another data set: unpack or fetch it again"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, head + PIXELS)
    return _images(records[:, head:]), torch.from_numpy(records[:, head - 1].astype(np.int64))


def _images(rows: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> Tensor:
    return torch.from_numpy(np.array(rows)).view(-1, 3, 32, 32)  # a copy: the file's bytes may not be written to
