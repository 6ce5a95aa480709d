"""A trained model to use: the network with its weights, what its inputs go through, and what its outputs mean.

    trained = flatmin_lab.load_run("runs/first")
    trained.predict(images)                     names of classes, for uint8 images or images from 0 to 1
    trained.with_normalisation()                a plain torch.nn.Module for images from 0 to 1

A run keeps the names of its classes and its normalisation in config.json, so the training data is not
needed. If a run has an EMA of the weights, that is what is loaded, unless you ask for the last weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from flatmin_lab.data.normalise import Normalisation
from flatmin_lab.data.registry import load
from flatmin_lab.evaluation.load_run import TrainedRun, check_data, find_run
from flatmin_lab.evaluation.subject import NormalisingModel
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.runs.result import AVERAGE, split_of
from flatmin_lab.system.json_types import check_types
from flatmin_lab.training.build import prepare_data

Weights = Literal["ema", "last"]
WEIGHTS = ("ema", "last")
BATCH_SIZE = 256
LARGEST_PIXEL = 2.0  # of images from 0 to 1, with some noise on them; one of 0 to 255 hardly lies below it
LARGEST_NORMALISED = 20.0  # standard deviations: no normalised pixel is so far from the mean
SMALLEST_PIXEL = -1.0  # likewise; normalised ones, or those from −1 to 1, reach it


class Inputs(TypedDict):
    """What a model takes and returns, as config.json has it."""

    kind: str  # "images" or "points"
    shape: Sequence[int]
    classes: Sequence[str]
    mean: Sequence[float]
    std: Sequence[float]


@dataclass(frozen=True, repr=False)
class TrainedModel:
    """`model` is in eval mode and takes normalised inputs; `normalise` makes them from images or points."""

    model: nn.Module
    normalise: Normalisation
    classes: Sequence[str]
    input_shape: tuple[int, ...]
    kind: str  # "images" or "points"
    recipe: Recipe
    seed: int
    checkpoint: Path
    epoch: int
    weights: Weights
    metrics: Mapping[str, float]  # of these weights; empty where they were not evaluated

    def __repr__(self) -> str:
        return (
            f"TrainedModel({self.recipe.model!r} on {self.recipe.data!r}, {self.recipe.method}, epoch {self.epoch}, "
            f"{self.weights} weights, {self.shape_text} to {len(self.classes)} classes)"
        )

    @property
    def device(self) -> torch.device:
        return self.normalise.mean.device

    @property
    def shape_text(self) -> str:
        return f"{self.kind} of {' × '.join(map(str, self.input_shape))}"

    @property
    def weights_text(self) -> str:
        return "the last weights" if self.weights == "last" else f"the EMA of the weights (decay {self.recipe.ema:g})"

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Of images (N, C, H, W), uint8 or from 0 to 1, or of points (N, D); on the model's device."""
        if not isinstance(x, Tensor):
            raise TypeError(f"inputs must be a tensor, got {type(x).__name__}; for an array, use torch.from_numpy")
        if tuple(x.shape[1:]) != self.input_shape:
            one = "; for a single one, give x[None]" if tuple(x.shape) == self.input_shape else ""
            raise ValueError(f"this model takes {self.shape_text}, got a tensor of shape {tuple(x.shape)}{one}")
        if self.kind == "images" and x.is_floating_point() and x.numel():
            _check_pixels(float(x.min()), float(x.max()))
        parts = [self.model(self.normalise(part.to(self.device))) for part in x.split(BATCH_SIZE)]
        return torch.cat(parts).float()

    def probabilities(self, x: Tensor) -> Tensor:
        return self.logits(x).softmax(dim=1)

    def predict(self, x: Tensor) -> list[str]:
        """The most probable class of each."""
        return [self.class_name(number) for number in self.logits(x).argmax(dim=1).tolist()]

    def class_name(self, number: int) -> str:
        """Of an output; a network may have more outputs than there are classes."""
        return self.classes[number] if number < len(self.classes) else f"output {number}"

    def with_normalisation(self) -> nn.Module:
        """The model as a function of images from 0 to 1, or of points as the data have them."""
        return NormalisingModel(self.model, self.normalise).eval()


def _check_pixels(smallest: float, largest: float) -> None:
    if largest > LARGEST_PIXEL or smallest <= SMALLEST_PIXEL:
        is_bytes = smallest >= 0 or largest > LARGEST_NORMALISED
        way_out = "divide them by 255" if is_bytes else "give them without normalisation, which is the model's"
        raise ValueError(f"images must be uint8, or from 0 to 1, got {smallest:g} to {largest:g}; {way_out}")


def load_run(
    path: Path | str,
    *,
    weights: Weights | None = None,
    device: torch.device | str = "cpu",
    data_dir: Path | str = "data",
) -> TrainedModel:
    """The model of a run's folder, or of one of its checkpoints.

    `weights` is "ema" or "last"; by default the EMA where the run has one. `data_dir` is for runs of earlier versions,
    which did not keep their normalisation: it is computed from the data.
    """
    if weights not in (None, *WEIGHTS):
        raise ValueError(f"unknown weights {weights!r}; choose from {', '.join(WEIGHTS)}")
    run = find_run(Path(path).expanduser())
    use_ema = run.has_ema if weights is None else weights == "ema"
    inputs = _inputs_of(run, Path(data_dir))
    model = run.load_model(inputs["shape"], len(inputs["classes"]), use_ema=use_ema)
    statistics = (torch.tensor(inputs[name]).to(device) for name in ("mean", "std"))
    return TrainedModel(
        model=model.to(device),
        normalise=Normalisation(*statistics),
        classes=list(inputs["classes"]),
        input_shape=tuple(inputs["shape"]),
        kind=inputs["kind"],
        recipe=run.recipe,
        seed=run.seed,
        checkpoint=run.path,
        epoch=run.checkpoint.state["epoch"],
        weights="ema" if use_ema else "last",
        metrics=_metrics_of(run, use_ema=use_ema),
    )


def _inputs_of(run: TrainedRun, data_dir: Path) -> Inputs:
    known: Any = run.inputs
    if known is not None:
        missing = Inputs.__required_keys__ - (known.keys() if isinstance(known, Mapping) else set())
        if missing:
            raise ValueError(
                f"{run.folder / 'config.json'} is damaged: its inputs have no {', '.join(sorted(missing))}"
            )
        check_types(Inputs, known)
        found: Inputs = known
        return found
    data = load(run.recipe.data, data_dir, size=run.recipe.size)
    check_data(run, data)
    ready = prepare_data(run.recipe, data, run.seed)
    return Inputs(
        kind="images" if data.train.is_images else "points",
        shape=list(data.train.shape),
        classes=list(data.names),
        mean=ready.normalise.mean.tolist(),
        std=ready.normalise.std.tolist(),
    )


def _metrics_of(run: TrainedRun, *, use_ema: bool) -> dict[str, float]:
    """What the last epoch measured for these weights; nothing if the checkpoint was taken within an epoch."""
    state = run.checkpoint.state
    if state["batch"] or not state["lines"]:
        return {}
    line = state["lines"][-1]
    average = AVERAGE if use_ema else ""
    wanted = (f"{average}{split_of(line)}_", f"{average}memorised")
    return {
        key.removeprefix(average): value
        for key, value in line.items()
        if key.startswith(wanted) and isinstance(value, int | float)
    }
