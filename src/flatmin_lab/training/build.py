"""Builds what a recipe describes: its data, its method and its model; optimizer.py has the base optimizer.

The data are the same for every method with one seed: the validation split for tuning, label noise if requested, and the
statistics of the training split.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatmin_lab import methods, models
from flatmin_lab.data.dataset import Dataset, Split
from flatmin_lab.data.label_noise import add_label_noise
from flatmin_lab.data.normalise import Normalisation
from flatmin_lab.methods import Method
from flatmin_lab.models.weights import WeightsError, load_weights
from flatmin_lab.recipes.recipe import Recipe

MAX_HEADS = 3  # up to this many modules with weights of another shape look like a head


class PreparedData(NamedTuple):
    data: Dataset  # its test split is what the run is evaluated on, be it test or validation
    which: str  # "test" or "validation"
    wrong: Tensor  # indices of wrong training labels
    normalise: Normalisation
    held_out: Tensor | None = None  # indices of training images held out to match AMP's radius, if it is matched


def prepare_data(recipe: Recipe, data: Dataset, seed: int) -> PreparedData:
    """Validation split, label noise and normalisation, the same for every method with that seed.

    If the radius is matched to held-out data, these are part of the training set, with its wrong labels.
    """
    which = "validation" if recipe.validation else "test"
    chosen = data.held_out(seed) if recipe.validation else data
    noisy, wrong = add_label_noise(chosen, recipe.label_noise, seed=seed)
    held_out = None
    if recipe.is_matched:
        usual = min(max(0.02, 500 / len(noisy.train)), 0.1)
        _, held_out = noisy.split_indices(seed, share=recipe.settings.get("held_out", usual), name="matched")
    return PreparedData(noisy, which, wrong, build_normalisation(recipe, noisy.train), held_out)


def build_normalisation(recipe: Recipe, train: Split) -> Normalisation:
    """By the training set's mean and standard deviation, or by those that the recipe gives."""
    return Normalisation.of(train) if recipe.normalise is None else Normalisation.fixed(*recipe.normalise, like=train)


def build_method(recipe: Recipe, normalise: Normalisation) -> Method:
    return methods.build(recipe.method, normalise=normalise, **recipe.settings)


def build_model(recipe: Recipe, data: Dataset, method: Method) -> nn.Module:
    """The recipe's model for data set and method; torch's generator draws its initial weights."""
    return build_network(recipe, data.train.shape, num_classes=data.num_classes, dropout=method.dropout)


def build_network(recipe: Recipe, shape: Sequence[int], *, num_classes: int, dropout: float) -> nn.Module:
    """The recipe's model for inputs of that shape."""
    model = models.build_for(
        recipe.model, shape, num_classes=num_classes, dropout=dropout, settings=recipe.model_settings
    )
    return model.to(memory_format=torch.channels_last) if recipe.channels_last else model  # type: ignore[call-overload]


def load_initial_weights(recipe: Recipe, model: nn.Module) -> None:
    """Load the recipe's initial weights into the model, except for the modules that keep their new ones."""
    assert recipe.init is not None
    without = [name for part in (recipe.init_except or "").split(",") if (name := part.strip())]
    try:
        load_weights(model, Path(recipe.init), without=without)
    except WeightsError as error:
        modules = sorted({key.rpartition(".")[0] for key in error.of_shape} | set(without))
        if not error.of_shape or len(modules) > MAX_HEADS or "" in modules:
            raise
        raise ValueError(
            f"{error}. To train these from scratch, such as a head for other classes: --init-except {','.join(modules)}"
        ) from error
