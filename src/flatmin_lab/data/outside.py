"""Data from outside a model's training distribution: another data set's test images, in the shape that the model takes.

outside = load_outside("svhn", like=cifar.test)         a name, an .npz file, or a folder of images
outside.split.x                                         (N, C, H, W), uint8

Their labels mean nothing to the model and are not used: a folder needs no classes, and a file x_test alone. Images of
another size or number of channels are converted as `flatmin predict` does it; points must have the model's dimension.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flatmin_lab.data.dataset import Split
from flatmin_lab.data.formats.download import Progress
from flatmin_lab.data.registry import is_folder, load
from flatmin_lab.data.sources import image_folder, npz

PROBES = 16  # images that are compared
CONVERTIBLE = (1, 3, 4)  # channels of images that Pillow can convert


@dataclass(frozen=True)
class OutsideData:
    """`split` has the shape of the model's inputs, and labels of 0; `converted_from` is what they were, if not that."""

    name: str
    split: Split
    converted_from: str = ""

    @property
    def checksum(self) -> str:
        """SHA-256 of the images as the model sees them."""
        return hashlib.sha256(self.split.x.cpu().contiguous().numpy().data).hexdigest()


def load_outside(
    name: str,
    root: Path | str = "data",
    *,
    like: Split,
    download: bool = False,
    progress: Progress | None = None,
) -> OutsideData:
    """The data on the device of `like`, which are the model's own; these may not be the same."""
    path = Path(name).expanduser()
    if is_folder(name):
        x, before = image_folder.read_unlabelled(path, _mode(name, like), (like.shape[1], like.shape[2]))
        found = OutsideData(path.resolve().name, _unlabelled(x), before)
    elif path.suffix == ".npz" and path.is_file():
        found = _fitted(path.stem, _unlabelled(npz.load_test_images(path)), like)
    else:
        data = load(name, root, download=download, progress=progress)
        found = _fitted(data.name, data.test, like)
    here = OutsideData(found.name, found.split.to(like.x.device), found.converted_from)
    if _holds(here.split.x, like.x):
        raise ValueError(
            f"the outside data must differ from the model's own, whose test images are among those of {name}; name "
            "another data set"
        )
    return here


def _holds(x: Tensor, own: Tensor) -> bool:
    """Are the model's own images among these? A few of them, spread over all, will do."""
    probes = own[torch.linspace(0, len(own) - 1, PROBES, device=own.device).long()]
    return all(any(bool((part == one).flatten(1).all(dim=1).any()) for part in x.split(4096)) for one in probes)


def _fitted(name: str, split: Split, like: Split) -> OutsideData:
    if split.shape == like.shape and split.is_images == like.is_images:
        return OutsideData(name, _unlabelled(split.x))
    if not split.is_images or split.shape[0] not in CONVERTIBLE:
        raise ValueError(
            f"the model takes {like.kind}, got {split.kind} in {name}, which cannot be converted to these; "
            "name outside data of that kind"
        )
    x = image_folder.converted(split.x, _mode(name, like), (like.shape[1], like.shape[2]))
    return OutsideData(name, _unlabelled(x), split.kind)


def _mode(name: str, like: Split) -> str:
    """Pillow's mode of the model's images."""
    if not like.is_images or like.shape[0] not in image_folder.MODES:
        raise ValueError(
            f"the model takes {like.kind}, to which the images of {name} cannot be converted; "
            "name outside data of just that kind, such as an .npz file"
        )
    return image_folder.MODES[like.shape[0]]


def _unlabelled(x: Tensor) -> Split:
    return Split(x, torch.zeros(len(x), dtype=torch.int64, device=x.device))
