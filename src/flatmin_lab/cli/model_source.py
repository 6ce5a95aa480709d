"""Which models are evaluated, and on which data: a run's, or the user's own."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from flatmin_lab.cli import display
from flatmin_lab.cli.request import read_data, read_run_data
from flatmin_lab.data.formats.download_progress import download_bar
from flatmin_lab.data.outside import OutsideData, load_outside
from flatmin_lab.data.registry import NAMED
from flatmin_lab.evaluation import load_run
from flatmin_lab.evaluation.load_run import TrainedRun
from flatmin_lab.evaluation.subject import Subject, user_subject
from flatmin_lab.models.user_model import make_user_model
from flatmin_lab.models.weights import load_weights
from flatmin_lab.system.machine import device_named


class EvaluatedModel(NamedTuple):
    """A model to evaluate, its name and method; its run, if the results may be kept in the run folder."""

    name: str
    method: str | None
    subject: Subject
    description: dict[str, Any]
    run: TrainedRun | None
    is_average: bool = False  # are these a run's averaged weights?


@dataclass(frozen=True)
class ModelSource:
    """The flags that say which model and data to evaluate."""

    model: str | None
    data: str | None
    size: tuple[int, int] | None
    data_dir: Path
    download: bool
    normalised: bool
    use_ema: bool
    device: str | None

    def models(self, places: Sequence[Path | None]) -> Iterator[EvaluatedModel]:
        """The models one by one, so that only one is in memory; first it checks that all of them exist."""
        self._check(places)
        if self.model is not None:
            yield from (self._user_model(self.model, place) for place in places)
            return
        runs = [_find_run(place) for place in places if place is not None]
        for run, name in zip(runs, _names(runs), strict=True):
            for damaged in run.damaged_checkpoints:
                display.say(display.terminal(), f"note: {damaged}; evaluating the checkpoint before it", style="yellow")
            data = read_run_data(run.recipe, self.data, self.data_dir, download=self.download)
            subject = load_run.subject_of(run, data, use_ema=self.use_ema, device=device_named(self.device))
            kept = None if self.use_ema else run
            yield EvaluatedModel(name, run.recipe.method, subject, run.describe(), kept, self.use_ema)

    def outside(self, names: Sequence[str], subject: Subject) -> Iterator[OutsideData]:
        """The data sets of --outside as the model takes them, one by one."""
        seen = set()
        for name in names:
            with download_bar() as progress:
                found = load_outside(name, self.data_dir, like=subject.test, download=self.download, progress=progress)
            if found.name in seen:
                raise ValueError(
                    f"outside data must have names of their own, got {found.name} twice; rename one of them"
                )
            seen.add(found.name)
            if found.converted_from:
                display.say(
                    display.terminal(),
                    f"note: {found.name} was converted from {found.converted_from} to {found.split.kind}",
                    style="yellow",
                )
            yield found

    def _check(self, places: Sequence[Path | None]) -> None:
        if self.model is None and None in places:
            raise ValueError("name a run folder or a checkpoint, or your own model with --model and --data")
        if self.model is None and self.size is not None:
            raise ValueError("--size belongs to --model; a run knows the size of its images")
        if self.model is None and self.normalised:
            raise ValueError("--normalised belongs to --model; a run knows how its images were normalised")
        if self.model is not None and self.data is None:
            raise ValueError("--model needs --data: a data set, an .npz file or a folder of images")
        if self.model is not None and self.use_ema:
            raise ValueError("--averaged belongs to a run that was trained with --ema, not to --model")

    def _user_model(self, name: str, weights: Path | None) -> EvaluatedModel:
        assert self.data is not None
        data = read_data(self.data, self.data_dir, download=self.download, size=self.size)
        made = make_user_model(name, data.train.shape, num_classes=data.num_classes, settings={})
        if weights is not None:
            load_weights(made, weights)
        description = {"model": name, "weights": None if weights is None else str(weights), "data": data.name}
        how: dict[str, Any] = {"normalised": self.normalised, "own_data": self.data not in NAMED}
        subject = user_subject(made, data, device=device_named(self.device), **how)
        for note in subject.notes:
            display.say(display.terminal(), f"note: {note}", style="yellow")
        return EvaluatedModel(name if weights is None else str(weights), None, subject, description, None)


def _find_run(place: Path) -> TrainedRun:
    try:
        return load_run.find_run(place)
    except load_run.NotInRunError as error:
        raise ValueError(f"{error}; for weights of your own, add --model file.py:make_model and --data") from error


def _names(runs: Sequence[TrainedRun]) -> list[str]:
    """Distinct names: by method and seed, by folder, by folder and epoch, or by file, whichever works first."""
    ways: list[Callable[[TrainedRun], str]] = [
        lambda run: f"{run.recipe.method}, seed {run.seed}",
        lambda run: run.folder.name,
        lambda run: f"{run.folder.name}, epoch {run.describe()['epoch']}",
        lambda run: str(run.path),
    ]
    named = [[way(run) for run in runs] for way in ways]
    return next((names for names in named if len(set(names)) == len(names)), named[-1])


def parse_length(flag: str, text: str | None) -> float | None:
    """A number, or a fraction: 4/255."""
    if text is None:
        return None
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"{flag} takes a number or a fraction such as 4/255, got {text!r}") from error
    if value < 0:
        raise ValueError(f"{flag} must be at least 0, got {text}")
    return value


def check_count(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
