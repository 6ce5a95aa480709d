"""A data set's rules, its held-out tenth and its checksum; the embedded sets; the command that describes one."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from flatmin_lab.data import DATA_SETS, Dataset, Split, augmentation, load
from flatmin_lab.data import __main__ as data_command
from flatmin_lab.data.sources import digits
from flatmin_lab.data.sources.spiral import Spiral
from flatmin_lab.data.sources.spiral import load as load_spiral
from tests.support import official_files
from tests.support.official_files import made


def test_digits_need_no_file_and_have_a_fixed_test_set() -> None:
    one, two = load("digits"), load("digits")
    assert one.checksum == two.checksum
    assert (len(one.train), len(one.test)) == (1438, 359)
    assert tuple(one.train.shape) == (1, 8, 8)
    assert int(one.train.x.max()) == 255
    assert min(one.test.y.bincount().tolist()) >= 34
    rows = {row.numpy().tobytes() for row in one.train.x}
    assert sum(row.numpy().tobytes() in rows for row in one.test.x) <= 1  # no image is on both sides


def test_the_spiral_is_drawn_by_its_seed() -> None:
    data = load("spiral")
    assert not data.train.is_images
    assert (len(data.train), len(data.test)) == (400, 10_000)
    assert torch.equal(load_spiral(seed=3).train.x, load_spiral(seed=3).train.x)
    assert not torch.equal(load_spiral(seed=3).train.x, data.train.x)
    drawn = Spiral.draw(4000, wrong=0.2, generator=torch.Generator().manual_seed(0))
    assert float(drawn.wrong.float().mean()) == pytest.approx(0.2, abs=0.03)
    assert load_spiral(wrong=0).train.y.bincount().tolist()[0] == pytest.approx(200, abs=40)
    with pytest.raises(ValueError, match=r"between 0 and 1, got 1\.5"):
        load_spiral(wrong=1.5)


class TestDataset:
    def test_a_tenth_is_held_out_by_seed(self) -> None:
        data = load("digits")
        tuning, again, other = data.held_out(0), data.held_out(0), data.held_out(1)
        assert (len(tuning.train), len(tuning.test)) == (1294, 144)
        assert torch.equal(tuning.test.x, again.test.x)
        assert not torch.equal(tuning.test.x, other.test.x)
        marked = torch.arange(len(data.train)).float()[:, None]  # every point knows its label
        points = Split(marked, torch.arange(len(data.train)))
        parts = Dataset("marked", points, points, [str(n) for n in range(len(marked))]).held_out(0)
        for part in (parts.train, parts.test):
            assert torch.equal(part.x[:, 0].long(), part.y)
        assert torch.cat([parts.train.y, parts.test.y]).sort().values.equal(points.y)  # each once
        assert torch.equal(data.held_out(np.int64(1)).test.x, other.test.x)  # whatever kind of 1 it is
        for share in (0.0, 1.0, 1e-9, 2.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="leaves one part empty"):
                data.held_out(0, share=share)

    def test_the_checksum_follows_every_byte(self) -> None:
        data = load("digits")
        x = data.train.x.clone()
        x[5, 0, 3, 3] += 1
        changed = Dataset("digits", Split(x, data.train.y), data.test, data.names)
        assert changed.checksum != data.checksum
        assert data.to("cpu").checksum == data.checksum

    def test_it_says_what_it_is_in_a_line(self) -> None:
        assert repr(load("digits")) == (
            "Dataset('digits', train=Split(1438 images of 1 × 8 × 8 on cpu), "
            "test=Split(359 images of 1 × 8 × 8 on cpu), 10 classes)"
        )

    def test_the_default_type_of_floats_changes_nothing(self) -> None:
        before = load("spiral").checksum
        torch.set_default_dtype(torch.float64)
        try:
            assert load("spiral").checksum == before
            draws = augmentation("vanilla", "cifar10").draw(3, generator=torch.Generator().manual_seed(0))
            assert draws.dtype == torch.float32
        finally:
            torch.set_default_dtype(torch.float32)

    @pytest.mark.parametrize(
        ("x", "y", "message"),
        [
            (torch.zeros(2, 3, 4, 4), torch.tensor([0, 1]), "uint8 images"),
            (torch.zeros(2, 4), torch.tensor([0, 3]), "0 to 1 for 2 classes, got 3"),
            (torch.zeros(2, 4), torch.tensor([0, -1]), "got -1"),
            (torch.zeros(2, 4), torch.tensor([0.0, 1.0]), "int64"),
            (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), "at least one image"),
            (torch.full((1, 4), torch.nan), torch.tensor([0]), "finite"),
        ],
    )
    def test_its_rules(self, x: Tensor, y: Tensor, message: str) -> None:
        good = Split(torch.zeros(2, 4), torch.tensor([0, 1]))
        with pytest.raises(ValueError, match=message):
            Dataset("x", Split(x, y), good, ["a", "b"])


def test_paths_of_the_home_folder_and_paths_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    official_files.cifar10_python(tmp_path / "real", made(10, 10, seed=0), made(3, 10, seed=1))
    assert len(load("cifar10", "~/real").train) == 10
    with pytest.raises(
        FileNotFoundError, match=r"nope\.npz must be an \.npz file or a folder of images, and is not there"
    ):
        load("~/nope.npz")
    with pytest.raises(ValueError, match="unknown data set ''"):
        load("")


@pytest.mark.parametrize("place", [".", "folder"])
def test_a_file_of_another_kind_is_refused_as_a_file(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "iris.csv").write_text("length,species\n5.1,setosa\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"iris\.csv must be an \.npz file .* neither; numpy\.savez makes one of"
    ):
        load(Path(place) / "iris.csv")


def test_only_the_images_of_a_folder_are_resized(tmp_path: Path) -> None:
    x, y = np.zeros((2, 8, 8), np.uint8), np.array([0, 1])
    np.savez(tmp_path / "x.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    for name in ("digits", "cifar10-made", tmp_path / "x.npz"):
        with pytest.raises(ValueError, match=r"images of a folder are resized to, got \(4, 4\) for .*; leave it out"):
            load(name, size=(4, 4))


def test_a_missing_package_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    digits.all_digits.cache_clear()
    with pytest.raises(ImportError, match=r"the data set digits needs sklearn, .*pip install 'flatmin\[lab\]'"):
        load("digits")


def test_the_module_describes_a_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    official_files.cifar10_python(tmp_path, made(50, 10, seed=0), made(10, 10, seed=1))
    monkeypatch.setattr(sys, "argv", ["flatmin_lab.data", "cifar10", "--root", str(tmp_path)])
    data_command.main()
    shown = capsys.readouterr()
    for fact in ("50 for training, 10 for testing, images of 3 × 32 × 32, 10 classes", "mean", "sha256", "MB"):
        assert fact in shown.out
    assert shown.err == ""
    monkeypatch.setattr(sys, "argv", ["flatmin_lab.data", "cifar10", "--root", str(tmp_path / "empty")])
    with pytest.raises(SystemExit, match="was not found"):
        data_command.main()
    assert "digits" in DATA_SETS
