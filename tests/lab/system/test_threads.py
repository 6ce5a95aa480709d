"""A small run on the CPU computes with one thread unless told otherwise, and the caller keeps its own number."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatmin_lab import models
from flatmin_lab.runs.events import Finished, Note, Saved, Started, Stopped
from flatmin_lab.runs.folder import RunFolder
from flatmin_lab.system.cpu_clock import CpuClock
from flatmin_lab.system.json_data import read_json
from flatmin_lab.system.threads import SMALL_FLOPS, VARIABLES, FlopCount, choose_threads, computing_with, most_flops
from flatmin_lab.training.loop import train
from flatmin_lab.training.train_state import TrainState
from tests.support.small_runs import after, run, tiny_data, tiny_recipe

HERE = 3  # the caller's threads, be there so many cores or not


@pytest.fixture(autouse=True)
def several_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with computing_with(HERE):
        yield


def threads_of(**how: Any) -> int | None:
    first = next(train(tiny_recipe(), tiny_data(), **how))
    assert isinstance(first, Started)
    return first.threads


def test_a_small_network_has_one_thread_and_its_result_says_so() -> None:
    last = run(tiny_recipe(epochs=1))[-1]
    assert isinstance(last, Finished)
    assert last.result["threads"] == 1
    assert torch.get_num_threads() == HERE


def test_the_caller_has_its_own_number_between_events() -> None:
    seen = [torch.get_num_threads() for _ in train(tiny_recipe(epochs=1), tiny_data())]
    assert set(seen) == {HERE}


def test_the_caller_has_its_own_number_after_an_error() -> None:
    def stop() -> str:
        assert torch.get_num_threads() == 1
        raise KeyError("no reason")

    with pytest.raises(KeyError):
        run(tiny_recipe(), stop=stop)
    assert torch.get_num_threads() == HERE


def test_a_number_that_is_asked_for_is_taken() -> None:
    assert threads_of(threads=2) == 2
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        threads_of(threads=0)


@pytest.mark.parametrize("name", VARIABLES)
def test_whoever_sets_the_environment_has_decided(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, str(HERE))
    assert threads_of() == HERE


def test_much_work_keeps_torchs_number_and_the_work_is_that_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatmin_lab.system.threads.SMALL_FLOPS", 4e5)  # a batch of 10 takes 1.7e5
    assert threads_of() == 1
    first = next(train(tiny_recipe(batch_size=40), tiny_data()))
    assert isinstance(first, Started)
    assert first.threads == HERE


@pytest.mark.parametrize(
    ("told", "chosen"),
    [
        ({"flops": SMALL_FLOPS - 1}, 1),
        ({"flops": SMALL_FLOPS}, HERE),
        ({"flops": 0.0, "on_cpu": False}, HERE),
        ({"flops": 0.0, "began_with": 2}, 2),
        ({"flops": 0.0, "began_with": HERE + 1}, 1),
        ({"flops": SMALL_FLOPS, "began_with": HERE + 1}, HERE),
        ({"flops": 0.0, "began_with": 2, "asked": 5}, 5),
    ],
)
def test_the_choice(told: dict[str, Any], chosen: int) -> None:
    assert choose_threads(told.pop("asked", None), **{"on_cpu": True, **told}) == chosen


def test_a_resumed_run_computes_with_the_threads_that_it_began_with(tmp_path: Path) -> None:
    run(tiny_recipe(), folder=tmp_path, threads=2, stop=after(2))
    events = run(tiny_recipe(), folder=tmp_path, resume=True)
    assert next(event for event in events if isinstance(event, Started)).threads == 2
    assert not [event for event in events if isinstance(event, Note)]
    assert read_json(tmp_path / "result.json")["threads"] == 2


def test_a_run_resumed_with_another_number_says_that_bits_may_differ(tmp_path: Path) -> None:
    run(tiny_recipe(), folder=tmp_path, threads=2, stop=after(2))
    events = run(tiny_recipe(), folder=tmp_path, resume=True, threads=1)
    (note,) = [event for event in events if isinstance(event, Note)]
    assert "threads 2 then, 1 now" in note.text


class Compiled(nn.Module):
    """A user's network that compiles itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), backend="eager", fullgraph=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(x)
        return logits


def test_a_network_that_compiles_itself_still_does() -> None:
    """Under a counter torch would give up on it, and `fullgraph` makes that an error."""
    recipe = tiny_recipe(model=f"{__file__}:Compiled", model_settings={}, epochs=1)
    events = list(train(recipe, tiny_data()))
    assert isinstance(events[0], Started)
    assert events[0].threads == 1
    assert isinstance(events[-1], Finished)


def test_a_network_of_ones_own_is_small_if_its_weights_cannot_compute_much(monkeypatch: pytest.MonkeyPatch) -> None:
    most = most_flops(36 * 3 + 3, (1, 6, 6)) * 10
    for limit, threads in ((most + 1, 1), (most, HERE)):
        monkeypatch.setattr("flatmin_lab.system.threads.SMALL_FLOPS", limit)
        first = next(train(tiny_recipe(model=f"{__file__}:Compiled", model_settings={}), tiny_data()))
        assert isinstance(first, Started)
        assert first.threads == threads


@pytest.mark.parametrize("name", ["convnet", "mlp", "preactresnet18"])
def test_no_built_in_network_computes_more_than_its_weights_can(name: str) -> None:
    shape = (3, 16, 16)
    model = models.build(name, **models.settings_for(name, shape)).eval()
    with torch.no_grad(), FlopCount() as counted:
        model(torch.zeros(1, *shape))
    assert 0 < counted.flops <= most_flops(sum(p.numel() for p in model.parameters()), shape)


def test_cpu_time_counts_only_while_the_clock_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("flatmin_lab.system.cpu_clock.process_time", lambda: now[0])
    clock = CpuClock()
    with clock.running():
        now[0] = 2.0
        assert clock.seconds() == 2
    now[0] = 10.0  # another run's
    with clock.running():
        clock.load(5.0)
        now[0] = 11.0
    assert clock.seconds() == 6


def test_a_run_from_before_its_cpu_time_was_counted_has_none(tmp_path: Path) -> None:
    def save(state: TrainState, folder: RunFolder) -> Saved:
        state.has_cpu_time = False
        return saved(state, folder)

    saved = TrainState.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainState, "save", save)
        run(tiny_recipe(), folder=tmp_path, stop=after(2))
    run(tiny_recipe(), folder=tmp_path, resume=True)
    assert "cpu_seconds" not in read_json(tmp_path / "result.json")


def test_cpu_seconds_and_resumptions_are_kept_over_a_resumption(tmp_path: Path) -> None:
    assert isinstance(run(tiny_recipe(), folder=tmp_path, stop=after(2))[-1], Stopped)
    run(tiny_recipe(), folder=tmp_path, resume=True)
    result = read_json(tmp_path / "result.json")
    assert result["resumed"] == 1
    assert result["cpu_seconds"] > 0
    alone = run(tiny_recipe())[-1]
    assert isinstance(alone, Finished)
    assert "resumed" not in alone.result
