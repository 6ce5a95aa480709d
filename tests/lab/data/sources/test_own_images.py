"""One's own images: an .npz file, or a folder."""

import io
import struct
import tracemalloc
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from torch import Tensor

from flatmin_lab.data import load
from flatmin_lab.data.sources import image_folder
from tests.support.official_files import made
from tests.support.pipes import pipe


class TestNpz:
    @pytest.mark.parametrize("order", ["NHWC", "NCHW", "NHW"])
    def test_images_in_any_order_of_axes(self, tmp_path: Path, order: str) -> None:
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

    def test_tiny_images_whose_channels_could_be_first_or_last(self, tmp_path: Path) -> None:
        def shape(*sides: int) -> tuple[int, ...]:
            x, y = np.zeros((2, *sides), np.uint8), np.array([0, 1])
            np.savez(tmp_path / "x.npz", x_train=x, y_train=y, x_test=x, y_test=y)
            return tuple(load(tmp_path / "x.npz").train.shape)

        assert shape(4, 4, 3) == (3, 4, 4)
        assert shape(3, 4, 4) == (3, 4, 4)
        for sides in ((3, 3, 3), (3, 5, 4)):
            with pytest.raises(ValueError, match=r"both could be them; use \(N, C, H, W\)"):
                shape(*sides)

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
            "images must be uint8": {**good, "x_train": np.zeros((2, 8, 8, 3))},
            "1, 3 or 4 channels": {**good, "x_test": np.zeros((2, 5, 8, 7), np.uint8)},
            "labels must be whole numbers, got float64": {**good, "y_train": np.array([0.0, 1.0])},
            "2 images and 3 labels": {**good, "y_train": np.array([0, 1, 1])},
            "labels must be 0 to 1 for 2 classes, got 5": {
                **good,
                "y_test": np.array([0, 5]),
                "names": np.array(["a", "b"]),
            },
            "labels must start at 0, got 1 to 2; subtract 1": {
                **good,
                "y_train": np.array([1, 2]),
                "y_test": np.array([1, 2]),
            },
            "got 90000 for 4 images; number the classes": {**good, "y_test": np.array([0, 90_000])},
            "at least two classes, got labels that are all 0": {
                **good,
                "y_train": np.zeros(2, int),
                "y_test": np.zeros(2, int),
            },
            "names must be strings": {**good, "names": np.array("cat")},
            "of at least one pixel": {**good, "x_train": good["x_train"][:, :0], "x_test": good["x_test"][:, :0]},
            "one shape": {**good, "x_test": np.zeros((2, 9, 9, 3), np.uint8)},
            "plain arrays": {**good, "y_train": np.array([{}, {}], dtype=object)},
            "names holds Python objects, which are never loaded": {**good, "names": np.array(["a", "b"], dtype=object)},
        }
        for message, arrays in cases.items():
            np.savez(tmp_path / "x.npz", **arrays)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=message):
                load(tmp_path / "x.npz")
        np.savez(tmp_path / "x.npz", **good)  # type: ignore[arg-type]
        content = (tmp_path / "x.npz").read_bytes()
        generator = np.random.default_rng(0)
        for place in generator.integers(0, len(content), 200):
            broken = bytearray(content)
            broken[place] ^= 1 << int(generator.integers(0, 8))
            (tmp_path / "x.npz").write_bytes(bytes(broken))
            with suppress(ValueError):
                load(tmp_path / "x.npz")
        (tmp_path / "x.npz").write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match=r"not an intact \.npz"):
            load(tmp_path / "x.npz")

    def test_what_the_arrays_take_is_checked_before_one_is_read(self, tmp_path: Path) -> None:
        """A member's header and its size in the file's directory must agree; neither is believed alone."""
        x, y = np.zeros((64, 64, 64), np.uint8), np.arange(64) % 2
        place = tmp_path / "x.npz"
        np.savez_compressed(place, x_train=x, y_train=y, x_test=x, y_test=y)
        assert len(load(place).train) == 64
        tracemalloc.start()
        try:
            with_header(place, "x_train.npy", (1 << 20, 64, 64), size=64 * 64 << 20)
            with pytest.raises(ValueError, match=r"x\.npz must take at most 4 GiB, got 4\.0 GiB packed into \d+ bytes"):
                load(place)
            with_header(place, "x_train.npy", (1 << 14, 64, 64), size=64**3)
            with pytest.raises(ValueError, match=r"x_train has uint8 of shape \(16384, 64, 64\), which do not fit"):
                load(place)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 4 << 20

    @pytest.mark.parametrize("code", [0xD800, 0x110000, 0xFFFFFFFF])
    def test_names_that_are_no_characters_are_refused(self, tmp_path: Path, code: int) -> None:
        x, y = np.zeros((2, 8, 8), np.uint8), np.array([0, 1])
        names = np.array([[99, 97, 116], [100, code, 103]], np.uint32).view("U3")[:, 0]
        np.savez(tmp_path / "x.npz", x_train=x, y_train=y, x_test=x, y_test=y, names=names)
        with pytest.raises(ValueError, match=r"x\.npz: names: names must be valid Unicode"):
            load(tmp_path / "x.npz")


