"""Models of the user's own: where they come from, what they are given, what weights fit them, and what errors say."""

import sys
import textwrap
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flatmin_lab.models import user_model, weights
from flatmin_lab.system import user_code

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


def make(name: str, shape: tuple[int, ...] = (1, 8, 8), *, dropout: float = 0.0, **settings: Any) -> nn.Module:
    return user_model.make_user_model(name, shape, num_classes=10, dropout=dropout, settings=settings)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a module in it."""
    (tmp_path / "my_model_module.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_model_module", raising=False)
    return tmp_path


def test_a_model_comes_from_a_module_or_a_file(here: Path) -> None:
    for name in ("my_model_module:make_model", "my_model_module.py:make_model", f"{here}/my_model_module.py"):
        assert user_code.is_user_code(name)
        assert isinstance(make(name), nn.Sequential)
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
        make(name)


def test_what_a_module_itself_lacks_is_not_hidden(here: Path) -> None:
    (here / "needs_more.py").write_text("import a_package_that_is_not_there\n")
    with pytest.raises(user_code.UserCodeError, match=r"needs_more.py, line 1.*\n.*\n.*a_package_that_is_not_there"):
        make("needs_more:make_model")


DECLARING = """
    from torch import nn

    class Net(nn.Module):
        def __init__(self, num_classes, in_channels, image_size, input_shape, *, dropout, width=3):
            super().__init__()
            self.given = num_classes, in_channels, image_size, input_shape, dropout, width

    def some(num_classes, width=3):
        made = nn.Module()
        made.given = num_classes, width
        return made

    def any_settings(num_classes, **settings):
        return some(num_classes, **settings)

    def needy(num_classes, depth):
        return nn.Linear(depth, num_classes)

    def lazy(num_classes):
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))

    def lazy_with_statistics(num_classes):
        frozen = nn.Dropout().eval()
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(4), frozen, nn.BatchNorm1d(4), nn.Linear(4, num_classes))

    class LazyInTraining(nn.Module):
        def __init__(self, num_classes):
            super().__init__()
            self.head, self.second = nn.LazyLinear(num_classes), nn.LazyLinear(num_classes)

        def forward(self, x):
            x = x.flatten(1)
            return self.head(x) + self.second(x) if self.training else self.head(x)

    def broken(num_classes):
        layer = nn.Linear(64, num_classes)
        return layer.no_such_thing
