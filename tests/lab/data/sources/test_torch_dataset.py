"""Any torch data set, read once, cached, and followed when it changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flatmin_lab.data import from_torch
from tests.support.official_files import made


class Items(Dataset[Any]):
    """A data set of one's own, which counts how often it is asked."""

    def __init__(self, x: Tensor, y: Tensor, form: str = "tensor") -> None:
        self.x, self.y, self.form, self.asked = x, y, form, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.asked += 1
        image, label = self.x[index], int(self.y[index])
        forms: dict[str, Any] = {
            "tensor": image,
            "float": image.float() / 255,
            "array": image.permute(1, 2, 0).numpy(),
            "pil": Image.fromarray(image.permute(1, 2, 0).numpy()),
            "random": (image.float() / 255 * torch.rand(())).clamp(0, 1),
            "normalised": (image.float() / 255 - 0.5) / 0.2,
        }
        return forms[self.form], label


def both(form: str = "tensor", count: int = 9) -> tuple[Items, Items]:
    return Items(*made(count, 4, seed=0), form), Items(*made(4, 4, seed=1), form)


@pytest.mark.parametrize("form", ["tensor", "float", "array", "pil"])
def test_every_form_of_an_image_gives_the_same_bytes(form: str) -> None:
    train, test = both(form)
    data = from_torch(train, test, name="mine")
    assert torch.equal(data.train.x, train.x)
    assert torch.equal(data.test.y, test.y)
    assert data.name == "mine"


def test_torchs_own_tensor_data_set_and_points() -> None:
    x, y = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 2
    data = from_torch(TensorDataset(x, y), TensorDataset(x[:4], y[:4]), name="points", names=["even", "odd"])
    assert torch.equal(data.train.x, x)
    assert data.names == ["even", "odd"]


def test_a_label_has_the_same_name_in_both_splits() -> None:
    train, test = both()
    for found, problem in ((["a", "c", "d"], "only one has b"), (["d", "c", "b", "a"], "in another order")):
        train.classes, test.classes = ["a", "b", "c", "d"], found  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=rf"both splits must have the same `classes`, .* {problem}"):
            from_torch(train, test, name="mine")
        assert from_torch(train, test, name="mine", names=["0", "1", "2", "3"]).names == ["0", "1", "2", "3"]
    for same in (["a", "b", "c", "d"], np.array(["a", "b", "c", "d"])):
        train.classes = test.classes = same  # type: ignore[attr-defined]
        assert from_torch(train, test, name="mine").names == ["a", "b", "c", "d"]


def test_the_second_time_it_comes_from_the_cache_and_a_change_is_noticed(tmp_path: Path) -> None:
    cache = tmp_path / "new" / "mine.npz"
    train, test = both()
    first = from_torch(train, test, name="mine", cache=cache)
    train.asked = test.asked = 0
    second = from_torch(train, test, name="mine", cache=cache)
    assert second.checksum == first.checksum
    assert train.asked + test.asked == 2 * (9 + 4)  # sets of up to 16 are looked at whole, twice
    longer, _ = both(count=11)
    assert len(from_torch(longer, test, name="mine", cache=cache).train) == 11
    for change in ("x", "y"):
        if change == "x":
            longer.x[1] = 255 - longer.x[1]
        else:
            longer.y[1] = (longer.y[1] + 1) % 4
        changed = from_torch(longer, test, name="mine", cache=cache)
        assert torch.equal(changed.train.x, longer.x)
        assert torch.equal(changed.train.y, longer.y)
    assert [file.name for file in cache.parent.iterdir()] == ["mine.npz"]


def test_a_broken_cache_and_a_file_of_another_kind_are_named(tmp_path: Path) -> None:
    train, test = both()
    cache = tmp_path / "mine.npz"
    from_torch(train, test, name="mine", cache=cache)
    cache.write_bytes(cache.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"mine\.npz is not an intact \.npz"):
        from_torch(train, test, name="mine", cache=cache)
    arrays = {"x_train": train.x, "y_train": train.y, "x_test": test.x, "y_test": test.y}
    np.savez(cache, **{key: value.numpy() for key, value in arrays.items()})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a data set of its own, not a cache"):
        from_torch(train, test, name="mine", cache=cache)


