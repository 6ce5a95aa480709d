"""`flatmin doctor`: versions, devices, data sets, and a check of a model or of the user's own training code.

A model is checked in a training loop made for it. A user's own model is a function or class, `file.py:make_model` or
`mymodule:make_model`, called with what it declares (models/user_model.py); the user's own training code is a function
that returns `(model, optimizer, closure)`. The checks are in `flatmin.doctor`.
"""

import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import flatmin
from flatmin.core.model_state import eval_mode
from flatmin.doctor import Crash, Finding, MakeTraining, examine, own_lines
from flatmin_lab import models
from flatmin_lab.cli import display
from flatmin_lab.data.registry import EMBEDDED, OFFICIAL, load
from flatmin_lab.system.machine import commit, hardware
from flatmin_lab.system.rng import RandomScope, generator
from flatmin_lab.system.user_code import find_function, is_user_code

PACKAGES = ("numpy", "pillow", "scikit-learn", "safetensors", "rich", "typer", "matplotlib", "jinja2", "tensorboard")
BATCH, CLASSES = 8, 10
STYLES = {"ok": "green", "warning": "yellow", "error": "red", "cannot tell": "dim"}


def run(model: str, shape: Sequence[int], data_dir: Path, device: torch.device) -> bool:
    """Print what is installed, and the doctor's findings about training that model; true if there is no error."""
    console = Console(highlight=False, soft_wrap=True)
    for title, rows in (("versions", versions()), ("devices", devices()), ("data sets", data_sets(data_dir))):
        console.print(_table(title, rows))
    with RandomScope(device, deterministic=device.type == "cuda").active():
        findings = examine(model_training(model, shape, device))
    return show_findings(f"{model} on {device}", findings)


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
    """Which data sets can be read, and why the others cannot."""
    rows = []
    for name in (*EMBEDDED, *OFFICIAL):
        try:
            data = load(name, root)
            rows.append((name, f"{len(data.train)} and {len(data.test)} {data.train.kind}, from {data.source}"))
        except FileNotFoundError:
            rows.append((name, f"not in {root.absolute()}; `flatmin train --data {name} --download` downloads it"))
        except (OSError, ValueError, ImportError) as error:
            rows.append((name, f"cannot be read: {error}"))
    return rows


def model_training(name: str, shape: Sequence[int], device: torch.device) -> MakeTraining:
    """A training loop for that model, with AMP around SGD, on random inputs of that shape."""
    with torch.random.fork_rng([]):
        model = make_model(name, shape).to(device).train()
    x = torch.randn(BATCH, *shape, generator=generator("doctor")).to(device)
    _check(model, x)
    y = torch.arange(BATCH, device=device)

    def make_training() -> tuple[nn.Module, flatmin.AMP, Callable[[], Tensor]]:
        model = make_model(name, shape).to(device).train()
        base = SGD((param for param in model.parameters() if param.requires_grad), lr=0.01, momentum=0.9)
        optimizer = flatmin.AMP(base, epsilon=0.1, model=model)

        def closure() -> Tensor:
            optimizer.zero_grad()
            answer = model(x)
            classes = answer.ndim == 2 and answer.shape[1] > 1
            loss = cross_entropy(answer, y % answer.shape[1]) if classes else answer.square().mean()
            loss.backward()
            return loss

        return model, optimizer, closure

    return make_training


def _check(model: nn.Module, x: Tensor) -> None:
    try:
        with torch.no_grad(), eval_mode(model):
            answer = model(x)
    except (RuntimeError, ValueError) as error:
        shape = ",".join(map(str, x.shape[1:]))
        raise ValueError(f"the model does not take inputs of {shape} ({error}); give its own with --shape") from error
    if not isinstance(answer, Tensor):
        raise TypeError(f"the model must return a tensor, got {type(answer).__name__}")


def make_model(name: str, shape: Sequence[int]) -> nn.Module:
    """A network for inputs of that shape, built in or the user's own."""
    return models.build_for(name, shape, num_classes=CLASSES, settings=models.settings_for(name, shape))


# ---- the user's own training code, and the findings


def examine_user_training(name: str) -> list[Finding]:
    """The doctor's findings about `mymodule:make_training`."""
    if not is_user_code(name):
        raise ValueError(f"doctor takes mymodule:make_training or file.py:make_training, got {name!r}")
    try:
        function = find_function(name, "make_training")
    except Exception as error:
        if isinstance(error, SyntaxError) or own_lines(error):
            return [Crash(f"importing {name}", error).finding()]
        raise
    with display.busy(display.terminal()) as say:
        say(f"examining {name}")
        return examine(function)


def show_findings(title: str, findings: Sequence[Finding]) -> bool:
    """Print the findings; true if none is an error."""
    console = Console(highlight=False, soft_wrap=True)
    table = Table(Column(Text(title)), "", "", box=None, pad_edge=False)
    for finding in findings:
        change = f"\n→ {finding.change}" if finding.change else ""
        verdict = Text(finding.verdict, style=STYLES[finding.verdict])
        table.add_row(Text(finding.name), verdict, Text(finding.seen + change))
    console.print(table)
    errors, warnings = (sum(finding.verdict == kind for finding in findings) for kind in ("error", "warning"))
    after = "; what comes after it was not examined: fix it, and run the doctor again" if errors else ""
    display.say(console, f"{_count_of(errors, 'error')}, {_count_of(warnings, 'warning')}{after}")
    return not errors


def _count_of(count: int, name: str) -> str:
    return f"{count or 'no'} {name}{'' if count == 1 else 's'}"
