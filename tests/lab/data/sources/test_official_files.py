"""CIFAR-10, CIFAR-100 and SVHN from their official layouts, and what a file of another kind gets."""

import hashlib
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import loadmat, savemat
from torch import Tensor

from flatmin_lab.data import Dataset, load
from flatmin_lab.data.formats import mat
from flatmin_lab.data.formats.official_bytes import MD5, SHA256, NotOfficialWarning
from flatmin_lab.data.sources import cifar, svhn
from tests.support import official_files
from tests.support.official_files import LAYOUTS, classes, made, packed

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


@pytest.mark.parametrize(
    ("layout", "version", "file"),
    [
        ("cifar10-python", "cifar-10-batches-py", "data_batch_3"),
        ("cifar100-python", "cifar-100-python", "test"),
        ("svhn", "svhn", "test_32x32.mat"),
    ],
)
def test_an_unpacked_file_that_is_not_the_official_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, version: str, file: str
) -> None:
    name, write, _ = LAYOUTS[layout]
    folder = write(tmp_path, made(25, classes(name), seed=0), made(7, classes(name), seed=1))
    source, table, digest = (svhn, SHA256, hashlib.sha256) if name == "svhn" else (cifar, MD5, hashlib.md5)
    official = {each: digest((folder / each).read_bytes()).hexdigest() for each in table[version]}
    load(name, tmp_path)  # 25 pictures: nobody's complete set
    monkeypatch.setattr(source, "OFFICIAL_SIZES", (25, 7))
    with pytest.warns(NotOfficialWarning, match="not the official bytes in"):
        load(name, tmp_path)
    monkeypatch.setitem(table, version, official)
    load(name, tmp_path)
    # a file that is as good as the official one, but not it
    other = write(tmp_path / "other", made(25, classes(name), seed=2), made(7, classes(name), seed=3))
    (folder / file).write_bytes((other / file).read_bytes())
    with pytest.warns(NotOfficialWarning, match=f"not the official bytes in {file};"):
        load(name, tmp_path)


@pytest.mark.parametrize("protocol", range(6))
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
    with pytest.raises(ValueError, match=r"training labels must be 0 to 9 for 10 classes, got 12 \(at 7 of 10\)"):
        load("cifar10", tmp_path / "a")
    savemat(tmp_path / "train_32x32.mat", {"X": x.permute(2, 3, 1, 0).numpy(), "y": y.numpy()[:, None]})
    savemat(tmp_path / "test_32x32.mat", {"X": x.permute(2, 3, 1, 0).numpy(), "y": y.numpy()[:, None]})
    with pytest.raises(ValueError, match=r"0 to 10, where 10 is the digit 0, got 12"):
        load("svhn", tmp_path)


WRONG_BATCHES = {
    "no data": ({b"labels": [1]}, "must hold 'data' and 'labels'"),
    "too narrow": (
        {b"data": np.zeros((2, 3), np.uint8), b"labels": [1, 2]},
        r"\(N, 3072\), got uint8 of shape \(2, 3\)",
    ),
    "floats": ({b"data": np.zeros((2, 3072)), b"labels": [1, 2]}, "arrays must hold whole numbers of 1 to 8 bytes"),
    "words": ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [b"1", b"2"]}, "list of whole numbers"),
    "one label short": ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, "2 images and 1 labels"),
}


@pytest.mark.parametrize("case", WRONG_BATCHES)
def test_a_batch_of_another_kind_is_refused(tmp_path: Path, case: str) -> None:
    content, message = WRONG_BATCHES[case]
    root = official_files.cifar10_python(tmp_path, made(10, 10, seed=0), made(3, 10, seed=1))
    (root / "test_batch").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=message):
        load("cifar10", tmp_path)


def test_a_training_batch_cut_at_an_image_is_noticed(tmp_path: Path) -> None:
    root = official_files.cifar10_binary(tmp_path, made(25, 10, seed=0), made(3, 10, seed=1))
    (root / "data_batch_2.bin").write_bytes((root / "data_batch_2.bin").read_bytes()[: 3 * 3073])
    with pytest.raises(ValueError, match=r"the same number of images, got .*'data_batch_2.bin': 3"):
        load("cifar10", tmp_path)


ODD_META: dict[str, object] = {"a number": 5, "nothing": None, "numbers": [1] * 10, "an array": np.arange(10)}


@pytest.mark.parametrize("names", ODD_META.values(), ids=ODD_META)
def test_odd_names_are_replaced_by_the_known_ones(tmp_path: Path, names: object) -> None:
    root = official_files.cifar10_python(tmp_path, made(10, 10, seed=0), made(3, 10, seed=1))
    (root / "batches.meta").write_bytes(pickle.dumps({b"label_names": names}))
    assert load("cifar10", tmp_path).names[3] == "cat"


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", ["u1", "f8", "i4"])
@pytest.mark.parametrize("compressed", [True, False])
def test_matlab_files_are_read_as_scipy_reads_them(tmp_path: Path, order: str, kind: str, compressed: bool) -> None:
    generator = np.random.default_rng(0)
    arrays = {
        "X": generator.integers(0, 99, (5, 4, 3, 2)).astype(kind),
        "y": np.arange(3, dtype=kind)[:, None],  # small enough for the short form of an element
    }
    extra = {"text": "words", "complex": np.array([1j]), "cell": np.array([1, "a"], dtype=object)}
    savemat(tmp_path / "x.mat", {**arrays, **extra}, do_compression=compressed)
    content = (tmp_path / "x.mat").read_bytes()
    if order == ">":
        if compressed:
            return  # scipy writes little-endian files; the big-endian one is made of its plain form
        content = matlab_big_endian(arrays)
        (tmp_path / "x.mat").write_bytes(content)
    found, expected = mat.load(content, ("X", "y", "text", "complex", "cell")), loadmat(tmp_path / "x.mat")
    assert set(found) == {"X", "y"}
    for name, array in arrays.items():
        assert np.array_equal(found[name], expected[name])
        assert found[name].dtype == array.dtype


def matlab_big_endian(arrays: dict[str, Any]) -> bytes:
    """A file as a machine of the other byte order writes it."""

    def element(kind: int, body: bytes) -> bytes:
        return struct.pack(">II", kind, len(body)) + body + bytes(-len(body) % 8)

    kinds = {"u1": (9, 2), "i4": (12, 5), "f8": (6, 9)}
    matrices = b""
    for name, array in arrays.items():
        kept, stored = kinds[array.dtype.str[1:]]
        body = element(6, struct.pack(">II", kept, 0)) + element(5, struct.pack(f">{array.ndim}i", *array.shape))
        body += element(1, name.encode())
        matrices += element(14, body + element(stored, array.astype(array.dtype.newbyteorder(">")).tobytes(order="F")))
    return b"MATLAB 5.0".ljust(124) + struct.pack(">H", 0x0100) + b"MI" + matrices
