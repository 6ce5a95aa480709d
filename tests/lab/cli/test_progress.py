"""Progress: in a terminal a bar, elsewhere lines; and before there is an estimate, what is under way."""

import io
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress as Bars

from flatmin_lab.cli import display
from flatmin_lab.cli.commands import demo, train_seeds, tune
from flatmin_lab.cli.commands.reproduce import reproduce
from flatmin_lab.cli.progress_columns import COMPILING, WARMUP_STEPS, columns, first_steps_text
from flatmin_lab.data import load
from flatmin_lab.execution.runner import Run
from flatmin_lab.recipes.defaults import default_recipe
from flatmin_lab.recipes.recipe import Job, Recipe
from flatmin_lab.runs.events import Epoch, Event, Finished, Progress, Started
from flatmin_lab.tuning.search_space import SearchSpace, hyper_parameters_of
from flatmin_lab.tuning.study import Draw

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
STEPS, EPOCHS = 10, 3
LINE = {"train_loss": 1.0, "train_error": 0.5, "test_error": 0.25, "test_nll": 0.75, "test_ece": 0.1, "seconds": 2.0}


def recipe(**changes: Any) -> Recipe:
    return default_recipe("digits", load("digits"), method="amp", epochs=EPOCHS, **changes)


def screen(width: int = 80, *, is_terminal: bool = True) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=is_terminal, highlight=False, soft_wrap=True)


def frames(console: Console) -> list[str]:
    """All that was shown, one line after the other, without colours."""
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in re.split(r"[\r\n]+", ESCAPES.sub("", console.file.getvalue())) if line.strip()]


