"""Docstrings as Markdown. They are written to be read as they stand, in a terminal and in the file:

    an indented block           an equation or code: Markdown has it so too
    lines that begin with >>>   an example, which becomes a block of code
    a word, spaces, a text      a list of arguments, which becomes a table; indented and in columns, likewise

Everything else is left as it is. And signatures as they are meant:

    *misplaced          catches a wrong call to explain it: not shown
    a NamedTuple        has the signature that griffe gives to dataclasses
    fields of both      stand in the signature, and in a table where a comment or a line says more; none has a heading
    fields of a recipe  have what they are declared to be: their default there, their text and rules in the table
"""

import re
from collections.abc import Iterator
from typing import Any

import griffe

from flatmin_lab.recipes.fields import descriptions
from flatmin_lab.recipes.recipe import Recipe

ROW = re.compile(r"(\S+(?: \S+)*?) {2,}(\S.*)")
INDENTED = re.compile(r" {4,}\S")
COMMENT = re.compile(r"\S {2}# (.+)")
CATCHES = "misplaced"
RECIPE = f"{Recipe.__module__}.{Recipe.__name__}"


class PlainText(griffe.Extension):
    """Makes Markdown of every docstring, and signatures of records, before they are rendered."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if CATCHES in func.parameters:
            del func.parameters[CATCHES]

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """After griffe's own extension for dataclasses, which mkdocs.yml names first."""
        for record in _classes(pkg):
            if _is_named_tuple(record):
                _give_signature(record)
            elif "dataclass" not in record.labels:
                continue
            _show_defaults(record)
            _gather(record)


def markdown(text: str) -> str:
    """A docstring, paragraph by paragraph.

    >>> print(markdown("A sum.\\n\\n>>> 1 + 1\\n2"))
    A sum.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    return "\n\n".join(map(_paragraph, re.split(r"\n\s*\n", text.strip("\n"))))


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    if lines[0].startswith(">>>"):
        return "\n".join(["```pycon", *lines, "```"])
    if lines[0].startswith("    "):
        return _table([(_name(name), _plain(what)) for name, what in rows]) if (rows := _columns(lines)) else text
    if len(lines) > 1 and all(ROW.fullmatch(line) or INDENTED.match(line) for line in lines):
        return _table([(f"`{name}`", what) for name, what in _rows(lines)])
    return text


def _rows(lines: list[str]) -> list[tuple[str, str]]:
    """Names and texts; a line that is indented goes on with the text before it."""
    rows: list[tuple[str, str]] = []
    for line in lines:
        if found := None if INDENTED.match(line) else ROW.fullmatch(line):
            rows.append((found[1], found[2]))
        else:
            rows[-1] = (rows[-1][0], rows[-1][1] + " " + line.strip())
    return rows


def _columns(lines: list[str]) -> list[tuple[str, str]]:
    """The rows of an indented block whose texts begin in one column; none if it is anything else."""
    lines = [line[4:] for line in lines]
    first = ROW.fullmatch(lines[0])
    column = first.start(2) if first and len(lines) > 1 else 0
    begun = [line[:column].endswith("  ") and re.match(r"[^\s#]", line[column:]) for line in lines]
    return _rows(lines) if column and all(begun) else []


def _name(text: str) -> str:
    """Code, if it looks like it: `error`, `line`, `plane`, `loss = …`; not Theorem 1."""
    if all(re.fullmatch(r"[\w.]+", part) for part in text.split(", ")):
        return ", ".join(f"`{part}`" for part in text.split(", "))
    return f"`{text}`" if re.search(r'[=("]', text) else _plain(text)


def _plain(text: str) -> str:
    """What was a block, and so is no Markdown; a gap in it, but after a comma, parts two things."""
    text = re.sub(r" {2,}", " · ", re.sub(r"(?<=,) {2,}", " ", text))
    return re.sub(r"([\\`*_\[\]<>])", r"\\\1", text)


def _table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {what.replace('|', '&#124;')} |" for name, what in rows)])


def _classes(place: griffe.Module | griffe.Class) -> Iterator[griffe.Class]:
    for member in list(place.members.values()):
        if isinstance(member, griffe.Class):
            yield member
        if isinstance(member, griffe.Module | griffe.Class):
            yield from _classes(member)


def _is_named_tuple(record: griffe.Class) -> bool:
    return any(str(base) == "NamedTuple" for base in record.bases)


def _fields(record: griffe.Class) -> list[griffe.Attribute]:
    return [member for member in record.members.values() if isinstance(member, griffe.Attribute) and member.annotation]


def _give_signature(record: griffe.Class) -> None:
    kind: Any = griffe.ParameterKind.positional_or_keyword  # a str to mypy, before Python 3.11
    given = [field for field in _fields(record) if "property" not in field.labels]
    own = [griffe.Parameter(one.name, annotation=one.annotation, kind=kind, default=one.value) for one in given]
    parameters = griffe.Parameters(griffe.Parameter("self", kind=kind), *own)
    record.set_member("__init__", griffe.Function("__init__", parent=record, parameters=parameters, returns="None"))


def _show_defaults(record: griffe.Class) -> None:
    """Of fields that `flag(default, …)` makes."""
    for parameter in record.parameters:
        if isinstance(call := parameter.default, griffe.ExprCall) and str(call.function) == "flag":
            parameter.default = call.arguments[0]


def _gather(record: griffe.Class) -> None:
    """What is said of its fields, in a table of its docstring; what takes more than a line keeps its heading."""
    rows, declared = [], descriptions(Recipe) if record.path == RECIPE else {}
    for field in _fields(record):
        comment = declared.get(field.name) or " ".join(COMMENT.findall(field.source.splitlines()[0]))
        said = field.docstring.value if field.docstring else comment
        if "\n\n" not in said:
            record.del_member(field.name)
            rows += [(f"`{field.name}`", " ".join(said.split()))] * (bool(said) and not field.name.startswith("_"))
    if rows:
        text = record.docstring.value if record.docstring else ""
        record.docstring = griffe.Docstring(f"{text}\n\n{_table(rows)}".lstrip(), parent=record)
