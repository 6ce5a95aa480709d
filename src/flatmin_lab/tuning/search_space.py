"""The search space of a tuning: a method's hyper-parameters with their ranges, and what all trials share.

    amp                ε from 0.01 to 2 and ζ from 0.05 to 5
    rmp                ε from 0.01 to 2
    label_smoothing    smoothing from 0.01 to 0.5
    flooding           level from 0.001 to 0.5
    mixup              alpha from 0.05 to 5
    adversarial        ε from 0.25/255 to 16/255
    dropout            rate from 0.01 to 0.5
    any, if named      lr from 0.005 to 1, weight_decay from 1e-5 to 1e-2; ERM has nothing else

The ranges of lr and weight_decay are SGD's, whose defaults are 0.1 and 1e-4; another optimizer's lie around its own
defaults in the same way. So AdamW's decay, which is decoupled from the gradient, is searched from 0.001 to 1. An
optimizer whose default is no decay adds it to the gradient as SGD does, and has SGD's range.

Smoothing and rate are drawn uniformly, all others log-uniformly. Values are rounded to three digits: more would mean
nothing and be harder to read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from flatmin_lab.methods import AUTO, METHODS, OF_AUTO, resolve_settings
from flatmin_lab.recipes import optimizers
from flatmin_lab.recipes.recipe import Recipe, default_of

Measure = Literal["error", "nll"]
PIXEL = 1 / 255  # one level of an 8-bit image: adversarial radii are counted in it
DECOUPLED = "decoupled_weight_decay"  # a setting of torch's Adam, NAdam and RAdam, with which they decay as AdamW
SYMBOLS = {"epsilon": "ε", "inner_lr": "ζ"}


@dataclass(frozen=True, kw_only=True)
class HyperParameter:
    """A number of the method or the recipe, searched from `low` to `high`; rounded and shown in multiples of `unit`."""

    name: str
    low: float
    high: float
    log: bool = True
    unit: float = 1.0

    @property
    def symbol(self) -> str:
        return SYMBOLS.get(self.name, self.name)

    def rounded(self, value: float) -> float:
        return float(f"{value / self.unit:.3g}") * self.unit

    def formatted(self, value: float) -> str:
        """A value as it is shown.

        >>> HYPER_PARAMETERS["adversarial"][0].formatted(2 / 255)
        '2/255'
        """
        return f"{value / self.unit:.3g}{'/255' if self.unit == PIXEL else ''}"


RADIUS = HyperParameter(name="epsilon", low=0.01, high=2.0)
HYPER_PARAMETERS: dict[str, tuple[HyperParameter, ...]] = {
    "erm": (),
    "amp": (RADIUS, HyperParameter(name="inner_lr", low=0.05, high=5.0)),
    "rmp": (RADIUS,),
    "label_smoothing": (HyperParameter(name="smoothing", low=0.01, high=0.5, log=False),),
    "flooding": (HyperParameter(name="level", low=0.001, high=0.5),),
    "mixup": (HyperParameter(name="alpha", low=0.05, high=5.0),),
    "adversarial": (HyperParameter(name="epsilon", low=0.25 * PIXEL, high=16 * PIXEL, unit=PIXEL),),
    "dropout": (HyperParameter(name="rate", low=0.01, high=0.5, log=False),),
}
RECIPE_FIELDS = (  # of every recipe, whatever the method
    HyperParameter(name="lr", low=0.005, high=1.0),
    HyperParameter(name="weight_decay", low=1e-5, high=1e-2),
)


def hyper_parameters_of(
    method: str,
    names: Sequence[str] | None = None,
    *,
    fixed: Sequence[str] = (),
    optimizer: str = "sgd",
    optimizer_settings: Mapping[str, Any] | None = None,
) -> tuple[HyperParameter, ...]:
    """The method's own, or the named ones, without those that are fixed.

    >>> [parameter.name for parameter in hyper_parameters_of("amp")]
    ['epsilon', 'inner_lr']
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose from {', '.join(METHODS)}")
    known = {parameter.name: parameter for parameter in (*HYPER_PARAMETERS[method], *RECIPE_FIELDS)}
    if names is None:
        chosen = [parameter.name for parameter in HYPER_PARAMETERS[method] if parameter.name not in fixed]
    else:
        chosen = list(dict.fromkeys(names))
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"--knobs of {method} are {', '.join(known)}, got {', '.join(unknown)}")
    if twice := [name for name in chosen if name in fixed]:
        raise ValueError(
            f"a number is either fixed or tuned, got {', '.join(twice)} as both; leave it out of one of them"
        )
    if not chosen:
        why = (
            "has no hyper-parameter of its own"
            if not HYPER_PARAMETERS[method]
            else "has all its hyper-parameters fixed"
        )
        raise ValueError(
            f"{method} {why}: there is nothing to tune; choose another --method, or --knobs lr,weight_decay"
        )
    own = _optimizer_defaults(optimizer, optimizer_settings or {})
    return tuple(_around(own[name], known[name]) if name in own else known[name] for name in chosen)


