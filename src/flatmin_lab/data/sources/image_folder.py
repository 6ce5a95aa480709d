"""A folder of images: one folder per class, under `train` and `test`, or split by a seed where there are none.

    pets/train/cat/1.png   pets/train/dog/2.jpg   pets/test/cat/3.png   …       or   pets/cat/1.png   pets/dog/2.jpg   …

All images must have one size, or be resized to one with `size=`. They are RGB, or grey where all of them are.

The files are untrusted: 20 kB of PNG can hold 10⁸ pixels, and Pillow starts Ghostscript for PostScript that is named
x.png. So only these formats are opened, only regular files, and every header is checked before a pixel is decoded.
"""

import os
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatmin_lab.data.dataset import Dataset, Split, stratified_split
from flatmin_lab.system.files import check_regular
from flatmin_lab.system.optional_deps import need
from flatmin_lab.system.rng import generator

EXTENSIONS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM", "TIFF")  # of these extensions, as Pillow calls them
MAX_PIXELS = 1 << 26  # of one image, 8192 by 8192: it takes some 400 MB while it is converted
MAX_BYTES = 1 << 34  # of all images, as they are kept: ImageNet takes as much at 64 by 64 pixels
GREY_MODES = ("1", "L", "LA")
COLOUR_MODES = ("P", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB", "PA")
MODES = {1: "L", 3: "RGB"}  # what images of so many channels are read as
WHAT = "a folder of images"
TEST_FOLDERS = ("test", "val", "valid", "validation")
# names of splits that are not called train and test: Train, testing, seg_test, training_set
TRAIN_LIKE = re.compile(r"(?<![a-z])train(ing|set)?(?![a-z])", re.IGNORECASE)
TEST_LIKE = re.compile(r"(?<![a-z])(test(ing|set)?|val(id|idation)?)(?![a-z])", re.IGNORECASE)


def load(path: Path, *, size: tuple[int, int] | None = None, seed: int = 0) -> Dataset:
    """From the folder; `size` (height, width) resizes, `seed` picks the test set where there is no `test/`."""
    if size is not None and (len(size) != 2 or min(size) < 1):
        raise ValueError(f"size must be (height, width) of at least 1 by 1, got {size}")
    test = next((path / name for name in TEST_FOLDERS if (path / name).is_dir()), None)
    if (path / "train").is_dir() != (test is not None):
        raise FileNotFoundError(
            f"{path} must have both train/ and test/, or neither (then a fifth is taken for testing); "
            f"got only {(test or path / 'train').name}/"
        )
    folders = [path] if test is None else [path / "train", test]
    names = _classes(folders)
    found = [_list_images(folder, names) for folder in folders]
    if test is None and min(Counter(found[0][1]).values()) < 3:
        raise ValueError(
            f"{path}: a class must have at least 3 images for a fifth of them to be one for testing; "
            "add images, or make train/ and test/"
        )
    headers = [read_header(file) for files, _ in found for file in files]
    mode = "L" if {header.mode for header in headers} <= set(GREY_MODES) else "RGB"
    _check_total(path, headers, size, channels=len(mode))
    splits = [Split(read_images(files, mode, size), torch.tensor(labels)) for files, labels in found]
    if test is None:
        train_part, test_part = stratified_split(splits[0].y, share=0.2, generator=generator("folder", seed))
        splits = [splits[0].at(train_part), splits[0].at(test_part)]
    return Dataset(path.resolve().name, splits[0], splits[1], names, str(path))


def _classes(folders: Sequence[Path]) -> list[str]:
    sets = [_folders_in(folder) for folder in folders]
    for folder, names in zip(folders, sets, strict=True):
        if not names:
            raise FileNotFoundError(f"{folder} must hold one folder of images per class, got no folder in it")
    if any(names != sets[0] for names in sets):
        odd = sorted(set(sets[0]) ^ set(sets[1]))
        raise ValueError(f"train and test must have the same classes; only one of them has {', '.join(odd)}")
    _check_classes(folders[0], sets[0])
    return sets[0]


def _check_classes(folder: Path, names: Sequence[str]) -> None:
    """Raise where the folders look like another level of the tree: learning these would go well, and mean nothing."""
    if len(names) == 1:
        raise ValueError(
            f"{folder} must hold a folder of images for each of at least two classes, got only {names[0]}/; "
            "name the folder that holds the classes"
        )
    trains, tests = ([name for name in names if like.search(name)] for like in (TRAIN_LIKE, TEST_LIKE))
    for train, test in product(trains, tests):
        if train != test and set(_folders_in(folder / train)) & set(_folders_in(folder / test)):
            raise ValueError(
                f"{folder} holds {train}/ and {test}/, which look like a training and a test set, not like classes; "
                "call them train/ and test/"
            )


def _folders_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not _is_hidden(entry.name))


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "__"))  # .git, .ipynb_checkpoints, ._image.png, __MACOSX


def find_images(folder: Path) -> list[Path]:
    """The images in a folder and in those inside it or linked from it, in order; by their names alone."""

    def refuse(error: OSError) -> None:
        raise error  # images in a folder that cannot be read would be missing without a word

    found: list[Path] = []
    seen: set[str] = set()
    for place, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        if (real := os.path.realpath(place)) in seen:  # links may go round in a circle
            folders.clear()
            continue
        seen.add(real)
        found += [Path(place, name) for name in files if not _is_hidden(name)]
    return sorted(file for file in found if file.suffix.lower() in EXTENSIONS)


def _list_images(folder: Path, names: Sequence[str]) -> tuple[list[Path], list[int]]:
    files, labels = [], []
    for label, name in enumerate(names):
        here = find_images(folder / name)
        if not here:
            raise FileNotFoundError(f"{folder / name} must hold images ({', '.join(EXTENSIONS)}), got none")
        files += here
        labels += [label] * len(here)
    return files, labels


