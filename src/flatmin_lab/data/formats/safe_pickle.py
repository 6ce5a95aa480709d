"""The official CIFAR batches, which are pickles, read without running a pickle.

A pickle is a program for a small stack machine, and loading one calls whatever functions it names. Here the program is
interpreted instruction by instruction, and only those that build numbers, strings, lists, dictionaries and numpy arrays
are known. It never calls anything: what numpy writes to rebuild an array (its shape, type and bytes) is checked, and
the bytes are viewed as an array. Anything else is refused where it is named.

Not pickle.Unpickler with a `find_class` that allows these names alone (tried with Python 3.11 and numpy 2.4). It guards
what is named, not what the instructions do: 300 kB of tuples within tuples as a key end the process, a key of 308 bytes
that doubles 60 times is hashed for ever, a place 2²⁸ in the memo takes 4 GB, whatever the names stand for. With numpy's
own functions behind them 177 bytes make an array of pointers out of any numbers, and 62 alter numpy itself.
"""

import math
import pickletools
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
# what numpy and Python write to rebuild an array; the names of numpy 1 and 2
MEANINGS = {
    "numpy ndarray": "array",
    "numpy dtype": "kind",
    "numpy.core.multiarray _reconstruct": "empty array",
    "numpy._core.multiarray _reconstruct": "empty array",
    "numpy.core.numeric _frombuffer": "array from bytes",
    "numpy._core.numeric _frombuffer": "array from bytes",
    "_codecs encode": "bytes from text",
    "__builtin__ bytes": "no bytes",
    "builtins bytes": "no bytes",
}


class ForbiddenError(Exception):
    """The pickle asks for something other than arrays and plain values."""


class GlobalStandIn(NamedTuple):
    """Stands for a function or class that the pickle names; it can only be used as `_call` allows."""

    meaning: str


class DtypeStandIn:
    """Stands for an integer numpy.dtype."""

    def __init__(self, code: Any) -> None:
        text = code.decode("latin1") if isinstance(code, bytes) else code
        if not isinstance(text, str) or text[:1] not in ("u", "i") or text[1:] not in ("1", "2", "4", "8"):
            raise ForbiddenError("arrays must hold whole numbers of 1 to 8 bytes")
        self.dtype: np.dtype[Any] = np.dtype(text)

    def build(self, state: Any) -> None:
        order = state[1].decode("latin1") if isinstance(state[1], bytes) else state[1]
        if order not in ("<", ">", "|", "="):
            raise ForbiddenError("an array's byte order must be known")
        self.dtype = np.dtype(f"{order}{self.dtype.str[1:]}".replace("|", "="))


class ArrayStandIn:
    """Stands for a numpy.ndarray; holds one once shape, type and bytes are known and consistent."""

    def __init__(self) -> None:
        self.array: Array = np.zeros(0, dtype=np.uint8)

    def build(self, state: Any) -> None:
        _, shape, kind, fortran, content = state
        self.fill(content, kind, shape, "F" if fortran else "C")

    def fill(self, content: Any, kind: Any, shape: Any, order: Any = "C") -> "ArrayStandIn":
        sides = isinstance(shape, tuple) and len(shape) <= 4 and all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
        if not (isinstance(kind, DtypeStandIn) and sides and isinstance(content, bytes | bytearray)):
            raise ForbiddenError("an array must come with its shape, type and bytes")
        if len(content) != math.prod(shape) * kind.dtype.itemsize:
            raise ForbiddenError(
                f"an array of shape {shape} must come with {math.prod(shape) * kind.dtype.itemsize} bytes"
            )
        self.array = np.frombuffer(content, dtype=kind.dtype).reshape(shape, order="F" if order == "F" else "C")
        return self


def _call(what: Any, arguments: Any) -> Any:
    """The value that calling `what` would give."""
    if not isinstance(what, GlobalStandIn) or not isinstance(arguments, tuple):
        raise ForbiddenError("it calls something that is not a function")
    if what.meaning == "kind":
        return DtypeStandIn(arguments[0])
    if what.meaning == "empty array":
        return ArrayStandIn()
    if what.meaning == "array from bytes" and len(arguments) in (3, 4):
        return ArrayStandIn().fill(*arguments)
    if what.meaning == "no bytes" and not arguments:
        return b""
    if what.meaning == "bytes from text" and isinstance(arguments[0], str) and arguments[1] in ("latin1", b"latin1"):
        return arguments[0].encode("latin1")
    raise ForbiddenError(f"it calls {what.meaning} in a way that makes no array")


