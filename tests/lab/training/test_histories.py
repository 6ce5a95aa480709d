"""Whole histories: random runs that are stopped, killed, short of disk space and damaged end with the same bits.

Networks and optimizers of the user's own may keep more than weights: they are resumed too, or refused at the start.
"""

import os
import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flatmin_lab.evaluation.load_run import find_run
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.runs import checkpoint
from flatmin_lab.runs.events import Epoch, Finished, RunError
from flatmin_lab.system.user_code import load_function
from flatmin_lab.training.loop import train
from tests.support.random_runs import AWKWARD, draw_recipe, fill_disk
from tests.support.small_runs import after, lasting, run, same, tiny_data, tiny_recipe, whole_state

SEEDS = range(200)
QUICK = range(16)
KEEPING_MORE: dict[str, dict[str, Any]] = {
    "generators of Python and numpy": {"model": f"{AWKWARD}:Skipping"},
    "a buffer that no state dict has": {"model": f"{AWKWARD}:Counting"},
    "a mask with −∞ and an expanded buffer": {"model": f"{AWKWARD}:Masked"},
    "a sparse buffer that no state dict has": {"model": f"{AWKWARD}:Sparse"},
    "complex numbers that no state dict has": {"model": f"{AWKWARD}:Rotating"},
    "moments of other types": {"model": "mlp", "optimizer": f"{AWKWARD}:mixed_moments", "weight_decay": 0.0},
}


# ---- what can happen to a run; each returns whether the run has ended


def stopped(recipe: Recipe, folder: Path, draw: random.Random) -> bool:
    """By a signal: between two steps, or in an evaluation."""
    return isinstance(run(recipe, folder, resume=True, stop=after(draw.randint(0, 14)))[-1], Finished)


def killed(recipe: Recipe, folder: Path, draw: random.Random) -> bool:
    """Without a chance to save: after any event, of which there is one a step."""
    more: dict[str, Any] = draw.choice([{"checkpoint_minutes": 0}, {"checkpoint_epochs": 2}, {}])
    events = train(recipe, tiny_data(), folder=folder, resume=True, **more)
    seen = list(islice(events, draw.randint(1, 20)))
    events.close()  # type: ignore[attr-defined]  # a generator
    (folder / ".checkpoint-00000099.safetensors.1-2.beside").write_bytes(b"half of a checkpoint")
    return isinstance(seen[-1], Finished)


def disk_full(recipe: Recipe, folder: Path, draw: random.Random) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fsync)  # put back at the end
        fill_disk(draw.randint(1, 12))
        try:
            return isinstance(run(recipe, folder, resume=True, checkpoint_minutes=0)[-1], Finished)
        except RunError as error:
            assert "make room, and repeat the command" in str(error)  # noqa: PT017
            return False


def damaged(recipe: Recipe, folder: Path, draw: random.Random) -> bool:
    places = checkpoint.listed(folder)
    if len(places) > 1:
        content = bytearray(places[0].read_bytes())
        content[-draw.randint(1, 50)] ^= 1
        places[0].write_bytes(bytes(content))
    return False


HAPPENINGS: tuple[Callable[[Recipe, Path, random.Random], bool], ...] = (stopped, stopped, killed, disk_full, damaged)


@pytest.mark.parametrize(
    "seed", [seed if seed in QUICK else pytest.param(seed, marks=pytest.mark.full) for seed in SEEDS]
)
def test_whatever_happens_to_a_run_it_ends_with_the_bits_of_one_that_was_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("flatmin_lab.training.loop.PROGRESS_SECONDS", 0.0)
    draw = random.Random(seed)
    recipe = draw_recipe(draw)
    run(recipe, tmp_path / "whole")
    folder, happened = tmp_path / "run", list[str]()
    for _ in range(4):
        what = draw.choice(HAPPENINGS)
        happened.append(what.__name__)
        if what(recipe, folder, draw):
            break
    run(recipe, folder, resume=True)
    assert same(whole_state(folder), whole_state(tmp_path / "whole")), happened
    assert not list(folder.glob(".*.beside"))


# ---- networks and optimizers that keep more than weights