class Header(NamedTuple):
    """What an image says of itself before its pixels."""

    mode: str
    height: int
    width: int


def read_header(file: Path) -> Header:
    """The checked header; no pixel is decoded."""
    check_regular(file)
    try:
        with _open(file) as opened:
            header = Header(str(opened.mode), opened.height, opened.width)
    except Exception as error:  # a damaged image can raise anything
        raise ValueError(f"{file} is not an image that can be read ({error}); repair or remove it") from error
    if header.height * header.width > MAX_PIXELS:
        raise ValueError(
            f"an image must have at most {MAX_PIXELS} pixels, got {header.width} by {header.height} in {file}; "
            "make it smaller, or remove it"
        )
    check_eight_bits(header.mode, str(file))
    return header


def _open(file: Path) -> Any:
    image = need("PIL.Image", WHAT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", image.DecompressionBombWarning)  # MAX_PIXELS is the lower limit
        return image.open(file, formats=FORMATS)


def _check_total(path: Path, headers: Sequence[Header], size: tuple[int, int] | None, *, channels: int) -> None:
    """Raise where the images would not fit into memory, before the first is decoded."""
    pixels = len(headers) * size[0] * size[1] if size else sum(header.height * header.width for header in headers)
    if pixels * channels > MAX_BYTES:
        raise ValueError(
            f"the images of a folder must take at most {MAX_BYTES >> 30} GiB, got {len(headers)} images of "
            f"{pixels * channels / (1 << 30):.1f} GiB in {path}; give a smaller size=(height, width), or --size HEIGHT "
            "WIDTH, or fewer images"
        )


def check_eight_bits(mode: str, what: str) -> str:
    """The mode, if its values go from 0 to 255; others would be truncated by the conversion."""
    if mode not in (*GREY_MODES, *COLOUR_MODES):
        raise ValueError(f"images must have 8 bits per channel, got mode {mode} in {what}; convert it first")
    return mode


def read_images(files: Sequence[Path], mode: str, size: tuple[int, int] | None) -> Tensor:
    """The pixels of files whose headers were checked, (N, C, H, W), in Pillow's mode L or RGB; resized with `size`."""
    image, ops = need("PIL.Image", WHAT), need("PIL.ImageOps", WHAT)
    rows: list[np.ndarray[Any, Any]] = []
    first = files[0]
    for file in files:
        try:
            with _open(file) as opened:
                upright = ops.exif_transpose(opened)  # cameras store rotated images
                row = _pixels(image, upright, mode, size)
        except Exception as error:  # a damaged image can raise anything
            raise ValueError(f"{file} is not an image that can be read ({error}); repair or remove it") from error
        if rows and row.shape != rows[0].shape:
            raise ValueError(
                f"all images must have one size: {first} is {rows[0].shape[1]} by {rows[0].shape[0]}, "
                f"{file} is {row.shape[1]} by {row.shape[0]}; give size=(height, width), or --size HEIGHT WIDTH, to "
                "resize them to one"
            )
        rows.append(row)
    return _stacked(rows)


def read_unlabelled(path: Path, mode: str, size: tuple[int, int]) -> tuple[Tensor, str]:
    """All images below a folder as (N, C, H, W), and what they were if some had to be converted.

    Whatever its classes; where it has a test/, those of it alone.
    """
    test = next((path / name for name in TEST_FOLDERS if (path / name).is_dir()), path)
    files = find_images(test)
    if not files:
        raise FileNotFoundError(f"{test} must hold images ({', '.join(EXTENSIONS)}), got none")
    headers = [read_header(file) for file in files]
    _check_total(path, headers, size, channels=len(mode))
    return read_images(files, mode, size), "" if set(headers) == {(mode, *size)} else _kinds(headers)


def _kinds(headers: Sequence[Header]) -> str:
    """What images are, in words.

    >>> _kinds([Header("L", 28, 28)] * 2)
    'images of 28 × 28 (L)'
    >>> _kinds([Header("L", 28, 28), Header("RGB", 64, 32), Header("RGB", 28, 28)])
    'images of 28 × 28 to 64 × 32 (L, RGB)'
    """
    sizes = sorted({(one.height, one.width) for one in headers}, key=lambda size: (size[0] * size[1], size))
    ends = dict.fromkeys(f"{height} × {width}" for height, width in (sizes[0], sizes[-1]))
    return f"images of {' to '.join(ends)} ({', '.join(sorted({one.mode for one in headers}))})"


def converted(x: Tensor, mode: str, size: tuple[int, int]) -> Tensor:
    """Images (N, C, H, W) of 1, 3 or 4 channels, converted and resized as `read_images` does it with files."""
    image = need("PIL.Image", WHAT)
    arrays = x.permute(0, 2, 3, 1).cpu().numpy()
    opened = (image.fromarray(row[:, :, 0] if x.shape[1] == 1 else row) for row in arrays)
    return _stacked([_pixels(image, one, mode, size) for one in opened])


def _pixels(image: Any, opened: Any, mode: str, size: tuple[int, int] | None) -> np.ndarray[Any, Any]:
    changed = opened.convert(mode)
    if size is not None:
        changed = changed.resize((size[1], size[0]), image.Resampling.BILINEAR)
    return np.array(changed)


def _stacked(rows: Sequence[np.ndarray[Any, Any]]) -> Tensor:
    """(N, C, H, W), of rows without a channel or with the channels last."""
    x = torch.from_numpy(np.stack(rows))
    return x[:, None] if x.ndim == 3 else x.permute(0, 3, 1, 2).contiguous()
