"""A recipe is everything that decides what a run computes, except the seed: frozen, checked when made, plain JSON.

    recipe = default_recipe("cifar10", data, method="amp")       the paper's protocol
    recipe = replace(recipe, epochs=60, lr=0.05)                 a variant

What does not change the numbers (the device, where the files are, how often a checkpoint is written) is not in it.

The paper's protocol: SGD with Nesterov momentum 0.9, batches of 50, a rate of 0.1 divided by ten after epochs 100 and
150 of 200, weight decay 1e-4, crops and flips, AMP with ε = 0.5 and ζ = 1 on PreActResNet18. `short` is the same in 60
epochs, with a radius of at most 0.1; `smoke` takes seconds on synthetic images, to see that everything runs.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, NamedTuple

from flatmin_lab import methods, models
from flatmin_lab.data.augment.transforms import KINDS, Kind
from flatmin_lab.data.registry import OFFICIAL, SYNTHETIC
from flatmin_lab.recipes.lr_schedules import SCHEDULES

Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS = ("fp32", "bf16", "fp16")
PAPER_EPOCHS, PAPER_BATCH_SIZE = 200, 50  # the paper's
PROTOCOLS = {"paper": PAPER_EPOCHS, "short": 60, "smoke": 3}  # with their epochs
LONG_EPOCHS = 150  # from so many epochs on the paper's radius pays; ε = 0.5 lost at 36 epochs, and won at 200
SHORT_RADIUS = 0.1
SMALL_DATA_RADIUS = {"digits": 0.3, "spiral": 0.2}  # AMP's, at the lengths in defaults.py
# the paper's tables: the first with its own augmentation, the second with three
TABLE_1, TABLE_2 = ("preactresnet18", "vgg16"), ("wideresnet28_10", "pyramidnet164_270")
COMMON_SETTINGS = {"num_classes", "in_channels", "dropout"}  # arguments of every model
SPEED = ("precision", "channels_last", "compile", "deterministic")  # how fast a run computes, not what


@dataclass(frozen=True)
class FollowedProtocol:
    """The protocol that a recipe follows, and in what it differs from a cell of it; `str()` makes the sentence.

    >>> str(FollowedProtocol("paper", settings=("ball tensor",), others=("no Nesterov",)))
    'paper, but ball tensor, no Nesterov'
    >>> FollowedProtocol.read("paper, but ball tensor, no Nesterov")
    FollowedProtocol(name='paper', settings=('ball tensor',), others=('no Nesterov',))
    """

    name: str
    settings: tuple[str, ...] = ()  # the method's that differ
    others: tuple[str, ...] = ()

    @property
    def exceptions(self) -> tuple[str, ...]:
        return self.settings + self.others

    def __str__(self) -> str:
        return f"{self.name}, but {', '.join(self.exceptions)}" if self.exceptions else self.name

    @staticmethod
    @cache
    def read(text: str) -> "FollowedProtocol":
        """Of a result file, which holds the sentence."""
        found = list(filter(None, text.partition(", but ")[2].split(", ")))
        known = {key for method in methods.METHODS for key in methods.resolve_settings(method, {})}
        settings = tuple(one for one in found if one.partition(" ")[0] in known)
        return FollowedProtocol(text.partition(",")[0], settings, tuple(one for one in found if one not in settings))


OWN = FollowedProtocol("own")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every field is compared when a run is resumed: a run folder belongs to one recipe."""

    data: str
    model: str
    method: str = "erm"
    settings: Mapping[str, Any] = field(default_factory=dict)  # the method's, where they are not its defaults
    model_settings: Mapping[str, Any] = field(default_factory=dict)
    size: tuple[int, int] | None = None  # what a folder's images are resized to
    augment: Kind = "vanilla"
    label_noise: float = 0.0  # share of the training labels replaced by a wrong one
    validation: bool = False  # train on nine tenths and evaluate on the last one: the test set is not used
    epochs: int = PAPER_EPOCHS
    batch_size: int = PAPER_BATCH_SIZE
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 1e-4
    schedule: str = "multi_step"
    milestones: tuple[float, ...] = (0.5, 0.75)  # fractions of the run
    gamma: float = 0.1
    warmup: float = 0.0  # epochs
    clip_norm: float | None = None  # of the gradient that the step takes; Δ is not clipped
    ema: float | None = None  # decay of an EMA of the weights, evaluated beside them
    precision: Precision = "fp32"
    channels_last: bool = False
    compile: bool = False  # on CUDA: the passes through torch.compile
    deterministic: bool = False  # on CUDA: the same bits every time, and slower
    name: str = ""  # of the table or figure that it belongs to

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", models.canonical(self.model))
        object.__setattr__(self, "milestones", tuple(self.milestones))
        object.__setattr__(self, "size", None if self.size is None else tuple(self.size))
        for name in ("settings", "model_settings"):
            try:
                json.dumps(getattr(self, name), allow_nan=False)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"{name} must be numbers, words and lists of them ({error}), got {getattr(self, name)}"
                ) from error
        for choice, known in (
            ("method", methods.METHODS),
            ("augment", KINDS),
            ("schedule", tuple(SCHEDULES)),
            ("precision", PRECISIONS),
        ):
            if getattr(self, choice) not in known:
                raise ValueError(f"unknown {choice} {getattr(self, choice)!r}; choose from {', '.join(known)}")
        for name, rule, holds in self._rules():
            if not holds:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)}")

    def _rules(self) -> list[tuple[str, str, bool]]:
        return [
            ("epochs", "a whole number of at least 1", _is_positive_int(self.epochs)),
            ("batch_size", "a whole number of at least 1", _is_positive_int(self.batch_size)),
            (
                "model_settings",
                "the model's own, without those of every model",
                not COMMON_SETTINGS & self.model_settings.keys(),
            ),
            ("lr", "above 0 and finite", 0 < self.lr < float("inf")),
            ("momentum", "at least 0 and below 1 (and above 0 for Nesterov's)", 0 <= self.momentum < 1),
            ("nesterov", "false where momentum is 0", self.momentum > 0 or not self.nesterov),
            ("weight_decay", "at least 0 and finite", 0 <= self.weight_decay < float("inf")),
            ("label_noise", "at least 0 and below 1", 0 <= self.label_noise < 1),
            ("milestones", "rising shares between 0 and 1", _is_rising(self.milestones)),
            ("gamma", "above 0 and at most 1", 0 < self.gamma <= 1),
            ("warmup", "epochs, at least 0 and fewer than there are", 0 <= self.warmup < self.epochs),
            ("warmup", "0 with one_cycle, which has its own", not (self.warmup and self.schedule == "one_cycle")),
            ("clip_norm", "above 0 and finite", self.clip_norm is None or 0 < self.clip_norm < float("inf")),
            ("ema", "above 0 and below 1", self.ema is None or 0 < self.ema < 1),
        ]

    @property
    def protocol(self) -> FollowedProtocol:
        """`paper` or `short` for a cell of the paper's tables, but for precision and the like; `smoke`; or `own`.

        Where only the method's settings, the split, a doubled length, or what the first version of the published code
        has otherwise (crops, momentum, clipping) differ, these are its exceptions.
        """
        kinds = ("vanilla",) if self.model in TABLE_1 else ("vanilla", "cutout", "autoaugment")
        lengths = {count: name for name, epochs in PROTOCOLS.items() for count in (epochs, 2 * epochs)}
        name = lengths.get(self.epochs)
        if self.data not in (SYNTHETIC if name == "smoke" else OFFICIAL) or self.model not in TABLE_1 + TABLE_2:
            return OWN
        if name is None or self.augment not in (*kinds, "vanilla_v1"):
            return OWN
        known = ("method", "augment", "nesterov", "clip_norm", "epochs", "name", "validation", *SPEED)
        free = {key: getattr(self, key) for key in known}
        free |= {"model_settings": self.model_settings, "batch_size": self.batch_size} if name == "smoke" else {}
        plain = Recipe(data=self.data, model=self.model, **free)
        if replace(self, settings={}) != plain:
            return OWN
        usual = replace(plain, epochs=PROTOCOLS[name])
        settings = methods.resolve_settings(self.method, perturbation(usual) if self.method == "amp" else {})
        mine = methods.resolve_settings(self.method, self.settings)
        changed = [f"{key} {mine.get(key)}" for key in {**settings, **mine} if mine.get(key) != settings.get(key)]
        others = ["first version's crops"] * (self.augment not in kinds) + ["no Nesterov"] * (not self.nesterov)
        others += [f"clipped to {self.clip_norm:g}"] if self.clip_norm is not None else []
        others += ["validation"] * self.validation + [f"{self.epochs} epochs"] * (self.epochs != usual.epochs)
        return FollowedProtocol(name, tuple(changed), tuple(others))

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON holds them: lists for tuples."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Recipe":
        known = {f.name for f in fields(Recipe)}
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"a recipe has no {', '.join(unknown)}; it may be of a newer flatmin")
        return Recipe(**values)


