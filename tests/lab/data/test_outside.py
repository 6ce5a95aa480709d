"""Outside data come in the shape that the model takes, as `flatmin predict` would read them, or are refused."""

from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from flatmin_lab.data import load
from flatmin_lab.data.dataset import Split
from flatmin_lab.data.outside import load_outside
from flatmin_lab.data.sources.image_folder import read_images
from tests.support.images import various


def like(*shape: int, images: bool = True) -> Split:
    """Two images of stripes, which no other data set has."""
    x = (torch.arange(2 * prod(shape)) % 251).view(2, *shape).to(torch.uint8 if images else torch.float32)
    return Split(x, torch.zeros(2, dtype=torch.int64))


def write(folder: Path, x: Tensor) -> list[Path]:
    """As PNG files, which lose nothing."""
    folder.mkdir(parents=True)
    files = [folder / f"{place:03}.png" for place in range(len(x))]
    for file, row in zip(files, x.permute(0, 2, 3, 1).numpy(), strict=True):
        Image.fromarray(row).save(file)
    return files


def write_npz(path: Path, x: Tensor) -> Path:
    array = x.numpy()
    np.savez(path, x_train=array, y_train=np.arange(len(x)) % 2, x_test=array, y_test=np.arange(len(x)) % 2)
    return path


def test_a_data_set_of_the_same_shape_is_its_test_images() -> None:
    found = load_outside("svhn-made", like=like(3, 32, 32))
    assert torch.equal(found.split.x, load("svhn-made").test.x)
    assert (found.name, found.converted_from) == ("svhn-made", "")


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 12), (1, 32, 32), (3, 40, 20)])
def test_images_are_converted_as_predict_converts_files(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    """The same pixels whether they lie in an .npz file or in a folder, and those that `read_images` makes of files."""
    x = various()
    files = write(tmp_path / "pets" / "deep", x)
    expected = read_images(files, {1: "L", 3: "RGB"}[shape[0]], shape[1:])
    archive = load_outside(str(write_npz(tmp_path / "other.npz", x)), like=like(*shape))
    folder = load_outside(str(tmp_path / "pets"), like=like(*shape))
    for found in (archive, folder):
        assert found.split.x.shape == (30, *shape)
        assert torch.equal(found.split.x, expected)
    assert (archive.name, archive.converted_from) == ("other", "images of 3 × 32 × 32")
    assert (folder.name, folder.converted_from) == ("pets", "images of 32 × 32 (RGB)")


def test_of_a_folder_it_is_said_what_was_converted_and_nothing_where_nothing_was(tmp_path: Path) -> None:
    write(tmp_path / "same", various())
    assert load_outside(str(tmp_path / "same"), like=like(3, 32, 32)).converted_from == ""
    write(tmp_path / "mixed" / "a", various())
    write(tmp_path / "mixed" / "b", various()[:, :, :20])
    assert (
        load_outside(str(tmp_path / "mixed"), like=like(3, 32, 32)).converted_from
        == "images of 20 × 32 to 32 × 32 (RGB)"
    )


def test_of_a_folder_with_a_test_part_only_that_is_read(tmp_path: Path) -> None:
    x = various()
    write(tmp_path / "pets" / "train" / "cat", x[:20])
    write(tmp_path / "pets" / "test" / "dog", x[20:])
    assert torch.equal(load_outside(str(tmp_path / "pets"), like=like(3, 32, 32)).split.x, x[20:])


def test_points_of_the_same_dimension_will_do() -> None:
    found = load_outside("spiral", like=like(2, images=False))
    assert torch.equal(found.split.x, load("spiral").test.x)


def test_the_checksum_is_that_of_what_the_model_sees(tmp_path: Path) -> None:
    archive = str(write_npz(tmp_path / "other.npz", various()))
    small, again, large = (load_outside(archive, like=like(1, side, side)) for side in (8, 8, 32))
    assert small.checksum == again.checksum != large.checksum


def test_the_models_own_images_are_not_outside() -> None:
    with pytest.raises(ValueError, match="whose test images are among those of digits; name another"):
        load_outside("digits", like=load("digits").test)


@pytest.mark.parametrize(
    ("name", "own", "text"),
    [
        ("spiral", like(1, 8, 8), r"takes images of 1 × 8 × 8, got points of 2 in spiral.*name outside data of that"),
        ("digits", like(2, images=False), r"takes points of 2, to which the images of digits cannot be converted"),
        ("digits", like(4, 8, 8), r"takes images of 4 × 8 × 8, to which .* such as an \.npz file"),
        ("spiral", like(3, images=False), r"takes points of 3, got points of 2"),
        ("nowhere.npz", like(1, 8, 8), r"and is not there"),
    ],
)
def test_what_the_model_cannot_take_is_refused(name: str, own: Split, text: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=text):
        load_outside(name, like=own)


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="must hold images"):
        load_outside(str(tmp_path), like=like(1, 8, 8))


def test_a_file_needs_no_labels(tmp_path: Path) -> None:
    x = np.full((3, 8, 8), 7, dtype=np.uint8)
    np.savez(tmp_path / "other.npz", x_test=x)
    found = load_outside(str(tmp_path / "other.npz"), like=load("digits").test)
    assert (found.name, len(found.split), found.converted_from) == ("other", 3, "")
    assert bool((found.split.x == 7).all())
    np.savez(tmp_path / "wrong.npz", y_test=x)
    with pytest.raises(ValueError, match="must hold x_test; missing: x_test, found: y_test"):
        load_outside(str(tmp_path / "wrong.npz"), like=load("digits").test)


def test_points_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x_test=np.full((3, 2), np.nan, np.float32))
    with pytest.raises(ValueError, match=r"x\.npz: points must be finite, got nan or infinity in x_test"):
        load_outside(str(tmp_path / "x.npz"), like=load("spiral").test)


def test_a_folder_that_was_divided_for_the_training_is_not_outside(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(10):
            pixels = generator.integers(0, 256, (8, 9), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets" / name / f"{number}.png")
    own = load(tmp_path / "pets", size=(5, 6)).test
    with pytest.raises(ValueError, match=r"whose test images are among those of .*pets; name another"):
        load_outside(str(tmp_path / "pets"), like=own)
