"""A user's own function or class, found by name.

    file.py:make_model          in a Python file
    mymodule:make_model         in a module that can be imported, also from the current folder

Without a colon the function has the default name of what it makes, such as make_model.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def is_user_code(name: str) -> bool:
    """Is it the name of user code, not of something built in?"""
    return ":" in name or name.endswith(".py")


def find_function(name: str, default: str) -> Callable[..., Any]:
    """The function of that name; `default` is its name if none is given, and the example in error messages."""
    place, colon, function = name.rpartition(":")
    place, function = (place, function) if colon else (name, default)
    if not place:
        raise ValueError(f"name your own function as file.py:{default} or mymodule:{default}, got {name!r}")
    module = _load_file(Path(place), default) if place.endswith(".py") else _import_module(place, default)
    found = getattr(module, function, None)
    if not callable(found):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        there = f"it has {', '.join(own)}" if own else "it has none"
        raise ValueError(f"{place} has no function or class {function!r}; {there}. Write {place}:NAME")
    return found  # type: ignore[no-any-return]


def _load_file(path: Path, default: str) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"{path.absolute()} does not exist; name your own function as file.py:{default}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} must be a Python file, which ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses look themselves up there
    _add_to_path(path.parent)
    spec.loader.exec_module(module)
    return module


def _import_module(name: str, default: str) -> ModuleType:
    here = Path.cwd()
    _add_to_path(here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that this one imports
        raise FileNotFoundError(
            f"there is no module {name!r} here ({here}); name your own function as mymodule:{default}, "
            f"or as file.py:{default}"
        ) from error


def _add_to_path(folder: Path) -> None:
    """Python does so for the folder of a script, and with `-m` for the current one; for a command it does neither."""
    if (place := str(folder.absolute())) not in sys.path:
        sys.path.insert(0, place)
