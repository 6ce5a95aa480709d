"""Any torch data set, read once, cached, and followed when it changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from flatmin_lab.data import from_torch
from official_files import made


class Items(Dataset[Any]):
    """A data set of one's own, which counts how often it is asked."""

    def __init__(self, x: Tensor, y: Tensor, form: str = "tensor") -> None:
        self.x, self.y, self.form, self.asked = x, y, form, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.asked += 1
        picture, label = self.x[index], int(self.y[index])
        forms: dict[str, Any] = {
            "tensor": picture,
            "float": picture.float() / 255,
            "array": picture.permute(1, 2, 0).numpy(),
            "pil": Image.fromarray(picture.permute(1, 2, 0).numpy()),
            "random": (picture.float() / 255 * torch.rand(())).clamp(0, 1),
            "normalised": (picture.float() / 255 - 0.5) / 0.2,
        }
        return forms[self.form], label


def both(form: str = "tensor", count: int = 9) -> tuple[Items, Items]:
    return Items(*made(count, 4, seed=0), form), Items(*made(4, 4, seed=1), form)


@pytest.mark.parametrize("form", ["tensor", "float", "array", "pil"])
def test_every_form_of_a_picture_gives_the_same_bytes(form: str) -> None:
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


def test_the_second_time_it_comes_from_the_cache_and_a_change_is_noticed(tmp_path: Path) -> None:
    cache = tmp_path / "new" / "mine.npz"
    train, test = both()
    first = from_torch(train, test, name="mine", cache=cache)
    train.asked = test.asked = 0
    second = from_torch(train, test, name="mine", cache=cache)
    assert second.checksum == first.checksum
    assert train.asked + test.asked == 12  # three items of each, twice
    longer, _ = both(count=11)
    assert len(from_torch(longer, test, name="mine", cache=cache).train) == 11
    assert [file.name for file in cache.parent.iterdir()] == ["mine.npz"]


def test_a_broken_cache_and_a_file_of_another_kind_are_named(tmp_path: Path) -> None:
    train, test = both()
    cache = tmp_path / "mine.npz"
    from_torch(train, test, name="mine", cache=cache)
    cache.write_bytes(cache.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"mine\.npz is not a whole \.npz"):
        from_torch(train, test, name="mine", cache=cache)
    arrays = {"x_train": train.x, "y_train": train.y, "x_test": test.x, "y_test": test.y}
    np.savez(cache, **{key: value.numpy() for key, value in arrays.items()})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a data set of its own, not a cache"):
        from_torch(train, test, name="mine", cache=cache)


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
    with pytest.raises(ValueError, match="at least one picture, got none"):
        from_torch([], test, name="mine")
    with pytest.raises(TypeError, match=r"pairs \(picture, label\), got Tensor at 0"):
        from_torch(torch.zeros(4, 3), test, name="mine")
    with pytest.raises(TypeError, match="a PIL image, an array or a tensor, got str at 0"):
        from_torch([("picture", 0)], test, name="mine")
    uneven = [(train.x[0], 0), (train.x[1][:, :20], 1)]
    with pytest.raises(ValueError, match=r"one shape, got \(3, 32, 32\) at 0 and \(3, 20, 32\) at 1"):
        from_torch(uneven, test, name="mine")
    with pytest.raises(ValueError, match="labels must be 0 to 1 for 2 classes"):
        from_torch(train, test, name="mine", names=["a", "b"])