@pytest.mark.parametrize("method", ["erm", "amp"])
@pytest.mark.parametrize("changes", KEEPING_MORE.values(), ids=KEEPING_MORE)
def test_what_a_users_code_keeps_is_kept(tmp_path: Path, changes: dict[str, Any], method: str) -> None:
    settings = {"epsilon": 0.05} if method == "amp" else {}
    sized = {"side": 6} if changes["model"] == "mlp" else {}
    recipe = tiny_recipe(**changes, method=method, settings=settings, model_settings=sized, ema=0.5, lr=0.05)
    random.seed(1)
    run(recipe, tmp_path / "whole")
    random.seed(2)
    before = random.getstate()
    run(recipe, tmp_path / "parts", stop=after(7))
    assert random.getstate() == before  # the caller's
    run(recipe, tmp_path / "parts", resume=True)
    expected = whole_state(tmp_path / "whole")
    assert same(whole_state(tmp_path / "parts"), expected)
    assert expected["result"]["average_test_nll"] is not None
    data = tiny_data()
    x = data.test.x.float() / 255
    x = (x - data.train.x.float().mean() / 255) / (data.train.x.float().std(correction=0) / 255)
    for prefix, use_ema in (("", False), ("average_", True)):
        model = find_run(tmp_path / "parts").load_model(data.train.shape, 3, use_ema=use_ema)
        nll = torch.nn.functional.cross_entropy(model(x), data.test.y).item()
        assert nll == pytest.approx(expected["result"][f"{prefix}test_nll"], rel=1e-4)


def test_a_mask_that_came_with_the_initial_weights_is_no_average_after_a_resume(tmp_path: Path) -> None:
    """The network makes it without −∞, and a resumed run does not read the initial weights."""
    network = load_function(f"{AWKWARD}:Masked", "")
    weights = {key: value.contiguous() for key, value in network(3, (1, 6, 6)).state_dict().items()}
    save_file(weights, tmp_path / "initial.safetensors")
    settings = {"model": f"{AWKWARD}:Masked", "model_settings": {"above": -9.0}}
    recipe = tiny_recipe(**settings, init=str(tmp_path / "initial.safetensors"), ema=0.5)
    run(recipe, tmp_path / "whole")
    run(recipe, tmp_path / "parts", stop=after(7))
    run(recipe, tmp_path / "parts", resume=True)
    expected = whole_state(tmp_path / "whole")
    assert expected["result"]["average_test_nll"] is not None
    assert same(whole_state(tmp_path / "parts"), expected)


def test_what_the_caller_draws_from_any_generator_changes_nothing_and_is_not_changed(tmp_path: Path) -> None:
    recipe = tiny_recipe(model=f"{AWKWARD}:Skipping", model_settings={})
    run(recipe, tmp_path / "quiet")

    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), np.random.rand()

    def seed() -> None:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)

    seed()
    expected = [draw() for _ in range(3)]
    seed()
    drawn = [draw() for event in train(recipe, tiny_data(), folder=tmp_path / "loud") if isinstance(event, Epoch)]
    assert drawn == expected
    assert same(lasting(tmp_path / "quiet"), lasting(tmp_path / "loud"))


def test_what_a_checkpoint_cannot_hold_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"_extra_state of .*:Noting is a dict; let its get_extra_state return a tens"):
        run(tiny_recipe(model=f"{AWKWARD}:Noting", model_settings={}), tmp_path / "model")
    with pytest.raises(ValueError, match=r"passed of .*:Sparse is sparse \(torch.sparse_coo\); keep its indices and v"):
        run(tiny_recipe(model=f"{AWKWARD}:Sparse", model_settings={"persistent": True}), tmp_path / "model")
    assert not (tmp_path / "model").exists()
    recipe, asked = tiny_recipe(optimizer=f"{AWKWARD}:counting_sgd", weight_decay=0.0), list[None]()
    with pytest.raises(ValueError, match=r"counting_sgd keeps 'count' beside them; keep it in the state of a param"):
        run(recipe, tmp_path / "optimizer", stop=lambda: asked.append(None))
    assert len(asked) == 1  # before each step
