"""Training on a GPU: the first weights of a CPU, the same bits captured or not and after a stop, and no waiting."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatmin_lab import methods, models
from flatmin_lab.data import Dataset, Normalisation, Split
from flatmin_lab.recipes.recipe import PRECISIONS, Recipe
from flatmin_lab.runs.events import Event, Finished, Note, Progress, RunError, Stopped
from flatmin_lab.system.rng import RandomScope
from flatmin_lab.training.captured_forward import CapturedForward
from flatmin_lab.training.evaluation import logits_of
from flatmin_lab.training.loop import train, training_steps
from tests.support.host_sync import fail_on_host_sync, run_without_host_sync
from tests.support.small_runs import after, lasting, learner_of, run, same, tiny_data, tiny_recipe

pytestmark = pytest.mark.cuda

VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in methods.METHODS},
    "averaged bf16": {"method": "amp", "ema": 0.9, "precision": "bf16", "channels_last": True},
    "late": {"method": "amp", "settings": {"epsilon": 0.1, "start": 0.4, "growth": "linear", "every": 2}},
    "less": {"method": "amp", "settings": {"epsilon": 0.1, "ascent_share": 0.3}},
    "mixed": {"method": "amp", "settings": {"epsilon": 0.1, "regulariser": "mixup"}},
    "auto": {
        "method": "amp",
        "settings": {"epsilon": "auto", "held_out": 0.2, "start": 0.2, "matches": 2},
        "label_noise": 0.2,
    },
    "fp16": {"method": "amp", "precision": "fp16", "clip_norm": 1.0, "settings": {"epsilon": 0.1}},
    "exempt norms": {"method": "amp", "exempt_norms": True, "weight_decay": 0.1, "settings": {"epsilon": 0.1}},
    "muon": {"method": "amp", "optimizer": "muon", "lr": 0.02, "settings": {"epsilon": 0.1}},
    "adamw": {"method": "amp", "optimizer": "adamw", "lr": 0.01, "settings": {"epsilon": 0.1}},
    "noise": {"method": "mixup", "label_noise": 0.3, "augment": "vanilla"},
    "published rmp": {"method": "rmp", "settings": {"ball": "tensor", "noise": "cube"}, "clip_norm": 50.0},
    "published attack": {"method": "adversarial", "settings": {"units": "inputs", "random_start": True}},
}
NETWORKS = ("preactresnet18", "vgg16", "wideresnet10_2", "pyramidnet29_24", "convnet")


def photographs(count: int = 64) -> Dataset:
    """Images of CIFAR's size."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    split = Split(x, torch.arange(count) % 10)
    return Dataset("photographs", split, split, [str(number) for number in range(10)])


@pytest.mark.parametrize("variant", VARIANTS)
def test_stopped_anywhere_it_goes_on_to_the_same_bits(tmp_path: Path, variant: str) -> None:
    recipe = tiny_recipe(deterministic=True, **VARIANTS[variant])
    run(recipe, tmp_path / "whole", device="cuda")
    expected = lasting(tmp_path / "whole")
    for first in (3, 8):
        folder = tmp_path / f"stopped-{first}"
        events = run(recipe, folder, device="cuda", stop=after(first))
        assert isinstance(events[-1], Stopped)
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


