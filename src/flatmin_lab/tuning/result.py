"""What a tuning found: its trials, which of them is chosen, and what trains with it.

The chosen trial is the finished one with the lowest measure on the validation split; where several have it (an error is
a whole number of pictures), the one of them with the lowest NLL.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.tuning.search_space import Knob, Measure, apart, knobs_of

State = Literal["finished", "pruned", "failed", "running"]
FLAGS = ("epsilon", "inner_lr", "inner_iter", "ball", "norm")  # settings with a flag of their own
FOLLOWING = ("nesterov",)  # fields without a flag: this follows from the momentum


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A training with one choice of the knobs; its measures are those after its last epoch."""

    number: int
    settings: Mapping[str, float]  # by the knobs' names
    state: State
    value: float | None  # what is tuned for
    error: float | None
    nll: float | None
    epochs: int  # that it was trained
    seconds: float | None
    seed: int
    why: str = ""  # it failed

    @property
    def rank(self) -> tuple[int, float, float, int]:
        """Of two the lower one is better."""
        value, nll = (math.inf if number is None else number for number in (self.value, self.nll))
        return get_args(State).index(self.state), value, nll, self.number


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """All that tuning.json holds."""

    method: str
    data: str
    model: str
    epochs: int
    measure: Measure
    seed: int
    pruning: bool
    wanted: int  # trials
    space: Mapping[str, Mapping[str, Any]]
    asked: Mapping[str, Any]  # fields of the recipe that were asked for
    recipe: Recipe  # of all trials, but for the knobs
    data_sha256: str
    study: str  # its name in Optuna's storage
    trials: Sequence[Trial]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """As they were looked for."""
        return tuple(replace(knob, **self.space[knob.name]) for knob in knobs_of(self.method, list(self.space)))

    def ranked(self) -> list[Trial]:
        """Best first; then those that did not come to their end."""
        return sorted(self.trials, key=lambda trial: trial.rank)

    @property
    def chosen(self) -> Trial | None:
        return next((trial for trial in self.ranked() if trial.state == "finished"), None)

    def count(self, *states: State) -> int:
        return sum(trial.state in states for trial in self.trials)

    @property
    def ended(self) -> int:
        return self.count("finished", "pruned", "failed")

    def settings(self) -> dict[str, Any]:
        """The method's, with the chosen ones."""
        own, _ = apart(self._chosen().settings)
        return {**self.recipe.settings, **own}

    def changes(self) -> dict[str, Any]:
        """What the recipe of a training with the chosen values has, beside its data and method."""
        _, chosen = apart(self._chosen().settings)
        model = {"model": self.recipe.model, "model_settings": dict(self.recipe.model_settings)}
        return {**model, **self.asked, "epochs": self.epochs, **chosen}

    def command(self) -> list[str]:
        """What trains with the chosen values, on the whole training set."""
        words = ["flatmin", "train", "--data", self.data, "--method", self.method]
        _, chosen = apart(self._chosen().settings)
        for name, value in {**self.asked, "epochs": self.epochs, **chosen}.items():
            words += _flag(name, value) if name not in FOLLOWING else []
        for name, value in self.settings().items():
            words += _flag(name, value) if name in FLAGS else ["--set", f"{name}={_plain(value)}"]
        return words

    def _chosen(self) -> Trial:
        if self.chosen is None:
            raise ValueError("no trial of this tuning has finished; go on with the same `flatmin tune`")
        return self.chosen

    def as_json(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("recipe", "trials", "facts")}
        chosen = self.chosen and {"trial": self.chosen.number, "settings": self.chosen.settings}
        trials = [asdict(trial) for trial in self.trials]
        return {**values, "chosen": chosen, "trials": trials, "recipe": self.recipe.as_json(), **self.facts}


def _flag(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else []
    parts = [_plain(part) for part in (value if isinstance(value, list | tuple) else [value])]
    return [flag, *([",".join(parts)] if name == "milestones" else parts)]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
