"""The default recipe for a data set: the protocol `paper-v2` (protocols.py), scaled down for small data sets.

recipe = default_recipe("cifar10", data, method="amp")
"""

from dataclasses import replace
from typing import Any

from flatmin_lab import models
from flatmin_lab.data.augment.transforms import Kind
from flatmin_lab.data.dataset import Dataset
from flatmin_lab.data.registry import DATA_SETS
from flatmin_lab.recipes import optimizers
from flatmin_lab.recipes.recipe import PAPER_BATCH_SIZE, Recipe, perturbation
from flatmin_lab.recipes.user_files import recorded

SMALL_DATA: dict[str, dict[str, Any]] = {
    "digits": {"model": "convnet", "model_settings": {"width": 16}, "augment": "none", "epochs": 24},
    "spiral": {"model": "mlp", "augment": "none", "epochs": 300, "schedule": "cosine"},
}


def default_recipe(name: str, data: Dataset, *, method: str = "erm", **changes: Any) -> Recipe:
    """The protocol `paper-v2`, scaled down for small data sets; `changes` replace fields of the recipe.

    A model given by name has its own default settings, and an optimizer its own rate and weight decay. AMP's radius
    follows from model, augmentation and length, unless the method's `settings` have one. The user's own files are
    recorded with their SHA-256.
    """
    values: dict[str, Any] = dict(SMALL_DATA.get(name) or {"model": _model_for(data), "augment": _augment_for(data)})
    if name not in DATA_SETS:
        values["batch_size"] = _batch_size_for(len(data.train), validation=changes.get("validation", False))
    own = {} if "model" in changes else values.get("model_settings", {})
    values = {**values, **optimizers.default_fields(changes.get("optimizer", "sgd")), **changes}
    shaped = models.settings_for(values["model"], data.train.shape)
    values["model_settings"] = {**shaped, **own, **changes.get("model_settings", {})}
    recipe = recorded(Recipe(data=name, method=method, **values))
    if method != "amp":
        return recipe
    return replace(recipe, settings={**perturbation(recipe), **recipe.settings})


def _model_for(data: Dataset) -> str:
    if not data.train.is_images:
        return "mlp"
    return "preactresnet18" if min(data.train.shape[1:]) >= 32 else "convnet"


def _batch_size_for(count: int, *, validation: bool) -> int:
    """The paper's batch size, or less for fewer images, or where one image would be alone in the last batch."""
    count -= round(count * 0.1) if validation else 0
    sizes = (size for size in range(min(PAPER_BATCH_SIZE, count), 1, -1) if count % size != 1)
    return next(sizes, max(count, 1))


def _augment_for(data: Dataset) -> Kind:
    return "vanilla" if data.train.is_images else "none"
