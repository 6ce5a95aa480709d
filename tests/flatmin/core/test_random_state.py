"""Python's and numpy's generators: wound back where the passes draw from them, and left alone where others do."""

import random
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flatmin
from flatmin.core.random_state import FIRST_LOOKS, LOOK_EVERY

Draw = Callable[[], float]
DRAWS: dict[str, Draw] = {"python": random.random, "numpy": lambda: float(np.random.rand())}


@pytest.fixture(params=DRAWS)
def draw(request: pytest.FixtureRequest) -> Draw:
    return DRAWS[request.param]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    before = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])


def steps(within: Callable[[int, int], None], count: int, *, form: str = "closure", inner_iter: int = 1) -> None:
    """Steps of AMP; `within(step, pass)` is called in every pass."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = flatmin.AMP(
        torch.optim.SGD(model.parameters(), lr=0.1), epsilon=0.1, inner_iter=inner_iter, model=model
    )
    for n in range(count):
        passes = iter(range(10))

        def run(n: int = n, passes: Iterator[int] = passes) -> Tensor:
            within(n, next(passes))
            loss: Tensor = model(torch.ones(1, 2)).square().mean()
            loss.backward()
            return loss

        if form == "blocks":
            optimizer.zero_grad()
            run()
            for _ in range(inner_iter):
                with optimizer.perturbed():
                    run()
            optimizer.step()
        else:

            def closure(run: Callable[[], Tensor] = run) -> Tensor:
                optimizer.zero_grad()
                return run()

            optimizer.step(closure)


@pytest.mark.parametrize("inner_iter", [1, 2])
@pytest.mark.parametrize("form", ["closure", "blocks"])
def test_a_model_that_draws_draws_the_same_in_every_pass_of_every_step(draw: Draw, form: str, inner_iter: int) -> None:
    drawn: dict[int, list[float]] = {}
    steps(lambda n, _: drawn.setdefault(n, []).append(draw()), 3 * FIRST_LOOKS, form=form, inner_iter=inner_iter)
    assert {len(numbers) for numbers in drawn.values()} == {1 + inner_iter}
    assert {len(set(numbers)) for numbers in drawn.values()} == {1}
    firsts = [numbers[0] for numbers in drawn.values()]
    random.seed(0)
    np.random.seed(0)
    assert firsts == [draw() for _ in firsts]  # as if each step had had one pass


def test_a_model_that_begins_to_draw_late_is_noticed_at_the_next_look(draw: Draw) -> None:
    drawn: dict[int, list[float]] = {}

    def late(n: int, _: int) -> None:
        if n > FIRST_LOOKS:
            drawn.setdefault(n, []).append(draw())

    steps(late, FIRST_LOOKS + 2 * LOOK_EVERY)
    alike = [len(set(numbers)) == 1 for numbers in drawn.values()]
    assert 0 < alike.index(True) <= LOOK_EVERY
    assert all(alike[alike.index(True) :])


def test_a_model_that_draws_something_the_first_time_it_runs_is_no_other_thread(draw: Draw) -> None:
    drawn: dict[int, list[float]] = {}

    def lazily(n: int, which: int) -> None:
        if n == which == 0:
            draw()
        drawn.setdefault(n, []).append(draw())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(lazily, 3 * FIRST_LOOKS)
    assert [len(set(numbers)) for numbers in drawn.values()][1:] == [1] * (3 * FIRST_LOOKS - 1)


def test_zero_grad_in_the_loop_does_not_count_as_a_step(draw: Draw) -> None:
    drawn: dict[int, list[float]] = {}
    model = nn.Linear(2, 1)
    optimizer = flatmin.AMP(torch.optim.SGD(model.parameters(), lr=0.1), epsilon=0.1, model=model)
    optimizer.zero_grad()
    for n in range(FIRST_LOOKS + 2 * LOOK_EVERY):
        optimizer.zero_grad()

        def closure(n: int = n) -> Tensor:
            if n > FIRST_LOOKS:
                drawn.setdefault(n, []).append(draw())
            loss: Tensor = model(torch.ones(1, 2)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    alike = [len(set(numbers)) == 1 for numbers in drawn.values()]
    assert all(alike[LOOK_EVERY:])


def test_another_thread_that_draws_does_not_get_its_numbers_twice(draw: Draw) -> None:
    drawn: list[float] = []
    with ThreadPoolExecutor(1) as prefetcher, pytest.warns(UserWarning, match="advanced differently in the passes"):
        # one number a step, now in the first pass, now in the second
        steps(
            lambda n, which: drawn.append(prefetcher.submit(draw).result()) if which == n // 2 % 2 else None,
            FIRST_LOOKS + 2 * LOOK_EVERY,
        )
    repeated = len(drawn) - len(set(drawn))
    assert repeated <= 8  # in the steps before it was seen
    assert len(set(drawn[12:])) == len(drawn[12:])


def test_generators_that_no_pass_draws_from_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("set back")

    monkeypatch.setattr(random, "setstate", refuse)
    monkeypatch.setattr(np.random, "set_state", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(lambda n, which: None, FIRST_LOOKS + 2)
    monkeypatch.undo()
