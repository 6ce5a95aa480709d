"""Every command line of the README and the guides is run as it stands, page by page, and ends well.

The reader's folder has small stand-ins for the official data sets, images, a module and weights of their own. What
would take hours is cut from outside (fewer images, epochs, trials and channels; workers in this process), never in
the line.
"""

import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from flatmin_lab import models
from flatmin_lab.bench import benchmark, time_estimate
from flatmin_lab.cli.commands import bench, compare, demo, tune
from flatmin_lab.comparing import comparer
from flatmin_lab.data.sources import synthetic
from flatmin_lab.data.sources.digits import all_digits
from flatmin_lab.evaluation import landscapes, measurements
from flatmin_lab.execution import process_pool
from flatmin_lab.execution.local import ThisProcess
from flatmin_lab.execution.process_pool import ProcessPool
from flatmin_lab.recipes import experiments, protocols
from flatmin_lab.recipes.experiments import paper_tables
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.tuning import tuner
from tests import ROOT
from tests.support.doc_blocks import PAGES, blocks, commands
from tests.support.official_files import cifar10_python, cifar100_python, svhn
from tests.support.official_files import made as drawn
from tests.support.processes import flatmin, words

NOT_RUN = {  # and why
    "make demo": "flatmin demo, in an environment that it makes first",
    "make test": "these tests",
    "pip install '.[lab]'": "fetches packages",
    "pip install '.[cluster]'": "fetches packages",
    "ray start --head --port 6379": "stays when the test has ended; integrations/cluster has clusters of its own",
    "ray start --address head:6379": "needs another machine",
    "flatmin reproduce table1 --protocol paper --executor ray --address head:6379": "needs the other machine",
    "torchrun --nproc-per-node 2 -m flatmin_lab train --data digits --method amp --out runs/digits": (
        "two processes, which test_train_ranks.py has"
    ),
    **{
        f"torchrun --nnodes 2 --node-rank {number} --nproc-per-node 4 --rdzv-endpoint first:29500 -m flatmin_lab train "
        "--data cifar10 --out runs/cifar10": "two machines with GPUs"
        for number in (0, 1)
    },
}
BEFORE = {  # what a page takes for granted
    "examining.md": [
        "flatmin train --method erm --data digits --epochs 2",
        "flatmin train --method amp --data digits --epochs 2",
        "flatmin train --method amp --data cifar10 --epochs 2",
    ],
}
LINES = {page: commands(page) for page in PAGES if commands(page)}
MOST_EPOCHS, EPOCHS, TRIALS, DIGITS = 24, 2, 2, 100
ENDLESS = 1_000_000  # the epochs of a run whose steps are timed, and which is then dropped

