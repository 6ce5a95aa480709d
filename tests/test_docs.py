"""Every snippet of the README and the guides runs, and none of them names a command that is not there.

The pages about trainers are run by tests/integrations, and so are the command lines of all pages.
"""

import json
import re
import shlex
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from runpy import run_path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import flatmin
from flatmin.core.tensors import plain
from flatmin_lab import load_run
from flatmin_lab.cli.app import app
from flatmin_lab.data import load
from flatmin_lab.evaluation.export import SUFFIXES, export
from flatmin_lab.recipes import default_recipe
from flatmin_lab.recipes.fields import flags
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.training import train
from tests import ROOT
from tests.support.doc_blocks import PAGES, after, before, blocks, code, commands, is_program

LANGUAGES = {
    "python",
    "diff",
    "bash",
    "text",
    "bibtex",
}  # the first three are run, here or by tests/integrations
DOCS = ROOT / "docs"


SNIPPETS = [
    pytest.param(text, id=f"{page.name}-{number}")
    for page in PAGES
    if not page.name.startswith("trainers_")  # their frameworks may not be there: tests/integrations runs these
    for number, text in enumerate(code(page))
    if not (page.name == "quick_start.md" and is_program(text))  # tests/integrations runs it, with what it prints
]


def reader(*, dropout: float = 0.1) -> dict[str, Any]:
    """What the reader of a page has at hand: a model, data, a loss, an optimizer and a closure."""
    torch.manual_seed(0)
    layers = {"first": nn.Linear(4, 8), "norm": nn.BatchNorm1d(8), "relu": nn.ReLU(), "drop": nn.Dropout(dropout)}
    model = nn.Sequential(OrderedDict({**layers, "last": nn.Linear(8, 3)}))
    batches = [(torch.randn(6, 4), torch.randint(0, 3, (6,))) for _ in range(3)]
    loss_fn = nn.CrossEntropyLoss()
    optimizer = flatmin.AMP(SGD(model.parameters(), lr=0.1), epsilon=0.1, model=model)
    (x, y), device = batches[0], "cpu"

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = loss_fn(model(x), y)
        loss.backward()
        return loss

    names: dict[str, Any] = {"loader": batches, "micro_batches": batches, "windows": [batches[:2], batches[2:]]}
    names |= {"torch": torch, "flatmin": flatmin, "model": model, "loss_fn": loss_fn, "optimizer": optimizer}
    if dist.is_initialized():
        names |= {"DistributedDataParallel": DistributedDataParallel, "ddp_model": DistributedDataParallel(model)}
    names |= {"x_held_out": batches[1][0], "y_held_out": batches[1][1]}
    names |= {
        "base": SGD(model.parameters(), lr=0.1),
        "epochs": 4,
        "validation_loss": lambda: loss_fn(model(x), y).detach(),
    }
    return {**names, "x": x, "y": y, "device": device, "closure": closure}


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of one, for pages about several."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class PublishedAMP(SGD):
    """A plain twin of the published code's optimizer: a ball a tensor, Δ subtracted again, gradients zeroed by it."""

    def __init__(self, params: Any, lr: float, epsilon: float, inner_lr: float = 1.0, **settings: Any) -> None:
        super().__init__(params, lr=lr, **settings)
        self.epsilon, self.inner_lr = epsilon, inner_lr

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        self.zero_grad()
        result = closure()
        params = [param for group in self.param_groups for param in group["params"]]
        deltas = [self.inner_lr * param.grad for param in params]
        deltas = [delta * min(1.0, self.epsilon / float(delta.norm() + 1e-12)) for delta in deltas]
        with torch.no_grad():
            for param, delta in zip(params, deltas, strict=True):
                param.add_(delta)
        self.zero_grad()
        closure()
        with torch.no_grad():
            for param, delta in zip(params, deltas, strict=True):
                param.sub_(delta)
        super().step()
        return result


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What users of other implementations import: pytorch_optimizer's SAM also as davda54/sam's, with its interface."""
    oracle = pytest.importorskip("pytorch_optimizer", reason="the oracle is installed with flatmin[dev]")
    for name, part in (("sam", {"SAM": oracle.SAM}), ("amp", {"AMP": PublishedAMP})):
        module = ModuleType(name)
        vars(module).update(part)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(scope="module")
def run_and_exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the reader of using_the_model.md has made before: a run, and its exports."""
    folder, data = tmp_path_factory.mktemp("reader"), load("digits")
    list(train(default_recipe("digits", data, method="amp", epochs=1), data, folder=folder / "runs" / "first"))
    for suffix in SUFFIXES:
        export(load_run(folder / "runs" / "first"), folder / f"digits{suffix}")
    return folder


