"""The house: flatmin needs torch alone, never looks at the laboratory, and does nothing when imported."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flatmin
import torch_alone

LIBRARY = Path(flatmin.__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(LIBRARY.parent)}
WITH_TRITON = ("triton_kernels.py", "multi_tensor.py")  # the second looks whether it is there
INTEGRATIONS = {  # each imports its own trainer
    "accelerate.py": {"accelerate"},
    "lightning.py": {"lightning", "pytorch_lightning", "torchmetrics"},
    "transformers.py": {"transformers"},
}
ALLOWED = {"flatmin", "torch", *sys.stdlib_module_names}


def imports_of(path: Path) -> set[str]:
    """The top-level names of everything a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


def test_the_library_imports_torch_and_itself_alone() -> None:
    files = list(LIBRARY.rglob("*.py"))
    assert len(files) > 5
    for path in files:
        own = {"triton"} if path.name in WITH_TRITON else set()  # comes with torch where torch has CUDA
        if path.parent.name == "integrations":
            own = INTEGRATIONS.get(path.name, set())
        assert imports_of(path) <= ALLOWED | own, path.name


def test_nothing_in_the_library_imports_an_integration() -> None:
    for path in LIBRARY.rglob("*.py"):
        imported = re.search(r"^\s*(from|import) flatmin.integrations", path.read_text(), re.MULTILINE)
        assert path.parent.name == "integrations" or imported is None, path.name


def test_the_library_imports_and_steps_where_torch_alone_is_installed() -> None:
    """In a process that refuses to import anything but the standard library, torch and what torch itself requires."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("torch_alone.py"))]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert result.stdout.strip() == "ok", result.stderr


def test_what_torch_requires_is_followed_through_the_extras_that_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "torch": ["sympy>=1.13", 'cuda-toolkit[cudart, nvtx]==13; platform_system == "Linux"', "numpy; extra == 'np'"],
        "cuda-toolkit": [
            "nvidia-cudart; extra == 'cudart'",
            "nvidia-nvvm; extra == 'nvcc'",
            "nvidia_nvtx; extra == 'nvtx'",
        ],
        "sympy": ["mpmath", "pytest; extra == 'dev'"],
        "mpmath": ["sympy"],
    }
    monkeypatch.setattr(torch_alone, "requires", lambda name: known.get(name, []))
    found = {name for name in torch_alone.required_by("torch", set()) if "[" not in name}
    assert found == {"torch", "sympy", "mpmath", "cuda-toolkit", "nvidia-cudart", "nvidia-nvtx"}


def test_importing_changes_no_global_setting() -> None:
    code = (
        "import torch; before = (torch.get_rng_state().sum(), torch.get_num_threads(), torch.get_default_dtype(),"
        " torch.backends.cudnn.benchmark); import flatmin; assert before == (torch.get_rng_state().sum(),"
        " torch.get_num_threads(), torch.get_default_dtype(), torch.backends.cudnn.benchmark); print('ok')"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert result.stdout.strip() == "ok", result.stderr


def test_every_public_name_is_there() -> None:
    assert all(hasattr(flatmin, name) for name in flatmin.__all__)
    assert {"AMP", "RMP"} <= set(flatmin.__all__)
