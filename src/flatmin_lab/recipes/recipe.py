"""A recipe is everything that decides what a run computes, except the seed: frozen, checked when made, plain JSON.

    recipe = default_recipe("cifar10", data, method="amp")       the protocol paper-v2
    recipe = replace(recipe, epochs=60, lr=0.05)                 a variant

What does not change the numbers (the device, where the files are, how often a checkpoint is written) is not in it.

What all of the paper's runs share is the default: SGD with momentum 0.9, batches of 50, a rate of 0.1 divided by ten
after epochs 100 and 150 of 200, weight decay 1e-4, crops and flips, AMP with ε = 0.5 and ζ = 1 on PreActResNet18. What
the protocols differ in is in protocols.py; a recipe without changes follows `paper-v2`.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from flatmin_lab import methods, models
from flatmin_lab.data.augment.transforms import KINDS, Kind
from flatmin_lab.data.registry import DATA_SETS, OFFICIAL, SYNTHETIC
from flatmin_lab.data.sources.synthetic import original_name
from flatmin_lab.recipes import optimizers
from flatmin_lab.recipes.fields import (
    DEVICE,
    FRACTION,
    METHOD,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_INT,
    RISING,
    Rule,
    check,
    declare,
    flag,
)
from flatmin_lab.recipes.lr_schedules import SCHEDULES
from flatmin_lab.recipes.protocols import (
    NAMES,
    OWN,
    PROTOCOLS,
    TABLE_1,
    TABLE_2,
    FollowedProtocol,
    Protocol,
    kind_of,
    method_settings,
    recipe_fields,
)
from flatmin_lab.system.json_types import check_types

Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS = ("fp32", "bf16", "fp16")
PAPER_EPOCHS, PAPER_BATCH_SIZE = 200, 50  # the paper's
LENGTH_FACTORS = (1, 1.25, 1.5, 2)  # of variants with more time
LONG_EPOCHS = 150  # from this many epochs on, the paper's radius pays off; ε = 0.5 lost at 36 epochs, and won at 200
SHORT_RADIUS = 0.1
SMALL_DATA_RADIUS = {"digits": 0.3, "spiral": 0.2}  # AMP's, at the lengths in defaults.py
COMMON_SETTINGS = {"num_classes", "in_channels", "dropout"}  # arguments of every model
SPEED = ("precision", "channels_last", "compile", "deterministic")  # how fast a run computes, not what
# newer than the first results, which have no such key: in JSON only where they are not the default
LATER_FIELDS = ("normalise", "optimizer", "optimizer_settings", "exempt_norms", "init", "init_except", "files")

# how a run may differ from a cell of a protocol and still follow it, and the words for each value
EXCEPTIONS: dict[str, Callable[[Any], str]] = {
    "augment": lambda augment: f"{'first' if augment == 'vanilla_v1' else 'second'} version's crops",
    "nesterov": lambda on: "Nesterov" if on else "no Nesterov",
    "clip_norm": lambda norm: "not clipped" if norm is None else f"clipped to {norm:g}",
    "normalise": lambda given: f"normalised by {given[0]:g} and {given[1]:g}" if given else "normalised by its own",
    "model_settings": lambda own: (
        "dropout once a block" if own.get("dropout_at") == "block" else "dropout after every ReLU"
    ),
    "weight_decay": lambda decay: f"weight decay {decay:g}",
    "ema": lambda decay: f"EMA {decay:g}",
    "milestones": lambda shares: f"drops at {' and '.join(f'{share:g}' for share in shares)}",
    "validation": lambda on: "validation",
    "epochs": lambda epochs: f"{epochs} epoch{'s' if epochs > 1 else ''}",
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every field is compared when a run is resumed: a run folder belongs to one recipe."""

    data: str = field(metadata=declare(f"{', '.join(DATA_SETS)}, an .npz file or a folder of images.", panel=None))
    model: str = field(
        metadata=declare(
            f"{', '.join(models.MODELS)}; timm:NAME; or your own, file.py:make_model",
            otherwise="depends on the data set",
            panel=None,
        )
    )
    method: str = flag("erm", "", choices=methods.METHODS, otherwise="amp", panel=None, after="data")
    settings: Mapping[str, Any] = field(  # where they are not the method's defaults
        default_factory=dict,
        metadata=declare(
            "Any setting of the method, such as smoothing=0.1; repeat for several.", panel=METHOD, after="size"
        ),
    )
    model_settings: Mapping[str, Any] = field(
        default_factory=dict,
        metadata=declare(
            "An argument for the model, such as width=64; repeat for several.",
            Rule("the model's own, without those of every model", lambda own, _: not COMMON_SETTINGS & own.keys()),
            panel=None,
            after="model",
        ),
    )
    init: str | None = flag(
        None,
        "Initial weights to fine-tune: a .safetensors file, or a state dict saved with torch.save.",
        panel=None,
        after="model_settings",
    )
    init_except: str | None = flag(
        None,
        "Modules that --init leaves out, such as the head if the classes differ: fc, or head,norm.",
        Rule("given with init", lambda _, recipe: recipe.init is not None),
        panel=None,
        after="init",
    )
    size: tuple[int, int] | None = flag(
        None, "Resize the images of a folder to this height and width, such as 32 32.", panel=None, after="validation"
    )
    augment: Kind = flag("vanilla", " (the paper: vanilla_v1, except in table 2).", choices=KINDS, after="warmup")
    normalise: tuple[float, float] | None = flag(
        None,
        "Normalise pixels (0 to 1) by this mean and standard deviation instead of the training set's.",
        Rule("a finite mean and a standard deviation above 0", lambda pair, _: _is_normalisation(pair)),
        after="clip_norm",
    )
    label_noise: float = flag(0.0, "Fraction of the training labels to replace with wrong ones.", FRACTION, after="ema")
    validation: bool = flag(
        False,
        "For tuning: hold out a tenth of the training set, and evaluate on it instead of the test set.",
        after="label_noise",
    )
    epochs: int = flag(PAPER_EPOCHS, "Passes over the training set (the paper: 200).", POSITIVE_INT)
    batch_size: int = flag(PAPER_BATCH_SIZE, "Images per step (the paper: 50).", POSITIVE_INT)
    optimizer: str = flag(
        "sgd",
        f"{', '.join(optimizers.OPTIMIZERS)}, or your own, file.py:make_optimizer (the paper: sgd).",
        Rule(
            f"{', '.join(optimizers.OPTIMIZERS)} or file.py:make_optimizer", lambda name, _: optimizers.is_known(name)
        ),
    )
    optimizer_settings: Mapping[str, Any] = field(
        default_factory=dict,
        metadata=declare("A setting of the optimizer, such as betas=0.9,0.95; repeat for several."),
    )
    lr: float = flag(0.1, "Peak learning rate (the paper: 0.1); other optimizers have their own default.", POSITIVE)
    momentum: float = flag(
        0.9,
        "SGD's momentum (the paper's code: 0.9).",
        Rule("at least 0 and below 1 (and above 0 for Nesterov's)", FRACTION.holds),
        Rule(
            "left out where the optimizer is not sgd", lambda value, recipe: recipe.optimizer == "sgd" or value == 0.9
        ),
    )
    nesterov: bool = flag(
        True,
        "Whether to use Nesterov momentum (the first version of the paper's code does not); default: yes.",
        Rule("false where momentum is 0", lambda on, recipe: recipe.momentum > 0 or not on),
    )
    weight_decay: float = flag(
        1e-4, "Weight decay (the paper: 1e-4); other optimizers have their own default.", NOT_NEGATIVE
    )
    exempt_norms: bool = flag(
        False,
        "Leave biases and the parameters of norms, all with at most one dimension, out of the weight decay.",
        Rule(
            "left out where the optimizer is your own, which makes its own groups",
            lambda on, recipe: not on or recipe.optimizer in optimizers.OPTIMIZERS,
        ),
    )
    schedule: str = flag("multi_step", " (the paper: multi_step).", choices=SCHEDULES)
    milestones: tuple[float, ...] = flag(
        (0.5, 0.75),
        "For multi_step: the fractions of the run after which the learning rate is divided by ten, such as 0.5,0.75.",
        RISING,
    )
    gamma: float = field(
        default=0.1, metadata=declare("", Rule("above 0 and at most 1", lambda factor, _: 0 < factor <= 1))
    )
    warmup: float = flag(
        0.0,
        "Epochs of linear warm-up.",
        Rule("epochs, at least 0 and fewer than there are", lambda epochs, recipe: 0 <= epochs < recipe.epochs),
        Rule(
            "0 with one_cycle, which has its own", lambda epochs, recipe: not epochs or recipe.schedule != "one_cycle"
        ),
    )
    clip_norm: float | None = flag(None, "Clip the gradient to this norm before the update.", POSITIVE)
    ema: float | None = flag(
        None,
        "Decay of an exponential moving average (EMA) of the weights, which is evaluated too.",
        Rule("above 0 and below 1", lambda decay, _: 0 < decay < 1),
    )
    precision: Precision = flag("fp32", "", choices=PRECISIONS, otherwise="fp32", panel=DEVICE)
    channels_last: bool = flag(False, "Store images as NHWC in memory.", panel=DEVICE)
    compile: bool = flag(False, "Use torch.compile on a GPU; the first steps take longer.", panel=DEVICE)
    deterministic: bool = flag(False, "Make the run bitwise reproducible on CUDA too.", panel=DEVICE)
    name: str = ""  # of the table or figure that it belongs to
    files: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of the user's own, by the field that names them

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", models.recorded_name(self.model))
        object.__setattr__(self, "milestones", tuple(self.milestones))
        for name in ("size", "normalise"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))
        for name in ("settings", "model_settings", "optimizer_settings"):
            try:
                json.dumps(getattr(self, name), allow_nan=False)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"{name} must be numbers, words and lists of them ({error}), got {getattr(self, name)}"
                ) from error
        check(self)
        optimizers.check_settings(self.optimizer, self.optimizer_settings)

    @property
    def is_matched(self) -> bool:
        """Is AMP's radius matched to held-out data?"""
        return self.method == "amp" and self.settings.get("epsilon") == methods.AUTO

    @property
    def held_out_epochs(self) -> int:
        """For how many epochs images are held out to match AMP's radius: 0 if it is not matched."""
        return max(1, round(methods.build("amp", **self.settings).release * self.epochs)) if self.is_matched else 0

    @cached_property
    def protocol(self) -> FollowedProtocol:
        """The protocol of the cell of the paper's tables that it is, apart from precision and the like; or `own`.

        Where only the method's settings and fields of `EXCEPTIONS` differ, these are its exceptions; of two protocols
        of one length it is the one with the fewer.
        """
        found = [followed for name in NAMES if (followed := self._following(name))]
        return min(found, key=lambda one: len(one.exceptions), default=OWN)

    def _following(self, name: Protocol) -> FollowedProtocol | None:
        epochs, kind = PROTOCOLS[name].epochs, kind_of(self.augment)
        kinds = ("vanilla",) if self.model in TABLE_1 else ("vanilla", "cutout", "autoaugment")
        if self.epochs not in {math.ceil(factor * epochs) for factor in LENGTH_FACTORS} or kind not in kinds:
            return None
        if self.data not in (SYNTHETIC if name == "smoke" else OFFICIAL) or self.model not in TABLE_1 + TABLE_2:
            return None
        own = {key: getattr(self, key) for key in ("data", "model", "method", "name", *SPEED)}
        usual = Recipe(
            **own, epochs=epochs, **recipe_fields(name, original_name(self.data), self.model, self.method, kind)
        )
        if name == "smoke":
            usual = replace(usual, model_settings=self.model_settings, batch_size=self.batch_size)
        apart = {f.name for f in fields(self) if getattr(self, f.name) != getattr(usual, f.name)} - {"settings"}
        placed = self.model_settings.keys() | usual.model_settings.keys() <= {"dropout_at"}
        if not apart <= EXCEPTIONS.keys() or ("model_settings" in apart and not placed):
            return None
        known = {**(perturbation(usual) if self.method == "amp" else {}), **method_settings(name, self.method)}
        settings = methods.resolve_settings(self.method, known)
        mine = methods.resolve_settings(self.method, self.settings)
        changed = [f"{key} {mine.get(key)}" for key in {**settings, **mine} if mine.get(key) != settings.get(key)]
        others = [say(getattr(self, key)) for key, say in EXCEPTIONS.items() if key in apart]
        return FollowedProtocol(name, tuple(changed), tuple(others))

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON holds them: lists for tuples, and younger fields where they are not the default."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {key: value for key, value in values.items() if key not in LATER_FIELDS or value != default_of(key)}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Recipe":
        """Checked, since anyone may have written the values; errors name the field."""
        if not isinstance(values, Mapping):
            raise TypeError(f"recipe must be an object, got a {type(values).__name__}: {values!r:.80}")
        known = {f.name for f in fields(Recipe)}
        if missing := [name for name in ("data", "model") if name not in values]:
            raise ValueError(f"a recipe must have {' and '.join(missing)}; it may be damaged")
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"a recipe has no {', '.join(unknown)}; it may be from a newer flatmin")
        check_types(Recipe, values)
        return Recipe(**values)


