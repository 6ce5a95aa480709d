"""Every snippet of the README and the guides runs, and none of them names a command that is not there."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flatmin
from flatmin.tensors import plain
from flatmin_lab.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets(page: Path) -> list[str]:
    """The code of a page: of its Python blocks, and of its diffs what stands after the change, and before it."""
    text = page.read_text()
    diffs = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    after = [re.sub(r"^[+ ]", "", diff, flags=re.MULTILINE) for diff in diffs]
    before = [re.sub(r"^\+.*\n", "", diff, flags=re.MULTILINE) for diff in diffs]
    before = [re.sub(r"^ ", "", diff, flags=re.MULTILINE) for diff in before]
    return [*re.findall(r"```python\n(.*?)```", text, re.DOTALL), *after, *before]


SNIPPETS = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    if not page.name.startswith("trainers_")  # their frameworks may not be there: tests/integrations runs these
    for number, code in enumerate(snippets(page))
]


def reader() -> dict[str, Any]:
    """What the reader of a page has at hand: a model, data, a loss, an optimizer and a closure."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    batches = [(torch.randn(6, 4), torch.randint(0, 3, (6,))) for _ in range(3)]
    loss_fn = nn.CrossEntropyLoss()
    optimizer = flatmin.AMP(torch.optim.SGD(model.parameters(), lr=0.1), epsilon=0.1, model=model)
    (x, y), device = batches[0], "cpu"

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = loss_fn(model(x), y)
        loss.backward()
        return loss

    names = {"torch": torch, "flatmin": flatmin, "loader": batches, "micro_batches": batches}
    if dist.is_initialized():
        names |= {"DistributedDataParallel": DistributedDataParallel, "ddp_model": DistributedDataParallel(model)}
    return {**names, **{key: value for key, value in locals().items() if key not in ("names", "batches")}}


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of one, for pages about several."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippets_run_as_they_stand(code: str, request: pytest.FixtureRequest) -> None:
    if "istributed" in code or "ddp_model" in code:
        request.getfixturevalue("one_rank")
    names = reader()
    before = [param.detach().clone() for param in names["model"].parameters()]
    exec(compile(code, "snippet", "exec"), names)
    for value in names["model"].parameters():
        assert value.isfinite().all()
    if ".step(" in code and len(before) == len(list(names["model"].parameters())):
        now = map(plain, names["model"].parameters())
        assert not all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


def test_there_are_snippets_and_pictures() -> None:
    assert len(SNIPPETS) >= 8
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_command_has_the_subcommands_and_flags_that_are_named(page: Path) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for line in re.findall(r"^flatmin (.+)$", page.read_text(), re.MULTILINE):
        name, *words = line.partition("#")[0].split()
        known = {option for param in commands[name].params for option in param.opts}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_the_readme_names_commands_that_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make (\w+)", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= named <= targets


@pytest.mark.parametrize("page", ["compared.md", "trainers_huggingface.md", "trainers_lightning.md"])
def test_the_tests_and_files_that_a_page_names_exist(page: str) -> None:
    text, files = (ROOT / "docs" / page).read_text(), list((ROOT / "tests").rglob("test_*.py"))
    known = {name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 15
    assert named <= known, named - known
    for path in re.findall(r"`((?:tests|examples)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path