@pytest.mark.parametrize("text", SNIPPETS)
def test_snippets_run_as_they_stand(
    text: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    has_run = '"runs/' in text or '"digits.' in text
    monkeypatch.chdir(request.getfixturevalue("run_and_exports") if has_run else tmp_path)
    if "istributed" in text or "ddp_model" in text:
        request.getfixturevalue("one_rank")
    if re.search(r"^from (sam|amp|pytorch_optimizer) ", text, re.MULTILINE):
        request.getfixturevalue("others")
    names = reader()
    start = [param.detach().clone() for param in names["model"].parameters()]
    exec(compile(text, "snippet", "exec"), names)
    for value in names["model"].parameters():
        assert value.isfinite().all()
    if ".step(" in text and not is_program(text):
        now = map(plain, names["model"].parameters())
        assert not all(torch.equal(a, b.to(a.dtype)) for a, b in zip(start, now, strict=True))


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize("page", ["from_sam.md", "from_published_code.md"])
def test_both_sides_of_a_change_of_optimizer_give_the_same_weights(page: str) -> None:
    changes = [block.text for block in blocks(DOCS / page, "diff")]
    assert changes
    for change in changes:
        ended = []
        for side in (before, after):
            names = reader(dropout=0.0)  # its masks are shared by the passes of one side alone
            for _ in range(3):
                exec(compile(side(change), page, "exec"), names)
            ended.append([param.detach() for param in names["model"].parameters()])
        for theirs, ours in zip(*ended, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_lengths_of_delta_are_those_of_the_results() -> None:
    """The table in choosing_epsilon.md, from the result files that it names."""
    files = sorted((ROOT / "results" / "paper-v2").glob("cifar10-preactresnet18-amp-[0-9].json"))[:3]
    curves = [json.loads(file.read_text())["curves"] for file in files]
    rows = [re.split(r"\s*\|\s*", row)[1:-1] for row in (DOCS / "choosing_epsilon.md").read_text().splitlines()]
    table = {row[0]: row[1:] for row in rows if row}
    for name, key in (("mean ‖Δ‖", "delta_norm"), ("sharpness L(θ + Δ) − L(θ)", "sharpness")):
        for epoch, said in zip(table["epoch"], table[name], strict=True):
            measured = sum(curve[key][int(epoch) - 1] for curve in curves) / len(curves)
            assert abs(measured - float(said)) <= 0.0051, (name, epoch, measured)


def test_there_are_snippets_and_pictures() -> None:
    assert len(SNIPPETS) >= 40
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_its_language_and_is_run_or_plain_text(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= LANGUAGES
    assert page.read_text().count("\n```") == 2 * len(blocks(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_command_has_the_subcommands_and_flags_that_are_named(page: Path) -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for line in commands(page):
        program, *words = shlex.split(line)
        if program == "flatmin":
            options = {option for param in known[words[0]].params for option in param.opts}
            assert {word for word in words if word.startswith("--")} <= options, line


def test_the_page_of_the_command_has_a_row_for_every_field_that_the_recipe_declares() -> None:
    pytest.importorskip("mkdocs", reason="installed with flatmin[docs]")
    hook = run_path(str(DOCS / "site_hooks" / "pages.py"))
    assert hook["MARKER"] in (DOCS / "command.md").read_text()
    _, page = "\n".join(hook["commands"](app)).split("## flatmin train\n")
    rows = dict(re.findall(r'<code class="flag">--([\w-]+)</code>.*? \| (.+) \|', page.partition("\n## ")[0]))
    for name, declared in flags(Recipe).items():
        said = rows["set" if name == "settings" else name.replace("_", "-")]
        assert re.sub(r"\\(.)", r"\1", said) == declared.text


def test_a_number_of_a_page_stays_on_one_line_with_its_unit() -> None:
    pytest.importorskip("mkdocs", reason="installed with flatmin[docs]")
    unbroken = run_path(str(DOCS / "site_hooks" / "pages.py"))["unbroken"]
    text, code = "<td>n = 3: 8.5 % ± 1.7</td>", "<pre>n = 3: 8.5 % ± 1.7</pre>"
    assert unbroken(text + code) == text.replace(" ", "\N{NO-BREAK SPACE}").replace(":\N{NO-BREAK SPACE}", ": ") + code


def test_the_readme_names_commands_that_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make (\w+)", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= named <= targets


@pytest.mark.parametrize(
    "page", ["compared.md", "trainers_huggingface.md", "trainers_lightning.md", "trainers_others.md", "from_sam.md"]
)
def test_the_tests_that_a_page_names_exist(page: str) -> None:
    text, files = (DOCS / page).read_text(), list((ROOT / "tests").rglob("test_*.py"))
    known = {name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > {"from_sam.md": 1, "trainers_others.md": 10}.get(page, 15)
    assert named <= known, named - known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_of_the_source_that_a_page_names_exist(page: Path) -> None:
    for path in re.findall(r"`((?:tests|examples|benchmarks|docs|constraints)/[\w/.]+\.\w+)`", page.read_text()):
        assert (ROOT / path).exists(), path
