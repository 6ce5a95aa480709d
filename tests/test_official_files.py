"""CIFAR-10, CIFAR-100 and SVHN from their official layouts, and what a file of another kind gets."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat
from torch import Tensor

import official_files
from flatmin_lab.data import Dataset, load
from official_files import LAYOUTS, classes, made, packed

Pair = tuple[Tensor, Tensor]


def same(data: Dataset, train: Pair, test: Pair) -> bool:
    pairs = ((data.train.x, train[0]), (data.train.y, train[1]), (data.test.x, test[0]), (data.test.y, test[1]))
    return all(torch.equal(one, two) for one, two in pairs)


FORMS = ["folder", "named folder", "the folder itself", "archive", "the archive itself"]
WAYS = [(layout, form) for layout in LAYOUTS for form in FORMS if not (layout == "svhn" and "archive" in form)]


@pytest.mark.parametrize(("layout", "form"), WAYS)
def test_official_files_are_read_to_the_last_byte(tmp_path: Path, layout: str, form: str) -> None:
    name, write, archive = LAYOUTS[layout]
    train, test = made(25, classes(name), seed=0), made(7, classes(name), seed=1)
    written = write(tmp_path / (name if "named" in form else ""), train, test)
    root = tmp_path
    if "archive" in form:
        assert archive is not None
        written = packed(written, archive)
    if "itself" in form:
        root = written
    data = load(name, root)
    assert same(data, train, test)
    assert data.train.x.is_contiguous()
    assert data.num_classes == classes(name)
    assert data.names[3] == {"cifar10": "cat", "cifar100": "fine_3", "svhn": "3"}[name]
    data.train.x[0] = 0  # it may be written to


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickles_of_every_protocol_are_read(tmp_path: Path, protocol: int) -> None:
    train, test = made(10, 10, seed=0), made(3, 10, seed=1)
    official_files.cifar10_python(tmp_path, train, test, protocol=protocol)
    assert same(load("cifar10", tmp_path), train, test)


def test_svhn_is_read_with_and_without_compression(tmp_path: Path) -> None:
    train, test = made(12, 10, seed=0), made(3, 10, seed=1)
    official_files.svhn(tmp_path, train, test, compressed=False)
    assert same(load("svhn", tmp_path), train, test)
    assert 0 in load("svhn", tmp_path).train.y.tolist()  # the file calls it 10


def test_names_are_numbers_where_the_file_with_them_is_missing(tmp_path: Path) -> None:
    root = official_files.cifar100_python(tmp_path, made(5, 100, seed=0), made(2, 100, seed=1))
    (root / "meta").unlink()
    assert load("cifar100", tmp_path).names[42] == "42"


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    root = official_files.cifar10_python(tmp_path, made(10, 10, seed=0), made(3, 10, seed=1))
    (root / "data_batch_4").unlink()
    with pytest.raises(FileNotFoundError, match="missing: data_batch_4"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn"])
def test_a_missing_data_set_says_where_it_looked_and_how_to_get_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError) as error:
        load(name, tmp_path / "nowhere")
    for part in (str(tmp_path / "nowhere"), "http", "--download", "32x32.mat" if name == "svhn" else "tar.gz"):
        assert part in str(error.value)


def test_an_unknown_data_set_names_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="unknown data set 'mnist'; choose from cifar10, cifar100, svhn, digits, spiral"
    ):
        load("mnist")


def test_labels_out_of_range_are_named(tmp_path: Path) -> None:
    (x, y), test = made(10, 10, seed=0), made(3, 10, seed=1)
    y[7] = 12
    official_files.cifar10_python(tmp_path / "a", (x, y), test)
    with pytest.raises(ValueError, match=r"training labels must be 0 to 9 for 10 classes, got 12 \(at 7\)"):
        load("cifar10", tmp_path / "a")
    savemat(tmp_path / "train_32x32.mat", {"X": x.permute(2, 3, 1, 0).numpy(), "y": y.numpy()[:, None]})
    savemat(tmp_path / "test_32x32.mat", {"X": x.permute(2, 3, 1, 0).numpy(), "y": y.numpy()[:, None]})
    with pytest.raises(ValueError, match=r"1 to 10 .*, got 12"):
        load("svhn", tmp_path)


WRONG_BATCHES = {
    "no data": ({b"labels": [1]}, "must hold 'data' and 'labels'"),
    "too narrow": (
        {b"data": np.zeros((2, 3), np.uint8), b"labels": [1, 2]},
        r"\(N, 3072\), got uint8 of shape \(2, 3\)",
    ),
    "floats": ({b"data": np.zeros((2, 3072)), b"labels": [1, 2]}, "whole numbers, got the type"),
    "words": ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [b"1", b"2"]}, "list of whole numbers"),
    "one label short": ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, "2 pictures and 1 labels"),
}


@pytest.mark.parametrize("case", WRONG_BATCHES)
def test_a_batch_of_another_kind_is_refused(tmp_path: Path, case: str) -> None:
    content, message = WRONG_BATCHES[case]
    root = official_files.cifar10_python(tmp_path, made(10, 10, seed=0), made(3, 10, seed=1))
    (root / "test_batch").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=message):
        load("cifar10", tmp_path)
