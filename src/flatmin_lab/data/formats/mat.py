"""Arrays of numbers from a MATLAB file of version 5 to 7, as SVHN's are.

    128 bytes of header, then elements: a tag of type and length, its bytes, padded to a multiple of 8
    a matrix is an element that holds elements: flags, sides, name, numbers; it may be compressed with zlib

Every length is checked against what is there. Anything but matrices of real numbers is skipped.

Not scipy.io.loadmat, which is not made for files that cannot be trusted: of 2,240 changes of one bit near the tags of
a small SVHN file, 21 end the process with a segmentation fault or a bus error (scipy 1.17: a type of numbers that it
does not know is an index into memory), 3 MB can unpack to 3 GB, and cells within cells overflow the stack. To refuse
those before it reads, tags, lengths, types and sides must be read here; what is then left for it is one line of numpy.
"""

import struct
import zlib
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
STORED_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
MATRIX_TYPES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
MATRIX, COMPRESSED = 14, 15
COMPLEX = 0x0800
MAX_BYTES = 1 << 28  # of all decompressed data; SVHN's largest file has 225 MB
MAX_ELEMENTS = 1000
MAX_SIDES = 32  # as many as numpy 1 can have


def load(content: bytes, wanted: tuple[str, ...]) -> dict[str, Array]:
    """The wanted matrices that the file holds; ValueError where the file is inconsistent."""
    if content[:10] == b"MATLAB 7.3" or content[:8] == b"\x89HDF\r\n\x1a\n":
        raise ValueError("it is version 7.3, which is HDF5; save it with -v7, or use the official file")
    order = {b"IM": "<", b"MI": ">"}.get(content[126:128])
    if order is None:
        raise ValueError("it has no MATLAB header")
    found, left = {}, MAX_BYTES
    for outer, packed in _elements(memoryview(content)[128:], order):
        kind, body = outer, packed
        if outer == COMPRESSED:
            unpacked = _decompress(packed, left)
            left -= len(unpacked)
            kind, body = next(_elements(memoryview(unpacked), order), (0, body))
        if kind == MATRIX:
            name, array = _matrix(body, order, wanted)
            if array is not None:
                found[name] = array
    return found


def _decompress(content: memoryview, limit: int) -> bytes:
    unpacker = zlib.decompressobj()
    unpacked = unpacker.decompress(content, max(limit, 1))
    if not unpacker.eof:
        raise ValueError("a packed matrix has no end, or unpacks to more than any official one")
    return unpacked


def _elements(content: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Type and bytes of each element."""
    place = 0
    for _ in range(MAX_ELEMENTS):
        if place >= len(content):
            return
        if place + 8 > len(content):
            raise ValueError("it ends inside a tag")
        first, length = struct.unpack_from(f"{order}II", content, place)
        if first >> 16:  # a small element: type, length and up to four bytes within the tag
            kind, length, start, after = first & 0xFFFF, first >> 16, place + 4, place + 8
            if length > 4:
                raise ValueError("a small element is too long")
        else:
            kind, start = first, place + 8
            after = start + length + (-length % 8 if kind != COMPRESSED else 0)
        if start + length > len(content):
            raise ValueError(f"an element must have {length} bytes, but {len(content) - start} are left")
        yield kind, content[start : start + length]
        place = after
    raise ValueError(f"it has more than {MAX_ELEMENTS} elements")


def _matrix(body: memoryview, order: str, wanted: tuple[str, ...]) -> tuple[str, Array | None]:
    """Name and numbers, in MATLAB's memory order: the first dimension varies fastest."""
    parts = [part for _, part in zip(range(4), _elements(body, order), strict=False)]
    if len(parts) < 3:
        raise ValueError("a matrix must have flags, sides and a name")
    (_, flags), (_, sides), (_, label) = parts[:3]
    (flag,) = struct.unpack_from(f"{order}I", flags)
    name, kept = bytes(label).decode("latin1"), MATRIX_TYPES.get(flag & 0xFF)
    if name not in wanted or kept is None or flag & COMPLEX:
        return name, None
    kind, numbers = parts[3] if len(parts) == 4 else (0, label)
    if kind not in STORED_TYPES:
        raise ValueError(f"{name} has no numbers of a known type")
    if len(sides) > 4 * MAX_SIDES:  # before they are multiplied: a hundred thousand take 3.5 s, a million over a minute
        raise ValueError(f"{name} must have at most {MAX_SIDES} sides, got {len(sides) // 4}")
    shape = tuple(int(side) for side in np.frombuffer(sides, dtype=f"{order}i4"))
    stored = np.dtype(f"{order}{STORED_TYPES[kind]}")
    if min(shape, default=-1) < 0 or prod(shape) * stored.itemsize != len(numbers):
        raise ValueError(f"{name} has sides {shape}, which do not fit its {len(numbers)} bytes")
    if prod(shape) * np.dtype(kept).itemsize > MAX_BYTES:
        raise ValueError(f"{name} has sides {shape}, more than any official matrix")
    return name, np.frombuffer(numbers, dtype=stored).reshape(shape, order="F").astype(kept, copy=False)
