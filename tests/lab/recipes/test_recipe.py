"""Recipes: checked when made, plain JSON, and what suits a data set."""

import json
import math
import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from flatmin_lab import models
from flatmin_lab.data import Dataset, load
from flatmin_lab.recipes.defaults import default_recipe
from flatmin_lab.recipes.experiments.experiment import cell
from flatmin_lab.recipes.protocols import OWN, FollowedProtocol
from flatmin_lab.recipes.recipe import LATER_FIELDS, Recipe, differences
from flatmin_lab.runs.events import Finished
from flatmin_lab.training.loop import train
from tests.support.small_runs import tiny_data

CIFAR = replace(tiny_data(), name="cifar10")


@pytest.fixture
def photographs() -> Dataset:
    """Images of the size of CIFAR's."""
    data = tiny_data()
    large = [split.x.repeat(1, 3, 6, 6)[:, :, :32, :32] for split in (data.train, data.test)]
    return replace(data, train=replace(data.train, x=large[0]), test=replace(data.test, x=large[1]))


def test_json_and_back_is_the_same_recipe() -> None:
    recipe = Recipe(data="digits", model="convnet", method="amp", settings={"epsilon": 0.1}, milestones=(0.3, 0.9))
    again = Recipe.from_json(json.loads(json.dumps(recipe.as_json())))
    assert again == recipe
    pair = Recipe(data="digits", model="convnet", method="adversarial", settings={"bounds": (0.0, 1.0)})
    assert differences(Recipe.from_json(pair.as_json()).as_json(), pair.as_json()) == []
    with pytest.raises(TypeError, match="settings must be"):
        Recipe(data="digits", model="convnet", method="rmp", settings={"generator": torch.Generator()})
    with pytest.raises(ValueError, match="colour"):
        Recipe.from_json({**recipe.as_json(), "colour": "red"})


JSON_VALUES: list[Any] = [None, True, -1, 10**400, 0.5, math.nan, "x", "", [], ["x"], [[]], [1, 2, 3], {}, {"x": {}}]


@pytest.mark.parametrize("name", [f.name for f in fields(Recipe)])
def test_a_field_of_the_wrong_type_is_named(name: str) -> None:
    """Every field with values of every type that JSON has: a recipe, or an error that names the field."""
    whole = Recipe(
        data="digits", model="convnet", method="amp", clip_norm=1.0, ema=0.9, size=(8, 8), normalise=(0.5, 0.5)
    ).as_json()
    for value in JSON_VALUES:
        try:
            Recipe.from_json({**whole, name: value}).as_json()
        except (TypeError, ValueError) as error:
            said = str(error)
        else:
            continue
        assert name in said, value


@pytest.mark.parametrize("values", JSON_VALUES)
def test_what_is_no_object_is_no_recipe(values: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"recipe (must (be an object|have data and model)|has no x)"):
        Recipe.from_json(values)


def test_differences_are_named_with_both_values() -> None:
    one = Recipe(data="digits", model="convnet")
    assert differences(one.as_json(), one.as_json()) == []
    (found,) = differences(one.as_json(), replace(one, lr=0.2).as_json())
    assert "lr" in found
    assert "0.1" in found
    assert "0.2" in found


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"batch_size": 0},
        {"lr": 0.0},
        {"lr": float("nan")},
        {"momentum": 1.0},
        {"momentum": 0.0},
        {"weight_decay": -1.0},
        {"label_noise": 1.0},
        {"milestones": (0.9, 0.3)},
        {"milestones": (0.5, 1.0)},
        {"gamma": 0.0},
        {"warmup": 200.0},
        {"warmup": 1.0, "schedule": "one_cycle"},
        {"clip_norm": 0.0},
        {"clip_norm": float("inf")},
        {"epochs": 2.5},
        {"epochs": True},
        {"model_settings": {"dropout": 0.5}},
        {"ema": 1.0},
        {"method": "sam"},
        {"schedule": "exponential"},
        {"precision": "fp8"},
        {"augment": "crop"},
        {"normalise": (0.5, 0.0)},
        {"normalise": (float("nan"), 1.0)},
        {"normalise": (0.5,)},
    ],
    ids=str,
)
def test_a_wrong_value_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|unknown"):
        Recipe(data="digits", model="convnet", **wrong)