"""


@pytest.fixture
def declaring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "declaring.py").write_text(textwrap.dedent(DECLARING))
    return f"{tmp_path}/declaring.py"


def test_a_function_is_given_what_it_declares(declaring: str) -> None:
    made: Any = make(f"{declaring}:Net", (3, 16, 20), dropout=0.2)
    assert made.given == (10, 3, (16, 20), (3, 16, 20), 0.2, 3)
    made = make(f"{declaring}:some", width=7)
    assert made.given == (10, 7)
    made = make(f"{declaring}:any_settings", width=7)
    assert made.given == (10, 7)


@pytest.mark.parametrize(
    ("function", "more", "text"),
    [
        ("some", {"depth": 2}, "takes width, got depth"),
        (
            "needy",
            {},
            "asks for depth, but can only be given num_classes, in_channels, image_size, input_shape, dropout",
        ),
        ("some", {"dropout": 0.1}, "the method dropout needs a network with dropout: let .* take dropout"),
        ("broken", {}, r"line 38, in broken\n    return layer.no_such_thing\nAttributeError: 'Linear' object has no"),
    ],
)
def test_what_a_function_does_not_take_or_raises_is_said_with_the_users_own_line(
    declaring: str, function: str, more: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        make(f"{declaring}:{function}", **more)
    assert "flatmin_lab" not in str(caught.value)


def test_a_syntax_error_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "typo.py").write_text("x = 1\ndef make_model(:\n")
    with pytest.raises(user_code.UserCodeError, match=r'(?s)typo.py", line 2.*SyntaxError'):
        make(f"{tmp_path}/typo.py")


def test_lazy_layers_are_there_before_an_optimizer_asks_for_them(declaring: str) -> None:
    assert [tuple(param.shape) for param in make(f"{declaring}:lazy").parameters()] == [(10, 64), (10,)]


def test_the_pass_for_lazy_layers_leaves_statistics_and_modes_as_they_are(declaring: str) -> None:
    made = make(f"{declaring}:lazy_with_statistics")
    assert made.state_dict()["3.num_batches_tracked"] == 0
    assert [module.training for module in made] == [True, True, False, True, True]  # type: ignore[attr-defined]


def test_lazy_layers_of_training_alone_are_there_too(declaring: str) -> None:
    made = make(f"{declaring}:LazyInTraining")
    assert [tuple(param.shape) for param in made.parameters()] == [(10, 64), (10,)] * 2


def test_loading_a_file_draws_no_random_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "drawing.py").write_text(
        "import torch\nfrom torch import nn\ntorch.manual_seed(0)\ntorch.rand(3)\n"
        "def make_model():\n    return nn.Linear(2, 2)\n"
    )
    torch.manual_seed(5)
    expected = nn.Linear(2, 2).weight
    torch.manual_seed(5)
    assert torch.equal(make(f"{tmp_path}/drawing.py").weight, expected)  # type: ignore[arg-type]


def test_a_network_of_timm_has_the_datas_classes_and_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def create_model(name: str, **given: Any) -> nn.Module:
        asked.append((name, given))
        return nn.Linear(1, 1)

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))
    make("timm:resnet18")
    make("timm:vit_tiny", (3, 32, 32), dropout=0.1, img_size=32)
    common = {"pretrained": False, "num_classes": 10}
    assert asked[0] == ("resnet18", {**common, "in_chans": 1})
    assert asked[1] == ("vit_tiny", {**common, "in_chans": 3, "drop_rate": 0.1, "img_size": 32})


def test_without_timm_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match="timm:resnet18 needs timm, which is not installed here: pip install timm"):
        make("timm:resnet18")


def test_a_file_finds_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "beside_my_file.py").write_text("width = 3\n")
    (tmp_path / "my_file.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom torch import nn\n"
        "from beside_my_file import width\n"
        "@dataclass\nclass Size:\n    width: int = width\n\n"
        "def make_model():\n    return nn.Linear(Size().width, 1)\n"
    )
    model = make(f"{tmp_path}/my_file.py")
    assert isinstance(model, nn.Linear)
    assert model.in_features == 3


def test_the_running_program_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the folder of the first file has the program in it, and that of the second a __main__.py."""
    monkeypatch.setattr("sys.path", [*sys.path])
    program = ModuleType("__main__")
    program.__file__ = str(tmp_path / "first" / "program.py")
    monkeypatch.setitem(sys.modules, "__main__", program)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__main__.py").write_text("")
        (tmp_path / name / "net_of_it.py").write_text(
            "from torch import nn\ndef make_model():\n    return nn.Linear(2, 1)\n"
        )
        make(f"{tmp_path}/{name}/net_of_it.py")
    assert sys.modules["__main__"] is program


@pytest.mark.parametrize("is_package", [True, False], ids=["package", "namespace"])
def test_every_file_imports_from_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_package: bool
) -> None:
    """Two versions of a project have files of the same names; a process may load runs of both."""
    monkeypatch.setattr("sys.path", [*sys.path])
    for width in (3, 4):
        (tmp_path / f"v{width}" / "parts").mkdir(parents=True)
        if is_package:
            (tmp_path / f"v{width}" / "parts" / "__init__.py").write_text("")
        (tmp_path / f"v{width}" / "parts" / "sizes.py").write_text(f"width = {width}\n")
        (tmp_path / f"v{width}" / "layers_of_it.py").write_text(
            "from torch import nn\nfrom parts.sizes import width\ndef layer():\n    return nn.Linear(width, 1)\n"
        )
        (tmp_path / f"v{width}" / "versioned.py").write_text(
            "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom layers_of_it import layer\n"
            "@dataclass\nclass Size:\n    width: int = 1\n\ndef make_model():\n    return layer()\n"
        )
    for width in (3, 4, 3, 3, 4):
        model = make(f"{tmp_path}/v{width}/versioned.py")
        assert isinstance(model, nn.Linear)
        assert model.in_features == width


