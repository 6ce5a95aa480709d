"""JSON files that hold an object, and numbers as JSON can hold them: None for nan and infinity."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from flatmin_lab.system.files import read_regular


def number(value: Any) -> float | None:
    """A number, or a tensor that holds one, as a float; None where it is not finite.

    >>> number(0.5), number(float("nan"))
    (0.5, None)
    """
    plain = float(value)
    return plain if math.isfinite(plain) else None


def numbers(values: Any) -> list[Any]:
    """Nested lists, arrays or tensors, rounded to six digits: enough for a plot, and half the file.

    >>> numbers([0.1234567, float("inf"), [1.0]])
    [0.123457, None, [1.0]]
    """
    plain = values.tolist() if hasattr(values, "tolist") else values
    return [numbers(value) if isinstance(value, list | tuple) else _rounded(value) for value in plain]


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular(path), object_pairs_hook=_without_repetition)
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged: it cannot be read as JSON ({error}); put a good copy there, or choose another folder"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it must hold an object, got {type(content).__name__}")
    return content


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object; a key that is there twice, after an edit or a merge, is an error, since one value would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {name!r} is there twice")
    return found