def run_events(*, first: int = 0) -> Iterator[Event]:
    """A run with three numbers an epoch, of which those of its first steps have a loss of 9."""
    yield Started(step=first, steps=STEPS * EPOCHS, epochs=EPOCHS, parameters=16794)
    yield Progress(epoch=first // STEPS + 1, step=first + WARMUP_STEPS, numbers={"loss": 9.0})
    for epoch in range(first // STEPS + 1, EPOCHS + 1):
        for step in (5, 9):
            time.sleep(0.01)  # a speed needs time
            yield Progress(epoch=epoch, step=STEPS * (epoch - 1) + step, numbers={"loss": 1.0})
        yield Epoch(epoch=epoch, step=STEPS * epoch, numbers={"epoch": epoch, **LINE})
    yield Finished({"test_error": 0.25, "test_nll": 0.75, "test_ece": 0.1, "seconds": 2.0})


@pytest.mark.parametrize("width", [60, 80, 120])
def test_there_is_a_bar_in_any_terminal_and_a_time_only_once_there_is_an_estimate(width: int) -> None:
    console, now = screen(width), [0.0]
    with Bars(*columns(width), console=console, get_time=lambda: now[0], auto_refresh=False) as bars:
        task = bars.add_task("epoch 1/60", total=100, numbers="the first steps")
        bars.refresh()
        for _ in range(3):
            now[0] += 1
            bars.update(task, advance=10, numbers="loss 0.123  error 12.34 %  sharpness 0.123  ‖Δ‖ 0.300", refresh=True)
    first, *_, last = frames(console)
    assert "━" in first
    assert first.endswith("the first steps")
    assert "left" not in first
    assert "-:--" not in "".join(frames(console))
    assert "━" in last
    assert "0:00:07 left loss" in last
    assert max(map(len, frames(console))) <= width


@pytest.mark.parametrize(("on_gpu", "captured", "compiled"), [(0, 1, 1), (1, 0, 0), (1, 1, 0), (1, 1, 1)])
def test_what_happens_first_depends_on_the_device(on_gpu: int, captured: int, compiled: int) -> None:
    text = first_steps_text(recipe(compile=bool(compiled)), on_gpu=bool(on_gpu), captured=bool(captured))
    assert (text == COMPILING) == bool(on_gpu and captured and compiled)
    assert ("CUDA graph" in text) == bool(on_gpu and captured and not compiled)


def test_a_run_says_what_it_does_until_its_steps_are_like_the_rest() -> None:
    console = screen()
    display.follow(run_events(), console, "headline", first_steps=COMPILING)
    shown = frames(console)
    assert shown[0].startswith("starting")
    assert shown[0].endswith("preparing data and model")
    assert any(line.startswith("epoch 1/3 ") and line.endswith(COMPILING) for line in shown)
    assert not any("loss 9" in line for line in shown)  # a step that was compiled is no measure of the others
    assert shown[-1].startswith("epoch 3/3 ")


def test_without_a_terminal_there_are_lines_alone_which_say_how_long_is_left() -> None:
    console = screen(200, is_terminal=False)
    display.follow(run_events(), console, "headline", first_steps=COMPILING)
    assert isinstance(console.file, io.StringIO)
    assert "\x1b" not in console.file.getvalue()
    headline, begin, *epochs = frames(console)
    assert (headline, begin) == ("headline", f"16,794 parameters, 10 steps per epoch; {COMPILING}")
    assert len(epochs) == EPOCHS
    assert all(re.search(r"2 s, about 0:00:\d\d left$", line) for line in epochs[:-1])
    assert epochs[-1].endswith("2 s")


def test_a_resumed_run_begins_in_its_epoch() -> None:
    console = screen()
    display.follow(run_events(first=STEPS), console, "headline", first_steps="the first steps")
    assert any(line.startswith("epoch 2/3 ") and line.endswith("the first steps") for line in frames(console))
    assert not any("epoch 1/3" in line for line in frames(console))


def test_seeds_trials_and_experiments_say_what_is_under_way_from_the_first_moment() -> None:
    consoles = [screen(), screen(), screen()]
    seeds, trials, runs = consoles
    events = list(run_events())
    train_seeds.follow(((0, event) for event in events), seeds, "headline", train_seeds.SeedRuns([0, 1]), COMPILING)
    search = SearchSpace(recipe=recipe(validation=True), hyper_parameters=hyper_parameters_of("amp", None))
    trial = [*events[:-1], Finished({**LINE, "validation_error": 0.2, "validation_nll": 0.5})]
    tune.follow(((Draw(0, {"epsilon": 0.1, "inner_lr": 1.0}), event) for event in trial), trials, search, 1)
    todo = [Run(Job(recipe(), 0), ())]
    reproduce.follow(((0, event) for event in events), todo, runs, lambda: None, first="")
    assert any(line.startswith("0 of 2 runs ") and line.endswith(COMPILING) for line in frames(seeds))
    assert frames(trials)[0].endswith("preparing the first trial")
    assert frames(trials)[-1].endswith("trial 0, epoch 3 of 3")
    assert frames(runs)[0].endswith("0 of 1 runs, no epoch has ended yet")
    for console in consoles:
        assert any("━" in line for line in frames(console))
    assert frames(runs)[-1].endswith("1 of 1 runs")


def test_epochs_of_minutes_have_an_estimate_too() -> None:
    now = [0.0]
    console = Console(file=io.StringIO(), width=80, force_terminal=True, get_time=lambda: now[0])

    def slow_events() -> Iterator[tuple[int, Event]]:
        for epoch in (1, 2):
            now[0] += 300
            yield 0, Epoch(epoch=epoch, step=epoch, numbers={"epoch": epoch, **LINE})

    reproduce.follow(slow_events(), [Run(Job(recipe(), 0), ())], console, lambda: None, first="")
    assert "0:05:00 left" in frames(console)[-1]


def test_the_demo_begins_with_what_it_will_train(monkeypatch: pytest.MonkeyPatch) -> None:
    line, end = {"epoch": 1, **LINE}, Finished({**LINE, "method": "amp"})
    monkeypatch.setattr(
        demo, "train_in_pool", lambda *_, **__: iter([(0, Epoch(epoch=1, step=1, numbers=line)), (0, end)])
    )
    console = screen()
    demo.train_all([Job(recipe(), 0), Job(recipe(), 1)], 4, console)
    assert frames(console)[0] == "2 runs of 3 epochs, 2 at once"
    assert frames(console)[1].endswith("starting processes")
    assert frames(console)[-1].endswith("1 of 2 runs")
