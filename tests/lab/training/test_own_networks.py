"""Networks and optimizers of the user's own are trained, saved and resumed as the built-in ones are, to the bit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import SGD, AdamW

from flatmin.capture.clipped_sgd import ClippedStep
from flatmin_lab.data.normalise import Normalisation
from flatmin_lab.recipes.defaults import default_recipe
from flatmin_lab.recipes.optimizers import OPTIMIZERS
from flatmin_lab.recipes.recipe import Job, Recipe
from flatmin_lab.recipes.user_files import ChangedFileError
from flatmin_lab.runs.events import Finished, Note
from flatmin_lab.runs.result_store import differs
from flatmin_lab.training.optimizer import build_optimizer
from tests.support import own_networks
from tests.support.small_runs import after, lasting, learner_of, run, same, tiny_data, tiny_recipe

FILE = str(Path(own_networks.__file__))
AMP = {"method": "amp", "settings": {"epsilon": 0.05}}
RUNS: dict[str, dict[str, Any]] = {
    "a ResNet, EMA": {"model": "ResNet", "ema": 0.9, **AMP},
    "a ViT with dropout, AdamW": {"model": "ViT", "optimizer": "adamw", "lr": 1e-3, **AMP},
    "tied layers, an optimizer of one's own": {"model": "TiedMLP", "optimizer": f"{FILE}:make_optimizer", **AMP},
}


def own_recipe(model: str, **changes: Any) -> Recipe:
    return tiny_recipe(**{"model": f"{FILE}:{model}", "model_settings": {}, **changes})


@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_an_interrupted_run_ends_with_the_bits_of_an_uninterrupted_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    recipe = own_recipe(**changes)
    run(recipe, tmp_path / "whole")
    run(recipe, tmp_path / "parts", stop=after(7))
    run(recipe, tmp_path / "parts", resume=True)
    assert same(lasting(tmp_path / "whole"), lasting(tmp_path / "parts"))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_every_optimizer_is_torchs_own_and_resumes_to_the_bit(
    tmp_path: Path, name: str, clip_norm: float | None
) -> None:
    recipe = tiny_recipe(optimizer=name, lr=1e-3, clip_norm=clip_norm, **AMP)
    made = build_optimizer(recipe, nn.Linear(2, 2))
    assert isinstance(made, OPTIMIZERS[name])
    assert isinstance(made, ClippedStep) == (clip_norm is not None)
    run(recipe, tmp_path / "whole")
    run(recipe, tmp_path / "parts", stop=after(7))
    run(recipe, tmp_path / "parts", resume=True)
    assert same(lasting(tmp_path / "whole"), lasting(tmp_path / "parts"))


def test_a_run_with_adamw_is_a_plain_loop_with_adamw() -> None:
    """The learner's steps beside torch's own, on the same batches."""
    recipe = tiny_recipe(optimizer="adamw", lr=2e-3, weight_decay=0.1, optimizer_settings={"betas": [0.8, 0.9]})
    ours, plain = learner_of(recipe, tiny_data()), learner_of(recipe, tiny_data()).model
    optimizer = AdamW(plain.parameters(), lr=2e-3, weight_decay=0.1, betas=(0.8, 0.9))
    for index, u in ours.batches.parts(0):
        ours.step(index, u, recipe.lr)
        x, y = ours.batches.at(index, u)
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    for one, other in zip(ours.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_groups_keep_the_ratio_of_their_rates() -> None:
    recipe = own_recipe("TiedMLP", optimizer=f"{FILE}:make_optimizer", lr=0.01)
    learner = learner_of(recipe, tiny_data())
    index, u = next(learner.batches.parts(0))
    learner.step(index, u, 0.004)
    assert [group["lr"] for group in learner.optimizer.param_groups] == [0.004, 0.002]


def test_frozen_layers_stay_and_tied_ones_stay_tied() -> None:
    learner = learner_of(own_recipe("TiedMLP", **AMP), tiny_data())
    model: Any = learner.model
    before = model.frozen.weight.clone()
    for index, u in learner.batches.parts(0):
        learner.step(index, u, 0.1)
    assert torch.equal(model.frozen.weight, before)
    assert model.first.weight is model.second.weight


def test_settings_of_an_optimizer_are_checked_before_anything_else() -> None:
    for changes, text in (
        ({"optimizer": "lion"}, "optimizer must be sgd, adamw, .* or file.py:make_optimizer, got lion"),
        ({"optimizer": "adamw", "optimizer_settings": {"momentum": 0.9}}, "of adamw are betas, eps, .*, got momentum$"),
        ({"optimizer": "adam", "optimizer_settings": {"lr": 0.1}}, "got lr; give --lr instead"),
        ({"optimizer": "adamw", "momentum": 0.5}, "momentum must be left out where the optimizer is not sgd, got 0.5"),
    ):
        with pytest.raises(ValueError, match=text):
            tiny_recipe(**changes)
    with pytest.raises(ValueError, match="adamw does not take"):
        build_optimizer(tiny_recipe(optimizer="adamw", optimizer_settings={"betas": 3}), nn.Linear(1, 1))


OPTIMIZER_ERRORS = {
    "def make_optimizer(params): ...": "must take lr, the peak learning rate",
    "def make_optimizer(params, lr): ...": "must make a torch.optim.Optimizer, got NoneType",
    "def make_optimizer(params, lr, depth): ...": "asks for depth, but can only be given params, model, lr, ",
    "def make_optimizer(params, lr):\n    return params.nothing": "line 2, in make_optimizer",
    "import torch\ndef make_optimizer(params, lr):\n    return torch.optim.LBFGS(params, lr=lr)": "got LBFGS",
    "import torch\ndef make_optimizer(params, lr):\n    return torch.optim.SGD([torch.zeros(1)], lr=lr)": "got others",
}


@pytest.mark.parametrize(("code", "text"), OPTIMIZER_ERRORS.items(), ids=OPTIMIZER_ERRORS.values())
def test_an_optimizer_that_cannot_be_made_is_told_why(tmp_path: Path, code: str, text: str) -> None:
    (tmp_path / "mine_optimizer.py").write_text(code)
    recipe = tiny_recipe(optimizer=f"{tmp_path}/mine_optimizer.py", weight_decay=0.0)
    with pytest.raises((ValueError, TypeError), match=text):
        build_optimizer(recipe, nn.Linear(2, 2))


def test_an_optimizer_that_cannot_be_saved_is_told_after_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "keeping.py").write_text(
        "import torch\n"
        "class Keeping(torch.optim.SGD):\n"
        "    def step(self, closure=None):\n"
        "        loss = super().step(closure)\n"
        "        for param in self.state:\n"
        "            self.state[param]['history'] = [param.detach().clone()]\n"
        "        return loss\n"
        "def make_optimizer(params, lr):\n    return Keeping(params, lr=lr, momentum=0.9)\n"
    )
    recipe, asked = tiny_recipe(optimizer=f"{tmp_path}/keeping.py", weight_decay=0.0), list[None]()
    with pytest.raises(ValueError, match=r"keeping.py:make_optimizer keeps history as a list"):
        run(recipe, tmp_path / "run", stop=lambda: asked.append(None))
    assert len(asked) == 1  # before each step


def test_an_optimizer_brings_its_own_rate_and_weight_decay() -> None:
    data = tiny_data()
    for name, rate, decay in (("adamw", 1e-3, 1e-2), (f"{FILE}:make_optimizer", 0.002, 0.05), ("sgd", 0.1, 1e-4)):
        made = default_recipe("tiny", data, model="mlp", optimizer=name)
        assert (made.lr, made.weight_decay) == (rate, decay)
        assert default_recipe("tiny", data, model="mlp", optimizer=name, lr=0.5).lr == 0.5
    assert type(build_optimizer(default_recipe("tiny", data, model="mlp"), nn.Linear(1, 1))) is SGD


# ---- outputs


def test_wrong_outputs_are_told_before_the_first_step(tmp_path: Path) -> None:
    for model, text in (
        ("too_few_outputs", r"logits \(2, K\) of 2 inputs for K = 3 classes, got \(2, 2\)$"),
        ("TwoAnswers", "got tuple in training mode"),
        ("Squeezed", r"logits \(1, K\) of 1 input for K = 3 classes, got \(3,\); keep the first dimension"),
    ):
        with pytest.raises(ValueError, match=text):
            run(own_recipe(model), tmp_path / model)
        assert not (tmp_path / model).exists()
    with pytest.raises(
        ValueError, match=r"does not take images of 1 × 6 × 6(?s:.)*own_networks.py, line \d+, in forward"
    ):
        run(own_recipe("ForOtherImages"))


@pytest.mark.parametrize("name", ["norm_of_the_batch_alone", "NormedByHand"])
def test_a_norm_without_running_statistics_is_trained_on_batches_of_two_or_more(name: str) -> None:
    assert any(isinstance(event, Finished) for event in run(own_recipe(name, epochs=1)))


def test_probabilities_are_noticed() -> None:
    notes = [event.text for event in run(own_recipe("softmax_too_soon", epochs=1)) if isinstance(event, Note)]
    assert notes == ["its outputs look like probabilities; return logits, before softmax"]


# ---- files


def test_a_recipe_has_the_checksum_of_its_files_and_the_run_a_copy(tmp_path: Path) -> None:
    recipe = own_recipe("ResNet", epochs=1)
    run(recipe, tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]
    assert list(config["files"]) == ["model"]
    assert (tmp_path / "run" / "code" / "model" / "own_networks.py").read_text() == Path(FILE).read_text()


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine_changing.py"
    path.write_text(
        "from torch import nn\n\ndef make_model():\n    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))\n"
    )
    return path


def test_a_changed_file_is_told_and_the_runs_copy_resumes_to_the_same_bits(tmp_path: Path, mine: Path) -> None:
    recipe = tiny_recipe(model=str(mine), model_settings={})
    run(recipe, tmp_path / "whole")
    run(recipe, tmp_path / "parts", stop=after(7))
    known = Recipe.from_json(json.loads((tmp_path / "parts" / "config.json").read_text())["recipe"])
    mine.write_text(mine.read_text() + "# a word more\n")
    copy = tmp_path / "parts" / "code" / "model" / mine.name
    with pytest.raises(ChangedFileError, match=f"has changed since .* resume with --model {copy}:make_model"):
        run(known, tmp_path / "parts", resume=True)
    with pytest.raises(ValueError, match="SHA-256 of model is '"):
        run(recipe, tmp_path / "parts", resume=True)
    run(replace(known, model=f"{copy}:make_model"), tmp_path / "parts", resume=True)
    one, other = lasting(tmp_path / "whole"), lasting(tmp_path / "parts")
    assert same(one, other)


def test_a_file_that_is_gone_is_told_and_the_runs_copy_resumes(tmp_path: Path, mine: Path) -> None:
    run(tiny_recipe(model=str(mine), model_settings={}), tmp_path / "run", stop=after(7))
    known = Recipe.from_json(json.loads((tmp_path / "run" / "config.json").read_text())["recipe"])
    mine.unlink()
    copy = tmp_path / "run" / "code" / "model" / mine.name
    with pytest.raises(FileNotFoundError, match=f"no longer exists.* resume with --model {copy}:make_model"):
        run(known, tmp_path / "run", resume=True)
    asked = replace(known, model=f"{copy}:make_model")
    assert isinstance(run(asked, tmp_path / "run", resume=True)[-1], Finished)
    copy.write_text("")
    with pytest.raises(FileNotFoundError, match=f"{mine} no longer exists.*: put the old file back, or train anew"):
        run(known, tmp_path / "run", resume=True)


def test_a_file_may_move(tmp_path: Path, mine: Path) -> None:
    run(tiny_recipe(model=str(mine), model_settings={}), tmp_path / "run", stop=after(7))
    moved = mine.rename(tmp_path / "elsewhere_changing.py")
    run(tiny_recipe(model=str(moved), model_settings={}), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "result.json").exists()


# ---- initial weights


def test_initial_weights_are_those_of_the_file(tmp_path: Path) -> None:
    """With a rate too small to move anything, the first epoch leaves them as they are."""
    weights = learner_of(own_recipe("ResNet"), tiny_data(), seed=5).model.state_dict()
    save_file(weights, tmp_path / "w.safetensors")
    torch.save({"state_dict": {f"module.{key}": value for key, value in weights.items()}}, tmp_path / "w.pt")
    for name in ("w.safetensors", "w.pt"):
        learner = learner_of(own_recipe("ResNet", init=str(tmp_path / name)), tiny_data())
        assert all(torch.equal(value, weights[key]) for key, value in learner.model.state_dict().items())


def test_a_head_of_another_size_is_told_with_the_way_out(tmp_path: Path) -> None:
    weights = dict(learner_of(own_recipe("ResNet"), tiny_data(), seed=5).model.state_dict())
    weights |= {"fc.weight": torch.zeros(10, 8), "fc.bias": torch.zeros(10)}
    save_file(weights, tmp_path / "w.safetensors")
    recipe = own_recipe("ResNet", init=str(tmp_path / "w.safetensors"))
    with pytest.raises(ValueError, match=r"fc.weight is \(10, 8\), not \(3, 8\).* --init-except fc$"):
        learner_of(recipe, tiny_data())
    learner = learner_of(replace(recipe, init_except="fc, "), tiny_data())  # a comma too many names nothing
    fresh = learner_of(own_recipe("ResNet"), tiny_data()).model.state_dict()
    for key, value in learner.model.state_dict().items():
        assert torch.equal(value, fresh[key] if key.startswith("fc.") else weights[key]), key


def test_a_checkpoint_is_not_a_file_of_weights_but_becomes_one(tmp_path: Path) -> None:
    run(own_recipe("ResNet", epochs=1), tmp_path / "run")
    checkpoint = next((tmp_path / "run").glob("checkpoint-*"))
    with pytest.raises(ValueError, match=r"a run's checkpoint.* with `flatmin export RUN --to weights.*, where RUN is"):
        learner_of(own_recipe("ResNet", init=str(checkpoint)), tiny_data())


def test_a_resumed_run_needs_its_initial_weights_no_more(tmp_path: Path) -> None:
    save_file(learner_of(own_recipe("ResNet"), tiny_data(), seed=5).model.state_dict(), tmp_path / "w.safetensors")
    recipe = own_recipe("ResNet", init=str(tmp_path / "w.safetensors"))
    run(recipe, tmp_path / "whole")
    run(recipe, tmp_path / "parts", stop=after(7))
    known = Recipe.from_json(json.loads((tmp_path / "parts" / "config.json").read_text())["recipe"])
    (tmp_path / "w.safetensors").unlink()
    *_, last = run(known, tmp_path / "parts", resume=True)
    assert isinstance(last, Finished)
    assert same(lasting(tmp_path / "whole"), lasting(tmp_path / "parts"))


# ---- what was there before


def test_the_json_of_a_recipe_without_the_younger_fields_is_as_it_was() -> None:
    plain = tiny_recipe().as_json()
    assert not plain.keys() & {"normalise", "optimizer", "optimizer_settings", "init", "init_except", "files"}
    assert Recipe.from_json(plain) == tiny_recipe()
    assert Recipe.from_json({**plain, "normalise": None}) == tiny_recipe()


def test_a_result_of_another_optimizer_is_another_runs() -> None:
    job = Job(tiny_recipe(), 0)
    found = {**job.recipe.as_json(), "settings": {}, "seed": 0}
    assert differs(found, job) == differs({**found, "normalise": None}, job) == []
    assert differs({**found, "optimizer": "adamw"}, job) == ["optimizer is 'adamw' there and 'sgd' here"]
    asked = Job(tiny_recipe(optimizer="adamw"), 0)
    assert differs(found, asked) == ["optimizer is 'sgd' there and 'adamw' here"]


def test_a_run_keeps_what_its_model_takes(tmp_path: Path) -> None:
    run(tiny_recipe(epochs=1), tmp_path / "run")
    known = json.loads((tmp_path / "run" / "config.json").read_text())["inputs"]
    normalise = Normalisation.of(tiny_data().train)
    assert known.pop("mean") == normalise.mean.tolist()
    assert known.pop("std") == normalise.std.tolist()
    assert known == {"kind": "images", "shape": [1, 6, 6], "classes": ["row", "column", "diagonal"]}
    assert load_file(next((tmp_path / "run").glob("checkpoint-*")))
