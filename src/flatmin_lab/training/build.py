"""Builds what a recipe describes: its data, its method, its model and its base optimizer.

The data are the same for every method with one seed: the validation split for tuning, label noise if requested, and the
statistics of the training split.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD

from flatmin_lab import methods, models
from flatmin_lab.data.dataset import Dataset, Split
from flatmin_lab.data.label_noise import add_label_noise
from flatmin_lab.data.normalise import Normalisation
from flatmin_lab.methods import Method
from flatmin_lab.recipes.recipe import Recipe


class PreparedData(NamedTuple):
    data: Dataset  # its test split is what the run is evaluated on, be it test or validation
    which: str  # "test" or "validation"
    wrong: Tensor  # indices of wrong training labels
    normalise: Normalisation
    held_out: Tensor | None = None  # indices of training images that AMP's radius is matched with, if it is


def prepare_data(recipe: Recipe, data: Dataset, seed: int) -> PreparedData:
    """Validation split, label noise and normalisation, the same for every method with that seed.

    Where the radius is matched to held-out data, these are part of the training set, with its wrong labels.
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


class ClippedSGD(SGD):
    """SGD that clips the norm of the gradient it steps with: after the closure, after a scaler has unscaled it.

    A step-pre-hook would run before the closure, and clip the gradient of the previous step. (Hooks may run twice a
    step, because SGD's own step runs them too; there are none here.)
    """

    def __init__(self, params: Iterable[Tensor], *, clip_norm: float, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.clip_norm = clip_norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], self.clip_norm)
        super().step()
        return result


def build_sgd(recipe: Recipe, model: nn.Module) -> SGD:
    """SGD of torch, which a captured step has a kernel for, unless gradients are clipped."""
    settings: dict[str, Any] = {
        "lr": recipe.lr,
        "momentum": recipe.momentum,
        "nesterov": recipe.nesterov,
        "weight_decay": recipe.weight_decay,
    }
    if recipe.clip_norm is None:
        return SGD(model.parameters(), **settings)
    return ClippedSGD(model.parameters(), clip_norm=recipe.clip_norm, **settings)


def build_method(recipe: Recipe, normalise: Normalisation) -> Method:
    return methods.build(recipe.method, normalise=normalise, **recipe.settings)


def build_model(recipe: Recipe, data: Dataset, method: Method) -> nn.Module:
    """The recipe's model for data set and method; torch's generator draws its initial weights."""
    sizes = {"num_classes": data.num_classes, "in_channels": data.in_channels}
    model = models.build(recipe.model, dropout=method.dropout, **sizes, **recipe.model_settings)
    return model.to(memory_format=torch.channels_last) if recipe.channels_last else model  # type: ignore[call-overload]
