"""For how long two recipes are the same training: a table, and brute force over what each step of the loop uses."""

from dataclasses import replace
from typing import Any

import pytest

from flatmin_lab import methods
from flatmin_lab.recipes.common_beginning import common_epochs
from flatmin_lab.recipes.experiments import by_name
from flatmin_lab.recipes.lr_schedules import rate
from flatmin_lab.recipes.recipe import Recipe

BATCHES = 7
ERM = Recipe(data="cifar10", model="preactresnet18", method="erm", epochs=20)


def amp(epsilon: float | str, start: float, *, milestones: tuple[float, ...] = (0.5, 0.75), **settings: Any) -> Recipe:
    known = {"epsilon": epsilon, "start": start, **settings}
    return replace(ERM, method="amp", settings=known, milestones=milestones)


LATE = amp(0.1, 0.75)
AUTO = amp("auto", 0.75, milestones=(0.5, 0.9))
PAIRS: dict[str, tuple[Recipe, Recipe, int]] = {
    "ERM and the last quarter": (ERM, LATE, 15),
    "another name": (ERM, replace(LATE, name="short/late"), 15),
    "the last quarter and tenth": (LATE, amp(0.2, 0.9), 15),
    "in the middle of an epoch": (ERM, amp(0.1, 0.74), 14),
    "in the last step": (ERM, amp(0.1, 0.9999), 19),
    "all that no step uses before the start": (
        ERM,
        amp(0.3, 0.5, inner_lr=0.2, inner_iter=3, ball="tensor", norm="linf", growth="linear", every=2),
        10,
    ),
    "another share for the ascent": (LATE, amp(0.1, 0.75, ascent_share=0.25), 15),
    "a drop before the start": (ERM, amp(0.1, 0.9, milestones=(0.25, 0.75)), 5),
    "a later drop": (ERM, amp(0.1, 0.9, milestones=(0.5, 0.97)), 15),
    "drops in one step": (ERM, amp(0.1, 0.9, milestones=(0.501, 0.75)), 18),  # round(0.501 · 140) = 70
    "two with later drops": (AUTO, amp("auto", 0.9, milestones=(0.5, 0.97), matches=5, release=0.9), 15),
    "two of ERM": (ERM, replace(ERM, milestones=(0.5,)), 15),
    "one of ERM": (ERM, ERM, 19),  # at least one epoch is its own
    "the same regulariser": (amp(0.1, 0.5, regulariser="mixup"), amp(0.2, 0.75, regulariser="mixup"), 10),
    "held out as much": (amp("auto", 0.5, held_out=0.1), amp("auto", 0.9, held_out=0.1), 10),
}
DIFFERENT: dict[str, dict[str, Any]] = {
    "data": {"data": "cifar100"},
    "model": {"model": "vgg16"},
    "model settings": {"model_settings": {"width": 4}},
    "augmentation": {"augment": "cutout"},
    "normalisation": {"normalise": (0.5, 0.5)},
    "label noise": {"label_noise": 0.2},
    "validation": {"validation": True},
    "length": {"epochs": 40},
    "batch": {"batch_size": 100},
    "optimizer": {"optimizer": "adamw"},
    "optimizer settings": {"optimizer_settings": {"dampening": 0.1}, "nesterov": False},
    "rate": {"lr": 0.05},
    "momentum": {"momentum": 0.8},
    "nesterov": {"nesterov": False},
    "weight decay": {"weight_decay": 5e-4},
    "exempt norms": {"exempt_norms": True},
    "schedule": {"schedule": "constant"},
    "gamma": {"gamma": 0.2},
    "warmup": {"warmup": 1.0},
    "clipping": {"clip_norm": 1.0},
    "EMA": {"ema": 0.99},
    "precision": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "layout": {"channels_last": True},
    "compile": {"compile": True},
    "deterministic": {"deterministic": True},
}
NEVER: dict[str, tuple[Recipe, Recipe]] = {
    "AMP from the beginning": (ERM, amp(0.1, 0.0)),
    "AMP from the first epoch on": (ERM, amp(0.1, 0.04)),
    "an automatic radius holds images out": (ERM, AUTO),
    "and a fixed one does not": (LATE, amp("auto", 0.75)),
    "other images held out": (amp("auto", 0.5, held_out=0.1), amp("auto", 0.5, held_out=0.2)),
    "a share that may be the default": (amp("auto", 0.5), amp("auto", 0.5, held_out=0.02)),
    "a regulariser beside AMP": (ERM, amp(0.1, 0.5, regulariser="label_smoothing")),
    "two regularisers": (amp(0.1, 0.5, regulariser="mixup"), amp(0.1, 0.5, regulariser="flooding")),
    "RMP": (ERM, replace(ERM, method="rmp")),
    "dropout": (ERM, replace(ERM, method="dropout")),
    "two of dropout": (replace(ERM, method="dropout"), replace(ERM, method="dropout", milestones=(0.5,))),
    "label smoothing": (ERM, replace(ERM, method="label_smoothing")),
    "an optimizer of the user's": (
        replace(ERM, optimizer="own.py:make", weight_decay=0.0, momentum=0.9),
        replace(LATE, optimizer="own.py:make", weight_decay=0.0, momentum=0.9),
    ),
    "initial weights": (replace(ERM, init="weights.safetensors"), replace(LATE, init="weights.safetensors")),
}