class Job(NamedTuple):
    """A training run to do: a recipe and a seed."""

    recipe: Recipe
    seed: int

    @property
    def key(self) -> tuple[str, int]:
        """Its identity among the paper's runs: name and seed."""
        return self.recipe.name, self.seed


def differences(here: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """The differences of two recipes, in words."""
    return [
        f"{key} is {here.get(key)!r} there and {asked.get(key)!r} here"
        for key in sorted(here.keys() | asked.keys())
        if here.get(key) != asked.get(key)
    ]


def _is_positive_int(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def _is_rising(milestones: tuple[float, ...]) -> bool:
    return list(milestones) == sorted(set(milestones)) and all(0 < share < 1 for share in milestones)


def perturbation(recipe: Recipe) -> dict[str, float]:
    """ε and ζ: the paper's for 200 epochs, and a small radius for short runs."""
    if recipe.data in SMALL_DATA_RADIUS:
        return {"epsilon": SMALL_DATA_RADIUS[recipe.data], "inner_lr": 1.0}
    epsilon, inner_lr = {"cutout": (0.3, 0.5), "autoaugment": (0.1, 0.1)}.get(recipe.augment, (0.5, 1.0))
    if recipe.model.startswith("vgg"):
        epsilon, inner_lr = 0.1, 0.2
    return {"epsilon": epsilon if recipe.epochs >= LONG_EPOCHS else min(epsilon, SHORT_RADIUS), "inner_lr": inner_lr}
