"""The user's own files that a recipe names: a model, an optimizer, initial weights. A run belongs to their content.

`recorded` writes their SHA-256 into the recipe, and `check_unchanged` compares. A file may move: two recipes are the
same where function and content are (`comparable`). A file beside it that it imports is not looked at.
"""

import hashlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from flatmin_lab.models import user_model
from flatmin_lab.recipes import optimizers
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.system.user_code import is_user_code, located, search_beside, source_file, split_name

FUNCTIONS = {"model": user_model.DEFAULT, "optimizer": optimizers.DEFAULT}  # fields, and the functions' default names
FIELDS = (*FUNCTIONS, "init")


class ChangedFileError(ValueError):
    """A file has another content than when the run was started."""


def is_own(field: str, name: str | None) -> bool:
    """Does the field name a file of the user's?"""
    if name is None:
        return False
    return user_model.is_own(name) if field == "model" else field == "init" or is_user_code(name)


def has_user_code(recipe: Recipe) -> bool:
    """Does a run of it execute a network or an optimizer that is neither flatmin's nor torch's?"""
    return is_user_code(recipe.model) or is_user_code(recipe.optimizer)


def located_name(field: str, name: str) -> str:
    """The name with an absolute path, so that it works from any folder; other names stay as they are."""
    if not is_own(field, name):
        return name
    return str(Path(name).expanduser().absolute()) if field == "init" else located(name, FUNCTIONS[field])


def file_of(field: str, name: str) -> Path:
    if field != "init":
        return source_file(name, FUNCTIONS[field])
    path = Path(name).expanduser()
    if path.is_dir():
        raise ValueError(
            f"--init takes a file of weights, got the folder {path}; a run's weights become one with "
            f"`flatmin export {path} --to weights.safetensors`"
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"--init takes a .safetensors file or one saved with torch.save, but {path} does not exist"
        )
    return path


def checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def named_files(recipe: Recipe) -> dict[str, str]:
    """The fields that name a file of the user's, with its name."""
    return {field: getattr(recipe, field) for field in FIELDS if is_own(field, getattr(recipe, field))}


def recorded(recipe: Recipe) -> Recipe:
    """The recipe with absolute paths, and with a SHA-256 for each of its files that has none yet."""
    names: dict[str, Any] = {field: located_name(field, name) for field, name in named_files(recipe).items()}
    if not names and not recipe.files:
        return recipe
    known = {field: recipe.files[field] for field in names if field in recipe.files}
    missing = {field: checksum(file_of(field, name)) for field, name in names.items() if field not in known}
    return replace(recipe, files={**known, **missing}, **names)


def check_unchanged(recipe: Recipe, *, copies: Path | None = None, without: Collection[str] = ()) -> None:
    """Raise where a file has changed or gone since it was recorded; `copies` is where a run keeps the old ones."""
    for field, name in named_files(recipe).items():
        if field in without or field not in recipe.files:
            continue
        try:
            path = file_of(field, name)
        except FileNotFoundError as error:
            place = split_name(name, FUNCTIONS[field])[0] if field in FUNCTIONS else name
            raise FileNotFoundError(
                f"{place} no longer exists, but this run was started with it: {_way_out(recipe, field, copies)}"
            ) from error
        if (found := checksum(path)) != recipe.files[field]:
            raise ChangedFileError(
                f"{path} has changed since this run was started (SHA-256 {recipe.files[field][:12]}… then, "
                f"{found[:12]}… now): {_way_out(recipe, field, copies)}"
            )


def _way_out(recipe: Recipe, field: str, copies: Path | None) -> str:
    name: str = getattr(recipe, field)
    kept = None if copies is None else copy_in(copies, field, name)
    if kept is None or not kept.is_file() or checksum(kept) != recipe.files[field]:
        return "put the old file back, or train anew in another folder with --out"
    _, function = split_name(name, FUNCTIONS[field])
    return (
        f"the run keeps it as it was, so resume with --{field} {kept}:{function}, or train anew in another folder "
        "with --out"
    )


def copy_in(copies: Path, field: str, name: str) -> Path | None:
    """Where a run keeps its copy of the code that a field names; weights are not copied."""
    if field not in FUNCTIONS:
        return None
    place, _ = split_name(name, FUNCTIONS[field])
    return copies / field / (Path(place).name if place.endswith(".py") else f"{place.rpartition('.')[2]}.py")


def with_original_model(recipe: Recipe, copies: Path) -> Recipe:
    """The recipe with the network's code as it was when the run was started: where it lies, or as the run keeps it.

    What is imported from beside the file is found where the file was, too. Other files need not be there.
    """
    kept = copy_in(copies, "model", recipe.model) if "model" in recipe.files else None
    if kept is None or _has_original_model(recipe):
        return recipe
    if not kept.is_file() or checksum(kept) != recipe.files["model"]:
        check_unchanged(recipe, copies=copies, without=[field for field in FIELDS if field != "model"])
    place, function = split_name(recipe.model, FUNCTIONS["model"])
    search_beside(place)
    return replace(recipe, model=f"{kept}:{function}")


def _has_original_model(recipe: Recipe) -> bool:
    try:
        return checksum(file_of("model", recipe.model)) == recipe.files["model"]
    except OSError:
        return False


def comparable(recipe: Recipe) -> dict[str, Any]:
    """The recipe's JSON, with the content of the user's files and without their folders: they may have moved."""
    names = {field: name for field, name in named_files(recipe).items() if field in recipe.files}
    short = {
        field: split_name(name, FUNCTIONS[field])[1] if field in FUNCTIONS else Path(name).name
        for field, name in names.items()
    }
    content = {f"SHA-256 of {field}": recipe.files[field] for field in names}
    return {**{key: value for key, value in recipe.as_json().items() if key != "files"}, **short, **content}
