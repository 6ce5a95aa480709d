"""`flatmin bench`: what a training step costs in time and memory, and how far that is from the least possible.

    result = run_benchmark(BenchmarkOptions(models=("preactresnet18",), batch_sizes=(50,)), device=torch.device("cuda"))

There is a table for every model and batch size: each method of contenders.py in each form, timed in turn (table.py),
beside the floor (roofline.py). cuDNN may search for its fastest algorithms; float32 is computed as torch does by
default. The result records these settings.
"""

import importlib.metadata
import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from flatmin_lab import models
from flatmin_lab.bench.contenders import EPSILON, FORMS, METHODS, MODES, RHO, SGD_SETTINGS, why_left_out
from flatmin_lab.bench.roofline import PASSES, floor, flops_of, measure_rates
from flatmin_lab.bench.rows import ratios
from flatmin_lab.bench.table import BenchmarkTable
from flatmin_lab.bench.timing import release_memory, use_cublas_on_all_streams
from flatmin_lab.bench.workload import CLASSES, IMAGES, Workload, random_images
from flatmin_lab.data.augment.transforms import KINDS, Kind, augmentation
from flatmin_lab.data.dataset import Split
from flatmin_lab.data.normalise import Normalisation
from flatmin_lab.recipes.recipe import PRECISIONS
from flatmin_lab.system.machine import facts
from flatmin_lab.system.rng import RandomScope
from flatmin_lab.training.learner import AUTOCAST

MIN_BLOCKS, MAX_BLOCKS = 5, 10  # blocks of steps per contender; quartiles need five
DEFAULT_MODELS = ("preactresnet18", "vgg16", "wideresnet28_10")
DEFAULT_BATCH_SIZES, DEFAULT_AT_ONCE, DEFAULT_STEPS = (50, 128, 512), (2, 4), 100
PACKAGES = ("triton", "pytorch-optimizer")


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """What to measure; checked on construction."""

    models: Sequence[str] = DEFAULT_MODELS
    batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES
    methods: Sequence[str] = METHODS
    forms: Sequence[str] = FORMS
    at_once: Sequence[int] = DEFAULT_AT_ONCE
    steps: int = DEFAULT_STEPS
    precision: str = "bf16"
    augment: Kind = "vanilla"

    def __post_init__(self) -> None:
        for name in self.models:
            with torch.device("meta"):
                models.build(name, num_classes=CLASSES)
        object.__setattr__(self, "models", tuple(map(models.canonical, self.models)))
        choices = (("method", self.methods, METHODS + MODES), ("form", self.forms, FORMS))
        for what, given, known in (*choices, ("precision", [self.precision], PRECISIONS)):
            for name in given:
                if name not in known:
                    raise ValueError(f"unknown {what} {name!r}; choose from {', '.join(known)}")
        if self.augment not in KINDS:
            raise ValueError(f"unknown augmentation {self.augment!r}; choose from {', '.join(KINDS)}")
        for size in self.batch_sizes:
            if not 2 <= size <= IMAGES:
                raise ValueError(f"the batch size must be from 2 to {IMAGES}, got {size}")
        for count in self.at_once:
            if count < 2:
                raise ValueError(
                    f"--at-once must be at least 2 models, got {count}; for one model use the form compiled"
                )
        if self.steps < MIN_BLOCKS:
            raise ValueError(f"at least {MIN_BLOCKS} steps must be timed, for quartiles, got {self.steps}")

    @property
    def rounds(self) -> int:
        return min(MAX_BLOCKS, max(MIN_BLOCKS, self.steps // MIN_BLOCKS))


def run_benchmark(
    options: BenchmarkOptions,
    *,
    device: torch.device,
    say: Callable[[str], None] = lambda text: None,
    after: Callable[[dict[str, Any]], None] = lambda result: None,
    images: int = IMAGES,
) -> dict[str, Any]:
    """All tables. `say` is called with what is under way, `after` with the result so far after every table."""
    _check_measurable(options, device)
    scope = RandomScope(device, deterministic=False)  # cuDNN may search; the caller's settings are restored
    with scope.active():
        say("measuring the speed of the device")
        speed = measure_rates(device, options.precision)
        result = {**facts(device), **_versions(), **_settings(options, device), "pictures": images, **speed}
        result["tables"] = []
        use_cublas_on_all_streams(device, AUTOCAST.get(options.precision, torch.float32))
        split = random_images(device, images)
        normalise = Normalisation.of(split)
        for model in options.models:
            for size in options.batch_sizes:
                table = _table(options, model, split, normalise, size, speed, say)
                result["tables"].append(table)
                _drop_compiled(options, device)
                after(result)
    return result


def _check_measurable(options: BenchmarkOptions, device: torch.device) -> None:
    """Check before any work that there is something to measure."""
    pairs = [
        (method, form) for method in options.methods for form in options.forms if method != "sam" or form == "eager"
    ]
    reasons = {why_left_out(*pair, device=device, precision=options.precision) for pair in pairs} or {
        "sam is eager only"
    }
    if None not in reasons:
        asked = f"{', '.join(options.methods)} as {', '.join(options.forms)}"
        raise ValueError(f"nothing can be measured for {asked} on {device}: {'; '.join(sorted(map(str, reasons)))}")


def _table(
    options: BenchmarkOptions,
    model: str,
    split: Split,
    normalise: Normalisation,
    batch_size: int,
    speed: dict[str, Any],
    say: Callable[[str], None],
) -> dict[str, Any]:
    augment = augmentation(options.augment, "cifar10")
    workload = Workload.build(
        model, split, normalise, batch_size=batch_size, augment=augment, precision=options.precision
    )
    flops = flops_of(model)
    parameters = sum(p.numel() for p in workload.new_model().parameters())
    sizes: dict[str, Any] = {"flops": flops, "batch_size": batch_size, "size": 4 * parameters}
    table = BenchmarkTable(workload, steps=options.steps, rounds=options.rounds, say=say)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="this step cannot be captured")  # the row says so
        table.add(options.methods, options.forms, options.at_once)
    found = table.run(parameters)
    return {
        "model": model,
        "batch_size": batch_size,
        "parameters": parameters,
        "flops_a_picture": flops,
        "floor": {
            method: floor(method, **sizes, precision=options.precision, speed=speed)
            for method in options.methods
            if method in PASSES
        },
        **found,
        "ratios": ratios(found["rows"]),
    }


def _drop_compiled(options: BenchmarkOptions, device: torch.device) -> None:
    """Free the compiled code of models that are no longer needed."""
    if device.type == "cuda" and {"compiled", "at-once"} & set(options.forms):
        torch.compiler.reset()
    release_memory(device)


def _settings(options: BenchmarkOptions, device: torch.device) -> dict[str, Any]:
    asked = asdict(options)
    return {
        **{name: asked[name] for name in ("precision", "augment", "steps")},
        "rounds": options.rounds,
        "device": device.type,
        "channels_last": True,
        "optimizer": {"name": "SGD", **SGD_SETTINGS},
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