@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")], ids=" to ".join)
def test_a_run_with_adamw_moves_between_cpu_and_gpu(tmp_path: Path, devices: tuple[str, str]) -> None:
    """Its implementation and the place of its step counts are those of the device."""
    recipe = tiny_recipe(optimizer="adamw", lr=0.01)
    run(recipe, tmp_path / "run", device=devices[0], stop=after(8))
    moved = run(recipe, tmp_path / "run", device=devices[1], resume=True)[-1]
    stayed = run(recipe, tmp_path / "stayed", device=devices[0])[-1]
    assert isinstance(moved, Finished)
    assert isinstance(stayed, Finished)
    assert moved.result["test_nll"] == pytest.approx(stayed.result["test_nll"], rel=0.02)


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "nadam", "radam", "adamax", "rmsprop"])
def test_optimizers_of_torch_step_inside_the_graph(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learner_of(tiny_recipe(optimizer=optimizer, lr=1e-3), tiny_data(), device="cuda")
    own, calls = learner.optimizer.base.step, []

    def counted(*args: Any, **more: Any) -> Any:
        calls.append(args)
        return own(*args, **more)

    monkeypatch.setattr(learner.optimizer.base, "step", counted)
    index, u = next(learner.batches.parts(0))
    for _ in range(3):
        learner.step(index, u, 1e-3)
    before, weights = len(calls), [p.detach().clone() for p in learner.model.parameters()]
    learner.step(index, u, 1e-3)
    assert learner.train_step.captured
    assert len(calls) == before
    assert not all(torch.equal(p, w) for p, w in zip(learner.model.parameters(), weights, strict=True))


def test_first_weights_are_those_of_the_cpu() -> None:
    here, there = (learner_of(tiny_recipe(), tiny_data(), seed=3, device=device) for device in ("cpu", "cuda"))
    for one, other in zip(here.model.parameters(), there.model.parameters(), strict=True):
        assert torch.equal(one, other.cpu())


STEPS: dict[str, dict[str, Any]] = {
    **{f"{name}, {kind}": {"method": name, "precision": kind} for name in methods.METHODS for kind in PRECISIONS},
    "clipped": {"method": "amp", "clip_norm": 0.1},
    "averaged": {"method": "amp", "ema": 0.9},
    "channels last": {"method": "mixup", "channels_last": True},
    **{name: VARIANTS[name] for name in ("published rmp", "published attack", "exempt norms", "adamw")},
}


@pytest.mark.parametrize("variant", STEPS)
def test_every_step_is_captured_and_measures_the_same(variant: str) -> None:
    """From the second one on, with what the ordinary first step measured, and the last, smaller batch too."""
    learner = learner_of(tiny_recipe(augment="vanilla", **STEPS[variant]), tiny_data(), device="cuda")
    first, captured = None, []
    for epoch in range(2):
        for index, u in learner.batches.parts(epoch):
            measured = learner.step(index, u, 0.01)
            first = first or measured
            captured.append(learner.train_step.captured)
            assert measured.keys() == first.keys()
    assert learner.train_step.reason is None
    assert captured == [False] + [True] * 9


@pytest.mark.parametrize("method", methods.METHODS)
def test_captured_it_is_the_same_to_the_bit(tmp_path: Path, method: str) -> None:
    """Steps, evaluations (of full and of smaller batches, of the average too), and what a checkpoint holds."""
    recipe = tiny_recipe(method=method, deterministic=True, augment="vanilla", ema=0.9, schedule="cosine")
    data = tiny_data(test=1100)
    for name, capture in (("captured", True), ("plain", False)):
        events = list(train(recipe, data, device="cuda", folder=tmp_path / name, capture=capture))
        assert isinstance(events[-1], Finished)
        assert not any(isinstance(event, Note) for event in events)
    assert same(lasting(tmp_path / "captured"), lasting(tmp_path / "plain"))


@pytest.mark.parametrize("method", ["erm", "amp", "mixup", "label_smoothing", "dropout", "rmp", "adversarial"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("capture", [True, False])
def test_the_host_never_waits_within_a_step(method: str, precision: Any, capture: bool) -> None:
    recipe = tiny_recipe(method=method, precision=precision, augment="vanilla")
    learner = learner_of(recipe, tiny_data(), device="cuda", capture=capture)
    index, u = next(learner.batches.parts(0))
    for _ in range(3):
        learner.step(index, u, 0.1)
    measured = run_without_host_sync(lambda: learner.step(index, u, 0.1))
    assert all(isinstance(value, Tensor) and value.is_cuda for value in measured.values())


@pytest.mark.parametrize("variant", ["erm", "amp", "late", "mixup", "dropout", "rmp", "averaged bf16"])
def test_the_host_never_waits_within_an_epoch(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """Between its first step and its last, although progress is told after each: numbers come when they come."""
    monkeypatch.setattr("flatmin_lab.training.loop.PROGRESS_SECONDS", 0.0)
    recipe = tiny_recipe(schedule="cosine", augment="vanilla", epochs=5, **VARIANTS[variant])
    settings: dict[str, Any] = {"folder": None, "resume": False, "capture": True, "stop": lambda: None}
    settings |= {"checkpoint_epochs": 1, "checkpoint_minutes": 99.0}
    events = training_steps(recipe, tiny_data(), seed=0, device="cuda", **settings)
    event: Event | None = None
    done = quiet = told = 0
    while not isinstance(event, Finished):
        within = done > 10 and done % 5 != 0  # after two epochs all graphs are there
        with fail_on_host_sync() if within else nullcontext():
            event = next(events)
        done += event is None
        quiet += within and event is None
        told += isinstance(event, Progress)
    assert (done, quiet, told) == (25, 12, 25)


def test_a_loss_that_is_not_finite_is_named_as_on_a_cpu() -> None:
    """Although the host is steps ahead when it hears of it."""
    recipe = tiny_recipe(lr=1e30, warmup=1.0, epochs=2, schedule="constant")
    named = []
    for device in ("cpu", "cuda"):
        with pytest.raises(RunError, match=r"the loss of step \d+") as caught:
            run(recipe, device=device)
        named.append(str(caught.value).partition(" is ")[0])
    assert named[0] == named[1]


@pytest.mark.parametrize("network", NETWORKS)
def test_captured_answers_are_the_models_own(network: str) -> None:
    """Bit for bit, when the weights have changed in place, and when they have moved."""
    data = photographs(40).to("cuda")
    normalise = Normalisation.of(data.test)
    scope = RandomScope(torch.device("cuda"), deterministic=True)
    with scope.active():
        model = models.build(network).cuda()
        forward = CapturedForward(model, batch_size=16)
        held = []
        for change in ("none", "in place", "moved"):
            for param in model.parameters():
                if change == "in place":
                    param.data.mul_(1.1)
                elif change == "moved":
                    param.data = param.data.clone()
            expected = logits_of(model, data.test, normalise, batch_size=16)
            found = logits_of(forward, data.test, normalise, batch_size=16)
            assert expected is not None
            assert found is not None
            assert torch.equal(found, expected)
            held.append(forward.graph)
        assert held[0] is not None
        assert held[1] is held[0]
        assert held[2] not in (None, held[0])
        assert model.training


def test_what_cannot_be_captured_is_answered_all_the_same() -> None:
    class Reading(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) * float(x.max())  # the host reads a number

    forward, x = CapturedForward(Reading(), batch_size=4), torch.rand(4, 1, 2, 2, device="cuda")
    for _ in range(2):
        assert torch.equal(forward(x), Reading()(x))
        assert forward.graph is None
    assert torch.equal(torch.ones(2, device="cuda") + 1, torch.full((2,), 2.0, device="cuda"))  # the device is well


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
