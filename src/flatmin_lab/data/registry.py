"""Every data set by its name, or by the path of a file or folder of your own.

load("cifar10", "data")      looks in data/ and data/cifar10/, for the unpacked folder and for the archive
load("digits")               embedded; needs no file
load("cifar10-made")         synthetic images in the shape of CIFAR-10
load("pets.npz"), load("images/pets")
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.data.formats.download import REMOTE, Progress, fetch
from flatmin_lab.data.sources import cifar, digits, image_folder, npz, spiral, svhn, synthetic


def _cifar(name: str, root: Path) -> Dataset | None:
    for layout in cifar.LAYOUTS[name]:
        named = [base / place for base in (root, root / name) for place in (layout.folder, layout.archive)]
        itself = [root] if root.name in (layout.folder, layout.archive) else []
        for source in itself + named:
            if source.exists():
                return cifar.load(name, source, layout)
    return None


def _svhn(name: str, root: Path) -> Dataset | None:
    for base in (root, root / name):
        if all((base / file).exists() for file in svhn.FILES):
            return svhn.load(base)
    return None


OFFICIAL: dict[str, Callable[[str, Path], Dataset | None]] = {"cifar10": _cifar, "cifar100": _cifar, "svhn": _svhn}
EMBEDDED: dict[str, Callable[[], Dataset]] = {"digits": digits.load, "spiral": spiral.load}
SYNTHETIC = tuple(f"{name}{synthetic.SUFFIX}" for name in OFFICIAL)
DATA_SETS = (*OFFICIAL, *EMBEDDED)  # the real ones; the spiral is the paper's own
NAMED = (*DATA_SETS, *SYNTHETIC)


def load(
    name: str | Path,
    root: Path | str = "data",
    *,
    device: torch.device | str = "cpu",
    download: bool = False,
    progress: Progress | None = None,
    size: tuple[int, int] | None = None,
) -> Dataset:
    """The data set on the device.

    `download` downloads missing official files into `root`. `size` (height, width) is what the images of
    a folder are resized to.

    >>> load("digits").train
    Split(1438 images of 1 × 8 × 8 on cpu)
    """
    return _load(str(name), Path(root).expanduser(), download=download, progress=progress, size=size).to(device)


def is_folder(name: str) -> bool:
    """Does this name a folder of images, the only data that can be resized? The name of a data set is that first."""
    return bool(name) and name not in NAMED and Path(name).expanduser().is_dir()


@lru_cache(maxsize=1)
def load_once(name: str, root: str, size: tuple[int, int] | None = None) -> Dataset:
    """The data set, for a process that runs task after task: the last one stays in memory."""
    return load(name, root, size=size)


def _load(name: str, root: Path, *, download: bool, progress: Progress | None, size: tuple[int, int] | None) -> Dataset:
    path = Path(name).expanduser()
    is_npz = path.suffix == ".npz" and path.is_file()
    if size is not None and (is_npz or name in NAMED):
        raise ValueError(
            f"a size is what the images of a folder are resized to, got {size} for {name}; leave it out, or resize the "
            "images yourself"
        )
    if name in EMBEDDED:
        return EMBEDDED[name]()
    if name in SYNTHETIC:
        return synthetic.load(name)
    if name in OFFICIAL:
        found = OFFICIAL[name](name, root)
        if found is None and download:
            for remote in REMOTE[name]:
                if not (root / remote.name).exists():
                    fetch(remote, root, progress=progress)
            found = OFFICIAL[name](name, root)
        if found is None:
            raise FileNotFoundError(_not_found(name, root))
        return found
    if is_folder(name):
        return image_folder.load(path, size=size)
    if is_npz:
        return npz.load(path)
    if path.is_file() or path.suffix == ".npz" or len(path.parts) > 1:
        made = "numpy.savez makes one of the arrays x_train, y_train, x_test and y_test"
        problem = f"and is neither; {made}" if path.exists() else "and is not there"
        raise FileNotFoundError(f"{path.absolute()} must be an .npz file or a folder of images, {problem}")
    raise ValueError(
        f"unknown data set {name!r}; choose from {', '.join(DATA_SETS)}, "
        "or give the path of an .npz file or of a folder of images that exists"
    )


def _not_found(name: str, root: Path) -> str:
    if name == "svhn":
        looked = list(svhn.FILES)
    else:
        looked = [place for layout in cifar.LAYOUTS[name] for place in (f"{layout.folder}/", layout.archive)]
    urls = " and ".join(remote.url for remote in REMOTE[name])
    return (
        f"{name} was not found: looked for {', '.join(looked)} in the folders {root.absolute()} and "
        f"{root.absolute() / name}. Put {urls} there, or download it: --download, or "
        f"load({name!r}, {str(root)!r}, download=True)"
    )
