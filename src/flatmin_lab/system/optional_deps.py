"""What the laboratory needs beyond torch, asked for where it is used: a missing package is named, with a way out."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def need(module: str, what: str, *, extra: str = "lab") -> Any:
    """The module; where it is not installed, an ImportError that says what needs it and how to get it."""
    with needed_by(what, extra=extra):
        return import_module(module)


@contextmanager
def needed_by(what: str, *, extra: str = "lab") -> Iterator[None]:
    """Around imports: the package that is not installed is named. One that is there and broken speaks for itself."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ImportError(
            f"{what} needs {package}, which is not installed here: pip install 'flatmin[{extra}]'", name=package
        ) from error