def test_a_default_recipe_is_the_second_version_s(photographs: Dataset) -> None:
    paper = default_recipe("cifar10", photographs, method="amp")
    assert (paper.model, paper.epochs, paper.batch_size, paper.lr) == ("preactresnet18", 200, 50, 0.1)
    assert (paper.momentum, paper.nesterov, paper.weight_decay, paper.augment) == (0.9, True, 1e-4, "vanilla")
    assert paper.settings == {"epsilon": 0.5, "inner_lr": 1.0}
    assert paper.protocol == FollowedProtocol("paper-v2")
    assert replace(paper, precision="bf16", method="erm", settings={}).protocol == FollowedProtocol("paper-v2")
    assert default_recipe("cifar10", photographs, method="amp", epochs=60).protocol == FollowedProtocol("short")
    assert default_recipe(
        "cifar10", photographs, method="mixup", epochs=60, settings={"alpha": 1.0}
    ).protocol == FollowedProtocol("short")
    assert default_recipe(
        "cifar100", photographs, method="amp", model="wideresnet28_10", augment="cutout"
    ).protocol == FollowedProtocol("paper-v2")


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": 100},
        {"lr": 0.05},
        {"augment": "none"},
        {"momentum": 0.0, "nesterov": False},
        {"augment": "cutout", "settings": {"epsilon": 0.3, "inner_lr": 0.5}},  # only wide ones have it in the paper
        {"model": "convnet"},
        {"model_settings": {"stem": 7}},
        {"label_noise": 0.1},
        {"data": "digits"},
        {"schedule": "cosine"},
    ],
    ids=str,
)
def test_what_is_not_the_paper_s_is_not_called_so(photographs: Dataset, changes: dict[str, Any]) -> None:
    assert replace(default_recipe("cifar10", photographs, method="amp"), **changes).protocol == OWN


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epochs": 60}, "short, but epsilon 0.5"),  # with the long training's radius
        ({"epochs": 400}, "paper-v2, but 400 epochs"),
        ({"validation": True}, "paper-v2, but validation"),
        ({"augment": "vanilla_v1"}, "paper-v2, but first version's crops"),
        ({"nesterov": False}, "paper-v2, but no Nesterov"),
        ({"clip_norm": 50.0}, "paper-v2, but clipped to 50"),
        ({"clip_norm": 0.5, "epochs": 60}, "short, but epsilon 0.5, clipped to 0.5"),
        ({"weight_decay": 5e-4, "ema": 0.9}, "paper-v2, but weight decay 0.0005, EMA 0.9"),
        ({"milestones": (0.5, 0.9), "epochs": 250}, "paper-v2, but drops at 0.5 and 0.9, 250 epochs"),
        (
            {"settings": {"epsilon": 0.5, "inner_lr": 1.0, "start": 0.5, "every": 2}},
            "paper-v2, but start 0.5, every 2",
        ),
        ({"settings": {"epsilon": 0.5, "inner_lr": 1.0, "start": 0.0, "every": 1}}, "paper-v2"),
        ({"model": "vgg16"}, "paper-v2, but epsilon 0.5, inner_lr 1.0"),  # which has another radius
        ({"settings": {"epsilon": 0.4, "inner_lr": 1.0}}, "paper-v2, but epsilon 0.4"),
        ({"settings": {"epsilon": 0.5, "inner_lr": 1.0, "ball": "tensor"}}, "paper-v2, but ball tensor"),
        ({"method": "rmp", "settings": {"epsilon": 3.0}}, "paper-v2, but epsilon 3.0"),
        ({"method": "label_smoothing", "settings": {"smoothing": 0.9}}, "paper-v2, but smoothing 0.9"),
    ],
    ids=str,
)
def test_what_differs_in_the_method_the_split_or_the_length_is_said(
    photographs: Dataset, changes: dict[str, Any], said: str
) -> None:
    protocol = replace(default_recipe("cifar10", photographs, method="amp"), **changes).protocol
    assert str(protocol) == said
    assert FollowedProtocol.read(said) == protocol  # as a result file has it


