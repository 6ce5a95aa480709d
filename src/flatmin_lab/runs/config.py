"""Which run a folder and each of its checkpoints belong to: its recipe, its seed, its data.

Two runs are the same if these three are; versions, machine and time may differ.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from flatmin_lab.recipes.recipe import Recipe, differences
from flatmin_lab.recipes.renamed import name_now
from flatmin_lab.recipes.user_files import comparable
from flatmin_lab.system.json_data import read_json
from flatmin_lab.system.json_types import check_types

IDENTITY = ("recipe", "seed", "data_sha256")


class Identity(TypedDict):
    """What tells two runs apart, as config.json holds it."""

    recipe: Mapping[str, Any]
    seed: int
    data_sha256: str


class OtherRunError(ValueError):
    """A folder belongs to another run: `what` names both, and the message adds what to do about it with `train`."""

    def __init__(self, path: Path, differences: str, *, renamed: str = "") -> None:
        self.what, self.differences = f"{path} belongs to another recipe: {differences}.{renamed}", differences
        super().__init__(f"{self.what} Leave these flags out to resume it, or choose another folder with --out")


def exists(path: Path) -> bool:
    return (path / "config.json").exists()


def read_config(path: Path) -> dict[str, Any]:
    """The folder's config.json, checked."""
    if not exists(path):
        raise FileNotFoundError(f"{path} is not a run folder: it has no config.json")
    known = read_json(path / "config.json")
    missing = set(IDENTITY) - known.keys()
    if missing or not isinstance(known["recipe"], dict):
        raise ValueError(
            f"{path / 'config.json'} is not a run's: it has no {', '.join(sorted(missing)) or 'recipe'}; "
            "choose another folder"
        )
    try:
        check_types(Identity, known)
    except TypeError as error:
        raise ValueError(f"{path / 'config.json'} is damaged: its {error}; choose another folder") from error
    return known


def recipe_of(path: Path, config: Mapping[str, Any]) -> Recipe:
    """The recipe of a run's folder or checkpoint, which a damaged or a newer one may not have."""
    try:
        return Recipe.from_json(config["recipe"])
    except (TypeError, ValueError) as error:
        place = path / "config.json" if path.is_dir() else path
        raise ValueError(f"{place} has no recipe that this flatmin can read: {error}; choose another folder") from error


def check_recipe(path: Path, known: Mapping[str, Any], recipe: Recipe, seed: int) -> None:
    """Raise where a folder's run has another recipe or seed."""
    check_same(path, known, {**known, "recipe": recipe.as_json(), "seed": seed})


def check_same(path: Path, known: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raise if two runs differ; they may differ in what does not change the numbers: versions, machine, time."""
    if not known:
        raise ValueError(f"{path} does not say which run it belongs to; it may be from another version of flatmin")
    # through a Recipe, so that fields of newer versions get their defaults
    here, there = comparable(Recipe.from_json(asked["recipe"])), comparable(recipe_of(path, known))
    if name_now(there["name"]) == here["name"]:
        there["name"] = here["name"]  # renamed: the rest says whether it is this run
    apart = differences(there, here)
    apart += differences({"seed": known["seed"]}, {"seed": asked["seed"]})
    if not apart and known["data_sha256"] != asked["data_sha256"]:
        apart = [f"the data set has different contents (SHA-256 {known['data_sha256']}, here {asked['data_sha256']})"]
    if apart:
        raise OtherRunError(path, "; ".join(apart), renamed=_moved(there["name"], here["name"]))


def _moved(there: str, here: str) -> str:
    """What to do with a run from before its recipe was renamed."""
    if there != here or (now := name_now(there)) is None:
        return ""
    return f" If it is from before {there} was renamed {now}, move it from …/{there}-… to …/{now}-…."
