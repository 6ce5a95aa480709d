"""How long it will take: what is multiplied is what happens."""

from typing import Any

import pytest
import torch

from flatmin_lab import estimate
from flatmin_lab.recipe import Job
from flatmin_lab.recipes import EXHIBITS, cell
from small_runs import learner_of, tiny_data, tiny_recipe


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("erm", {}),
        ("mixup", {}),
        ("rmp", {}),
        ("adversarial", {}),
        ("amp", {"epsilon": 0.1}),
        ("amp", {"epsilon": 0.1, "inner_iter": 3}),
    ],
)
def test_the_passes_of_a_step_are_counted_right(method: str, settings: dict[str, Any]) -> None:
    recipe = tiny_recipe(method=method, settings=settings)
    learner = learner_of(recipe, tiny_data())
    counted = []
    learner.model.register_forward_hook(lambda *_: counted.append(1))
    index, u = next(iter(learner.batches.parts(0)))
    learner.step(index, u, 0.1)
    assert len(counted) == estimate.passes(recipe)


def test_a_training_is_its_steps_and_a_look_at_the_test_set_after_each_epoch() -> None:
    data = tiny_data(train=40, test=30)
    recipe = tiny_recipe(epochs=3, batch_size=10)
    assert estimate.seconds_of(recipe, data, 1.0) == pytest.approx(3 * (4 + 3 / 3))
    held_out = tiny_recipe(epochs=3, batch_size=10, validation=True)
    assert estimate.seconds_of(held_out, data, 1.0) == pytest.approx(3 * (3.6 + 0.4 / 3))
    amp = tiny_recipe(epochs=3, batch_size=10, method="amp", settings={"epsilon": 0.1})
    assert estimate.seconds_of(amp, data, 2.0) == pytest.approx(3 * (8 + 3 / 3))  # a step has two passes


def test_of_those_that_are_alike_one_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def step(recipe: Any, data: Any, *, device: Any) -> float:
        measured.append(recipe.name)
        return 0.5

    monkeypatch.setattr(estimate, "seconds_a_step", step)
    jobs = EXHIBITS["table1"]("smoke").jobs((0, 1))
    sets = {recipe.data: tiny_data() for recipe in EXHIBITS["table1"]("smoke").recipes}
    found = estimate.seconds_of_all(jobs, sets, device=torch.device("cpu"))
    assert len(found) == len(jobs) == 96
    assert len(measured) == 2 * 2  # two networks, one or two passes
    assert all(seconds > 0 for seconds in found)


def test_a_step_is_measured_on_a_training_that_leaves_nothing() -> None:
    recipe = cell("smoke", "cifar10", "vgg16", "amp")
    data = tiny_data(train=20)
    small = tiny_recipe(method="amp", settings={"epsilon": 0.1})
    assert 0 < estimate.seconds_a_step(small, data, device=torch.device("cpu")) < 5
    assert Job(recipe, 0).seed == 0
