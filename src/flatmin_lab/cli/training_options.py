"""The flags of a training run, shared by `flatmin train` and `flatmin tune`, and how they change its recipe."""

from typing import Annotated, Any

from flatmin_lab import models
from flatmin_lab.cli.options import option
from flatmin_lab.data import DATA_SETS
from flatmin_lab.data.augment.transforms import KINDS
from flatmin_lab.recipes.lr_schedules import SCHEDULES
from flatmin_lab.recipes.recipe import PRECISIONS, Recipe

TRAINING, SPEED = "Training", "Device and speed"

Data = Annotated[str | None, option(f"{', '.join(DATA_SETS)}, an .npz file or a folder of images.")]
Model = Annotated[str | None, option(f"{', '.join(models.MODELS)}; default: the data set's own.")]
Size = Annotated[tuple[int, int] | None, option("Height and width that a folder's images are resized to.")]
BatchSize = Annotated[int | None, option("Images per step (the paper: 50).", panel=TRAINING)]
Lr = Annotated[float | None, option("The highest learning rate (the paper: 0.1).", panel=TRAINING)]
Momentum = Annotated[float | None, option("SGD's Nesterov momentum (the paper's code: 0.9).", panel=TRAINING)]
WeightDecay = Annotated[float | None, option("The paper: 1e-4.", panel=TRAINING)]
Schedule = Annotated[str | None, option(f"{', '.join(SCHEDULES)} (the paper: multi_step).", panel=TRAINING)]
Milestones = Annotated[
    str | None,
    option(
        "For multi_step: the fractions of the run after which the rate is divided by ten, as in 0.5,0.75.",
        panel=TRAINING,
    ),
]
Warmup = Annotated[float | None, option("Epochs of a linear warm-up.", panel=TRAINING)]
Augment = Annotated[str | None, option(f"{', '.join(KINDS)} (the paper: vanilla).", panel=TRAINING)]
ClipNorm = Annotated[float | None, option("Clip the norm of the gradient that the step takes.", panel=TRAINING)]
LabelNoise = Annotated[float | None, option("Fraction of the training labels replaced by a wrong one.", panel=TRAINING)]
Precision = Annotated[str | None, option(f"{', '.join(PRECISIONS)}; default: fp32.", panel=SPEED)]
ChannelsLast = Annotated[bool | None, option("Images as NHWC in memory.", "--channels-last", panel=SPEED)]
Compile = Annotated[
    bool | None, option("Use torch.compile on a GPU; the first steps take longer.", "--compile", panel=SPEED)
]
Deterministic = Annotated[bool | None, option("Bitwise reproducible on CUDA too.", "--deterministic", panel=SPEED)]


def recipe_changes(*, milestones: str | None, momentum: float | None, **fields: Any) -> dict[str, Any]:
    """The recipe's fields that the flags change, by name."""
    known = {"momentum": momentum, "nesterov": None if momentum is None else momentum > 0, **fields}
    shares = {} if milestones is None else {"milestones": parse_numbers(milestones)}
    return {key: value for key, value in known.items() if value is not None} | shares


def check_milestones(milestones: str | None, recipe: Recipe) -> None:
    if milestones is not None and recipe.schedule != "multi_step":
        raise ValueError(f"--milestones belongs to the schedule multi_step, got {recipe.schedule}")


def parse_numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.replace("x", ",").split(","))
    except ValueError as error:
        raise ValueError(f"numbers must be separated by commas, as in 0.5,0.75 or 3,32,32, got {text!r}") from error
