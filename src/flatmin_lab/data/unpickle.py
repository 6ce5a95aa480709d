"""Reading the official CIFAR batches, which are pickles, without letting a pickle do anything.

A pickle is a program: it names functions of any module, and loading calls them. Here it may name five things, the ones
with which numpy writes arrays, and it does not even get those: in their place stand small functions of our own that
take shape, type and bytes apart, check them, and let numpy look at the bytes. Everything else is refused where it is
named, before anything is called.
"""

import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

ARRAY = ("numpy", "ndarray")
KIND = ("numpy", "dtype")
MAKE_ARRAY = (("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"))
FROM_BUFFER = (("numpy.core.numeric", "_frombuffer"), ("numpy._core.numeric", "_frombuffer"))
TO_BYTES = ("_codecs", "encode")


class Refused(pickle.UnpicklingError):
    """The pickle asked for something that is no array."""


class _Kind:
    """Stands for numpy.dtype: whole numbers of 1 to 8 bytes."""

    __slots__ = ("code", "order")

    def __init__(self, code: Any, *_: Any) -> None:
        text = code.decode("latin1") if isinstance(code, bytes) else code
        if not (isinstance(text, str) and len(text) == 2 and text[0] in "ui" and text[1] in "1248"):
            raise Refused(f"arrays must hold whole numbers, got the type {code!r}")
        self.code, self.order = text, "="

    def __setstate__(self, state: Any) -> None:
        order = state[1].decode("latin1") if isinstance(state[1], bytes) else state[1]
        if order not in ("<", ">", "|", "="):
            raise Refused(f"unknown byte order {order!r}")
        self.order = order


class _Array:
    """Stands for numpy.ndarray: filled from what the pickle says, once that fits together."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: np.ndarray[Any, Any] = np.zeros(0, dtype=np.uint8)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, content = state
        self.fill(content, kind, shape, "F" if fortran else "C")

    def fill(self, content: Any, kind: Any, shape: Any, order: Any) -> "_Array":
        if not (isinstance(kind, _Kind) and isinstance(shape, tuple) and all(isinstance(n, int) for n in shape)):
            raise Refused("an array must come with its shape and type")
        dtype = np.dtype(kind.order.replace("|", "=") + kind.code)
        if not isinstance(content, bytes | bytearray) or len(content) != math.prod(shape) * dtype.itemsize:
            raise Refused(f"an array of shape {shape} must come with {math.prod(shape) * dtype.itemsize} bytes")
        self.value = np.frombuffer(content, dtype=dtype).reshape(shape, order="F" if order == "F" else "C")
        return self


def _to_bytes(text: Any, encoding: Any) -> bytes:
    if not (isinstance(text, str) and encoding in ("latin1", b"latin1")):
        raise Refused(f"bytes must be written as latin1, got {encoding!r}")
    return text.encode("latin1")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """A fresh function each time, so that a pickle cannot change what the next one gets."""
        asked = (module, name)
        if asked in MAKE_ARRAY:
            return lambda *_: _Array()
        if asked in FROM_BUFFER:
            return lambda content, kind, shape, order="C": _Array().fill(content, kind, shape, order)
        if asked == KIND:
            return lambda code, *_: _Kind(code)
        if asked == ARRAY:
            return lambda *_: _Array()
        if asked == TO_BYTES:
            return lambda *words: _to_bytes(*words)  # noqa: PLW0108  # fresh, like the others
        raise Refused(f"it asks for {module}.{name}, and a batch may hold nothing but arrays")


def load(content: bytes, what: str) -> dict[str, Any]:
    """The dictionary of a CIFAR batch, its keys as str, its arrays as numpy's."""
    try:
        found = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Refused as error:
        raise ValueError(f"{what} was refused: {error}. Use the official file") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{what} is damaged or cut short ({error}); unpack or fetch it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{what} must hold a dictionary, got {type(found).__name__}; use the official file")
    plain = {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in found.items()}
    return {key: value.value if isinstance(value, _Array) else value for key, value in plain.items()}
