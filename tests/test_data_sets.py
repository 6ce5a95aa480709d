"""Every data set from its official layout, its own rules, and what a wrong file gets."""

import pickle
import subprocess
import sys
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from torch import Tensor

import official_files
from flatmin_lab.data import DATA_SETS, Dataset, Split, load
from flatmin_lab.data import folder as picture_folder
from flatmin_lab.data.spiral import Spiral
from flatmin_lab.data.spiral import load as load_spiral
from official_files import made, packed

Pair = tuple[Tensor, Tensor]
LAYOUTS: dict[str, tuple[str, Callable[..., Path], str | None]] = {
    "cifar10-python": ("cifar10", official_files.cifar10_python, "cifar-10-python.tar.gz"),
    "cifar10-binary": ("cifar10", official_files.cifar10_binary, "cifar-10-binary.tar.gz"),
    "cifar100-python": ("cifar100", official_files.cifar100_python, "cifar-100-python.tar.gz"),
    "cifar100-binary": ("cifar100", official_files.cifar100_binary, "cifar-100-binary.tar.gz"),
    "svhn": ("svhn", official_files.svhn, None),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def classes(name: str) -> int:
    return 100 if name == "cifar100" else 10


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


class Spy:
    """Unpickled with pickle itself, it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("file", ["data_batch_3", "test_batch", "batches.meta"])
def test_a_pickle_that_asks_for_more_than_arrays_is_refused_before_it_runs(tmp_path: Path, file: str) -> None:
    root = official_files.cifar10_python(tmp_path, made(10, 10, seed=0), made(3, 10, seed=1))
    trap = tmp_path / "sprung"
    (root / file).write_bytes(pickle.dumps({b"data": Spy(trap), b"labels": [], b"label_names": []}))
    with pytest.raises(ValueError, match=rf"{file} was refused: it asks for .*touch|{file} was refused"):
        load("cifar10", tmp_path)
    assert not trap.exists()


HOSTILE = {
    "os.system": b"cos\nsystem\n(S'true'\ntR.",
    "builtins.eval": b"cbuiltins\neval\n(S'1'\ntR.",
    "by stack": pickle.dumps(print, protocol=4),
    "numpy's own loader": b"cnumpy\nload\n(S'x'\ntR.",
    "an instance": b"(S'x'\nios\nsystem\n.",
    "objects in an array": pickle.dumps({b"data": np.array([object()], dtype=object)}),
    "a persistent id": b"Pid\n.",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_pickles_do_nothing(tmp_path: Path, content: bytes) -> None:
    root = official_files.cifar10_python(tmp_path, made(10, 10, seed=0), made(3, 10, seed=1))
    (root / "test_batch").write_bytes(content)
    with pytest.raises(ValueError, match="test_batch"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_file_cut_short_is_said_to_be(tmp_path: Path, layout: str, share: float) -> None:
    name, write, archive = LAYOUTS[layout]
    written = write(tmp_path, made(25, classes(name), seed=0), made(7, classes(name), seed=1))
    victims = [written / "train_32x32.mat"] if archive is None else [packed(written, archive)]
    if archive is not None:
        official = write(tmp_path / "unpacked", made(25, classes(name), seed=0), made(7, classes(name), seed=1))
        victims.append(
            next(file for file in sorted(official.iterdir()) if "train" in file.name or "batch_2" in file.name)
        )
    for victim in victims:
        content = victim.read_bytes()
        victim.write_bytes(content[: int(share * len(content))])
        root = tmp_path / "unpacked" if "unpacked" in str(victim) else tmp_path
        with pytest.raises(ValueError, match=r"cut short|not a whole"):
            load(name, root)


def test_bytes_changed_at_random_are_an_error_or_other_pictures_never_a_crash(tmp_path: Path) -> None:
    root = official_files.cifar10_python(tmp_path, made(10, 10, seed=0), made(3, 10, seed=1))
    whole = (root / "test_batch").read_bytes()
    generator = np.random.default_rng(0)
    for _ in range(150):
        broken = bytearray(whole)
        # the frame of the pickle, not the pixels
        for place in generator.integers(0, 300, size=3):
            broken[place] = generator.integers(0, 256)
        (root / "test_batch").write_bytes(bytes(broken))
        with suppress(ValueError):
            load("cifar10", tmp_path)


def test_a_member_outside_its_folder_or_a_link_is_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    with tarfile.open(tmp_path / "cifar-100-python.tar.gz", "w:gz") as tar:
        official_files.member(tar, "../cifar-100-python/train", b"")
        link = tarfile.TarInfo("cifar-100-python/train")
        link.type, link.linkname = tarfile.SYMTYPE, str(secret)
        tar.addfile(link)
    with pytest.raises(FileNotFoundError, match="missing: train, test"):
        load("cifar100", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cifar-100-python.tar.gz", "secret"]


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


def test_digits_need_no_file_and_have_a_fixed_test_set() -> None:
    one, two = load("digits"), load("digits")
    assert one.checksum == two.checksum
    assert (len(one.train), len(one.test)) == (1438, 359)
    assert tuple(one.train.shape) == (1, 8, 8)
    assert int(one.train.x.max()) == 255
    assert min(one.test.y.bincount().tolist()) >= 34
    rows = {row.numpy().tobytes() for row in one.train.x}
    assert sum(row.numpy().tobytes() in rows for row in one.test.x) <= 1  # no picture is on both sides


def test_the_spiral_is_drawn_by_its_seed() -> None:
    data = load("spiral")
    assert not data.train.pictures
    assert (len(data.train), len(data.test)) == (400, 10_000)
    assert torch.equal(load_spiral(seed=3).train.x, load_spiral(seed=3).train.x)
    assert not torch.equal(load_spiral(seed=3).train.x, data.train.x)
    drawn = Spiral.draw(4000, wrong=0.2, generator=torch.Generator().manual_seed(0))
    assert float(drawn.wrong.float().mean()) == pytest.approx(0.2, abs=0.03)
    assert load_spiral(wrong=0).train.y.bincount().tolist()[0] == pytest.approx(200, abs=40)
    with pytest.raises(ValueError, match=r"between 0 and 1, got 1\.5"):
        load_spiral(wrong=1.5)


class TestNpz:
    @pytest.mark.parametrize("order", ["NHWC", "NCHW", "NHW"])
    def test_pictures_in_any_order_of_axes(self, tmp_path: Path, order: str) -> None:
        (x, y), (x_test, y_test) = made(6, 4, seed=0), made(3, 4, seed=1)

        def axes(t: Tensor) -> Tensor:
            return {"NHWC": t.permute(0, 2, 3, 1), "NCHW": t, "NHW": t[:, 0]}[order]

        arrays = {
            "x_train": axes(x).numpy(),
            "y_train": y.numpy(),
            "x_test": axes(x_test).numpy(),
            "y_test": y_test.numpy(),
        }
        np.savez(tmp_path / "pets.npz", allow_pickle=False, **arrays, names=np.array(["cat", "dog", "ant", "bee"]))
        data = load(tmp_path / "pets.npz")
        expected = x[:, :1] if order == "NHW" else x
        assert torch.equal(data.train.x, expected)
        assert data.name == "pets"
        assert data.names == ["cat", "dog", "ant", "bee"]

    def test_points(self, tmp_path: Path) -> None:
        x = np.random.default_rng(0).normal(size=(9, 4))
        np.savez(tmp_path / "p.npz", x_train=x, y_train=np.arange(9) % 3, x_test=x[:2], y_test=np.array([0, 2]))
        data = load(tmp_path / "p.npz")
        assert data.train.x.dtype == torch.float32
        assert data.names == ["0", "1", "2"]

    def test_what_is_wrong_is_named(self, tmp_path: Path) -> None:
        good = {"x_train": np.zeros((2, 8, 8, 3), np.uint8), "y_train": np.array([0, 1])}
        good |= {"x_test": good["x_train"], "y_test": good["y_train"]}
        cases = {
            "missing: y_test": {key: value for key, value in good.items() if key != "y_test"},
            "pictures must be uint8": {**good, "x_train": np.zeros((2, 8, 8, 3))},
            "1, 3 or 4 channels": {**good, "x_test": np.zeros((2, 5, 8, 7), np.uint8)},
            "labels must be whole numbers, got float64": {**good, "y_train": np.array([0.0, 1.0])},
            "2 pictures and 3 labels": {**good, "y_train": np.array([0, 1, 1])},
            "labels must be 0 to 1 for 2 classes, got 5": {
                **good,
                "y_test": np.array([0, 5]),
                "names": np.array(["a", "b"]),
            },
            "one shape": {**good, "x_test": np.zeros((2, 9, 9, 3), np.uint8)},
            "plain arrays": {**good, "y_train": np.array([{}, {}], dtype=object)},
        }
        for message, arrays in cases.items():
            np.savez(tmp_path / "x.npz", **arrays)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=message):
                load(tmp_path / "x.npz")
        content = (tmp_path / "x.npz").read_bytes()
        (tmp_path / "x.npz").write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match=r"not a whole \.npz"):
            load(tmp_path / "x.npz")


class TestFolder:
    def write(self, root: Path, *, count: int = 10, mode: str = "RGB", size: tuple[int, int] = (9, 7)) -> Path:
        generator = np.random.default_rng(0)
        for name in ("cat", "dog"):
            (root / name).mkdir(parents=True)
            for number in range(count):
                shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
                pixels = generator.integers(0, 256, shape, dtype=np.uint8)
                Image.fromarray(pixels).save(root / name / f"{number}.png")
        return root

    def test_train_and_test_folders(self, tmp_path: Path) -> None:
        self.write(tmp_path / "pets" / "train")
        self.write(tmp_path / "pets" / "test", count=3)
        data = load(tmp_path / "pets")
        assert tuple(data.train.x.shape) == (20, 3, 7, 9)
        assert data.test.y.tolist() == [0, 0, 0, 1, 1, 1]
        assert data.names == ["cat", "dog"]
        with Image.open(tmp_path / "pets" / "train" / "dog" / "0.png") as picture:
            assert np.array_equal(data.train.x[10].permute(1, 2, 0).numpy(), np.array(picture))

    def test_one_folder_is_divided_by_class_and_seed(self, tmp_path: Path) -> None:
        data = load(self.write(tmp_path / "pets"))
        assert data.train.y.bincount().tolist() == [8, 8]
        assert data.test.y.bincount().tolist() == [2, 2]
        other = picture_folder.load(tmp_path / "pets", seed=1)
        assert not torch.equal(other.test.x, data.test.x)

    def test_grey_pictures_have_one_channel_and_sizes_can_be_made_equal(self, tmp_path: Path) -> None:
        assert load(self.write(tmp_path / "grey", mode="L")).in_channels == 1
        root = self.write(tmp_path / "mixed")
        Image.new("RGB", (20, 20)).save(root / "dog" / "large.png")
        with pytest.raises(ValueError, match=r"9 by 7.*large.png is 20 by 20; give size="):
            load(root)
        assert tuple(picture_folder.load(root, size=(8, 6)).train.shape) == (3, 8, 6)

    def test_what_is_wrong_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        with pytest.raises(FileNotFoundError, match="a folder of pictures a class"):
            load(tmp_path / "empty")
        root = self.write(tmp_path / "pets")
        (root / "cat" / "3.png").write_bytes(b"no picture")
        with pytest.raises(ValueError, match=r"3\.png is not a picture"):
            load(root)
        (root / "cat" / "3.png").unlink()
        Image.fromarray(np.zeros((7, 9), np.uint16)).save(root / "cat" / "deep.png")
        with pytest.raises(ValueError, match=r"8 bits a channel, got .*deep\.png of mode I;16"):
            load(root)
        self.write(tmp_path / "half" / "train")
        with pytest.raises(FileNotFoundError, match="both train/ and test/, or neither"):
            load(tmp_path / "half")
        self.write(tmp_path / "half" / "test")
        (tmp_path / "half" / "test" / "bird").mkdir()
        with pytest.raises(ValueError, match="only one of them has bird"):
            load(tmp_path / "half")


class TestDataset:
    def test_a_tenth_is_held_out_by_seed(self) -> None:
        data = load("digits")
        tuning, again, other = data.held_out(0), data.held_out(0), data.held_out(1)
        assert (len(tuning.train), len(tuning.test)) == (1294, 144)
        assert torch.equal(tuning.test.x, again.test.x)
        assert not torch.equal(tuning.test.x, other.test.x)
        both = torch.cat([tuning.train.x, tuning.test.x]).flatten(1).sort(dim=0).values
        assert torch.equal(both, data.train.x.flatten(1).sort(dim=0).values)  # the training set, each picture once
        for share in (0.0, 1.0, 1e-9, 2.0):
            with pytest.raises(ValueError, match="leaves one part empty"):
                data.held_out(0, share=share)

    def test_the_checksum_follows_every_byte(self) -> None:
        data = load("digits")
        x = data.train.x.clone()
        x[5, 0, 3, 3] += 1
        changed = Dataset("digits", Split(x, data.train.y), data.test, data.names)
        assert changed.checksum != data.checksum
        assert data.to("cpu").checksum == data.checksum

    @pytest.mark.parametrize(
        ("x", "y", "message"),
        [
            (torch.zeros(2, 3, 4, 4), torch.tensor([0, 1]), "uint8 pictures"),
            (torch.zeros(2, 4), torch.tensor([0, 3]), "0 to 1 for 2 classes, got 3"),
            (torch.zeros(2, 4), torch.tensor([0, -1]), "got -1"),
            (torch.zeros(2, 4), torch.tensor([0.0, 1.0]), "int64"),
            (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), "at least one picture"),
            (torch.full((1, 4), torch.nan), torch.tensor([0]), "finite"),
        ],
    )
    def test_its_rules(self, x: Tensor, y: Tensor, message: str) -> None:
        good = Split(torch.zeros(2, 4), torch.tensor([0, 1]))
        with pytest.raises(ValueError, match=message):
            Dataset("x", Split(x, y), good, ["a", "b"])


def test_the_module_describes_a_data_set(tmp_path: Path) -> None:
    official_files.cifar10_python(tmp_path, made(50, 10, seed=0), made(10, 10, seed=1))

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "flatmin_lab.data", *arguments]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    shown = command("cifar10", "--root", str(tmp_path))
    assert shown.returncode == 0, shown.stderr
    for fact in ("50 to train on, 10 to test with, 3 × 32 × 32, 10 classes", "mean", "sha256", "MB"):
        assert fact in shown.stdout
    assert shown.stderr == ""
    wrong = command("cifar10", "--root", str(tmp_path / "empty"))
    assert wrong.returncode == 1
    assert "was not found" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    assert "digits" in DATA_SETS
