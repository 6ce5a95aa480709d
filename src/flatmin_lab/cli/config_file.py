"""`--config`: a recipe from a file, as the start of another run; flags change it.

    flatmin train --config runs/first --lr 0.05          a run's folder, or its config.json
    flatmin train --config run.json                      {"data": "digits", "model": "mlp", "epochs": 10}

Fields that the file does not have get their defaults for the data set. The seed is --seed, or 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flatmin_lab.data.registry import is_folder
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.recipes.user_files import FIELDS, located_name
from flatmin_lab.system.json_data import read_json
from flatmin_lab.system.json_types import check_types

OF_OPTIMIZER = ("optimizer", "optimizer_settings", "lr", "weight_decay", "momentum", "nesterov", "exempt_norms")
SETTINGS = ("model_settings", "optimizer_settings")
NOT_TAKEN = ("name", "files")  # of a table of the paper; of contents that may have changed since


@dataclass(frozen=True)
class ConfigValues:
    """The fields of a recipe that a file has."""

    values: Mapping[str, Any]

    @staticmethod
    def of(path: Path) -> "ConfigValues":
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(f"--config takes a JSON file or a run folder, but {file} does not exist")
        try:
            found = read_json(file)
        except ValueError as error:
            why = error.__cause__ or "it holds no object"
            raise ValueError(f"--config takes a JSON file or a run folder, but {file} cannot be read: {why}") from error
        values = found["recipe"] if isinstance(found.get("recipe"), dict) else found
        known = [field.name for field in fields(Recipe)]
        if values is not found and (beside := sorted(found.keys() & set(known))):
            raise ValueError(f"{file}: {', '.join(beside)} must be inside its recipe, not beside it; move it there")
        if unknown := sorted(values.keys() - set(known)):
            raise ValueError(f"{file}: a recipe has no {', '.join(unknown)}; it has {', '.join(known)}")
        try:
            check_types(Recipe, values)
        except TypeError as error:
            raise ValueError(f"{file}: {error}") from error
        taken = {key: value for key, value in values.items() if key not in NOT_TAKEN and value is not None}
        return ConfigValues(taken)

    @property
    def data(self) -> str | None:
        return self.values.get("data")

    def method(self, asked: str | None) -> str | None:
        return asked or self.values.get("method")

    def changes(self, asked: Mapping[str, Any], *, data: str | None) -> dict[str, Any]:
        """The recipe's fields; flags take precedence. A size is left out for other data than a folder of images."""
        is_other = data is not None and data != self.data and not is_folder(data)
        left_out = ("data", "method", "settings", *(["size"] if is_other else []))
        there = {key: value for key, value in self.values.items() if key not in left_out}
        there |= {key: located_name(key, there[key]) for key in FIELDS if there.get(key) is not None}
        return overridden(there, asked)

    def settings(self, asked: Mapping[str, Any], method: str | None) -> dict[str, Any]:
        """The method's settings; those of another method do not apply."""
        same = method in (None, self.values.get("method"))
        return {**(self.values.get("settings", {}) if same else {}), **asked}


def overridden(there: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a recipe, changed by flags; settings of another model or optimizer do not apply.

    >>> overridden({"optimizer": "adamw", "lr": 0.001, "epochs": 9}, {"optimizer": "sgd"})
    {'epochs': 9, 'optimizer': 'sgd'}
    """
    kept = dict(there)
    if "model" in asked:
        kept.pop("model_settings", None)
    if asked.get("optimizer") not in (None, there.get("optimizer", "sgd")):
        for key in OF_OPTIMIZER:
            kept.pop(key, None)
    merged = {key: {**kept[key], **asked[key]} for key in SETTINGS if key in asked and key in kept}
    return {**kept, **asked, **merged}
