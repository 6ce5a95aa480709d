"""A trained run: its newest checkpoint, or a given one, and the model with those weights.

`find_run` reads the folder, `subject_of` adds the data that it is evaluated on; trained_model.py needs no data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatmin_lab import methods
from flatmin_lab.data.augment.transforms import augmentation
from flatmin_lab.data.dataset import Dataset
from flatmin_lab.data.registry import NAMED
from flatmin_lab.evaluation.subject import Subject
from flatmin_lab.models.weights import assign_weights, load_unsaved_buffers
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.recipes.user_files import with_original_model
from flatmin_lab.runs import checkpoint
from flatmin_lab.runs import config as run_config
from flatmin_lab.runs.checkpoint import Checkpoint
from flatmin_lab.runs.events import RunError
from flatmin_lab.runs.folder import CODE
from flatmin_lab.training.build import build_network, prepare_data


class NotInRunError(ValueError):
    """A file outside any run folder, so nothing says which model it belongs to."""


class UnfinishedError(RunError):
    """The last checkpoint of a finished run is damaged; the run must be resumed from the one before."""


@dataclass(frozen=True)
class TrainedRun:
    """A checkpoint, and what its run folder says about it."""

    path: Path
    recipe: Recipe
    seed: int
    data_sha256: str
    checkpoint: Checkpoint
    is_newest: bool  # of the checkpoints in its folder
    inputs: Mapping[str, Any] | None  # what the model takes and returns, as config.json has it; None in old runs
    damaged_checkpoints: tuple[str, ...] = ()  # newer ones that could not be read

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def has_ema(self) -> bool:
        return bool(self.checkpoint.part("average"))

    def describe(self) -> dict[str, Any]:
        """Which weights these are, and how far they were trained."""
        state = self.checkpoint.state
        return {
            "checkpoint": str(self.path),
            "epoch": state["epoch"],
            "batches": state["batch"],
            "epochs": self.recipe.epochs,
        }

    def load_model(self, shape: Sequence[int], classes: int, *, use_ema: bool = False) -> nn.Module:
        """The model in eval mode, with the weights of the checkpoint or their EMA.

        A user's own model is built by their file as it was when the run was started.
        """
        if use_ema and not self.has_ema:
            raise ValueError(f"{self.path} has no EMA of the weights: it was trained without --ema")
        weights = self.checkpoint.part("average.module" if use_ema else "model")
        buffers = self.checkpoint.part("average_buffers.module" if use_ema else "buffers")
        recipe = with_original_model(self.recipe, self.folder / CODE)
        dropout = methods.dropout_rate(recipe.method, recipe.settings)
        with torch.random.fork_rng([]):
            model = build_network(recipe, shape, num_classes=classes, dropout=dropout)
        assign_weights(model, weights, str(self.path))
        load_unsaved_buffers(model, buffers)
        return model.eval()


def find_run(path: Path) -> TrainedRun:
    """The newest intact checkpoint of a folder, or the checkpoint that is named."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give a run folder, or one of its checkpoints")
    folder = path if path.is_dir() else path.parent
    if path.is_file() and not run_config.exists(folder):
        raise NotInRunError(f"{path} is not in a run folder; give a run folder, or one of its checkpoints")
    if not run_config.exists(folder) and (inside := sorted(path.glob("*/config.json"))):
        names = ", ".join(str(config.parent) for config in inside[:3])
        raise ValueError(f"{path} holds {len(inside)} runs; name one, such as {names}")
    config = run_config.read_config(folder)
    places = checkpoint.listed(folder) if path.is_dir() else [path]
    if not places and (folder / "result.json").exists():
        raise FileNotFoundError(
            f"the run in {folder} has ended, but its checkpoints are gone; put them back, or train it in another folder"
        )
    if not places:
        raise FileNotFoundError(f"{folder} has no checkpoint yet; resume the run with `flatmin train --resume`")
    place, whole, damaged = checkpoint.newest_whole(places, config)
    damaged_checkpoints = tuple(str(error) for _, error in damaged)
    if place is None or whole is None:
        raise RunError("; ".join(damaged_checkpoints))
    recipe = run_config.recipe_of(folder, config)
    is_newest = [place] == checkpoint.listed(folder)[:1]
    return TrainedRun(
        place,
        recipe,
        int(config["seed"]),
        str(config["data_sha256"]),
        whole,
        is_newest,
        config.get("inputs"),
        damaged_checkpoints,
    )


def find_finished_run(folder: Path) -> TrainedRun:
    """The last checkpoint of a finished run; where it is damaged, the run counts as unfinished from now on."""
    found = find_run(folder)
    if found.describe()["epoch"] != found.recipe.epochs:
        (folder / "result.json").replace(folder / "result.json.damaged")
        raise UnfinishedError("its last checkpoint is damaged; the same command resumes it from the one before")
    return found


def check_data(run: TrainedRun, data: Dataset) -> None:
    """Raise where these are not the data that the run was trained on."""
    if data.checksum != run.data_sha256:
        raise ValueError(
            f"{run.path} was trained on {run.recipe.data} with SHA-256 {run.data_sha256}, but this {data.name} has "
            f"{data.checksum}; give the same data with --data"
        )


def subject_of(run: TrainedRun, data: Dataset, *, use_ema: bool, device: torch.device) -> Subject:
    """The run's model, with the data that it was trained on."""
    check_data(run, data)
    ready = prepare_data(run.recipe, data.to(device), run.seed)
    model = run.load_model(ready.data.train.shape, ready.data.num_classes, use_ema=use_ema).to(device)
    return Subject(
        model,
        ready.normalise,
        ready.data.train,
        ready.data.test,
        ready.which,
        augment=augmentation(run.recipe.augment, ready.data),
        batch_size=run.recipe.batch_size,
        own_data=run.recipe.data not in NAMED,
    )
