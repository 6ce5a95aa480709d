"""Run as a program: import flatmin and take a step where only torch and what it requires can be found."""

import re
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from types import ModuleType
from typing import Any


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required_by(package: str, known: set[str], extras: str = "") -> set[str]:
    """The package and all that it requires, and so on, as far as it is installed.

    Of extras those that are asked for: torch for a GPU requires cuda-toolkit[cudart,…], which brings more packages.
    """
    try:
        lines = requires(package) or []
    except PackageNotFoundError:
        return known
    known.add(canonical(package))
    wanted = {canonical(extra) for extra in extras.split(",")}
    for line in lines:
        name, of = re.findall(r"^([\w.-]+)(?:\s*\[([^]]*)\])?", line)[0]
        extra = re.search(r"extra == ['\"]([\w.-]+)", line)
        asked = f"{canonical(name)}[{of}]"  # known too, so that each is followed once
        if asked not in known and (extra is None or canonical(extra[1]) in wanted):
            known.add(asked)
            required_by(name, known, of.replace(" ", ""))
    return known


def others() -> set[str]:
    """The modules of every installed package that torch does not require."""
    packages = required_by("torch", set())
    owners = packages_distributions().items()
    return {module for module, of in owners if not packages & {canonical(name) for name in of}} | {"flatmin_lab"}


class Without(MetaPathFinder):
    """A finder that does not find some modules, as if they were not installed."""

    def __init__(self, finder: Any, hidden: set[str]) -> None:
        self.finder, self.hidden = finder, hidden

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] in self.hidden:
            return None
        spec: ModuleSpec | None = self.finder.find_spec(fullname, path, target)
        return spec


if __name__ == "__main__":
    hidden = others() - {"flatmin"}
    assert "pytest" in hidden
    sys.meta_path[:] = [Without(finder, hidden) for finder in sys.meta_path]
    import torch

    import flatmin

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = flatmin.AMP(torch.optim.SGD([weight], lr=0.1), epsilon=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    unwanted = {"numpy", "flatmin_lab"} & set(sys.modules)
    print(f"imported {unwanted}" if unwanted else "ok")