FIRST_VERSION: dict[str, Any] = {"augment": "vanilla_v1", "nesterov": False, "clip_norm": 50.0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "erm", "settings": {}}, "paper"),
        ({"method": "erm", "settings": {}, "epochs": 400}, "paper, but 400 epochs"),
        ({"settings": {"epsilon": 0.5, "inner_lr": 1.0, "ball": "tensor"}}, "paper"),
        ({"settings": {"epsilon": 0.5, "inner_lr": 1.0}}, "paper, but ball global"),
        ({"method": "rmp", "settings": {"ball": "tensor", "noise": "cube"}}, "paper"),
        ({"method": "rmp", "settings": {}}, "paper, but ball global, noise None"),
        ({"method": "label_smoothing", "settings": {"over": "others"}}, "paper"),
        ({"method": "adversarial", "settings": {"units": "inputs", "random_start": True}}, "paper"),
        ({"method": "dropout", "settings": {}, "model_settings": {"dropout_at": "block"}}, "paper"),
        ({"method": "dropout", "settings": {}}, "paper, but dropout after every ReLU"),
        ({"method": "dropout", "settings": {}, "model": "vgg16"}, "paper"),
        ({"method": "erm", "settings": {}, "data": "svhn"}, "paper, but normalised by its own"),
        ({"method": "erm", "settings": {}, "data": "svhn", "normalise": (0.5, 0.5)}, "paper"),
        ({"method": "erm", "settings": {}, "clip_norm": None}, "paper, but not clipped"),
        (
            {"method": "erm", "settings": {}, "epochs": 60},
            "short, but first version's crops, no Nesterov, clipped to 50",
        ),
        (
            {
                "model": "wideresnet28_10",
                "augment": "cutout",
                "nesterov": True,
                "settings": {"epsilon": 0.3, "inner_lr": 0.5, "ball": "tensor"},
            },
            "paper",
        ),  # of the second version alone
    ],
    ids=str,
)
def test_the_paper_s_protocol_is_the_published_code_s(photographs: Dataset, changes: dict[str, Any], said: str) -> None:
    recipe = replace(default_recipe("cifar10", photographs, method="amp"), **{**FIRST_VERSION, **changes})
    assert str(recipe.protocol) == said
    assert FollowedProtocol.read(said) == recipe.protocol


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (0.5, 1.0)),
        ({"model": "vgg16"}, (0.1, 0.2)),
        ({"augment": "cutout"}, (0.3, 0.5)),
        ({"augment": "autoaugment"}, (0.1, 0.1)),
        ({"epochs": 60}, (0.1, 1.0)),
        ({"settings": {"epsilon": 0.7}}, (0.7, 1.0)),
        ({"epochs": 10, "settings": {"epsilon": 0.7, "inner_lr": 2.0}}, (0.7, 2.0)),
    ],
    ids=str,
)
def test_the_radius_follows_model_augmentation_and_length(
    photographs: Dataset, changes: dict[str, Any], expected: tuple[float, float]
) -> None:
    settings = default_recipe("cifar10", photographs, method="amp", **changes).settings
    assert (settings["epsilon"], settings["inner_lr"]) == expected


def test_each_data_set_has_a_model_that_takes_it(photographs: Dataset) -> None:
    spiral, digits = load("spiral"), load("digits")
    assert default_recipe("spiral", spiral).model == "mlp"
    assert default_recipe("spiral", spiral).augment == "none"
    assert default_recipe("digits", digits).model == "convnet"
    assert default_recipe("mine.npz", tiny_data()).model == "convnet"
    assert default_recipe("mine.npz", photographs).model == "preactresnet18"
    assert default_recipe("digits", digits, model="mlp").model_settings == {"side": 8}
    assert default_recipe("digits", digits, model="convnet").model_settings == {}


@pytest.mark.parametrize(
    ("count", "validation", "expected"), [(51, False, 49), (7, True, 6), (12, False, 12), (900, True, 50)]
)
def test_few_images_of_one_s_own_get_a_batch_size_that_works(count: int, validation: bool, expected: int) -> None:
    data = tiny_data(train=count)
    recipe = default_recipe("mine.npz", data, validation=validation, epochs=1, model="convnet")
    assert recipe.batch_size == expected
    assert isinstance(list(train(recipe, data))[-1], Finished)


def test_names_of_models_have_one_spelling() -> None:
    for spelling in ("preact_resnet18", "PreActResNet-18", "preactresnet18", "pre-act-resnet_18"):
        assert Recipe(data="cifar10", model=spelling).model == "preactresnet18"
    assert models.canonical("WideResNet-28-10") == "wideresnet28_10"
    assert models.canonical("pyramidnet164_270") == "pyramidnet164_270"
    assert all(models.canonical(name) == name for name in models.MODELS)
    assert models.build("wide_resnet10_1", num_classes=3) is not None
    with pytest.raises(ValueError, match="Res_Net"):
        models.build("Res_Net")


def test_a_recipe_from_before_a_field_was_there_has_its_default() -> None:
    recipe = Recipe(data="digits", model="convnet")
    assert not set(LATER_FIELDS) & recipe.as_json().keys()
    assert Recipe.from_json(recipe.as_json()) == recipe
    exempt = replace(recipe, exempt_norms=True)
    assert exempt.as_json()["exempt_norms"] is True
    assert Recipe.from_json(exempt.as_json()) == exempt


def test_the_protocol_is_worked_out_anew_for_a_changed_recipe() -> None:
    recipe = cell("paper-v2", "cifar10", "preactresnet18", "erm")
    assert recipe.protocol.name == "paper-v2"
    assert pickle.loads(pickle.dumps(recipe)) == recipe == replace(recipe)
    assert replace(recipe, lr=0.2).protocol == OWN
