"""What the laboratory needs beyond torch, asked for where it is used: a missing package is named, with a way out."""

from importlib import import_module
from typing import Any


def need(module: str, what: str, *, extra: str = "lab") -> Any:
    """The module; where it is not installed, an ImportError that says what needs it and how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{what} needs {package}, which is not installed here: pip install 'flatmin[{extra}]'", name=package
        ) from error