def test_of_a_large_set_sixteen_items_are_looked_at(tmp_path: Path) -> None:
    cache = tmp_path / "mine.npz"
    train, test = both(count=100)
    from_torch(train, test, name="mine", cache=cache)
    train.asked = 0
    from_torch(train, test, name="mine", cache=cache)
    assert train.asked == 32


def test_nothing_wrong_gets_into_the_cache(tmp_path: Path) -> None:
    train, test = both()
    train.y[1] = -1
    with pytest.raises(ValueError, match="labels must start at 0, got -1 to 3"):
        from_torch(train, test, name="mine", cache=tmp_path / "mine.npz")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shape", [(8, 6, 3), (3, 8, 6), (1, 8, 6), (8, 6)])
@pytest.mark.parametrize("form", ["array", "tensor"])
def test_channels_are_found_first_or_last(shape: tuple[int, ...], form: str) -> None:
    """A tensor that could be read either way has them first, an array last."""
    x = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    image = x if form == "tensor" else x.numpy()
    data = from_torch([(image, 0)], [(image, 0)], name="mine")
    expected = {(8, 6): x[None], (8, 6, 3): x.movedim(-1, 0)}.get(shape, x)
    assert torch.equal(data.train.x[0], expected)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("random", "differs from one reading to the next"),
        ("normalised", "values from 0 to 1, got .* without normalisation"),
    ],
)
def test_transforms_do_not_belong_in_it(form: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_torch(*both(form), name="mine")


def test_other_shapes_of_a_data_set_are_refused() -> None:
    train, test = both()
    with pytest.raises(TypeError, match="must know its length"):
        from_torch(iter([]), test, name="mine")
    with pytest.raises(ValueError, match="at least one image, got none"):
        from_torch([], test, name="mine")
    with pytest.raises(TypeError, match=r"pairs \(image, label\), got Tensor at 0"):
        from_torch(torch.zeros(4, 3), test, name="mine")
    with pytest.raises(TypeError, match="a PIL image, an array or a tensor, got str at 0"):
        from_torch([("image", 0)], test, name="mine")
    uneven = [(train.x[0], 0), (train.x[1][:, :20], 1)]
    with pytest.raises(ValueError, match=r"one shape, got \(3, 32, 32\) at 0 and \(3, 20, 32\) at 1"):
        from_torch(uneven, test, name="mine")
    with pytest.raises(ValueError, match="labels must be 0 to 1 for 2 classes"):
        from_torch(train, test, name="mine", names=["a", "b"])
    with pytest.raises(TypeError, match="items by index, got a DataLoader; pass the data set itself"):
        from_torch(DataLoader(train), test, name="mine")
    with pytest.raises(ValueError, match=r"1, 3 or 4 channels, .*got shape \(7, 9, 11\) at 0"):
        from_torch([(torch.zeros(7, 9, 11), 0)], test, name="mine")
    with pytest.raises(ValueError, match=r"uint8, or floats from 0 to 1, got torch\.int64 at 0"):
        from_torch([(torch.zeros(3, 9, 11, dtype=torch.int64), 0)], test, name="mine")
    with pytest.raises(ValueError, match="8 bits per channel, got mode I;16 in item 0"):
        from_torch([(Image.fromarray(np.zeros((4, 4), np.uint16)), 0)], test, name="mine")
    with pytest.raises(ValueError, match="a point must be finite"):
        from_torch([(torch.tensor([1.0, torch.nan]), 0)], test, name="mine")
    for label in (1.7, "cat", None, torch.tensor([0.0, 1.0]), True):
        with pytest.raises(TypeError, match="a label must be one whole number, got"):
            from_torch([(train.x[0], label)], test, name="mine")
