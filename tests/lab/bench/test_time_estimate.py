"""How long it will take: what is multiplied is what happens."""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flatmin_lab.bench import time_estimate
from flatmin_lab.data import load
from flatmin_lab.recipes.defaults import default_recipe
from flatmin_lab.recipes.experiments import EXPERIMENTS
from flatmin_lab.recipes.experiments.experiment import cell
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.runs.events import Epoch, Event, Finished, Progress
from flatmin_lab.training.loop import train
from tests.support.small_runs import learner_of, tiny_data, tiny_recipe


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("erm", {}),
        ("mixup", {}),
        ("rmp", {}),
        ("adversarial", {}),
        ("amp", {"epsilon": 0.1}),
        ("amp", {"epsilon": 0.0}),
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
    assert len(counted) == time_estimate.passes_per_step(recipe)


def test_a_run_is_its_steps_and_an_evaluation_of_the_test_set_after_each_epoch() -> None:
    data, known = tiny_data(train=40, test=30), time_estimate.Pace(step_seconds=1.0, image_seconds=0.1)
    recipe = tiny_recipe(epochs=3, batch_size=10)
    assert time_estimate.estimate_seconds(recipe, data, known) == pytest.approx(3 * (4 + 30 * 0.1))
    held_out = tiny_recipe(epochs=3, batch_size=10, validation=True)
    assert time_estimate.estimate_seconds(held_out, data, known) == pytest.approx(3 * (3.6 + 4 * 0.1))


def test_a_run_that_perturbs_late_has_two_kinds_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(method="amp", settings={"epsilon": 0.1, "start": 0.5, "every": 2})
    (one, plain), (other, perturbed) = time_estimate.kinds_of_steps(recipe)
    assert (one, other) == (0.75, 0.25)
    assert [time_estimate.passes_per_step(kind) for kind in (plain, perturbed)] == [1, 2]

    def pace(recipe: Any, *_: Any, **__: Any) -> time_estimate.Pace:
        return time_estimate.Pace(float(time_estimate.passes_per_step(recipe)), 0.0)

    monkeypatch.setattr(time_estimate, "measure_pace", pace)
    jobs = [Job(tiny_recipe(), 0), Job(recipe, 0), Job(tiny_recipe(method="amp", settings={"epsilon": 0.1}), 0)]
    erm, late, amp = time_estimate.estimate_all_seconds(jobs, {"tiny": tiny_data()}, device=torch.device("cpu"))
    assert [late / erm, amp / erm] == pytest.approx([1.25, 2])


def test_every_kind_of_step_of_a_matched_radius_can_be_built() -> None:
    settings = {"epsilon": "auto", "start": 0.5, "held_out": 0.2, "release": 0.5}
    plain, matched = (kind for _, kind in time_estimate.kinds_of_steps(tiny_recipe(method="amp", settings=settings)))
    assert plain.settings == {"epsilon": 0.0}
    for kind in (plain, matched):
        learner_of(kind, tiny_data())


class Work(TorchDispatchMode):
    """A clock that a busy machine does not change: 0.1 ms for an operation, and 0.1 µs for each of its numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seconds += 1e-4 + 1e-7 * sum(value.numel() for value in args if isinstance(value, Tensor))
        return func(*args, **(kwargs or {}))


def test_an_estimate_is_near_the_run_where_most_of_it_is_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = load("spiral")
    recipe = default_recipe("spiral", data, method="amp", epochs=10)
    with Work() as clock:
        monkeypatch.setattr(time_estimate, "perf_counter", lambda: clock.seconds)
        (guess,) = time_estimate.estimate_all_seconds([Job(recipe, 0)], {"spiral": data}, device=torch.device("cpu"))
        start = clock.seconds
        assert isinstance(list(train(recipe, data, seed=0))[-1], Finished)
    assert 0.5 < guess / (clock.seconds - start) < 2


def test_a_step_that_comes_after_the_end_of_an_epoch_counts_only_where_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time_estimate, "perf_counter", lambda: clock[0])

    def events(steps: int) -> Iterator[Event | None]:
        """A step takes 1 ms, an evaluation of the test set 100."""
        for epoch in count(1):
            for _ in range(steps):
                clock[0] += 0.001
                yield Progress(epoch=epoch, step=1, numbers={})
                yield None
            clock[0] += 0.1
            yield Epoch(epoch=epoch, step=1, numbers={})

    for steps, expected in ((4, 0.001), (1, 0.101)):
        monkeypatch.setattr(time_estimate, "endless_run", lambda *_, steps=steps, **__: nullcontext(events(steps)))
        found = time_estimate.seconds_per_step(tiny_recipe(), tiny_data(), device=torch.device("cpu"))
        assert found == pytest.approx(expected)


def test_a_look_is_measured_in_small_where_a_large_batch_would_take_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated = []

    def logits_of(answers: Any, split: Any, normalise: Any) -> torch.Tensor:
        evaluated.append(len(split))
        clock[0] += len(split) * each
        return torch.zeros(len(split), 3)

    clock = [0.0]
    monkeypatch.setattr(time_estimate, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(time_estimate, "logits_of", logits_of)
    for each, sizes in ((1e-4, [50, 50, 500, 500]), (0.1, [50, 50])):
        evaluated.clear()
        data = tiny_data(test=600)
        assert time_estimate.seconds_per_evaluation(tiny_recipe(), data, device=torch.device("cpu")) == pytest.approx(
            each
        )
        assert evaluated == sizes


def test_of_those_that_are_alike_one_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def pace(recipe: Any, data: Any, *, device: Any) -> time_estimate.Pace:
        measured.append(recipe.name)
        return time_estimate.Pace(0.5, 0.01)

    monkeypatch.setattr(time_estimate, "measure_pace", pace)
    jobs = EXPERIMENTS["table1"]("smoke").jobs((0, 1))
    sets = {recipe.data: tiny_data() for recipe in EXPERIMENTS["table1"]("smoke").recipes}
    found = time_estimate.estimate_all_seconds(jobs, sets, device=torch.device("cpu"))
    assert len(found) == len(jobs) == 96
    assert len(measured) == 2 * 2 + 1  # two networks, one or two passes, and dropout's places in one of them
    assert all(seconds > 0 for seconds in found)


def test_a_step_is_measured_on_a_run_that_leaves_nothing() -> None:
    recipe = cell("smoke", "cifar10", "vgg16", "amp")
    data = tiny_data(train=20)
    small = tiny_recipe(method="amp", settings={"epsilon": 0.1})
    before = torch.get_rng_state()
    found = time_estimate.measure_pace(small, data, device=torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    assert 0 < found.step_seconds < 5
    assert 0 < found.image_seconds < 1
    assert Job(recipe, 0).seed == 0
