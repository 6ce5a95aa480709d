"""The architecture: layers that import from their left alone, and a library that needs torch alone and only defines."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor, nn

import flatmin
from flatmin.core.random_state import FIRST_LOOKS
from tests import ROOT
from tests.programs import torch_alone

LIBRARY = Path(flatmin.__file__).parent
SOURCE = LIBRARY.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(LIBRARY.parent)}
WITH_TRITON = ("triton_kernels.py", "multi_tensor.py")  # the second looks whether it is there
INTEGRATIONS = {  # each imports its own trainer
    "accelerate.py": {"accelerate"},
    "lightning_package.py": {"lightning", "pytorch_lightning"},
    "lightning_step.py": {"torchmetrics"},
    "recorded_step.py": {"transformers"},
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


PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST_CALLS, MOST_FILES = 150, 6  # of a warm step
LARGEST_FOLDER = 13  # entries: a dozen can be seen at a glance
LISTED = r"^ *((?:[\w*]+(?:\.py|/)(?:, )?)+)  "  # a line of such a list: names, then what is in them
LARGEST_ROOT = 17  # a package's root also has files that Python asks for


def packages_imported(package: str, path: Path) -> set[str]:
    """The parts of `package` that a file imports: `core` for `from flatmin.core.tensors import plain`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        parts = [name.split(".") for name in names]
        found |= {part[1] for part in parts if part[0] == package and len(part) > 1}
    return found


def layers_of(package: str) -> list[list[str]]:
    """Bottom up, those beside each other together, as the page about the architecture has them."""
    found = re.search(rf"^ +{package}: +(.+(\n +→ .+)*)", PAGE, re.MULTILINE)
    assert found is not None
    return [names.split(", ") for names in re.split(r"\s+→ ", found[1])]


@pytest.mark.parametrize("package", ["flatmin", "flatmin_lab"])
def test_a_package_imports_only_from_its_left(package: str) -> None:
    root, layers = SOURCE / package, layers_of(package)
    level = {name: height for height, names in enumerate(layers) for name in names}
    there = {path.stem for path in root.iterdir() if not path.name.startswith(("_", "py.typed"))}
    assert there == level.keys(), "every package has its place in docs/architecture.md"
    for path in root.rglob("*.py"):
        own = path.relative_to(root).parts[0].removesuffix(".py")
        if own in level:
            imported = packages_imported(package, path) & level.keys() - {own}
            wrong = [name for name in imported if level[name] >= level[own]]
            assert not wrong, f"{path.relative_to(SOURCE)} imports from its right: {wrong}"


def test_every_file_that_the_walks_name_is_there_and_a_step_visits_no_other() -> None:
    walks = PAGE[PAGE.index("## Three walks") : PAGE.index("## Where to add")].split("\n**A ")[1:]
    named = [re.findall(r"`([\w/]+\.py)`", walk) for walk in walks]
    for files, package in zip(named, ("flatmin", "flatmin", "flatmin_lab"), strict=True):
        assert len(files) > 5
        assert [name for name in files if not (SOURCE / package / name).exists()] == []
    assert calls_of_a_step(deep_network()).keys() == set(named[0])


def deep_network(layers: int = 20) -> nn.Module:
    """Of 80 weights and 60 buffers for 20 layers."""
    parts = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1)) for _ in range(layers)]
    return nn.Sequential(*parts)


def calls_of_a_step(model: nn.Module) -> Counter[str]:
    """How often a warm step of AMP with `model=` calls into which files of the library."""
    optimizer = flatmin.AMP(torch.optim.SGD(model.parameters(), lr=0.1), epsilon=0.1, model=model)
    x = torch.randn(8, 4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(FIRST_LOOKS + 2):
        optimizer.step(closure)
    found = Counter[str]()

    def called(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(LIBRARY):
            found[str(path.relative_to(LIBRARY))] += 1

    sys.setprofile(called)
    try:
        optimizer.step(closure)
    finally:
        sys.setprofile(None)
    return found


def test_a_warm_step_makes_few_calls_in_few_files_however_large_the_model() -> None:
    few, many = calls_of_a_step(deep_network(2)), calls_of_a_step(deep_network(20))
    assert few == many
    assert many.total() <= MOST_CALLS
    assert len(many) <= MOST_FILES


def private_names(path: Path, *, of_others: bool) -> set[str]:
    """The attributes with an underscore that a file uses: those of `self`, or those of other objects."""
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    own = [isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") for node in found]
    names = {node.attr for node, mine in zip(found, own, strict=True) if mine != of_others}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_nothing_outside_an_optimizer_uses_a_private_name_of_its() -> None:
    optimizers = [LIBRARY / "optim" / f"{name}.py" for name in ("wrapper", "perturbed", "amp", "rmp")]
    private = set().union(*(private_names(path, of_others=False) for path in optimizers))
    assert len(private) > 10
    for path in set(LIBRARY.rglob("*.py")) - set(optimizers):
        assert not private_names(path, of_others=True) & private, path.name


def test_no_folder_of_the_source_is_too_full() -> None:
    for folder in (path for path in SOURCE.rglob("*") if path.is_dir()):
        if folder.name == "__pycache__" or folder.name.endswith(".egg-info"):
            continue
        entries = [path.name for path in folder.iterdir() if path.name != "__pycache__"]
        most = LARGEST_ROOT if folder.parent == SOURCE else LARGEST_FOLDER
        assert len(entries) <= most, f"{folder.relative_to(SOURCE)} has {len(entries)} entries"


def test_a_package_lists_its_files_or_what_it_offers() -> None:
    for init in SOURCE.rglob("__init__.py"):
        module = ast.parse(init.read_text(encoding="utf-8"))
        text = ast.get_docstring(module) or ""
        offers = any(isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" for node in module.body)
        listed = [name for line in re.findall(LISTED, text, re.MULTILINE) for name in line.split(", ")]
        if offers and not listed:
            continue
        there = {path.name + "/" * path.is_dir() for path in init.parent.iterdir()} - {"__init__.py", "__pycache__/"}
        assert {name for name in there if not any(fnmatch(name, pattern) for pattern in listed)} == set(), init
        assert {pattern for pattern in listed if not any(fnmatch(name, pattern) for name in there)} == set(), init


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
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "programs" / "torch_alone.py")]
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


def test_importing_changes_no_global_setting_and_imports_the_optimizers_alone() -> None:
    code = (
        "import sys, torch; before = (torch.get_rng_state().sum(), torch.get_num_threads(), torch.get_default_dtype(),"
        " torch.backends.cudnn.benchmark); import flatmin; assert before == (torch.get_rng_state().sum(),"
        " torch.get_num_threads(), torch.get_default_dtype(), torch.backends.cudnn.benchmark);"
        " there = {name.split('.')[1] for name in sys.modules if name.startswith('flatmin.')};"
        " assert there == {'ball', 'core', 'optim'}, there; flatmin.doctor, flatmin.captured_step; print('ok')"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert result.stdout.strip() == "ok", result.stderr


def test_every_public_name_is_there() -> None:
    assert all(hasattr(flatmin, name) for name in flatmin.__all__)
    assert {"AMP", "RMP"} <= set(flatmin.__all__)
