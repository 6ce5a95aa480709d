"""Arrays of numbers from a MATLAB file of version 5 to 7, as SVHN's are.

    128 bytes of header, then elements: a tag of type and length, its bytes, filled up to a multiple of 8
    a matrix is an element that holds elements: flags, sides, name, numbers; it may be packed with zlib

Written here because scipy's reader, given an altered file, can bring the whole process down. Every length is checked
against what is there. Anything but matrices of real numbers is passed over.
"""

import struct
import zlib
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
KEPT = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
MATRIX, PACKED = 14, 15
COMPLEX = 0x0800
LIMIT = 1 << 30  # bytes of one matrix; SVHN's largest has 225 MB


def load(content: bytes, wanted: tuple[str, ...]) -> dict[str, Array]:
    """The wanted matrices that are there; ValueError where the file does not fit together."""
    if content[:10] == b"MATLAB 7.3" or content[:8] == b"\x89HDF\r\n\x1a\n":
        raise ValueError("it is of version 7.3, which is HDF5; save it with -v7, or use the official file")
    order = {b"IM": "<", b"MI": ">"}.get(content[126:128])
    if order is None:
        raise ValueError("it has no MATLAB header")
    found = {}
    for outer, packed in _elements(content[128:], order):
        inner = _elements(_unpacked(packed), order) if outer == PACKED else iter([(outer, packed)])
        for kind, body in inner:
            if kind == MATRIX:
                name, array = _matrix(body, order, wanted)
                if array is not None:
                    found[name] = array
    return found


def _unpacked(content: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    unpacked = unpacker.decompress(content, LIMIT)
    if not unpacker.eof:
        raise ValueError("a packed matrix has no end, or is larger than any official one")
    return unpacked


def _elements(content: bytes, order: str) -> Iterator[tuple[int, bytes]]:
    """Type and bytes of one element after the other."""
    view, place = memoryview(content), 0
    while place < len(content):
        if place + 8 > len(content):
            raise ValueError("it ends inside a tag")
        first, length = struct.unpack_from(f"{order}II", content, place)
        if first >> 16:  # a small one: type, length and up to four bytes in the place of a tag
            kind, length, start, after = first & 0xFFFF, first >> 16, place + 4, place + 8
            if length > 4:
                raise ValueError("a small element is too long")
        else:
            kind, start = first, place + 8
            after = start + length + (-length % 8 if kind != PACKED else 0)
        if start + length > len(content):
            raise ValueError(f"an element must have {length} bytes, and {len(content) - start} are left")
        yield kind, bytes(view[start : start + length])
        place = after


def _matrix(body: bytes, order: str, wanted: tuple[str, ...]) -> tuple[str, Array | None]:
    """Name and numbers, in the order of memory of MATLAB: the first side runs fastest."""
    parts = _elements(body, order)
    (_, flags), (_, sides), (_, label) = next(parts), next(parts), next(parts)
    (flag,) = struct.unpack_from(f"{order}I", flags)
    name, kept = label.decode("latin1"), KEPT.get(flag & 0xFF)
    if name not in wanted or kept is None or flag & COMPLEX:
        return name, None
    shape = tuple(int(side) for side in np.frombuffer(sides, dtype=f"{order}i4"))
    kind, numbers = next(parts)
    stored = np.dtype(f"{order}{NUMBERS[kind]}")
    if min(shape, default=-1) < 0 or prod(shape) * stored.itemsize != len(numbers):
        raise ValueError(f"{name} has sides {shape}, which do not fit its {len(numbers)} bytes")
    return name, np.frombuffer(numbers, dtype=stored).reshape(shape, order="F").astype(kept, copy=False)
