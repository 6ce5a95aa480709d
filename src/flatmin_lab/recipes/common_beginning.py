"""For how long two recipes are the same training: until AMP starts it is the base optimizer itself, bit for bit.

    common_epochs(erm, last_quarter, batches=1000)      150 of 200, if their learning rates drop first at 0.5 and 0.75

With the same seed, data and machine, these epochs need to be trained only once, and the other run branches off. What is
not known to leave them as they are ends the beginning: every field counts but the name, the milestones (their rates are
compared step by step), and those settings of AMP that no step uses before its start.
"""

from dataclasses import fields
from functools import cache

from flatmin_lab import methods
from flatmin_lab.recipes.lr_schedules import rate
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.recipes.user_files import named_files

FREE = ("name", "method", "settings", "milestones")
FIXED = tuple(field.name for field in fields(Recipe) if field.name not in FREE)
UNUSED_BEFORE_START = {  # settings of AMP; `start` and `release` bound the number of epochs
    *("epsilon", "inner_lr", "inner_iter", "ball", "norm", "start", "growth", "every", "ascent_share"),
    *("release", "matches"),
}


def common_epochs(one: Recipe, other: Recipe, *, batches: int) -> int:
    """For how many whole epochs of so many batches they are the same training; at least one is left to each."""
    if any(getattr(one, name) != getattr(other, name) for name in FIXED):
        return 0
    if one.is_matched != other.is_matched or _used(one) != _used(other) or named_files(one) or named_files(other):
        return 0
    return min(_unperturbed(one, batches), _unperturbed(other, batches), _same_rates(one, other, batches))


def _used(recipe: Recipe) -> dict[str, object]:
    """The method's settings that count from the first step on, such as the regulariser beside AMP."""
    return {key: value for key, value in recipe.settings.items() if key not in UNUSED_BEFORE_START}


def _unperturbed(recipe: Recipe, batches: int) -> int:
    """The whole epochs before the first perturbed step; of a matched radius those with the images held out."""
    if recipe.method == "erm":
        return recipe.epochs - 1
    if recipe.method != "amp":
        return 0
    first = methods.build("amp", **recipe.settings).schedule.first_step(recipe.epochs * batches)
    epochs = min(first // batches, recipe.epochs - 1)
    return min(epochs, recipe.held_out_epochs) if recipe.is_matched else epochs


def _same_rates(one: Recipe, other: Recipe, batches: int) -> int:
    if one.milestones == other.milestones or one.schedule != "multi_step":
        return one.epochs
    steps, warmup = one.epochs * batches, round(one.warmup * batches)
    drops = sorted([one.milestones, other.milestones])
    return _steps_with_same_rates(one.lr, steps, warmup, one.gamma, *drops) // batches


@cache
def _steps_with_same_rates(
    lr: float, steps: int, warmup: int, gamma: float, one: tuple[float, ...], other: tuple[float, ...]
) -> int:
    for step in range(steps):
        rates = {
            rate("multi_step", lr, step, steps, warmup=warmup, gamma=gamma, milestones=own) for own in (one, other)
        }
        if len(rates) > 1:
            return step
    return steps
