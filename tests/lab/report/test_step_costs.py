"""What a step costs is told with the form it was timed in, and with its setting."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flatmin_lab.bench import amp_cost
from flatmin_lab.recipes.experiments.experiment import cell
from flatmin_lab.report.loader import load_results
from flatmin_lab.report.pages.report import report_page
from tests.support.pages import text_of
from tests.support.report_files import write_result
from tests.support.small_runs import tiny_data, tiny_recipe

COST: dict[str, Any] = {
    "hardware": "a GPU",
    "data": "cifar10",
    "model": "preactresnet18",
    "epochs": 200,
    "batch_size": 64,
    "precision": "bf16",
    "form": "graph",
    "torch": "2.12.0",
    "commit": "abc1234",
    "methods": {"erm": {"ms": 2.0, "hours": 0.5}, "amp": {"ms": 3.9, "hours": 0.95}},
    "ratio": 1.95,
}
ROWS = [
    {"method": "erm", "form": "eager", "models": 1, "ms": 8.0},
    {"method": "amp", "form": "eager", "models": 1, "ms": 18.0},
    {"method": "erm", "form": "compiled", "models": 1, "ms": 1.5},
    {"method": "amp", "form": "compiled", "models": 1, "failed": "out of memory"},
    {"method": "erm", "form": "at-once", "models": 4, "ms": 0.5},
    {"method": "amp", "form": "at-once", "models": 4, "ms": 1.0},
]


def benchmark(**changes: Any) -> dict[str, Any]:
    table = {"model": "vgg16", "batch_size": 128, "rows": ROWS, **changes}
    return {"hardware": "another GPU", "torch": "2.13.0", "commit": "def5678", "precision": "fp32", "tables": [table]}


def costs_told(folder: Path, **files: Any) -> str:
    """What the page says between this section's heading and the next one's."""
    write_result(folder, cell("paper", "cifar10", "preactresnet18", "erm"), 0, 0.05)
    for name, content in files.items():
        (folder / "paper" / f"{name}-1.json").write_text(json.dumps(content))
    found = load_results([folder])
    assert not found.unusable
    page = text_of(report_page(found)).partition("How to read the tables Mean")[2]
    return page.partition("What AMP costs")[2].partition("How these runs differ")[0]


def files(**content: Any) -> dict[str, Any]:
    return {name.replace("_", "-"): one for name, one in content.items()}


def test_each_time_has_its_form_network_batches_precision_machine_and_commit(tmp_path: Path) -> None:
    told = costs_told(tmp_path, **files(cost_gpu=COST, bench_gpu=benchmark()))
    trained = "a GPU, torch 2.12.0, commit abc1234: training for 200 epochs of CIFAR-10, protocol “paper”, "
    trained += "PreActResNet18, batches of 64, bf16 one CUDA graph, not compiled 2.00 3.90 1.95 0.50 0.95 1.90"
    assert trained in told
    timed = "another GPU, torch 2.13.0, commit def5678: flatmin bench, VGG16, batches of 128, fp32 "
    timed += "plain PyTorch (eager) 8.00 18.00 2.25 The paper, V100"
    assert timed in told  # without the form of which AMP failed, and without several networks at once


def test_a_benchmark_without_both_methods_is_left_out(tmp_path: Path) -> None:
    assert costs_told(tmp_path, **files(bench_gpu=benchmark(rows=ROWS[:1]))) == ""
    assert "VGG16" not in costs_told(tmp_path, **files(cost_gpu=COST, bench_gpu=benchmark(rows=ROWS[2:])))


def test_a_form_that_no_one_recorded_is_not_guessed(tmp_path: Path) -> None:
    bare = {key: value for key, value in COST.items() if key not in ("form", "batch_size", "model", "torch")}
    told = costs_told(tmp_path, **files(cost_gpu=bare))
    start = "a GPU, commit abc1234: training for 200 epochs of CIFAR-10, protocol “paper”, bf16"
    assert f"{start} form not recorded 2.00 3.90" in told


@pytest.mark.parametrize(
    "wrong", [{"form": 1}, {"batch_size": 0}, {"batch_size": "50"}, {"model": None}, {"commit": ["a"]}], ids=str
)
def test_a_setting_that_is_none_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    write_result(tmp_path, cell("paper", "cifar10", "preactresnet18", "erm"), 0, 0.05)
    (tmp_path / "cost-gpu.json").write_text(json.dumps({**COST, **wrong}))
    (left_out,) = load_results([tmp_path]).unusable
    assert next(iter(wrong)) in left_out.why


def test_what_was_timed_outside_a_checkout_has_no_commit(tmp_path: Path) -> None:
    told = costs_told(tmp_path, **files(cost_gpu={**COST, "commit": None}, bench_gpu={**benchmark(), "commit": None}))
    assert "a GPU, torch 2.12.0: training for 200 epochs" in told
    assert "another GPU, torch 2.13.0: flatmin bench" in told


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_timed_is_recorded_with_its_setting(compiled: bool) -> None:
    """On a CPU nothing is captured or compiled, whatever the recipe says."""
    erm = replace(tiny_recipe(batch_size=10), compile=compiled)
    recipes = {"erm": erm, "amp": replace(erm, method="amp", settings={"epsilon": 0.1})}
    found = amp_cost.measure_cost(recipes, tiny_data(), device=torch.device("cpu"), steps=1)
    assert (found["form"], found["batch_size"], found["model"]) == ("eager", 10, erm.model)
    assert found["ratio"] == found["methods"]["amp"]["ms"] / found["methods"]["erm"]["ms"]