WAYS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "plain": lambda weights: weights,
    "in a checkpoint": lambda weights: {"epoch": 3, "state_dict": weights},
    "of DataParallel": lambda weights: {f"module.{key}": value for key, value in weights.items()},
    "of an EMA": lambda weights: {"n_averaged": torch.tensor(3), **{f"module.{key}": weights[key] for key in weights}},
    "compiled": lambda weights: {f"_orig_mod.{key}": value for key, value in weights.items()},
    "compiled around DataParallel": lambda weights: {
        f"_orig_mod.module.{key}": value for key, value in weights.items()
    },
    "compiled in Lightning": lambda weights: {
        "state_dict": {f"model._orig_mod.{key}": value for key, value in weights.items()}
    },
    "of Lightning": lambda weights: {"state_dict": {f"model.{key}": value for key, value in weights.items()}},
}


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_read_from_wherever_trainers_put_them(tmp_path: Path, way: str) -> None:
    saved, fresh = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.save(WAYS[way](dict(saved.state_dict())), tmp_path / "weights.pt")
    weights.load_weights(fresh, tmp_path / "weights.pt")
    assert torch.equal(saved.weight, fresh.weight)
    if way == "plain":
        save_file(dict(saved.state_dict()), tmp_path / "weights.safetensors")
        weights.load_weights(nn.Linear(3, 2), tmp_path / "weights.safetensors")


def test_weights_of_another_model_are_refused_and_the_names_that_differ_said(tmp_path: Path) -> None:
    torch.save({"0.weight": torch.zeros(3, 2), "1.weight": torch.zeros(1), "9.bias": torch.zeros(1)}, tmp_path / "w.pt")
    model: Any = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    before = model[0].weight.detach().clone()
    with pytest.raises(ValueError, match="of another model") as caught:
        weights.load_weights(model, tmp_path / "w.pt")
    said = str(caught.value)
    assert "without 0.bias, 1.bias, 1.num_batches_tracked, 1.running_mean and 1 more" in said
    assert "with 9.bias, which the model does not have" in said
    assert "0.weight is (3, 2), not (4, 2)" in said
    assert torch.equal(before, model[0].weight)


def test_weights_of_any_precision_are_read_and_whole_numbers_refused(tmp_path: Path) -> None:
    """Those of a quantised network mean something else."""
    saved = nn.Linear(3, 2)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        fresh = nn.Linear(3, 2)
        torch.save({key: value.to(dtype) for key, value in saved.state_dict().items()}, tmp_path / "w.pt")
        weights.load_weights(fresh, tmp_path / "w.pt")
        assert torch.equal(fresh.weight, saved.weight.to(dtype).float())
    torch.save({key: (100 * value).to(torch.int8) for key, value in saved.state_dict().items()}, tmp_path / "w.pt")
    with pytest.raises(weights.WeightsError, match=r"weight is torch\.int8, not torch\.float32"):
        weights.load_weights(nn.Linear(3, 2), tmp_path / "w.pt")


def test_a_mask_among_the_buffers_may_have_been_saved_as_bool(tmp_path: Path) -> None:
    saved, fresh = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    saved.running_var = torch.tensor([True, False])
    torch.save(saved.state_dict(), tmp_path / "w.pt")
    weights.load_weights(fresh, tmp_path / "w.pt")
    assert torch.equal(fresh.running_var, torch.tensor([1.0, 0.0]))  # type: ignore[arg-type]


def test_named_modules_keep_their_own_weights(tmp_path: Path) -> None:
    def network(classes: int) -> nn.Sequential:
        return nn.Sequential(OrderedDict(body=nn.Linear(3, 4), head=nn.Linear(4, classes)))

    saved, fresh = network(10), network(2)
    torch.save(saved.state_dict(), tmp_path / "w.pt")
    head = fresh.state_dict()["head.weight"].clone()
    with pytest.raises(weights.WeightsError, match=r"head.weight is \(10, 4\), not \(2, 4\)"):
        weights.load_weights(fresh, tmp_path / "w.pt")
    with pytest.raises(ValueError, match="no module called hat; it has body, head"):
        weights.load_weights(fresh, tmp_path / "w.pt", without=["hat"])
    weights.load_weights(fresh, tmp_path / "w.pt", without=["head"])
    assert torch.equal(fresh.state_dict()["body.weight"], saved.state_dict()["body.weight"])
    assert torch.equal(fresh.state_dict()["head.weight"], head)


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
            weights.load_weights(nn.Linear(1, 1), tmp_path / name)


def test_a_device_without_memory_is_not_the_users_error() -> None:
    with pytest.raises(torch.OutOfMemoryError), user_code.user_lines("the forward pass"):
        raise torch.OutOfMemoryError("no memory")
