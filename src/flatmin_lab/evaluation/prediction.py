"""Predictions for image files: the class of each, its probability, and the runner-up.

Images are read as a folder of training images is (data/sources/image_folder.py): the same formats, limits and
conversions, and brought to the size of the model's inputs. A file that cannot be read does not stop the others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flatmin_lab.data.sources.image_folder import find_images, read_header, read_images
from flatmin_lab.evaluation.trained_model import TrainedModel

IMAGES_AT_ONCE = 64
MODES = {1: "L", 3: "RGB"}  # of so many channels


@dataclass(frozen=True)
class Prediction:
    """The most probable class of a file, and the second one, if there are two."""

    file: Path
    label: str
    probability: float
    runner_up: str
    runner_up_probability: float
    size: tuple[int, int]  # height and width of the file, before it was resized


@dataclass(frozen=True)
class Unreadable:
    file: Path
    why: str


def image_files(places: Sequence[Path]) -> list[Path]:
    """The named files, and the images in the named folders, each once."""
    found: dict[Path, None] = {}
    for place in places:
        if not place.exists():
            raise FileNotFoundError(f"{place} does not exist; give image files, or folders of them")
        images = find_images(place) if place.is_dir() else [place]
        if not images:
            raise FileNotFoundError(f"{place} holds no images")
        found |= dict.fromkeys(images)
    return list(found)


def predict_files(trained: TrainedModel, files: Sequence[Path]) -> Iterator[Prediction | Unreadable]:
    """In the order of the files."""
    if trained.kind != "images" or trained.input_shape[0] not in MODES:
        raise ValueError(
            f"this model takes {trained.shape_text}, which are not grey or colour images; "
            "load it in Python, with flatmin_lab.load_run"
        )
    for start in range(0, len(files), IMAGES_AT_ONCE):
        yield from _predict(trained, files[start : start + IMAGES_AT_ONCE])


def _predict(trained: TrainedModel, files: Sequence[Path]) -> Iterator[Prediction | Unreadable]:
    channels, height, width = trained.input_shape
    read, sizes, refused = [], {}, {}
    for file in files:
        try:
            header = read_header(file)
            read.append(read_images([file], MODES[channels], (height, width)))
            sizes[file] = (header.height, header.width)
        except (ValueError, OSError) as error:
            refused[file] = str(error)
    rows = iter(trained.probabilities(torch.cat(read)) if read else ())
    for file in files:
        if file in refused:
            yield Unreadable(file, refused[file])
            continue
        best = next(rows).cpu().sort(descending=True)
        (first, *others), (share, *shares) = best.indices.tolist(), best.values.tolist()
        second = trained.class_name(others[0]) if others else ""
        yield Prediction(file, trained.class_name(first), share, second, shares[0] if shares else 0.0, sizes[file])
