"""What a tuning found: its trials, which of them is chosen, and the command that trains with its values.

The chosen trial is the method's finished one with the lowest measure on the validation split; among several with the
same one (an error is a whole number of images), the one with the lowest NLL. It is compared with ERM's trial,
which is never chosen itself.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from flatmin_lab import methods
from flatmin_lab.recipes.fields import NUMBERS, flags
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.tuning.erm_comparison import Comparison
from flatmin_lab.tuning.search_space import HyperParameter, Measure, hyper_parameters_of, split_settings

State = Literal["finished", "pruned", "failed", "running"]
RECIPE_FLAGS = flags(Recipe)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A run with one choice of the hyper-parameters; its measures are those after its last epoch."""

    number: int
    settings: Mapping[str, float]  # by the names of the hyper-parameters
    state: State
    value: float | None  # what is tuned for
    error: float | None
    nll: float | None
    epochs: int  # it was trained for
    seconds: float | None
    seed: int
    why: str = ""  # it failed
    is_erm: bool = False  # the baseline: it has no settings

    @property
    def rank(self) -> tuple[int, float, float, int]:
        """Sorts trials, the best first."""
        value, nll = (math.inf if number is None else number for number in (self.value, self.nll))
        return get_args(State).index(self.state), value, nll, self.number


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The content of tuning.json."""

    method: str
    data: str
    model: str
    epochs: int
    measure: Measure
    seed: int
    pruning: bool
    wanted: int  # number of trials
    space: Mapping[str, Mapping[str, Any]]
    asked: Mapping[str, Any]  # fields of the recipe that the user set
    recipe: Recipe  # of all trials, but for the hyper-parameters
    data_sha256: str
    study: str  # its name in Optuna's storage
    trials: Sequence[Trial]
    against_erm: Comparison | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def hyper_parameters(self) -> tuple[HyperParameter, ...]:
        """The hyper-parameters, with the ranges that were searched."""
        known = hyper_parameters_of(self.method, list(self.space))
        return tuple(replace(parameter, **self.space[parameter.name]) for parameter in known)

    def ranked(self) -> list[Trial]:
        """Finished trials, best first; then those that did not finish."""
        return sorted(self.trials, key=lambda trial: trial.rank)

    @property
    def chosen(self) -> Trial | None:
        """The best trial of the method, if one has finished."""
        return next((trial for trial in self.ranked() if trial.state == "finished" and not trial.is_erm), None)

    @property
    def erm(self) -> Trial | None:
        """ERM's trial; a tuning of ERM itself has none, nor does one that was started without it."""
        return next((trial for trial in self.trials if trial.is_erm), None)

    @property
    def is_better_than_erm(self) -> bool | None:
        """Whether the chosen trial is better by more than chance; None where that is not known."""
        if self.chosen is None or self.erm is None or self.erm.state != "finished":
            return None
        if (self.erm.value or 0.0) <= (self.chosen.value or 0.0):
            return False
        return None if self.against_erm is None else self.against_erm.is_better

    def count(self, *states: State) -> int:
        return sum(trial.state in states for trial in self.trials)

    @property
    def ended(self) -> int:
        return self.count("finished", "pruned", "failed")

    def settings(self) -> dict[str, Any]:
        """The method's settings, with the chosen values."""
        own, _ = split_settings(self._chosen_trial().settings)
        return {**self.recipe.settings, **own}

    def changes(self) -> dict[str, Any]:
        """The fields of a recipe with the chosen values, beside its data, method and settings."""
        _, chosen = split_settings(self._chosen_trial().settings)
        model = {"model": self.recipe.model, "model_settings": dict(self.recipe.model_settings)}
        return {**model, **self.asked, "epochs": self.epochs, **chosen}

    def command(self) -> list[str]:
        """The command that trains with the chosen values, on the whole training set."""
        words = ["flatmin", "train", "--data", self.data, "--method", self.method]
        _, chosen = split_settings(self._chosen_trial().settings)
        for name, value in {**self.asked, "epochs": self.epochs, **chosen}.items():
            words += _flag(name, value) if name in RECIPE_FLAGS else []
        for name, value in self.settings().items():
            words += _flag(name, value) if name in methods.FLAGS else ["--set", f"{name}={_as_text(value)}"]
        return words

    def _chosen_trial(self) -> Trial:
        if self.chosen is None:
            raise ValueError(
                f"no trial of {self.method} in this tuning has finished; resume it with the same `flatmin tune`"
            )
        return self.chosen

    def as_json(self) -> dict[str, Any]:
        apart = ("recipe", "trials", "against_erm", "facts")
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in apart}
        compared = self.against_erm and {**asdict(self.against_erm), "is_better": self.against_erm.is_better}
        chosen = self.chosen and {"trial": self.chosen.number, "settings": self.chosen.settings}
        trials = [asdict(trial) for trial in self.trials]
        found = {"chosen": chosen, "against_erm": compared, "trials": trials}
        return {**values, **found, "recipe": self.recipe.as_json(), **self.facts}


def _flag(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        on_by_default = name in RECIPE_FLAGS and RECIPE_FLAGS[name].default is True
        return [flag] if value else [f"--no-{flag[2:]}"] if on_by_default else []
    if isinstance(value, Mapping):
        return [word for key, one in value.items() for word in (flag, f"{key}={_as_text(one)}")]
    parts = [_as_text(part) for part in (value if isinstance(value, list | tuple) else [value])]
    has_commas = name in RECIPE_FLAGS and RECIPE_FLAGS[name].kind == NUMBERS
    return [flag, *([",".join(parts)] if has_commas else parts)]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
