"""What a training step costs: time, memory, and how far both are from the least that they could be.

    result = measure(Wanted(models=("preactresnet18",), batch_sizes=(50,)), device=torch.device("cuda"))

For every model and batch size a table: the methods of contenders.py in each of its forms, timed in turns
(table.py), beside the floor (roofline.py). cuDNN may search for its fastest algorithms, and computes float32
as torch's defaults say; the result names all that.
"""

import importlib.metadata
import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from flatmin_lab import models
from flatmin_lab.bench.contenders import EPSILON, FORMS, METHODS, RHO, SETTINGS, left_out
from flatmin_lab.bench.roofline import PASSES, floor, flops_of, rates
from flatmin_lab.bench.rows import ratios
from flatmin_lab.bench.table import Contenders
from flatmin_lab.bench.timing import tidy, use_all_streams
from flatmin_lab.bench.workload import CLASSES, PICTURES, Work, random_pictures
from flatmin_lab.data.augment.transforms import KINDS, Kind, augmentation
from flatmin_lab.data.dataset import Split
from flatmin_lab.data.normalise import Normalisation
from flatmin_lab.recipes.recipe import PRECISIONS
from flatmin_lab.system.machine import facts
from flatmin_lab.system.rng import RandomScope
from flatmin_lab.training.learner import AUTOCAST

LEAST, ROUNDS = 5, 10  # blocks of steps: at least and at most
MODELS, BATCH_SIZES, AT_ONCE, STEPS = ("preactresnet18", "vgg16", "wideresnet28_10"), (50, 128, 512), (2, 4), 100
PACKAGES = ("triton", "pytorch-optimizer")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to measure; checked when made."""

    models: Sequence[str] = MODELS
    batch_sizes: Sequence[int] = BATCH_SIZES
    methods: Sequence[str] = METHODS
    forms: Sequence[str] = FORMS
    at_once: Sequence[int] = AT_ONCE
    steps: int = STEPS
    precision: str = "bf16"
    augment: Kind = "vanilla"

    def __post_init__(self) -> None:
        for name in self.models:
            with torch.device("meta"):
                models.build(name, num_classes=CLASSES)
        object.__setattr__(self, "models", tuple(map(models.canonical, self.models)))
        choices = (("method", self.methods, METHODS), ("form", self.forms, FORMS))
        for what, given, known in (*choices, ("precision", [self.precision], PRECISIONS)):
            for name in given:
                if name not in known:
                    raise ValueError(f"unknown {what} {name!r}; choose from {', '.join(known)}")
        if self.augment not in KINDS:
            raise ValueError(f"unknown augmentation {self.augment!r}; choose from {', '.join(KINDS)}")
        for size in self.batch_sizes:
            if not 2 <= size <= PICTURES:
                raise ValueError(f"the batch size must be from 2 to {PICTURES}, got {size}")
        for count in self.at_once:
            if count < 2:
                raise ValueError(f"at once are at least 2 models, got {count}; one alone is the form compiled")
        if self.steps < LEAST:
            raise ValueError(f"at least {LEAST} steps must be timed, for quartiles, got {self.steps}")

    @property
    def rounds(self) -> int:
        return min(ROUNDS, max(LEAST, self.steps // LEAST))


def measure(
    wanted: Wanted,
    *,
    device: torch.device,
    say: Callable[[str], None] = lambda text: None,
    after: Callable[[dict[str, Any]], None] = lambda result: None,
    pictures: int = PICTURES,
) -> dict[str, Any]:
    """All tables; `say` hears what is under way, `after` gets the result so far after every table."""
    _check_some(wanted, device)
    scope = RandomScope(device, deterministic=False)  # cuDNN may search, and the caller's settings come back
    with scope.active():
        say("the speed of the device")
        speed = rates(device, wanted.precision)
        result = {**facts(device), **_versions(), **_settings(wanted, device), "pictures": pictures, **speed}
        result["tables"] = []
        use_all_streams(device, AUTOCAST.get(wanted.precision, torch.float32))
        split = random_pictures(device, pictures)
        normalise = Normalisation.of(split)
        for model in wanted.models:
            for size in wanted.batch_sizes:
                table = _table(wanted, model, split, normalise, size, speed, say)
                result["tables"].append(table)
                _forget(wanted, device)
                after(result)
    return result


def _check_some(wanted: Wanted, device: torch.device) -> None:
    """Before any work: is there anything to measure?"""
    pairs = [(method, form) for method in wanted.methods for form in wanted.forms if method != "sam" or form == "eager"]
    reasons = {left_out(*pair, device=device, precision=wanted.precision) for pair in pairs} or {"sam is eager alone"}
    if None not in reasons:
        asked = f"{', '.join(wanted.methods)} as {', '.join(wanted.forms)}"
        raise ValueError(f"nothing can be measured of {asked} on {device}: {'; '.join(sorted(map(str, reasons)))}")


def _table(
    wanted: Wanted,
    model: str,
    split: Split,
    normalise: Normalisation,
    batch_size: int,
    speed: dict[str, Any],
    say: Callable[[str], None],
) -> dict[str, Any]:
    augment = augmentation(wanted.augment, "cifar10")
    work = Work.of(model, split, normalise, batch_size=batch_size, augment=augment, precision=wanted.precision)
    flops = flops_of(model)
    parameters = sum(p.numel() for p in work.new_model().parameters())
    sizes: dict[str, Any] = {"flops": flops, "batch_size": batch_size, "size": 4 * parameters}
    contenders = Contenders(work, steps=wanted.steps, rounds=wanted.rounds, say=say)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="this step cannot be captured")  # its row says so
        contenders.add(wanted.methods, wanted.forms, wanted.at_once)
    found = contenders.run(parameters)
    return {
        "model": model,
        "batch_size": batch_size,
        "parameters": parameters,
        "flops_a_picture": flops,
        "floor": {
            method: floor(method, **sizes, precision=wanted.precision, speed=speed)
            for method in wanted.methods
            if method in PASSES
        },
        **found,
        "ratios": ratios(found["rows"]),
    }


def _forget(wanted: Wanted, device: torch.device) -> None:
    """Compiled code of models that are gone."""
    if device.type == "cuda" and {"compiled", "at-once"} & set(wanted.forms):
        torch.compiler.reset()
    tidy(device)


def _settings(wanted: Wanted, device: torch.device) -> dict[str, Any]:
    asked = asdict(wanted)
    return {
        **{name: asked[name] for name in ("precision", "augment", "steps")},
        "rounds": wanted.rounds,
        "device": device.type,
        "channels_last": True,
        "optimizer": {"name": "SGD", **SETTINGS},
        "epsilon": EPSILON,
        "rho": RHO,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def _versions() -> dict[str, Any]:
    def found(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        **{package.replace("-", "_"): found(package) for package in PACKAGES},
    }