def with_header(place: Path, name: str, shape: tuple[int, ...], *, size: int) -> None:
    """Replace a member by one that announces uint8 of that shape, and to have that many bytes; it has but a few."""
    with zipfile.ZipFile(place) as old:
        kept = {other: old.read(other) for other in old.namelist() if other != name}
    start = io.BytesIO()
    np.lib.format.write_array_header_1_0(start, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(place, "w") as new:
        for other, content in kept.items():
            new.writestr(other, content)
        new.writestr(name, start.getvalue() + bytes(999))
        new.getinfo(name).file_size = len(start.getvalue()) + size  # written into the directory at the end


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
        with Image.open(tmp_path / "pets" / "train" / "dog" / "0.png") as image:
            assert np.array_equal(data.train.x[10].permute(1, 2, 0).numpy(), np.array(image))

    def test_one_folder_is_divided_by_class_and_seed(self, tmp_path: Path) -> None:
        data = load(self.write(tmp_path / "pets"))
        assert data.train.y.bincount().tolist() == [8, 8]
        assert data.test.y.bincount().tolist() == [2, 2]
        other = image_folder.load(tmp_path / "pets", seed=1)
        assert not torch.equal(other.test.x, data.test.x)

    def test_grey_images_have_one_channel_and_sizes_can_be_made_equal(self, tmp_path: Path) -> None:
        assert load(self.write(tmp_path / "grey", mode="L")).in_channels == 1
        root = self.write(tmp_path / "mixed")
        Image.new("RGB", (20, 20)).save(root / "dog" / "large.png")
        with pytest.raises(ValueError, match=r"9 by 7.*large.png is 20 by 20; give size="):
            load(root)
        assert tuple(load(root, size=(8, 6)).train.shape) == (3, 8, 6)
        with pytest.raises(ValueError, match=r"\(height, width\) of at least 1 by 1, got \(0, 8\)"):
            load(root, size=(0, 8))

    def test_a_camera_held_upright_and_files_of_other_programs(self, tmp_path: Path) -> None:
        root = self.write(tmp_path / "pets", size=(7, 9))
        for other in (".ipynb_checkpoints", "__MACOSX"):
            (root / other).mkdir()
        (root / "cat" / ".ipynb_checkpoints").mkdir()
        for copy in ("cat/.ipynb_checkpoints/0-checkpoint.png", "cat/._0.png"):
            (root / copy).write_bytes((root / "cat" / "0.png").read_bytes())
        turned = Image.fromarray(np.zeros((7, 9, 3), np.uint8))  # 9 wide, 7 high, to be turned by a quarter
        exif = turned.getexif()
        exif[0x0112] = 6
        turned.save(root / "dog" / "camera.jpg", exif=exif)
        data = load(root)
        assert data.names == ["cat", "dog"]
        assert tuple(data.train.shape) == (3, 9, 7)
        assert len(data.train) + len(data.test) == 21

    def test_what_is_wrong_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        with pytest.raises(FileNotFoundError, match="one folder of images per class"):
            load(tmp_path / "empty")
        root = self.write(tmp_path / "pets")
        (root / "cat" / "3.png").write_bytes(b"no image")
        with pytest.raises(ValueError, match=r"3\.png is not an image"):
            load(root)
        (root / "cat" / "3.png").unlink()
        Image.fromarray(np.zeros((7, 9), np.uint16)).save(root / "cat" / "deep.png")
        with pytest.raises(ValueError, match=r"8 bits per channel, got mode I;16 in .*deep\.png"):
            load(root)
        few = self.write(tmp_path / "few", count=2)
        (few / "dog" / "0.png").write_bytes(b"no image")  # which takes longer to find out
        with pytest.raises(ValueError, match="at least 3 images"):
            load(few)
        self.write(tmp_path / "half" / "train")
        with pytest.raises(FileNotFoundError, match="both train/ and test/, or neither"):
            load(tmp_path / "half")
        self.write(tmp_path / "half" / "test")
        (tmp_path / "half" / "test" / "bird").mkdir()
        with pytest.raises(ValueError, match="only one of them has bird"):
            load(tmp_path / "half")

    @pytest.mark.parametrize(
        "names", [("Train", "Test"), ("training", "testing"), ("seg_train", "seg_test"), ("training_set", "Validation")]
    )
    def test_splits_that_are_not_called_train_and_test_are_not_taken_for_classes(
        self, tmp_path: Path, names: tuple[str, str]
    ) -> None:
        for name in names:
            self.write(tmp_path / "pets" / name, count=3)
        with pytest.raises(ValueError, match=r"not like classes; call them train/ and test/"):
            load(tmp_path / "pets")

    def test_classes_may_have_such_words_in_their_names(self, tmp_path: Path) -> None:
        root = self.write(tmp_path / "places", count=3)
        (root / "cat").rename(root / "train_station")
        (root / "dog").rename(root / "test tube")
        (root / "train_val" / "inside").mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (9, 7)).save(root / "train_val" / "inside" / f"{number}.png")
        assert load(root).names == ["test tube", "train_station", "train_val"]

    def test_a_folder_above_that_of_the_classes_is_refused(self, tmp_path: Path) -> None:
        self.write(tmp_path / "all" / "pets", count=3)
        with pytest.raises(ValueError, match="at least two classes, got only pets/; name the folder that holds"):
            load(tmp_path / "all")

    def test_a_test_folder_without_labels_is_named(self, tmp_path: Path) -> None:
        self.write(tmp_path / "pets" / "train", count=3)
        (tmp_path / "pets" / "test").mkdir()
        Image.new("RGB", (9, 7)).save(tmp_path / "pets" / "test" / "0.png")
        with pytest.raises(FileNotFoundError, match=r"pets/test must hold one folder of images per class, got no"):
            load(tmp_path / "pets")

    def test_the_name_of_a_file_does_not_choose_the_program_that_reads_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """PostScript is a program; Pillow hands it to Ghostscript, whatever the file is called."""
        started: list[object] = []
        monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *given, **_: started.append(given))
        root = self.write(tmp_path / "pets")
        (root / "cat" / "x.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 7\n%%EndComments\n%%EOF\n")
        with pytest.raises(ValueError, match=r"x\.png is not an image that can be read"):
            load(root)
        assert not started

    def test_an_image_that_is_too_large_is_refused_by_its_header(self, tmp_path: Path) -> None:
        root = self.write(tmp_path / "pets")
        (root / "dog" / "x.png").write_bytes(png_without_pixels(13_000, 12_000))
        with pytest.raises(ValueError, match=r"at most 67108864 pixels, got 13000 by 12000 in .*x\.png; make it"):
            load(root)
        (root / "dog" / "x.png").write_bytes(png_without_pixels(100_000, 100_000))
        with pytest.raises(ValueError, match=r"x\.png is not an image .* \(10000000000 pixels\) exceeds limit"):
            load(root)

    def test_images_that_are_too_large_together_are_refused_by_their_headers(self, tmp_path: Path) -> None:
        root = self.write(tmp_path / "pets", count=3)
        for number in range(90):
            (root / "dog" / f"large-{number}.png").write_bytes(png_without_pixels(8192, 8192))
        with pytest.raises(ValueError, match=r"at most 16 GiB, got 96 images of 16\.9 GiB in .*pets; give a"):
            load(root)
        with pytest.raises(ValueError, match=r"at most 16 GiB, got 96 images of 268\.2 GiB in .*pets"):
            load(root, size=(10**5, 10**4))

    def test_linked_folders_are_read_and_links_may_go_round_in_a_circle(self, tmp_path: Path) -> None:
        root, other = self.write(tmp_path / "pets"), self.write(tmp_path / "other", count=4)
        (root / "cat" / "more").symlink_to(other / "cat")
        (root / "cat" / "circle").symlink_to(root / "cat")
        (root / "bird").symlink_to(other / "dog")
        data = load(root)
        assert (data.train.y.bincount() + data.test.y.bincount()).tolist() == [4, 14, 10]

    def test_a_pipe_is_refused_and_a_link_to_an_image_is_followed(self, tmp_path: Path) -> None:
        root = self.write(tmp_path / "pets")
        (root / "cat" / "link.png").symlink_to(root / "cat" / "0.png")
        assert len(load(root).train) + len(load(root).test) == 21
        with (
            pipe(root / "cat" / "x.png"),
            pytest.raises(ValueError, match=r"x\.png must be a regular file"),
        ):
            load(root)


def png_without_pixels(width: int, height: int) -> bytes:
    """The header of an RGB image of that size, and the end."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
