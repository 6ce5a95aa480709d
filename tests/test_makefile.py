"""What `make` would do: which command installs what, and when it says so."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INDEX = "https://index.example/cpu"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    (tmp_path / "constraints").mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints/cpu.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def dry_run(project: Path, *words: str) -> str:
    command = ["make", "--dry-run", "--no-print-directory", *words]
    return subprocess.run(command, cwd=project, check=True, capture_output=True, text=True, timeout=60).stdout


def test_no_index_is_asked_that_was_not_named(project: Path) -> None:
    assert "index-url" not in dry_run(project, "demo")


@pytest.mark.parametrize(("target", "where"), [("demo", ".venv"), ("test-integrations", ".venv-integrations")])
def test_an_index_for_torch_is_asked_beside_the_usual_one(project: Path, target: str, where: str) -> None:
    (install,) = [line for line in dry_run(project, target, f"TORCH_INDEX={INDEX}").splitlines() if "pip" in line]
    assert install.startswith(f"{where}/bin/python -m pip install")
    assert f"--extra-index-url {INDEX}" in install


def test_another_torch_has_an_environment_of_its_own(project: Path) -> None:
    lines = dry_run(project, "test-torch", "TORCH=2.11.0").splitlines()
    (install,) = [line for line in lines if "pip" in line]
    assert install.startswith(".venv-torch-2.11.0/bin/python -m pip install")
    assert '"torch==2.11.0"' in install
    assert "constraints" not in install
    assert lines[-1].startswith(".venv-torch-2.11.0/bin/python -m pytest")


def test_another_torch_must_be_named(project: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        dry_run(project, "test-torch")
    assert "name a version of torch, as in `make test-torch TORCH=2.11.0`" in caught.value.stderr


def test_it_says_that_it_installs_and_only_when_it_does(project: Path) -> None:
    assert "installing into .venv" in dry_run(project, "demo")
    (project / ".venv").mkdir()
    (project / ".venv" / ".ready").touch()
    assert dry_run(project, "demo").strip() == ".venv/bin/flatmin demo"
