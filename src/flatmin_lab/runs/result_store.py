"""Which runs are there: a result file for each that finished, a folder for each that was begun.

    results/short/cifar10-preactresnet18-amp-0.json           what came of it: small, kept, the evidence
    results/short/cifar10-preactresnet18-amp-1.failed.json    what it failed with
    results/short/cost-nvidia-h200.json                       what a step of ERM and of AMP takes there
    results/planned.json                                      what was to be run, written down before it ran
    runs/short/cifar10-preactresnet18-amp-0/                  checkpoints: large, and of no use once all is measured

A result file is result.json with what was measured afterwards, and the curves of the training.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

from flatmin_lab.methods import resolve_settings
from flatmin_lab.recipes.recipe import SPEED, Job
from flatmin_lab.runs import checkpoint
from flatmin_lab.runs import config as run_config
from flatmin_lab.system.files import atomic_write
from flatmin_lab.system.json_data import numbers, read_json

State = Literal["done", "unmeasured", "without weights", "failed", "begun", "missing"]
PLANNED, FAILED, COST = "planned.json", ".failed.json", "cost-"
IDENTITY_SUFFIXES = (
    "_error",
    "_nll",
    "seconds",
    "seed",
    "data_sha256",
    "commit",
    "hardware",
)  # by which a training is known again
CURVES = ("train_loss", "train_error", "nll", "error", "ece", "delta_norm", "sharpness")  # of an epoch, as far as known


@dataclass(frozen=True)
class ResultStore:
    results: Path
    runs: Path

    def file(self, job: Job) -> Path:
        return self.results / f"{job.recipe.name}-{job.seed}.json"

    def failure(self, job: Job) -> Path:
        return self.results / f"{job.recipe.name}-{job.seed}{FAILED}"

    def folder(self, job: Job) -> Path:
        return self.runs / f"{job.recipe.name}-{job.seed}"

    def result(self, job: Job) -> dict[str, Any] | None:
        """Of a finished run; an error where the file is another recipe's."""
        if not self.file(job).exists():
            return None
        try:
            found = read_json(self.file(job))
        except ValueError as error:
            raise ValueError(f"{error}, or delete it: its run's folder makes it again, if that is there") from error
        if not {"recipe", "seed", "method"} <= found.keys():
            raise ValueError(f"{self.file(job)} is not a result; delete it, or put a good copy there")
        if apart := differs(found, job):
            raise ValueError(
                f"{self.file(job)} is of another training: {'; '.join(apart)}. Move it away, or give other --results"
            )
        return found

    def state(self, job: Job, parts: Iterable[str] = ()) -> State:
        """How far a run is, where these parts are wanted of it."""
        found = self.result(job)
        if found is not None:
            if all(part in found for part in parts):
                return "done"
            return "unmeasured" if self.has_weights_of(job, found) else "without weights"
        if self.failure(job).exists():
            return "failed"
        return "begun" if run_config.exists(self.folder(job)) else "missing"

    def has_weights_of(self, job: Job, result: Mapping[str, Any]) -> bool:
        """Whether the run's folder holds the weights that a result is of, and not those of another training."""
        folder = self.folder(job)
        if not checkpoint.listed(folder) or not (folder / "result.json").exists():
            return False
        own = read_json(folder / "result.json")
        return all(own.get(key) == result.get(key) for key in own if key.endswith(IDENTITY_SUFFIXES))

    def write(self, job: Job, result: Mapping[str, Any]) -> Path:
        """A run's result; what it failed with before is forgotten."""
        _write_json(self.file(job), result)
        self.failure(job).unlink(missing_ok=True)
        return self.file(job)

    def write_failure(self, job: Job, what: str, step: int | None, facts: Mapping[str, Any]) -> None:
        said = {"name": job.recipe.name, "protocol": job.recipe.protocol, **_identity(job)}
        _write_json(self.failure(job), {**said, "error": what, "step": step, **facts})

    # ---- what AMP costs

    def costs(self, protocol: str) -> list[Path]:
        return sorted((self.results / protocol).glob(f"{COST}*.json"))

    def write_cost(self, protocol: str, found: Mapping[str, Any]) -> Path:
        """One file a kind of hardware."""
        machine = "".join(c if c.isalnum() else "-" for c in str(found["hardware"]).lower())
        _write_json(self.results / protocol / f"{COST}{machine}.json", {"protocol": protocol, **found})
        return self.results / protocol / f"{COST}{machine}.json"

    # ---- what was planned

    def planned(self) -> list[dict[str, Any]]:
        """In the order of their planning: name, seed and day."""
        path = self.results / PLANNED
        return list(read_json(path).get("runs", [])) if path.exists() else []

    def plan(self, runs: Sequence[tuple[Job, tuple[str, ...]]], today: date) -> int:
        """Write down what is to be run and measured, before it is; how many of these are new.

        What was begun before it was planned cannot be planned any more.
        """
        known = self.planned()
        there = {(run["name"], run["seed"]) for run in known}
        fresh = [(job, parts) for job, parts in runs if job.key not in there]
        if late := [job for job, _ in fresh if self.state(job) != "missing"]:
            names = ", ".join(f"{job.recipe.name} with seed {job.seed}" for job in late[:3])
            raise ValueError(
                f"a plan is written before its trainings run, and {len(late)} of these have been begun: {names}; "
                "plan the others, with --seeds or --methods"
            )
        new = [
            {
                "name": job.recipe.name,
                "seed": job.seed,
                "planned": today.isoformat(),
                **({"parts": list(parts)} if parts else {}),
            }
            for job, parts in fresh
        ]
        if new:
            lines = ",\n".join(f"  {json.dumps(run)}" for run in [*known, *new])
            _write_text(self.results / PLANNED, f'{{"runs": [\n{lines}\n]}}\n')
        return len(new)


def curves_of(lines: Sequence[Mapping[str, Any]], split: str) -> dict[str, list[float | None]]:
    """An epoch a number, to six digits."""
    keys = {name: name if name in lines[-1] else f"{split}_{name}" for name in CURVES}
    return {name: numbers([line.get(key) for line in lines]) for name, key in keys.items() if key in lines[-1]}


def remove_old_checkpoints(folder: Path, kept: Path | None = None) -> None:
    """Of a finished run the last weights are enough: those that were measured, or the newest."""
    places = checkpoint.listed(folder)
    for old in [place for place in places if place != (kept or places[0])]:
        with suppress(OSError):
            old.unlink()


def _identity(job: Job) -> dict[str, Any]:
    """What names a training in a table."""
    recipe = job.recipe
    names = {"data": recipe.data, "model": recipe.model, "method": recipe.method, "seed": job.seed}
    return {**names, "settings": resolve_settings(recipe.method, recipe.settings), "augment": recipe.augment}


def differs(found: Mapping[str, Any], job: Job) -> list[str]:
    """In what a result differs from what is asked for; how fast it was computed is nothing of that kind."""
    asked = {**job.recipe.as_json(), **_identity(job)}
    ignored = {"name", *(key for key in SPEED if key != "precision")}
    return [
        f"{key} is {found.get(key)!r} there and {value!r} here"
        for key, value in asked.items()
        if key not in ignored and _sorted(found.get(key)) != _sorted(value)
    ]


def _sorted(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A key a line: small, and a change is one line."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in content.items())
    _write_text(path, f"{{\n{lines}\n}}\n")


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(text.encode())
