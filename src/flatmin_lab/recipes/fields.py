"""A field of the recipe is declared once: what it is, where the command's help lists it, which values it takes.

    lr: float = flag(0.1, "Peak learning rate.", POSITIVE)

From this line the recipe checks the value, `flatmin train` and `flatmin tune` have the option --lr, and the reference
has a row.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import Field, field, fields
from functools import cache
from typing import Any, NamedTuple, TypeVar

TRAINING, METHOD, DEVICE = "Training", "Method", "Device and speed"  # panels of the command's help
DECLARED = "declared"  # the key of the metadata
NUMBERS = tuple[float, ...]  # the type of a field whose option takes numbers with commas
T = TypeVar("T")


class Rule(NamedTuple):
    """What a value must be, and whether it is; it may depend on the other fields."""

    text: str
    holds: Callable[[Any, Any], bool]  # of the value and the recipe


class Declaration(NamedTuple):
    """What is declared about a field; without a text it has no option."""

    text: str
    rules: tuple[Rule, ...]
    choices: tuple[str, ...]
    otherwise: str | None  # what the command takes where the option is not given; None: the field's default
    panel: str | None
    after: str | None  # the field that the help lists before it; None: the order of the fields

    @property
    def help(self) -> str:
        return self.text if self.otherwise is None else f"{self.text}; default: {self.otherwise}."


Fields = tuple[tuple[Field[Any], Declaration], ...]


class Flag(NamedTuple):
    """An option of the command: what it sets, its help, and its panel there."""

    kind: Any  # the type of the field
    text: str
    panel: str | None
    default: Any = None  # the field's


POSITIVE = Rule("above 0 and finite", lambda value, _: 0 < value < float("inf"))
NOT_NEGATIVE = Rule("at least 0 and finite", lambda value, _: 0 <= value < float("inf"))
FRACTION = Rule("at least 0 and below 1", lambda value, _: 0 <= value < 1)
POSITIVE_INT = Rule(
    "a whole number of at least 1",
    lambda value, _: isinstance(value, int) and not isinstance(value, bool) and value >= 1,
)
RISING = Rule(
    "rising shares between 0 and 1",
    lambda shares, _: list(shares) == sorted(set(shares)) and all(0 < share < 1 for share in shares),
)


def declare(
    text: str,
    *rules: Rule,
    choices: Iterable[str] = (),
    otherwise: str | None = None,
    panel: str | None = TRAINING,
    after: str | None = None,
) -> dict[str, Declaration]:
    """The metadata of a field; the text begins with the choices, if there are any."""
    known = tuple(choices)
    return {DECLARED: Declaration(", ".join(known) + text, rules, known, otherwise, panel, after)}


def flag(default: T, text: str, *rules: Rule, **more: Any) -> T:
    """A field with an option; typed as its default, as `dataclasses.field` is."""
    return field(default=default, metadata=declare(text, *rules, **more))


def check(recipe: object) -> None:
    """Raise if a value is not one of its choices, or breaks a rule. A field that is None by default may be None."""
    kind: type = type(recipe)
    known = _declared(kind)
    for f, declared in known:
        if declared.choices and (value := getattr(recipe, f.name)) not in declared.choices:
            raise ValueError(f"unknown {f.name} {value!r}; choose from {', '.join(declared.choices)}")
    for f, declared in known:
        value = getattr(recipe, f.name)
        for rule in () if value is None and f.default is None else declared.rules:
            if not rule.holds(value, recipe):
                raise ValueError(f"{f.name} must be {rule.text}, got {value}")


def flags(recipe: type) -> dict[str, Flag]:
    """By the names of the fields, in the order of the help."""
    listed = _after(None, _declared(recipe))
    return {f.name: Flag(f.type, declared.help, declared.panel, f.default) for f, declared in listed}


def descriptions(recipe: type) -> dict[str, str]:
    """What the reference says about the fields: their texts and rules."""
    return {
        f.name: " ".join(filter(None, [declared.text, *(f"Must be {rule.text}." for rule in declared.rules)]))
        for f, declared in _declared(recipe)
    }


@cache
def _declared(recipe: type) -> Fields:
    return tuple((f, f.metadata[DECLARED]) for f in fields(recipe) if DECLARED in f.metadata)


def _after(name: str | None, known: Fields) -> Iterator[tuple[Field[Any], Declaration]]:
    """The fields with an option that are listed after that one, each with those that are listed after it."""
    for f, declared in known:
        if declared.text and declared.after == name:
            yield f, declared
            yield from _after(f.name, known)
