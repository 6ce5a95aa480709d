"""Recipes that the paper does not have: what is compared differs in one thing, and nothing is chosen on test images."""

from collections import Counter
from dataclasses import fields

import pytest

from flatmin_lab.methods import mean_passes
from flatmin_lab.recipes.experiments import EXPERIMENTS
from flatmin_lab.recipes.protocols import NAMES, Protocol
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.report.paper.tables import fill_table


def of(experiment: str, protocol: Protocol, data: str = "cifar10") -> list[Recipe]:
    return [recipe for recipe in EXPERIMENTS[experiment](protocol).recipes if recipe.data == data]


def differences(one: Recipe, other: Recipe) -> set[str]:
    return {f.name for f in fields(Recipe) if getattr(one, f.name) != getattr(other, f.name)} - {"name"}


@pytest.mark.parametrize("name", ["vit", "best"])
def test_amp_on_the_test_set_differs_from_erm_in_the_method_alone(name: str) -> None:
    final = [recipe for recipe in of(name, "paper") if not recipe.validation]
    erm = final[0]
    others = [recipe for recipe in final if recipe.method == "amp"]
    assert erm.method == "erm"
    assert others
    assert all(differences(recipe, erm) == {"method", "settings"} for recipe in others)


def test_what_is_tried_is_tried_on_held_out_images_with_both_methods() -> None:
    tried = [recipe for recipe in of("best", "short") if recipe.validation]
    erm = tried[0]
    changes = {frozenset(differences(recipe, erm)) for recipe in tried if recipe.method == "erm"}
    alone = ((), ("weight_decay",), ("batch_size", "lr"), ("schedule",), ("ema",), ("exempt_norms",))
    assert changes == {frozenset(own) for own in (*alone, ("optimizer", "lr", "weight_decay"))}
    of_amp = {
        frozenset(differences(recipe, erm) - {"method", "settings"}) for recipe in tried if recipe.method == "amp"
    }
    assert of_amp == changes


def test_lengths_reach_from_a_twentieth_to_twice_and_share_their_runs_with_the_best_recipe() -> None:
    lengths: dict[str, list[int]] = {"erm": [], "amp": []}
    for recipe in of("length", "paper"):
        lengths[recipe.method].append(recipe.epochs)
        assert differences(recipe, of("length", "paper")[0]) <= {"method", "settings", "epochs"}
    assert lengths == {"erm": [10, 25, 50, 100, 200, 400], "amp": [10, 25, 50, 100, 200]}
    shared = {recipe.name: recipe for recipe in of("best", "paper")}
    common = [recipe for recipe in of("length", "paper") if recipe.name in shared]
    assert [(recipe.method, recipe.epochs) for recipe in common] == [("erm", 200), ("erm", 400), ("amp", 200)]
    assert all(recipe == shared[recipe.name] for recipe in common)


def test_the_networks_that_are_examined_are_those_of_table_1() -> None:
    table_1 = {recipe.name: recipe for recipe in EXPERIMENTS["table1"]("paper").recipes}
    examined = EXPERIMENTS["examine"]("paper")
    assert all(recipe == table_1[recipe.name] for recipe in examined.recipes)
    assert examined.parts == ("spectrum", "selective", "outside")


def test_temperatures_are_fitted_to_the_networks_of_other_experiments() -> None:
    known = {recipe.name: recipe for name in ("frontier", "table1") for recipe in EXPERIMENTS[name]("short").recipes}
    scaled = EXPERIMENTS["temperature"]("short")
    assert len(scaled.names) == len(scaled.recipes)
    assert all(recipe == known[recipe.name] for recipe in scaled.recipes)
    assert scaled.parts == ("scaled",)


@pytest.mark.parametrize("protocol", NAMES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_no_two_rows_of_a_block_have_one_name(name: str, protocol: Protocol) -> None:
    if (name, protocol) == ("precision", "smoke"):
        return  # a CPU computes in float32 alone
    rows = fill_table(EXPERIMENTS[name](protocol), {}).rows
    repeated = [key for key, count in Counter((row.place, row.name) for row in rows).items() if count > 1]
    assert not repeated


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_on_digits_every_mode_has_a_length_for_as_many_passes(noise: float) -> None:
    lengths: dict[float, list[str]] = {}
    for recipe in of("length", "short", "digits"):
        if recipe.label_noise == noise:
            passes = recipe.epochs * mean_passes(recipe.method, recipe.settings)
            lengths.setdefault(passes, []).append(f"{recipe.method}, start {recipe.settings.get('start', 0)}")
    every = ["erm, start 0", "amp, start 0", "amp, start 0.75"]
    assert lengths == {5: [every[0], every[2]], 10: every, 20: every, 40: every, 80: every}
