"""Is everything here, and does it work? Versions, devices, data sets, and the first law on a model of the user's own:

    AMP with ε = 0 is the optimizer itself, bit for bit

A model of your own is a function (or a class), `file.py:make_model` or `mymodule:make_model`, called without arguments.
"""

import copy
import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

import flatmin
from flatmin.modes import evaluating
from flatmin_lab import models, own_model
from flatmin_lab.data.catalogue import EMBEDDED, OFFICIAL, load
from flatmin_lab.data.seeds import generator
from flatmin_lab.machine import commit, hardware
from flatmin_lab.surroundings import Surroundings, drawn_from, seed_generators

PACKAGES = ("numpy", "pillow", "scikit-learn", "safetensors", "rich", "typer", "matplotlib", "jinja2", "tensorboard")
STEPS, BATCH, CLASSES = 3, 8, 10


def run(model: str, shape: Sequence[int], data_dir: Path, device: torch.device) -> bool:
    """Print what was found; true if the laws hold."""
    console = Console(highlight=False, soft_wrap=True)
    for title, rows in (("versions", versions()), ("devices", devices()), ("data sets", data_sets(data_dir))):
        console.print(_table(title, rows))
    found = laws(model, shape, device)
    rows = [(name, f"{'yes' if holds else 'NO'}{f' ({detail})' if detail else ''}") for name, holds, detail in found]
    console.print(_table(f"{model} on {device}", rows))
    return all(holds for _, holds, _ in found)


def _table(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(title, "", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table


def versions() -> list[tuple[str, str]]:
    def found(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    own = f"{flatmin.__version__}{f', commit {commit()}' if commit() else ''}"
    return [
        ("flatmin", own),
        ("Python", platform.python_version()),
        ("torch", torch.__version__),
        *((package, found(package)) for package in PACKAGES),
    ]


def devices() -> list[tuple[str, str]]:
    rows = [("cpu", f"{hardware(torch.device('cpu'))}, {torch.get_num_threads()} threads")]
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        name = hardware(torch.device("cuda", number))
        rows.append((f"cuda:{number}", f"{name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"))
    return rows if len(rows) > 1 else [*rows, ("cuda", "none")]


def data_sets(root: Path) -> list[tuple[str, str]]:
    """Which can be read, and why the others cannot."""
    rows = []
    for name in (*EMBEDDED, *OFFICIAL):
        try:
            data = load(name, root)
            rows.append((name, f"{len(data.train)} and {len(data.test)} {data.train.kind}, from {data.source}"))
        except FileNotFoundError:
            rows.append((name, f"not in {root.absolute()}; `flatmin train --data {name} --download` fetches it"))
        except (OSError, ValueError, ImportError) as error:
            rows.append((name, f"cannot be read: {error}"))
    return rows


def laws(name: str, shape: Sequence[int], device: torch.device) -> list[tuple[str, bool, str]]:
    """What must hold on any model: each with whether it does, and a number."""
    surroundings = Surroundings(device, deterministic=device.type == "cuda")
    with surroundings.inside():
        seed_generators([torch.device("cpu")], 0)
        model = make(name, shape).to(device).train()
        x = torch.randn(BATCH, *shape, generator=generator("doctor")).to(device)
        _check_shape(model, x)
        plain, wrapped, amp = model, copy.deepcopy(model), copy.deepcopy(model)
        _steps(plain, _base(plain), x)
        _steps(wrapped, flatmin.AMP(_base(wrapped), epsilon=0.0, model=wrapped), x)
        optimizer = flatmin.AMP(_base(amp), epsilon=0.1, model=amp)
        places = [param.data_ptr() for param in amp.parameters()]
        _steps(amp, optimizer, x)
    pairs = zip(plain.state_dict().values(), wrapped.state_dict().values(), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    finite = all(bool(param.isfinite().all()) for param in amp.parameters())
    kept = places == [param.data_ptr() for param in amp.parameters()]
    last = optimizer.last
    length = 0.0 if last.delta_norm is None else last.delta_norm.item()
    rise = last.loss_perturbed - last.loss if last.loss is not None and last.loss_perturbed is not None else None
    return [
        ("ε = 0 is the optimizer itself, bit for bit", same, f"{STEPS} steps of SGD"),
        ("ε = 0.1: ‖Δ‖ ≤ ε", length <= 0.1 * (1 + 1e-6), f"{length:.4f}"),
        ("ε = 0.1: the weights stay finite, and in their place", finite and kept, _sharpness(rise)),
    ]


def _check_shape(model: nn.Module, x: Tensor) -> None:
    try:
        with torch.no_grad(), evaluating(model):
            model(x)
    except (RuntimeError, ValueError) as error:
        shape = ",".join(map(str, x.shape[1:]))
        raise ValueError(f"the model does not take inputs of {shape} ({error}); give its own with --shape") from error


def _sharpness(rise: Tensor | None) -> str:
    return "" if rise is None else f"the loss rises by {rise.item():.4f} in the ball"


def _base(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.01, momentum=0.9)


def _steps(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    seed_generators(drawn_from(x.device), 1)  # the same dropout masks for all
    y = torch.arange(len(x), device=x.device)

    def closure() -> Tensor:
        optimizer.zero_grad()
        answer = model(x)
        if not isinstance(answer, Tensor):
            raise TypeError(f"the model must answer with a tensor, got {type(answer).__name__}")
        classes = answer.ndim == 2 and answer.shape[1] > 1
        loss = cross_entropy(answer, y % answer.shape[1]) if classes else answer.square().mean()
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)  # type: ignore[arg-type]  # torch says float, everyone returns a tensor


def make(name: str, shape: Sequence[int]) -> nn.Module:
    """A built-in model for inputs of that shape, or one of the user's own."""
    if own_model.is_own(name):
        return own_model.make(name)
    return models.build(name, num_classes=CLASSES, in_channels=shape[0], **models.settings_for(name, shape))
