"""What can be tuned of a method, where it is looked for, and what all trials of a tuning share.

    amp                ε from 0.01 to 2 and ζ from 0.05 to 5
    rmp                ε from 0.01 to 2
    label_smoothing    smoothing from 0.01 to 0.5
    flooding           level from 0.001 to 0.5
    mixup              alpha from 0.05 to 5
    adversarial        ε from 0.25/255 to 16/255
    dropout            rate from 0.01 to 0.5
    any, if named      lr from 0.005 to 1, weight_decay from 1e-5 to 1e-2; ERM has nothing else

Shares (smoothing, rate) are drawn evenly, everything else by its logarithm. Drawn numbers have three digits: more would
mean nothing, and fewer are easier to say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from flatmin_lab.methods import METHODS, resolve_settings
from flatmin_lab.recipes.recipe import Recipe

Measure = Literal["error", "nll"]
PIXEL = 1 / 255
SIGNS = {"epsilon": "ε", "inner_lr": "ζ"}


@dataclass(frozen=True, kw_only=True)
class Knob:
    """A number of the method, or of the recipe: from `low` to `high`; `unit` is what its digits are counted in."""

    name: str
    low: float
    high: float
    log: bool = True
    unit: float = 1.0

    @property
    def sign(self) -> str:
        return SIGNS.get(self.name, self.name)

    def rounded(self, value: float) -> float:
        return float(f"{value / self.unit:.3g}") * self.unit

    def words(self, value: float) -> str:
        """Its number as it is shown.

        >>> KNOBS["adversarial"][0].words(2 / 255)
        '2/255'
        """
        return f"{value / self.unit:.3g}{'/255' if self.unit == PIXEL else ''}"


RADIUS = Knob(name="epsilon", low=0.01, high=2.0)
KNOBS: dict[str, tuple[Knob, ...]] = {
    "erm": (),
    "amp": (RADIUS, Knob(name="inner_lr", low=0.05, high=5.0)),
    "rmp": (RADIUS,),
    "label_smoothing": (Knob(name="smoothing", low=0.01, high=0.5, log=False),),
    "flooding": (Knob(name="level", low=0.001, high=0.5),),
    "mixup": (Knob(name="alpha", low=0.05, high=5.0),),
    "adversarial": (Knob(name="epsilon", low=0.25 * PIXEL, high=16 * PIXEL, unit=PIXEL),),
    "dropout": (Knob(name="rate", low=0.01, high=0.5, log=False),),
}
FIELDS = (Knob(name="lr", low=0.005, high=1.0), Knob(name="weight_decay", low=1e-5, high=1e-2))  # of every recipe


def knobs_of(method: str, names: Sequence[str] | None = None, *, fixed: Sequence[str] = ()) -> tuple[Knob, ...]:
    """The method's own, or those that are named; not those that are fixed.

    >>> [knob.name for knob in knobs_of("amp")]
    ['epsilon', 'inner_lr']
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose from {', '.join(METHODS)}")
    known = {knob.name: knob for knob in (*KNOBS[method], *FIELDS)}
    if names is None:
        chosen = [knob.name for knob in KNOBS[method] if knob.name not in fixed]
    else:
        chosen = list(dict.fromkeys(names))
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"--knobs of {method} are {', '.join(known)}, got {', '.join(unknown)}")
    if twice := [name for name in chosen if name in fixed]:
        raise ValueError(f"a number is fixed or tuned, got {', '.join(twice)} as both; leave it out of one of them")
    if not chosen:
        why = "has no knob of its own" if not KNOBS[method] else "has all its knobs fixed"
        raise ValueError(
            f"{method} {why}: there is nothing to tune; choose another --method, or --knobs lr,weight_decay"
        )
    return tuple(known[name] for name in chosen)


def in_words(method: str, settings: Mapping[str, float]) -> str:
    """As in: ε 0.3, ζ 1."""
    known = {knob.name: knob for knob in (*KNOBS[method], *FIELDS)}
    return ", ".join(f"{known[name].sign} {known[name].words(value)}" for name, value in settings.items())


@dataclass(frozen=True, kw_only=True)
class Search:
    """A tuning before its first trial. All trials have one seed: the same split, first weights and order."""

    recipe: Recipe  # of every trial, but for the knobs
    knobs: tuple[Knob, ...]
    measure: Measure = "error"  # of the validation split after the last epoch
    seed: int = 0
    pruning: bool = True
    asked: Mapping[str, Any] = field(default_factory=dict)  # the fields of the recipe that do not follow from its data

    def __post_init__(self) -> None:
        if self.measure not in get_args(Measure):
            raise ValueError(f"unknown measure {self.measure!r}; choose from {', '.join(get_args(Measure))}")
        if not self.recipe.validation:
            raise ValueError("a tuning must not look at the test set, got a recipe without validation=True")

    def trial(self, settings: Mapping[str, float]) -> Recipe:
        """With these numbers in place of the knobs."""
        own, fields = apart(settings)
        changes: dict[str, Any] = dict(fields)
        return replace(self.recipe, settings={**self.recipe.settings, **own}, **changes)

    def usual(self) -> dict[str, float]:
        """What would be trained without tuning, as far as it is looked for: the first trial."""
        known = {**self.recipe.as_json(), **resolve_settings(self.recipe.method, self.recipe.settings)}
        return {knob.name: known[knob.name] for knob in self.knobs if knob.low <= known[knob.name] <= knob.high}

    def identity(self, data_sha256: str) -> dict[str, Any]:
        """In what a tuning that is gone on with must agree."""
        return {
            "recipe": self.recipe.as_json(),
            "space": self.space(),
            "measure": self.measure,
            "seed": self.seed,
            "pruning": self.pruning,
            "data_sha256": data_sha256,
        }

    def space(self) -> dict[str, dict[str, Any]]:
        keys = ("low", "high", "log")
        return {knob.name: {key: asdict(knob)[key] for key in keys} for knob in self.knobs}


def apart(settings: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Settings of the method, and fields of the recipe."""
    names = {knob.name for knob in FIELDS}
    own = {name: value for name, value in settings.items() if name not in names}
    return own, {name: value for name, value in settings.items() if name in names}
