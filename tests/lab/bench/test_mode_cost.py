"""What cheaper trainings cost: the kinds of steps that a run has, timed as `flatmin bench` times them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flatmin_lab.bench import roofline
from flatmin_lab.bench.benchmark import BenchmarkOptions, run_benchmark
from flatmin_lab.bench.contenders import ASCENTS, METHODS, MODES, build_contender
from flatmin_lab.bench.mode_cost import CAPTURED, EAGER, StepTimes, contender_of, step_times
from flatmin_lab.bench.time_estimate import kinds_of_steps, passes_per_step
from flatmin_lab.bench.workload import Workload, random_images
from flatmin_lab.data import Normalisation, augmentation
from flatmin_lab.recipes.experiments import EXPERIMENTS
from flatmin_lab.recipes.recipe import Recipe
from tests.support.small_runs import learner_of, tiny_data, tiny_recipe

CPU = torch.device("cpu")
MS = {"erm": 1.0, "amp-idle": 1.1, "amp": 2.1, "amp-quarter": 1.5}
TIMES = StepTimes("a machine", "preactresnet18", 50, "bf16", {CAPTURED: MS, EAGER: {"erm": 2.0, "amp": 5.0}})


def mode(name: str) -> Recipe:
    known = EXPERIMENTS["frontier"]("short").recipes
    return next(recipe for recipe in known if recipe.name == f"short/cifar10-preactresnet18-{name}")


def test_a_cost_is_the_mean_of_the_kinds_of_steps_over_erm() -> None:
    erm = mode("erm")
    costs = {name: TIMES.cost(mode(name), erm, CAPTURED) for name in ("erm", "amp", "amp-start-0.75", "erm-times-1.5")}
    assert costs == pytest.approx(
        {"erm": 1.0, "amp": 2.1, "amp-start-0.75": 0.75 * 1.1 + 0.25 * 2.1, "erm-times-1.5": 1.5}
    )
    quarter = replace(erm, method="amp", settings={"epsilon": 0.1, "start": 0.5, "ascent_share": 0.25})
    assert TIMES.cost(quarter, erm, CAPTURED) == pytest.approx(0.5 * 1.1 + 0.5 * 1.5)


def test_what_was_not_timed_has_no_cost() -> None:
    erm = mode("erm")
    assert TIMES.cost(mode("amp"), erm, EAGER) == 2.5
    assert TIMES.cost(mode("amp-start-0.75"), erm, EAGER) is None  # no step without a perturbation was timed
    assert TIMES.cost(mode("amp"), erm, "graph") is None
    for settings in ({"inner_iter": 2}, {"ascent_share": 0.1}):
        assert contender_of(replace(erm, method="amp", settings=settings)) is None
    assert contender_of(replace(erm, method="adversarial")) is None
    assert TIMES.fits(erm, "a machine")
    assert not TIMES.fits(erm, "another")
    assert not TIMES.fits(replace(erm, batch_size=128), "a machine")


@pytest.mark.parametrize("method", ["erm", "amp", "amp-idle", "amp-quarter"])
def test_a_contender_takes_the_passes_of_the_kind_of_step_it_stands_for(method: str) -> None:
    images = 16
    split = random_images(CPU, 64)
    augment = augmentation("none", "cifar10")
    own = Workload.build(
        "convnet", split, Normalisation.of(split), batch_size=images, augment=augment, precision="fp32"
    )
    seen: list[int] = []
    contender = build_contender(own, method, "eager")
    step: Any = contender.step
    step.spec.model.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    contender(1)
    settings = {"amp-idle": {"epsilon": 0.0}, "amp-quarter": {"ascent_share": 0.25}}.get(method, {})
    kind = tiny_recipe(method=method.partition("-")[0], settings=settings)
    assert contender_of(kind) == method
    assert sum(seen) == images * passes_per_step(kind)


def test_a_quarter_is_what_the_learner_takes() -> None:
    recipe = tiny_recipe(method="amp", settings={"epsilon": 0.1, "ascent_share": 0.25}, batch_size=10)
    learner = learner_of(recipe, tiny_data(train=40))
    seen: list[int] = []
    learner.model.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    learner.step(*next(iter(learner.batches.parts(0))), 0.1)
    x, y = torch.zeros(10, 3, 8, 8), torch.zeros(10)
    assert seen == [len(ASCENTS["amp-quarter"](x, y)[0]), 10]
    assert ASCENTS["amp-half"](x, y)[0].shape == (10, 3, 4, 4)


def test_the_benchmark_times_every_mode_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "MAX_SECONDS", 0.0)
    options = BenchmarkOptions(
        models=("convnet",), batch_sizes=(8,), methods=("erm", "amp", *MODES), steps=5, precision="fp32"
    )
    result = run_benchmark(options, device=CPU, images=64)
    (times,) = step_times(result)
    assert times.ms.keys() == {EAGER}
    assert times.ms[EAGER].keys() == {"erm", "amp", *MODES}
    assert {f"{name} / erm, eager" for name in ("amp", *MODES)} <= result["tables"][0]["ratios"].keys()
    assert BenchmarkOptions().methods == METHODS  # the modes are timed where they are asked for


def test_every_mode_of_the_frontier_can_be_timed() -> None:
    for recipe in EXPERIMENTS["frontier"]("short").recipes:
        assert {contender_of(kind) for _, kind in kinds_of_steps(recipe)} <= MS.keys(), recipe.name
