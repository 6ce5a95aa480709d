"""Methods that torch.compile runs as they are, outside of its graphs: a step moves weights and catches errors.

`torch.compiler.disable` would import the compiler along with flatmin. torch imports it for the first optimizer, so it
is applied then (`keep_untraced`).
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_TO_DISABLE: list[Callable[[], None]] = []


def untraced(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorates such a method."""
    outside = [method]

    def disable() -> None:
        outside[0] = torch.compiler.disable(method)

    _TO_DISABLE.append(disable)

    @wraps(method)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return outside[0](*args, **kwargs)

    return run


def keep_untraced() -> None:
    """Called for every new optimizer, because torch.compile cannot do it while it traces."""
    while _TO_DISABLE:
        _TO_DISABLE.pop()()