def _is_normalisation(pair: Any) -> bool:
    return len(pair) == 2 and math.isfinite(pair[0]) and 0 < pair[1] < math.inf


def default_of(name: str) -> Any:
    """The default of a field, as JSON holds it."""
    declared = next(f for f in fields(Recipe) if f.name == name)
    return declared.default if declared.default_factory is MISSING else declared.default_factory()


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
    usual = {key: default_of(key) for key in LATER_FIELDS}
    there, wanted = ({**{key: usual[key] for key in usual if key in {**here, **asked}}, **one} for one in (here, asked))
    return [
        f"{key} is {there.get(key)!r} there and {wanted.get(key)!r} here"
        for key in sorted(there.keys() | wanted.keys())
        if there.get(key) != wanted.get(key)
    ]


def perturbation(recipe: Recipe) -> dict[str, float]:
    """ε and ζ: the paper's for 200 epochs, and a small radius for short runs."""
    if recipe.data in SMALL_DATA_RADIUS:
        return {"epsilon": SMALL_DATA_RADIUS[recipe.data], "inner_lr": 1.0}
    epsilon, inner_lr = {"cutout": (0.3, 0.5), "autoaugment": (0.1, 0.1)}.get(recipe.augment, (0.5, 1.0))
    if recipe.model.startswith("vgg"):
        epsilon, inner_lr = 0.1, 0.2
    return {"epsilon": epsilon if recipe.epochs >= LONG_EPOCHS else min(epsilon, SHORT_RADIUS), "inner_lr": inner_lr}
