"""A data set as a recipe wants it: the validation split for tuning, wrong labels if asked for, its statistics."""

from typing import NamedTuple

from torch import Tensor

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.data.label_noise import with_wrong_labels
from flatmin_lab.data.normalise import Normalisation
from flatmin_lab.recipes.recipe import Recipe


class Prepared(NamedTuple):
    data: Dataset  # what it is measured on is its test split, whichever that is
    which: str  # "test", or "validation"
    wrong: Tensor  # the places of wrong training labels
    normalise: Normalisation


def prepared(recipe: Recipe, data: Dataset, seed: int) -> Prepared:
    """The same for every method with that seed."""
    which = "validation" if recipe.validation else "test"
    chosen = data.held_out(seed) if recipe.validation else data
    noisy, wrong = with_wrong_labels(chosen, recipe.label_noise, seed=seed)
    return Prepared(noisy, which, wrong, Normalisation.of(noisy.train))