def _optimizer_defaults(optimizer: str, settings: Mapping[str, Any]) -> dict[str, float]:
    """The optimizer's rate and weight decay, where it has any by default.

    >>> _optimizer_defaults("adamw", {}), _optimizer_defaults("adam", {})
    ({'lr': 0.001, 'weight_decay': 0.01}, {'lr': 0.001})
    """
    found = optimizers.default_fields(optimizer)
    if settings.get(DECOUPLED):
        found["weight_decay"] = optimizers.default_fields("adamw")["weight_decay"]
    return {name: value for name, value in found.items() if value > 0}


def _around(own: float, parameter: HyperParameter) -> HyperParameter:
    """The range around an optimizer's own default, as SGD's is around its own.

    >>> lr = _around(0.001, RECIPE_FIELDS[0])
    >>> lr.low, lr.high
    (5e-05, 0.01)
    """
    ratio = own / default_of(parameter.name)
    return replace(
        parameter, low=parameter.rounded(ratio * parameter.low), high=parameter.rounded(ratio * parameter.high)
    )


def without_auto(
    settings: Mapping[str, Any], tuned: Sequence[HyperParameter], *, given: Sequence[str] = ()
) -> tuple[dict[str, Any], str]:
    """The settings of every trial, and which were dropped: a radius that is tuned is not matched to held-out data.

    Settings of a matched radius are dropped with it, but what the user has given stays, and is refused.

    >>> without_auto({"epsilon": "auto", "release": 0.5, "inner_lr": 2.0}, hyper_parameters_of("amp", ["epsilon"]))
    ({'inner_lr': 2.0}, 'epsilon auto, release 0.5')
    """
    found = dict(settings)
    if found.get("epsilon") != AUTO or "epsilon" not in {parameter.name for parameter in tuned}:
        return found, ""
    names = [name for name in ("epsilon", *OF_AUTO) if name in found and name not in given]
    return found, ", ".join(f"{name} {found.pop(name)}" for name in names)


def describe_settings(method: str, settings: Mapping[str, float]) -> str:
    """As in: "ε 0.3, ζ 1"."""
    known = {parameter.name: parameter for parameter in (*HYPER_PARAMETERS[method], *RECIPE_FIELDS)}
    return ", ".join(f"{known[name].symbol} {known[name].formatted(value)}" for name, value in settings.items())


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What a tuning searches, and how. All trials have one seed: the same split, initial weights and order."""

    recipe: Recipe  # of every trial, but for the hyper-parameters
    hyper_parameters: tuple[HyperParameter, ...]
    measure: Measure = "error"  # of the validation split after the last epoch
    seed: int = 0
    pruning: bool = True
    asked: Mapping[str, Any] = field(default_factory=dict)  # fields of the recipe that the user set

    def __post_init__(self) -> None:
        if self.measure not in get_args(Measure):
            raise ValueError(f"unknown measure {self.measure!r}; choose from {', '.join(get_args(Measure))}")
        if not self.recipe.validation:
            raise ValueError("a tuning must not use the test set, got a recipe without validation=True")
        if self.recipe.is_matched and "epsilon" in self.ranges():
            raise ValueError("epsilon is either auto or tuned, got both; leave it out of the recipe's settings")

    def trial_recipe(self, settings: Mapping[str, float]) -> Recipe:
        """The recipe with these values of the hyper-parameters."""
        own, fields = split_settings(settings)
        changes: dict[str, Any] = dict(fields)
        return replace(self.recipe, settings={**self.recipe.settings, **own}, **changes)

    @property
    def has_erm_trial(self) -> bool:
        """Does ERM have a trial of its own? It is the baseline of every other method."""
        return self.recipe.method != "erm"

    def erm_recipe(self) -> Recipe:
        """The recipe of ERM's trial: the same in everything but the method."""
        return replace(self.recipe, method="erm", settings={})

    def default_settings(self) -> dict[str, float]:
        """The values without tuning, where they are within the ranges: the method's first trial."""
        known = {**self.recipe.as_json(), **resolve_settings(self.recipe.method, self.recipe.settings)}
        return {p.name: known[p.name] for p in self.hyper_parameters if p.low <= known[p.name] <= p.high}

    def identity(self, data_sha256: str) -> dict[str, Any]:
        """What must be the same for a tuning to be resumed."""
        return {
            "recipe": self.recipe.as_json(),
            "space": self.ranges(),
            "measure": self.measure,
            "seed": self.seed,
            "pruning": self.pruning,
            "data_sha256": data_sha256,
        }

    def ranges(self) -> dict[str, dict[str, Any]]:
        keys = ("low", "high", "log")
        return {p.name: {key: asdict(p)[key] for key in keys} for p in self.hyper_parameters}


def split_settings(settings: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Those of the method, and those that are fields of the recipe."""
    names = {parameter.name for parameter in RECIPE_FIELDS}
    own = {name: value for name, value in settings.items() if name not in names}
    return own, {name: value for name, value in settings.items() if name in names}
