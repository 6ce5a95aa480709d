"""Training on a GPU: the same first weights as on a CPU, the same bits after a stop, and no waiting within a step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flatmin_lab import methods
from flatmin_lab.data import Batches, Dataset, Normalisation, Split, augmentation
from flatmin_lab.learner import Learner
from flatmin_lab.recipes import Recipe
from flatmin_lab.records import Finished, Stopped
from flatmin_lab.train import train
from small_runs import after, lasting, run, same, tiny_data, tiny_recipe
from waiting import without_sync

pytestmark = pytest.mark.cuda

VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in methods.METHODS},
    "averaged bf16": {"method": "amp", "ema": 0.9, "precision": "bf16", "channels_last": True},
    "fp16": {"method": "amp", "precision": "fp16", "clip_norm": 1.0, "settings": {"epsilon": 0.1}},
    "noise": {"method": "mixup", "label_noise": 0.3, "augment": "vanilla"},
}
NETWORKS = ("preactresnet18", "vgg16", "wideresnet10_2", "pyramidnet29_24", "convnet")


def photographs(count: int = 64) -> Dataset:
    """Pictures of CIFAR's size."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    split = Split(x, torch.arange(count) % 10)
    return Dataset("photographs", split, split, [str(number) for number in range(10)])


def learner_of(recipe: Recipe, data: Dataset) -> tuple[Learner, Batches]:
    there = data.to("cuda")
    normalise = Normalisation.of(there.train)
    batches = Batches(
        split=there.train,
        batch_size=recipe.batch_size,
        normalise=normalise,
        augment=augmentation(recipe.augment, data),
    )
    return Learner(recipe, there, normalise, seed=0, device=torch.device("cuda")), batches


@pytest.mark.parametrize("variant", VARIANTS)
def test_stopped_anywhere_it_goes_on_to_the_same_bits(tmp_path: Path, variant: str) -> None:
    recipe = tiny_recipe(deterministic=True, **VARIANTS[variant])
    run(recipe, tmp_path / "whole", device="cuda")
    expected = lasting(tmp_path / "whole")
    for first in (3, 8):
        folder = tmp_path / f"stopped-{first}"
        records = run(recipe, folder, device="cuda", stop=after(first))
        assert isinstance(records[-1], Stopped)
        torch.cuda.manual_seed(99)  # whatever state the new process has
        assert isinstance(run(recipe, folder, device="cuda", resume=True)[-1], Finished)
        assert same(lasting(folder), expected)


@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_trains_deterministically(network: str) -> None:
    recipe = Recipe(
        data="photographs", model=network, method="amp", settings={"epsilon": 0.1}, epochs=1, batch_size=32, lr=0.01
    )
    first, again = (
        list(train(Recipe(**{**recipe.as_json(), "deterministic": True}), photographs(), device="cuda"))[-1]
        for _ in range(2)
    )
    assert isinstance(first, Finished)
    assert isinstance(again, Finished)
    assert first.result["test_nll"] == again.result["test_nll"]


def test_a_run_begun_on_a_cpu_goes_on_on_a_gpu(tmp_path: Path) -> None:
    recipe = tiny_recipe(method="amp", settings={"epsilon": 0.1})
    run(recipe, tmp_path / "run", stop=after(8))
    moved = run(recipe, tmp_path / "run", device="cuda", resume=True)[-1]
    stayed = run(recipe, tmp_path / "cpu")[-1]
    assert isinstance(moved, Finished)
    assert isinstance(stayed, Finished)
    assert moved.result["test_nll"] == pytest.approx(stayed.result["test_nll"], rel=0.02)


def test_first_weights_are_those_of_the_cpu() -> None:
    data = tiny_data()
    normalise = Normalisation.of(data.train)
    here = Learner(tiny_recipe(), data, normalise, seed=3, device=torch.device("cpu"))
    there = Learner(tiny_recipe(), data.to("cuda"), normalise, seed=3, device=torch.device("cuda"))
    for one, other in zip(here.model.parameters(), there.model.parameters(), strict=True):
        assert torch.equal(one, other.cpu())


@pytest.mark.parametrize("method", ["erm", "amp", "mixup", "label_smoothing", "dropout", "rmp", "adversarial"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_host_never_waits_within_a_step(method: str, precision: Any) -> None:
    learner, batches = learner_of(tiny_recipe(method=method, precision=precision, augment="vanilla"), tiny_data())
    x, y = next(batches.epoch(0))
    for _ in range(3):
        learner.step(x, y, 0.1)
    measured = without_sync(lambda: learner.step(x, y, 0.1))
    assert all(isinstance(value, Tensor) and value.is_cuda for value in measured.values())


@pytest.mark.filterwarnings("ignore")  # of torch, about itself and about tf32
def test_compiled_training_learns_the_same() -> None:
    recipe = Recipe(
        data="photographs",
        model="preactresnet18",
        method="amp",
        settings={"epsilon": 0.1},
        augment="none",
        epochs=2,
        batch_size=32,
        lr=0.01,
    )
    plain = list(train(recipe, photographs(), device="cuda"))[-1]
    compiled = list(train(Recipe(**{**recipe.as_json(), "compile": True}), photographs(), device="cuda"))[-1]
    assert isinstance(plain, Finished)
    assert isinstance(compiled, Finished)
    assert compiled.result["test_nll"] == pytest.approx(plain.result["test_nll"], rel=0.1)