@pytest.mark.parametrize(("one", "other", "epochs"), PAIRS.values(), ids=PAIRS)
def test_the_common_beginning_is_this_long(one: Recipe, other: Recipe, epochs: int) -> None:
    assert common_epochs(one, other, batches=BATCHES) == epochs
    assert common_epochs(other, one, batches=BATCHES) == epochs


@pytest.mark.parametrize("changes", DIFFERENT.values(), ids=DIFFERENT)
def test_recipes_that_differ_have_no_common_beginning(changes: dict[str, Any]) -> None:
    assert common_epochs(replace(ERM, **changes), LATE, batches=BATCHES) == 0
    assert common_epochs(LATE, replace(ERM, **changes), batches=BATCHES) == 0


def test_every_field_of_a_recipe_is_in_the_table() -> None:
    listed = {name for changes in DIFFERENT.values() for name in changes}
    # these are compared one by one, with init, or cannot stand alone
    assert listed | {"name", "method", "settings", "milestones", "size", "init", "init_except", "files"} == {
        *Recipe.__dataclass_fields__
    }


@pytest.mark.parametrize(("one", "other"), NEVER.values(), ids=NEVER)
def test_what_changes_the_first_steps_is_no_common_beginning(one: Recipe, other: Recipe) -> None:
    assert common_epochs(one, other, batches=BATCHES) == 0
    assert common_epochs(other, one, batches=BATCHES) == 0


def test_of_a_matched_radius_no_epoch_is_shared_after_its_release() -> None:
    late = amp("auto", 0.999)
    for percent in range(100):
        early = amp("auto", percent / 100, release=0.001)
        assert common_epochs(early, late, batches=BATCHES) <= early.held_out_epochs <= percent / 5 + 1


@pytest.mark.parametrize("batches", [1, 3, 1000])
def test_in_every_shared_step_of_the_frontier_rates_are_equal_and_nothing_is_perturbed(batches: int) -> None:
    """Step by step, for all pairs of the experiment that this is for; and beyond the last one, something differs."""
    recipes = [one for name, one in by_name().items() if name.startswith("short/cifar10-preactresnet18-")]
    recipes = [one for one in recipes if one.method in ("erm", "amp")]
    shared = 0
    for i, one in enumerate(recipes):
        for other in recipes[:i]:
            epochs = common_epochs(one, other, batches=batches)
            shared += epochs > 0
            if epochs:
                assert [_step(one, step, batches) for step in _ends(epochs, batches)] == [
                    _step(other, step, batches) for step in _ends(epochs, batches)
                ]
                assert not any(_step(each, epochs * batches - 1, batches)[1] for each in (one, other))
    assert shared > 20


def _ends(epochs: int, batches: int) -> list[int]:
    return [step for epoch in range(epochs) for step in {epoch * batches, (epoch + 1) * batches - 1}]


def _step(recipe: Recipe, step: int, batches: int) -> tuple[float, bool, int]:
    """Of a step of the loop: its rate, whether it is perturbed, and how many images are held out."""
    steps = recipe.epochs * batches
    method = methods.build(recipe.method, **recipe.settings)
    rates = {"milestones": recipe.milestones, "gamma": recipe.gamma} if recipe.schedule == "multi_step" else {}
    lr = rate(recipe.schedule, recipe.lr, step, steps, warmup=round(recipe.warmup * batches), **rates)
    perturbs = recipe.method == "amp" and method.schedule.share(step, steps) > 0
    return lr, perturbs, int(step // batches < recipe.held_out_epochs)