MINE = """
import torch
from torch import nn


def make_model():
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(900, 2))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What lies in the reader's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for seed, (write, classes) in enumerate(((cifar10_python, 10), (cifar100_python, 100), (svhn, 10))):
        write(tmp_path / "data", drawn(60, classes, seed=2 * seed), drawn(20, classes, seed=2 * seed + 1))
    (training, *_) = [block.text for block in blocks(ROOT / "docs" / "doctor.md", "python")]
    pages = [block.text for block in blocks(ROOT / "docs" / "training.md", "python")]
    networks = "\n".join(text for text in pages if "def make_" in text)
    for place in ("mine.py", "path/to/mine.py", "mymodule.py"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(training + networks + MINE)
    (to_compare, *_) = [block.text for block in blocks(ROOT / "docs" / "comparing.md", "python")]
    (tmp_path / "training.py").write_text(to_compare)
    for number in range(20):
        picture = tmp_path / "pictures" / ("cats", "dogs")[number % 2] / f"{number}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.frombytes("RGB", (32, 32), bytes((number * k) % 256 for k in range(3 * 32 * 32))).save(picture)
    names: dict[str, Any] = {}
    exec(MINE, names)
    torch.save(names["make_model"]().state_dict(), tmp_path / "weights.pt")
    return tmp_path


def _at_once(work: Any, tasks: Any, *, stop: Any = lambda: None, **_: Any) -> Iterator[tuple[Any, Any]]:
    """In place of workers: one task after the other, here."""
    return ((task, said) for task in tasks for said in work(task, stop))


def _here(pool: ProcessPool, function: Any, queue: Any) -> Any:
    return ThisProcess(pool.devices).run(function, queue)


def _forget() -> None:
    """The digits, and recipes that were made with other numbers of trials."""
    for made in (all_digits, experiments.by_name, *experiments.EXPERIMENTS.values()):
        made.cache_clear()  # type: ignore[attr-defined]


def _with(function: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    """The function, with some arguments that it always gets."""
    return lambda *arguments, **named: function(*arguments, **{**named, **fixed})


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Less of everything: what is left takes seconds."""
    sklearn = pytest.importorskip("sklearn.datasets")
    digits = sklearn.load_digits()
    digits.images, digits.target = digits.images[:DIGITS], digits.target[:DIGITS]
    monkeypatch.setattr(sklearn, "load_digits", lambda: digits)
    monkeypatch.setattr(synthetic, "TRAIN_IMAGES", 40)
    narrow = {"preactresnet18": {"width": 4}, "vgg16": {"width": 4, "hidden": 16}}
    for name, settings in narrow.items():
        monkeypatch.setitem(models.MODELS, name, partial(models.MODELS[name], **settings))
    check = Recipe.__post_init__

    def shortened(recipe: Recipe) -> None:
        if MOST_EPOCHS < recipe.epochs < ENDLESS:  # digits keep theirs, which is in a folder's name
            object.__setattr__(recipe, "epochs", EPOCHS)
        object.__setattr__(recipe, "warmup", min(recipe.warmup, recipe.epochs - 1))
        check(recipe)

    monkeypatch.setattr(Recipe, "__post_init__", shortened)
    for protocol, length in protocols.PROTOCOLS.items():
        monkeypatch.setitem(protocols.PROTOCOLS, protocol, length._replace(trials=1))
    monkeypatch.setattr(paper_tables, "METHODS", ("erm", "amp"))
    monkeypatch.setattr(process_pool, "run_in_pool", _at_once)
    monkeypatch.setattr(ProcessPool, "run", _here)
    monkeypatch.setattr(demo, "run_demo", _with(demo.run_demo, seeds=TRIALS, epochs=EPOCHS))
    monkeypatch.setattr(tune, "tuning", _with(tuner.tune, trials=TRIALS))
    monkeypatch.setattr(compare, "about_entries", _with(comparer.about_entries, seeds=1))
    monkeypatch.setattr(landscapes, "landscape", _with(landscapes.landscape, points=3))
    monkeypatch.setattr(landscapes, "line_between", _with(landscapes.line_between, points=3))
    monkeypatch.setattr(measurements, "spectrum_of", _with(measurements.spectrum_of, images=5, steps=3))
    monkeypatch.setattr(measurements, "flatness_of", _with(measurements.flatness_of, images=5, restarts=1))
    monkeypatch.setattr(time_estimate, "TIMED_SECONDS", 0.1)
    run_benchmark = benchmark.run_benchmark
    monkeypatch.setattr(bench, "run_benchmark", lambda options, **how: run_benchmark(replace(options, steps=5), **how))
    _forget()
    yield
    _forget()
    for name in ("mine", "mymodule", "training"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("cheap", "folder")
@pytest.mark.filterwarnings("ignore:.*")  # about data too small to be sensible; other tests check warnings
@pytest.mark.parametrize("page", LINES, ids=lambda page: page.name)
def test_every_command_line_of_a_page_runs(page: Path) -> None:
    for line in [*BEFORE.get(page.name, []), *LINES[page]]:
        if line in NOT_RUN:
            continue
        program, *arguments = shlex.split(line)
        assert program == "flatmin", f"{page.name}: {line} is neither run nor in NOT_RUN"
        done = flatmin(*arguments)
        assert done.exit_code == 0, f"{page.name}: {line}\n{words(done.output)}\n{done.exception!r}"


def test_what_is_not_run_stands_on_a_page() -> None:
    assert NOT_RUN.keys() <= {line for lines in LINES.values() for line in lines}
    assert len(LINES) > 8
