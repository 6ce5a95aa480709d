"""Small data sets in the exact layout of the official files: the same names, keys, types and order of bytes.

Written without the readers' help: the pickles the way Python 2 and numpy wrote them (protocol 2, keys of bytes), the
binary records byte by byte, the .mat files with scipy.
"""

import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.io import savemat
from torch import Tensor

CIFAR10_NAMES = [b"airplane", b"automobile", b"bird", b"cat", b"deer", b"dog", b"frog", b"horse", b"ship", b"truck"]
FINE_NAMES = [f"fine_{number}".encode() for number in range(100)]


def made(count: int, classes: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) uint8 and labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return x, torch.randint(0, classes, (count,), generator=generator)


def dumped(content: Any, *, protocol: int = 2) -> bytes:
    """A pickle with the module names of the numpy of 2009."""
    written = pickle.dumps(content, protocol=protocol)
    return written.replace(b"numpy._core.multiarray", b"numpy.core.multiarray") if protocol < 4 else written


def rows(x: Tensor) -> "np.ndarray[Any, Any]":
    return x.flatten(1).numpy()


def cifar10_python(
    folder: Path, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], *, protocol: int = 2
) -> Path:
    """Five training batches, a test batch and the names."""
    root = folder / "cifar-10-batches-py"
    root.mkdir(parents=True)
    for number, (x, y) in enumerate(zip(train[0].chunk(5), train[1].chunk(5), strict=True), start=1):
        batch = {b"batch_label": b"training batch", b"labels": y.tolist(), b"data": rows(x), b"filenames": [b"a.png"]}
        (root / f"data_batch_{number}").write_bytes(dumped(batch, protocol=protocol))
    batch = {b"batch_label": b"testing batch 1 of 1", b"labels": test[1].tolist(), b"data": rows(test[0])}
    (root / "test_batch").write_bytes(dumped(batch, protocol=protocol))
    meta = {b"num_cases_per_batch": 10000, b"label_names": CIFAR10_NAMES, b"num_vis": 3072}
    (root / "batches.meta").write_bytes(dumped(meta, protocol=protocol))
    return root


def cifar10_binary(folder: Path, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Path:
    root = folder / "cifar-10-batches-bin"
    root.mkdir(parents=True)

    def records(x: Tensor, y: Tensor) -> bytes:
        return b"".join(bytes([label]) + image.numpy().tobytes() for image, label in zip(x, y.tolist(), strict=True))

    for number, (x, y) in enumerate(zip(train[0].chunk(5), train[1].chunk(5), strict=True), start=1):
        (root / f"data_batch_{number}.bin").write_bytes(records(x, y))
    (root / "test_batch.bin").write_bytes(records(*test))
    (root / "batches.meta.txt").write_bytes(b"\n".join(CIFAR10_NAMES) + b"\n\n")
    return root


def cifar100_python(folder: Path, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Path:
    root = folder / "cifar-100-python"
    root.mkdir(parents=True)
    for name, (x, y) in (("train", train), ("test", test)):
        batch = {b"fine_labels": y.tolist(), b"coarse_labels": (y // 5).tolist(), b"data": rows(x), b"filenames": []}
        (root / name).write_bytes(dumped(batch))
    (root / "meta").write_bytes(dumped({b"fine_label_names": FINE_NAMES, b"coarse_label_names": [b"any"] * 20}))
    return root


def cifar100_binary(folder: Path, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Path:
    root = folder / "cifar-100-binary"
    root.mkdir(parents=True)
    for name, (x, y) in (("train", train), ("test", test)):
        records = [bytes([label // 5, label]) + one.numpy().tobytes() for one, label in zip(x, y.tolist(), strict=True)]
        (root / f"{name}.bin").write_bytes(b"".join(records))
    (root / "fine_label_names.txt").write_bytes(b"\n".join(FINE_NAMES) + b"\n")
    return root


def svhn(folder: Path, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], *, compressed: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (x, y) in (("train", train), ("test", test)):
        labels = torch.where(y == 0, 10, y).to(torch.uint8)[:, None].numpy()
        content = {"X": x.permute(2, 3, 1, 0).numpy(), "y": labels}
        savemat(folder / f"{name}_32x32.mat", content, do_compression=compressed)
    return folder


def packed(root: Path, name: str) -> Path:
    """The folder as a .tar.gz beside it, and the folder gone."""
    archive = root.parent / name
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(root, root.name)
    for file in root.iterdir():
        file.unlink()
    root.rmdir()
    return archive


def member(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


# name of the data set, what writes it, and what its archive is called
LAYOUTS: dict[str, tuple[str, Callable[..., Path], str | None]] = {
    "cifar10-python": ("cifar10", cifar10_python, "cifar-10-python.tar.gz"),
    "cifar10-binary": ("cifar10", cifar10_binary, "cifar-10-binary.tar.gz"),
    "cifar100-python": ("cifar100", cifar100_python, "cifar-100-python.tar.gz"),
    "cifar100-binary": ("cifar100", cifar100_binary, "cifar-100-binary.tar.gz"),
    "svhn": ("svhn", svhn, None),
}


def classes(name: str) -> int:
    return 100 if name == "cifar100" else 10
