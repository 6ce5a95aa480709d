"""The options of a training run, made from the declarations of the recipe's fields and the methods' settings.

    @recipe_options(after={"seed": "lr"})
    def command(seed: int = 0, **flags: Any) -> None: ...

has --lr, --seed and an option for every other field. One that is not given is None in `flags`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from inspect import Parameter, Signature, signature
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from flatmin_lab import methods
from flatmin_lab.cli.options import option, parse_settings
from flatmin_lab.recipes import optimizers
from flatmin_lab.recipes.fields import METHOD, NUMBERS, Flag, flags
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.recipes.user_files import FIELDS, located_name

Command = TypeVar("Command", bound=Callable[..., None])
# what stands after an option in the help, where the type would say little and take much of a narrow terminal
PLACEHOLDERS = {
    "normalise": "MEAN STD",
    **dict.fromkeys(("settings", "model_settings", "optimizer_settings"), "KEY=VALUE"),
}
OF_REQUEST = ("data", "method", "settings")  # `Request` has them beside the other fields


def recipe_options(
    *, after: Mapping[str, str], without: Collection[str] = (), recipe: type[Recipe] = Recipe
) -> Callable[[Command], Command]:
    """Give a command an option for each field of the recipe, beside its own parameters.

    Its own are listed in their order, or after the field that `after` names; one with the name of a field replaces it.
    The command takes the others as keywords.
    """

    def give(command: Command) -> Command:
        known = {parameter.name: parameter for parameter in _parameters(recipe) if parameter.name not in without}
        names, place = list(known), len(known)
        for parameter in signature(command).parameters.values():
            name = parameter.name
            if parameter.kind is Parameter.VAR_KEYWORD:
                continue
            if name in names:
                place = names.index(name)
            else:
                place = names.index(after[name]) + 1 if name in after else place
                names.insert(place, name)
            known[name], place = parameter.replace(kind=Parameter.KEYWORD_ONLY), place + 1
        vars(command)["__signature__"] = Signature([known[name] for name in names])
        command.__annotations__ = {name: known[name].annotation for name in names}
        return command

    return give


def _parameters(recipe: type[Recipe]) -> Iterator[Parameter]:
    """Before --set, which takes any setting of the method, those that have an option of their own."""
    of_amp = signature(methods.amp).parameters
    for name, flag in flags(recipe).items():
        if name == "settings":
            for setting, text in methods.FLAGS.items():
                yield _parameter(setting, Flag(of_amp[setting].annotation, text, METHOD))
        yield _parameter(name, flag, "--set" if name == "settings" else None)


def _parameter(name: str, flag: Flag, option_name: str | None = None) -> Parameter:
    """The option is named, so that a bool has no --no-… beside it, unless one would want that."""
    usual = f"--{name.replace('_', '-')}"
    usual = f"{usual}/--no-{usual[2:]}" if flag.default is True else usual
    info = option(flag.text, option_name or usual, panel=flag.panel, metavar=PLACEHOLDERS.get(name))
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[_taken(flag.kind) | None, info])


def _taken(kind: Any) -> Any:
    """What an option takes: a word for a choice or for numbers with commas, KEY=VALUE for settings.

    What can be a number or a word is taken as a word, and parsed later.

    >>> _taken(float | None), _taken(Literal["l2", "linf"]), _taken(tuple[float, ...]), _taken(tuple[int, int])
    (<class 'float'>, <class 'str'>, <class 'str'>, tuple[int, int])
    """
    if get_origin(kind) in (UnionType, Union):
        kind = next(one for one in reversed(get_args(kind)) if one is not type(None))
    if get_origin(kind) is Literal or kind == NUMBERS:
        return str
    return list[str] if get_origin(kind) is Mapping else kind


def recipe_changes(given: Mapping[str, Any], recipe: type[Recipe] = Recipe) -> dict[str, Any]:
    """The recipe's fields that the flags change, by name; a file of the user's own has its absolute path."""
    known = {name: flag for name, flag in flags(recipe).items() if given.get(name) is not None}
    changes = {name: given[name] for name in known if name not in OF_REQUEST}
    if changes.get("momentum") == 0:
        changes = {"nesterov": False, **changes}
    for name in changes.keys() & known.keys():
        if known[name].kind == NUMBERS:
            changes[name] = parse_numbers(changes.pop(name))
        elif get_origin(known[name].kind) is Mapping:
            changes[name] = parse_settings(changes.pop(name), f"--{name.replace('_', '-')}")
        elif name in FIELDS:
            changes[name] = located_name(name, changes[name])
    return changes


def method_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The method's settings: those with a flag of their own, and those of --set."""
    own = {name: given[name] for name in methods.FLAGS if given[name] is not None}
    if "epsilon" in own:
        own["epsilon"] = parse_radius(own["epsilon"])
    found = own | parse_settings(given["settings"])
    return {name: value for name, value in found.items() if methods.UNLISTED.get(name, ...) != value}


def check_used(given: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise if a flag was given that this recipe's schedule or optimizer does not use."""
    if given["milestones"] is not None and recipe.schedule != "multi_step":
        raise ValueError(f"--milestones belongs to the schedule multi_step, got {recipe.schedule}")
    for name in sorted(optimizers.SGD_FIELDS):
        if given[name] is not None and recipe.optimizer != "sgd":
            raise ValueError(
                f"--{name} belongs to the optimizer sgd, got {recipe.optimizer}; leave it out "
                f"(settings of other optimizers: --optimizer-settings KEY=VALUE)"
            )


def parse_radius(text: str) -> float | str:
    """A number, or the word auto.

    >>> parse_radius("0.1"), parse_radius("auto")
    (0.1, 'auto')
    """
    if text == methods.AUTO:
        return text
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"--epsilon takes a number, or auto, got {text!r}") from error


def parse_numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.replace("x", ",").split(","))
    except ValueError as error:
        raise ValueError(f"numbers must be separated by commas, as in 0.5,0.75 or 3,32,32, got {text!r}") from error
