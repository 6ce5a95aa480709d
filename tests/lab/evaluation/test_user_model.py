"""Models of the user's own: where they come from, what weights fit them, and what is said where they do not."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flatmin_lab.evaluation import user_code, user_model

MODULE = """
    import torch
    from torch import nn

    def make_model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def wider():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Linear(12, 10))

    not_a_function = 3

    def nothing():
        return None
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a module in it."""
    (tmp_path / "my_model_module.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "my_model_module", raising=False)
    return tmp_path


def test_a_model_comes_from_a_module_or_a_file(here: Path) -> None:
    for name in ("my_model_module:make_model", "my_model_module.py:make_model", f"{here}/my_model_module.py"):
        assert user_code.is_user_code(name)
        assert isinstance(user_model.make_model(name), nn.Sequential)
    assert not user_code.is_user_code("convnet")


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("my_model_module:absent", ValueError, "no function or class 'absent'"),
        ("my_model_module:not_a_function", ValueError, "no function or class"),
        ("my_model_module:nothing", TypeError, "got NoneType"),
        ("no_such_module:make_model", FileNotFoundError, "no module 'no_such_module'"),
        ("absent.py:make_model", FileNotFoundError, "does not exist"),
    ],
)
def test_what_cannot_be_made_is_named(here: Path, name: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        user_model.make_model(name)


def test_what_a_module_itself_lacks_is_not_hidden(here: Path) -> None:
    (here / "needs_more.py").write_text("import a_package_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        user_model.make_model("needs_more:make_model")


def test_a_file_finds_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    (tmp_path / "beside_my_file.py").write_text("width = 3\n")
    (tmp_path / "my_file.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom torch import nn\n"
        "from beside_my_file import width\n"
        "@dataclass\nclass Size:\n    width: int = width\n\n"
        "def make_model():\n    return nn.Linear(Size().width, 1)\n"
    )
    model = user_model.make_model(f"{tmp_path}/my_file.py")
    assert isinstance(model, nn.Linear)
    assert model.in_features == 3


WAYS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "plain": lambda weights: weights,
    "in a checkpoint": lambda weights: {"epoch": 3, "state_dict": weights},
    "of DataParallel": lambda weights: {f"module.{key}": value for key, value in weights.items()},
    "compiled": lambda weights: {f"_orig_mod.{key}": value for key, value in weights.items()},
    "of Lightning": lambda weights: {"state_dict": {f"model.{key}": value for key, value in weights.items()}},
}


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_read_from_wherever_trainers_put_them(tmp_path: Path, way: str) -> None:
    saved, fresh = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.save(WAYS[way](dict(saved.state_dict())), tmp_path / "weights.pt")
    user_model.load_weights(fresh, tmp_path / "weights.pt")
    assert torch.equal(saved.weight, fresh.weight)
    if way == "plain":
        save_file(dict(saved.state_dict()), tmp_path / "weights.safetensors")
        user_model.load_weights(nn.Linear(3, 2), tmp_path / "weights.safetensors")


def test_weights_of_another_model_are_refused_and_the_names_that_differ_said(tmp_path: Path) -> None:
    torch.save({"0.weight": torch.zeros(3, 2), "1.weight": torch.zeros(1), "9.bias": torch.zeros(1)}, tmp_path / "w.pt")
    model: Any = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    before = model[0].weight.detach().clone()
    with pytest.raises(ValueError, match="of another model") as caught:
        user_model.load_weights(model, tmp_path / "w.pt")
    said = str(caught.value)
    assert "without 0.bias, 1.bias, 1.num_batches_tracked, 1.running_mean and 1 more" in said
    assert "with 9.bias, which the model does not have" in said
    assert "0.weight is (3, 2), not (4, 2)" in said
    assert torch.equal(before, model[0].weight)


class Payload:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("a pickle was run",))


def test_nothing_that_is_pickled_runs_and_damaged_files_are_named(tmp_path: Path) -> None:
    torch.save({"weight": Payload()}, tmp_path / "evil.pt")
    (tmp_path / "short.pt").write_bytes(b"PK\x03\x04 torn")
    (tmp_path / "short.safetensors").write_bytes(b"torn")
    (tmp_path / "trash.pt").write_bytes(b"\x80\x02trash.")
    torch.save([1, 2, 3], tmp_path / "list.pt")
    torch.save({"epoch": 3, "weights_of_it": {"weight": torch.zeros(1)}}, tmp_path / "odd.pt")
    for name, text in {
        "evil.pt": "never run",
        "short.pt": "never run",
        "short.safetensors": "cannot be read as safetensors",
        "trash.pt": "never run",
        "list.pt": "must hold a state dict, got list",
        "odd.pt": "got dict with epoch, weights_of_it",
        ".": "is a folder",
        "absent.pt": "does not exist",
    }.items():
        with pytest.raises((ValueError, FileNotFoundError), match=text):
            user_model.load_weights(nn.Linear(1, 1), tmp_path / name)
