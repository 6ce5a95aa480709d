"""Values read from JSON or a command line, checked against the annotations of their dataclass or function.

JSON has lists where a dataclass has tuples, and writes 1.0 as 1: both are accepted. Errors name the field.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

NAMES = {str: "text", bool: "true or false", int: "a whole number", float: "a number", NoneType: "null"}


def check_types(kind: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Raise a TypeError where a value cannot be the field of its name; names without a field are ignored.

    >>> from dataclasses import make_dataclass
    >>> check_types(make_dataclass("Walk", [("steps", int)]), {"steps": "many"})
    Traceback (most recent call last):
    TypeError: steps must be a whole number, got a str: 'many'
    """
    for name, annotation in _annotations(kind).items():
        if name in values and not _fits(values[name], annotation):
            found = values[name]
            raise TypeError(f"{name} must be {_describe(annotation)}, got a {type(found).__name__}: {found!r:.80}")


@cache
def _annotations(kind: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(value: Any, annotation: Any) -> bool:
    if get_origin(annotation) in (Union, UnionType):
        return any(_fits(value, choice) for choice in get_args(annotation))
    if get_origin(annotation) is not None:
        return _fits_generic(value, get_origin(annotation), get_args(annotation))
    if annotation is float:
        return _is_number(value)
    if annotation in (int, str, bool, NoneType):
        return isinstance(value, annotation) and (annotation is bool or not isinstance(value, bool))
    return True


def _fits_generic(value: Any, origin: Any, inside: tuple[Any, ...]) -> bool:
    if origin is Literal:
        return isinstance(value, str)  # which of them, the dataclass says
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_fits(key, inside[0]) for key in value)
    if not isinstance(value, list | tuple):
        return False
    if origin is tuple:
        long_enough = inside[-1] is Ellipsis or len(value) == len(inside)
        return long_enough and all(_fits(part, inside[0]) for part in value)
    return True


def _is_number(value: Any) -> bool:
    """A number that a float can hold; JSON has larger ones."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(float(value))
    except OverflowError:
        return False


def _describe(annotation: Any) -> str:
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(map(_describe, inside))
    if origin is Literal:
        return f"one of {', '.join(inside)}"
    if origin is Mapping:
        return "an object"
    if origin is tuple:
        count = "" if inside[-1] is Ellipsis else f"{len(inside)} numbers, each "
        return f"a list of {count}{_describe(inside[0])}"
    return "a list" if origin is Sequence else NAMES.get(annotation, "a value")
