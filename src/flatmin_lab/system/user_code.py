"""A user's own function or class, found by name.

    file.py:make_model          in a Python file
    mymodule:make_model         in a module that can be imported, also from the current folder

Without a colon the function has the default name of what it makes, such as make_model.

The function declares what it takes: `call_with` passes it those of the offered values that it names. An error in it is
the user's own: `user_lines` reports it with their lines, and without ours.
"""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flatmin.doctor import own_lines

DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)  # nobody's code is to blame
MAX_LINES = 3  # of the user's code that an error shows: the innermost ones
_FOLDERS: set[str] = set()  # of the files that were loaded


class UserCodeError(ValueError):
    """The user's own code raised; the message has their lines."""


def is_user_code(name: str) -> bool:
    """Is it the name of user code, not of something built in?"""
    return ":" in name or name.endswith(".py")


def split_name(name: str, default: str) -> tuple[str, str]:
    """The file or module, and the function.

    >>> split_name("nets/mine.py", "make_model"), split_name("mymodule:Net", "make_model")
    (('nets/mine.py', 'make_model'), ('mymodule', 'Net'))
    """
    place, colon, function = name.rpartition(":")
    place, function = (place, function) if colon else (name, default)
    if not place or not function:
        raise ValueError(f"name your own function as file.py:{default} or mymodule:{default}, got {name!r}")
    return place, function


def located(name: str, default: str) -> str:
    """The name with an absolute path in place of a relative one or of a module, so that it works from any folder.

    A module of a package may import from its package, and keeps its name.

    >>> located("mypackage.networks:Net", "make_model")
    'mypackage.networks:Net'
    """
    place, function = split_name(name, default)
    if place.endswith(".py"):
        return f"{Path(place).expanduser().absolute()}:{function}"
    if "." in place or (path := source_file(name, default)).name != f"{place}.py":
        return name
    return f"{path.absolute()}:{function}"


def source_file(name: str, default: str) -> Path:
    """The file that the function is in."""
    place, _ = split_name(name, default)
    if place.endswith(".py"):
        path = Path(place).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"{path.absolute()} does not exist; name your own function as file.py:{default}")
        return path
    _add_to_path(Path.cwd())
    try:
        spec = importlib.util.find_spec(place)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise FileNotFoundError(_no_module(place, default))
    return Path(spec.origin)


@contextmanager
def user_lines(doing: str) -> Iterator[None]:
    """An exception inside is reported as one of the user's code, while `doing` this, with the user's own lines."""
    try:
        yield
    except (UserCodeError, *DEVICE_ERRORS):
        raise
    except Exception as error:
        shown = [
            f"  {frame.filename}, line {frame.lineno}, in {frame.name}\n    {frame.line}\n"
            for frame in own_lines(error)[-MAX_LINES:]
        ]
        what = "".join(traceback.format_exception_only(error)).rstrip()
        raise UserCodeError(f"{doing} raised an error:\n{''.join(shown)}{what}") from error


def load_function(name: str, default: str) -> Callable[..., Any]:
    """As `find_function`; an error in the user's file is reported with their lines."""
    try:
        return find_function(name, default)
    except Exception as error:
        if isinstance(error, SyntaxError) or own_lines(error):
            with user_lines(f"loading {name}"):
                raise
        raise


def call_with(name: str, function: Callable[..., Any], offered: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """Call it with what it declares of `offered`, and with all of `settings`; `name` is for errors.

    >>> call_with("mine", lambda num_classes, width=4: (num_classes, width), {"num_classes": 3, "dropout": 0.0}, {})
    (3, 4)
    """
    declared = parameters_of(function)
    given = {**{key: value for key, value in offered.items() if key in declared}, **settings}
    if not takes_any(function) and (unknown := [key for key in settings if key not in declared]):
        own = [key for key in declared if key not in offered]
        raise ValueError(f"{name} takes {', '.join(own) or 'no settings'}, got {', '.join(unknown)}")
    missing = [key for key, one in declared.items() if one.default is Parameter.empty and key not in given]
    if missing:
        raise ValueError(
            f"{name} asks for {', '.join(missing)}, but can only be given {', '.join(offered)}; "
            "give the others a default, or a value among the settings"
        )
    with user_lines(name):
        return function(**given)


def parameters_of(function: Callable[..., Any]) -> dict[str, Parameter]:
    """What it declares by name, with the defaults."""
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return {key: one for key, one in signature(function).parameters.items() if one.kind in named}


def takes_any(function: Callable[..., Any]) -> bool:
    """Does it take any name, as **settings?"""
    return any(one.kind is Parameter.VAR_KEYWORD for one in signature(function).parameters.values())


def find_function(name: str, default: str) -> Callable[..., Any]:
    """The function of that name; `default` is its name if none is given, and the example in error messages.

    Its file is run, without effect on torch's random numbers.
    """
    place, function = split_name(name, default)
    with torch.random.fork_rng([]):
        module = _load_file(source_file(name, default)) if place.endswith(".py") else _import_module(place, default)
    found = getattr(module, function, None)
    if not callable(found):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        there = f"it has {', '.join(own)}" if own else "it has none"
        raise ValueError(f"{place} has no function or class {function!r}; {there}. Write {place}:NAME")
    return found  # type: ignore[no-any-return]


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} must be a Python file, which ends in .py")
    module = importlib.util.module_from_spec(spec)
    _import_from(path.parent)
    sys.modules.setdefault(path.stem, module)  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def _import_module(name: str, default: str) -> ModuleType:
    _add_to_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that this one imports
        raise FileNotFoundError(_no_module(name, default)) from error


def _no_module(name: str, default: str) -> str:
    return (
        f"there is no module {name!r} here ({Path.cwd()}); name your own function as mymodule:{default}, "
        f"or as file.py:{default}"
    )


def search_beside(place: str) -> None:
    """Let a copy of a file import what is beside the file itself."""
    if place.endswith(".py") and Path(place).parent.is_dir():
        _import_from(Path(place).parent)


def _add_to_path(folder: Path) -> None:
    """Python does so for the folder of a script, and with `-m` for the current one; for a command it does neither."""
    if (place := str(folder.absolute())) not in sys.path:
        sys.path.insert(0, place)


def _import_from(folder: Path) -> None:
    """Let a file import what lies beside it, also if the file of another run has imported that name from its folder."""
    place = str(folder.absolute())
    known = [name for name in list(sys.modules) if "." not in name and name != "__main__"]
    for name in [name for name in known if _place_of(name) in _FOLDERS - {place}]:
        if (folder / f"{name}.py").is_file() or (folder / name).is_dir():
            for inside in [other for other in list(sys.modules) if f"{other}.".startswith(f"{name}.")]:
                del sys.modules[inside]
    sys.path[:] = [place, *(other for other in sys.path if other != place)]
    _FOLDERS.add(place)


def _place_of(name: str) -> str:
    """The folder that an imported module or package lies in."""
    module = sys.modules[name]
    inside = next(iter(getattr(module, "__path__", ())), None) or getattr(module, "__file__", None)
    return "" if inside is None else str(Path(inside).absolute().parent)