class _Machine:
    """A stack, a memo, and a method for every supported instruction."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.stack: list[Any] = []
        self.marks: list[int] = []  # the stack's height at each mark
        self.memo: dict[int, Any] = {}
        self.encoded = 0  # bytes made from text; more than there is text means one text was reused over and over

    def run(self) -> Any:
        for opcode, argument, _ in pickletools.genops(self.content):
            name = opcode.name
            if name == "STOP":
                return self.stack.pop()
            if name in PUSHED:
                self.stack.append(argument)
            elif name in CONSTANTS:
                self.stack.append(CONSTANTS[name])
            elif name in TUPLES:
                self.stack.append(tuple(self.last(TUPLES[name])))
            elif name in AS_BYTES:  # a str of Python 2
                self.stack.append(str(argument).encode("latin1"))
            elif name not in IGNORED:
                action = getattr(self, f"do_{name.lower().removeprefix('long_bin').removeprefix('bin')}", None)
                if action is None:
                    raise ForbiddenError(f"it holds the instruction {name}")
                action(argument)
        raise ValueError("it has no end")

    def since_mark(self) -> list[Any]:
        place = self.marks.pop()
        items = self.stack[place:]
        del self.stack[place:]
        return items

    def last(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        if len(self.stack) - count < (self.marks[-1] if self.marks else 0):
            raise ValueError("its stack is too short")
        del self.stack[-count:]
        return items

    def push_global(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):  # not shown: 300 bytes can double to 2⁶⁰ brackets
            raise ForbiddenError("it asks for something by what is not a name, but a batch may hold only arrays")
        meaning = MEANINGS.get(f"{module} {name}")
        if meaning is None:
            raise ForbiddenError(f"it asks for {module:.99}.{name:.99}, but a batch may hold only arrays")
        self.stack.append(GlobalStandIn(meaning))

    def put_items(self, pairs: list[Any]) -> None:
        """Into the dictionary at the top of the stack, as `add_items` into a list."""
        target = self.stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            raise ForbiddenError("it sets items of something that is not a dictionary")
        if not all(isinstance(key, str | bytes) for key in pairs[::2]):
            raise ForbiddenError("a dictionary's keys must be strings")
        target.update(zip(pairs[::2], pairs[1::2], strict=True))

    def add_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise ForbiddenError("it appends to something that is not a list")
        target.extend(items)

    def do_mark(self, _: Any) -> None:
        self.marks.append(len(self.stack))

    def do_put(self, index: Any) -> None:
        self.memo[index] = self.stack[-1]

    def do_memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def do_get(self, index: Any) -> None:
        self.stack.append(self.memo[index])

    def do_empty_dict(self, _: Any) -> None:
        self.stack.append({})

    def do_dict(self, _: Any) -> None:
        pairs = self.since_mark()
        self.stack.append({})
        self.put_items(pairs)

    def do_empty_list(self, _: Any) -> None:
        self.stack.append([])

    def do_list(self, _: Any) -> None:
        self.stack.append(self.since_mark())

    def do_tuple(self, _: Any) -> None:
        self.stack.append(tuple(self.since_mark()))

    def do_setitem(self, _: Any) -> None:
        self.put_items(self.last(2))

    def do_setitems(self, _: Any) -> None:
        self.put_items(self.since_mark())

    def do_append(self, _: Any) -> None:
        self.add_items(self.last(1))

    def do_appends(self, _: Any) -> None:
        self.add_items(self.since_mark())

    def do_global(self, words: Any) -> None:
        self.push_global(*words.split(" ", 1))

    def do_stack_global(self, _: Any) -> None:
        self.push_global(*self.last(2))

    def do_reduce(self, _: Any) -> None:
        made = _call(*self.last(2))
        self.encoded += len(made) if isinstance(made, bytes) else 0
        if self.encoded > len(self.content):
            raise ForbiddenError("it makes more bytes than it holds")
        self.stack.append(made)

    def do_build(self, _: Any) -> None:
        (state,) = self.last(1)
        if not isinstance(self.stack[-1], DtypeStandIn | ArrayStandIn) or not isinstance(state, tuple):
            raise ForbiddenError("it sets the state of something that is not an array")
        self.stack[-1].build(state)


IGNORED = ("PROTO", "FRAME")
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
AS_BYTES = ("STRING", "BINSTRING", "SHORT_BINSTRING")
PUSHED = (
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    "BYTEARRAY8",
)


def load(content: bytes, what: str) -> dict[str, Any]:
    """The dictionary of a CIFAR batch: its keys as str, arrays as numpy's, strings of Python 2 as bytes."""
    try:
        found = _Machine(content).run()
    except ForbiddenError as error:
        raise ValueError(f"{what} was refused: {error}. Use the official file") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{what} is damaged or cut short ({error!s:.200}); unpack or fetch it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{what} must hold a dictionary, got {type(found).__name__}; use the official file")
    plain = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in found.items()}
    return {key: value.array if isinstance(value, ArrayStandIn) else value for key, value in plain.items()}
