"""Packages beyond torch, imported where they are used: a missing one is named, with the command that installs it."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def need(module: str, what: str, *, extra: str = "lab") -> Any:
    """Import the module; where it is not installed, an ImportError says what needs it and how to install it."""
    with needed_by(what, extra=extra):
        return import_module(module)


@contextmanager
def needed_by(what: str, *, extra: str = "lab") -> Iterator[None]:
    """Around imports: names a package that is not installed. One that is installed and broken raises its own error."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ImportError(
            f"{what} needs {package}, which is not installed here: pip install 'flatmin[{extra}]'", name=package
        ) from error
