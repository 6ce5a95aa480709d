"""Run as a program where flatmin was installed with torch alone: the library works, the command says what it lacks.

Nothing is there but what torch itself requires, so a package that flatmin uses and does not ask for shows here.
"""

import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from importlib.metadata import distributions, files, version
from pathlib import Path

import torch
from torch import Tensor, nn

import flatmin
from tests.programs.torch_alone import canonical, required_by

WAY_OUT = "pip install 'flatmin[lab]'"
INSTALLERS = {"flatmin", "pip", "setuptools"}  # the last comes with a new environment before Python 3.12
Training = tuple[nn.Module, flatmin.AMP | flatmin.RMP, Callable[[], Tensor]]


def check_what_is_installed() -> None:
    assert Path(flatmin.__file__).is_relative_to(sysconfig.get_path("purelib")), f"not installed: {flatmin.__file__}"
    assert flatmin.__version__ == version("flatmin")
    assert "flatmin/py.typed" in {str(path) for path in files("flatmin") or []}
    others = {canonical(found.name) for found in distributions()} - required_by("torch", set())
    assert others <= INSTALLERS, f"torch does not require {sorted(others - INSTALLERS)}"


def batch() -> tuple[Tensor, Tensor]:
    x = torch.rand(60, 4, generator=torch.Generator().manual_seed(0))
    return x, x[:, :3].argmax(1)


def make_training(kind: type[flatmin.AMP] | type[flatmin.RMP] = flatmin.AMP) -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer = kind(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), epsilon=0.05, model=model)
    x, y = batch()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return model, optimizer, closure


def check_steps(kind: type[flatmin.AMP] | type[flatmin.RMP], *, blocks: bool) -> nn.Module:
    """A short training with a closure, or in blocks; the model that comes out."""
    model, optimizer, closure = make_training(kind)
    losses = []
    for _ in range(40):
        if blocks:
            losses.append(closure().item())
            with optimizer.perturbed():
                nn.functional.cross_entropy(model(batch()[0]), batch()[1]).backward()
            optimizer.step()
        else:
            losses.append(optimizer.step(closure).item())
    assert optimizer.last.delta_norm is not None
    assert optimizer.last.delta_norm <= 0.05 * (1 + 1e-6)
    assert losses[-1] < losses[0] / 2, losses
    return model


def check_measurements(model: nn.Module) -> None:
    x, y = batch()
    model.eval()
    logits = model(x).detach()
    assert flatmin.metrics.error(logits, y) < 0.3
    measured = [measure(logits, y) for measure in (flatmin.metrics.nll, flatmin.metrics.ece, flatmin.metrics.brier)]
    attacked = flatmin.attacks.pgd(model, x, y, epsilon=0.1, step_size=0.05, steps=3)
    assert (attacked - x).abs().max() <= 0.1 + 1e-6
    assert flatmin.metrics.nll(model(attacked), y) > measured[0]
    loss = flatmin.flatness.empirical_risk(x, y)
    worst = flatmin.flatness.worst_case_loss(model, loss, epsilon=0.05)
    assert worst.loss > worst.centre
    top, line = flatmin.flatness.top_eigenvalue(model, loss), flatmin.flatness.line(model, loss)
    measured += [top, flatmin.flatness.trace(model, loss).value, *line.losses]
    assert all(torch.as_tensor(number).isfinite() for number in measured)


def check_doctor() -> None:
    findings = flatmin.doctor.examine(make_training)
    assert len(findings) > 10
    assert {finding.verdict for finding in findings} == {"ok"}, [found for found in findings if found.verdict != "ok"]


def check_command() -> None:
    """It cannot run here; a line says why, whatever is asked. So does whoever imports the laboratory."""
    command = str(Path(sysconfig.get_path("scripts")) / "flatmin")
    for words in ([command], [command, "--help"], [command, "train"], [sys.executable, "-m", "flatmin_lab"]):
        done = run(words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), (words, done)
        assert WAY_OUT in done.stderr
    for module in ("data", "training", "report.figures"):
        done = run([sys.executable, "-W", "ignore", "-c", f"import flatmin_lab.{module}"])
        last = done.stderr.splitlines()[-1]
        assert last.startswith("ImportError: flatmin_lab."), done
        assert WAY_OUT in last


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Outside the checkout, so that what is installed is what is found."""
    with tempfile.TemporaryDirectory() as elsewhere:
        return subprocess.run(words, cwd=elsewhere, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    check_what_is_installed()
    for kind in (flatmin.AMP, flatmin.RMP):
        for blocks in (False, True):
            trained = check_steps(kind, blocks=blocks)
    check_measurements(trained)
    check_doctor()
    check_command()
    print(f"flatmin {flatmin.__version__} works beside torch {torch.__version__} alone")
