"""What the user's closure refers to: free variables, globals, bound arguments, attributes of its object."""

from collections.abc import Callable, Iterator
from functools import partial
from inspect import getclosurevars, isfunction, ismethod
from typing import Any

from torch import nn


def variables(closure: Callable[..., Any]) -> Iterator[tuple[str, object]]:
    while isinstance(closure, partial):
        yield from closure.keywords.items()
        yield from ((f"argument {place}", value) for place, value in enumerate(closure.args))
        closure = closure.func
    if ismethod(closure):
        yield from ((f"self.{name}", value) for name, value in getattr(closure.__self__, "__dict__", {}).items())
    try:
        found = getclosurevars(closure)
    except (TypeError, ValueError):  # not a Python function
        return
    yield from {**found.globals, **found.nonlocals}.items()


def networks(closure: Callable[..., Any]) -> dict[str, nn.Module]:
    """The modules among them, and among what the functions among them refer to."""
    found = list(variables(closure))
    found += [pair for _, value in found if isfunction(value) for pair in variables(value)]
    return {name: value for name, value in found if isinstance(value, nn.Module)}
