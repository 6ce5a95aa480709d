"""The store of results: a file for each finished run, and a folder for each run that has started.

    results/short/cifar10-preactresnet18-amp-0.json           its result: small, kept, the evidence
    results/short/cifar10-preactresnet18-amp-1.failed.json    its error
    results/short/cost-nvidia-h200.json                       the time of a step of ERM and of AMP there
    results/bench-nvidia-h200.json                            what `flatmin bench` measured there, for the frontier
    results/planned.json                                      the planned runs, and what will be tested of them
    runs/short/cifar10-preactresnet18-amp-0/                  checkpoints: large, not needed once everything is measured

A result file is result.json with the evaluations after training, and the training curves.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal, TypedDict

from flatmin_lab.methods import resolve_settings
from flatmin_lab.recipes.recipe import LATER_FIELDS, SPEED, Job, default_of
from flatmin_lab.recipes.renamed import name_now
from flatmin_lab.runs import checkpoint
from flatmin_lab.runs import config as run_config
from flatmin_lab.runs.events import RunError
from flatmin_lab.system.files import atomic_write, is_full_disk, locked
from flatmin_lab.system.json_data import numbers, read_json
from flatmin_lab.system.json_types import check_types

State = Literal["done", "unmeasured", "without weights", "failed", "begun", "missing"]
PLANNED, FAILED, COST, BENCH = "planned.json", ".failed.json", "cost-", "bench-"
IDENTITY_SUFFIXES = (
    "_error",
    "_nll",
    "seconds",
    "seed",
    "data_sha256",
    "commit",
    "hardware",
)  # what tells two runs apart
CURVES = (  # of an epoch, where known
    *("train_loss", "train_error", "nll", "error", "ece"),
    *("delta_norm", "sharpness", "epsilon", "held_out_nll"),
)


class DamagedResultError(ValueError):
    """The result of a finished run cannot be read; other runs are not affected."""


class UnwrittenError(RunError):
    """A file of the store could not be written."""


class PlannedRun(TypedDict, total=False):
    """A line of the plan."""

    name: str
    seed: int
    planned: str
    parts: Sequence[str]
    renamed_from: str  # what its recipe was called when it was planned
    withdrawn: str  # why it will not be run after all; it stays listed


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
        """The result of a finished run; an error where the file belongs to another recipe."""
        if not self.file(job).exists():
            return None
        try:
            found = read_json(self.file(job))
        except ValueError as error:
            way_out = "or delete it: the run folder makes it again, if it still exists"
            raise DamagedResultError(f"{error}, {way_out}") from error
        if not {"recipe", "seed", "method"} <= found.keys():
            raise DamagedResultError(f"{self.file(job)} is not a result; delete it, or put a good copy there")
        if apart := differs(found, job):
            now = name_now(str(found["recipe"]))
            moved = f", if it is of what is now {now}, to {self.results / f'{now}-{job.seed}.json'}" if now else " away"
            raise ValueError(
                f"{self.file(job)} belongs to another run: {'; '.join(apart)}. Move it{moved}, or give "
                "another --results"
            )
        return found

    def state(self, job: Job, parts: Iterable[str] = ()) -> State:
        """How far a run is, given that these parts are to be measured; an error where its result cannot be read."""
        found = self.result(job)
        if found is not None:
            if all(part in found for part in parts):
                return "done"
            return "unmeasured" if self.has_weights_of(job, found) else "without weights"
        if self.failure(job).exists():
            return "failed"
        return "begun" if run_config.exists(self.folder(job)) else "missing"

    def has_weights_of(self, job: Job, result: Mapping[str, Any]) -> bool:
        """Does the run's folder hold the weights that this result was measured on, and not those of another run?"""
        folder = self.folder(job)
        if not checkpoint.listed(folder) or not (folder / "result.json").exists():
            return False
        try:
            own = read_json(folder / "result.json")
        except ValueError as error:
            raise DamagedResultError(str(error)) from error
        return all(own.get(key) == result.get(key) for key in own if key.endswith(IDENTITY_SUFFIXES))

    def write(self, job: Job, result: Mapping[str, Any]) -> Path:
        """Write a run's result, and delete its earlier failure."""
        _write_json(self.file(job), result)
        self.failure(job).unlink(missing_ok=True)
        return self.file(job)

    def extend(self, job: Job, known: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
        """Write what is known and what was found, beside what another process may have added meanwhile."""
        folder = self.file(job).parent
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            whole = {**known, **(self.result(job) or {}), **found}
            self.write(job, whole)
        return whole

    def write_failure(self, job: Job, what: str, step: int | None, facts: Mapping[str, Any]) -> None:
        said = {"name": job.recipe.name, "protocol": str(job.recipe.protocol), **_identity(job)}
        _write_json(self.failure(job), {**said, "error": what, "step": step, **facts})

    # ---- the cost of AMP

    def costs(self, protocol: str) -> list[Path]:
        return sorted((self.results / protocol).glob(f"{COST}*.json"))

    def write_cost(self, protocol: str, found: Mapping[str, Any]) -> Path:
        """Write the cost: one file per kind of hardware."""
        machine = "".join(c if c.isalnum() else "-" for c in str(found["hardware"]).lower())
        _write_json(self.results / protocol / f"{COST}{machine}.json", {"protocol": protocol, **found})
        return self.results / protocol / f"{COST}{machine}.json"

    # ---- the plan

    def planned(self) -> list[dict[str, Any]]:
        """The planned runs in order: name, seed and day."""
        path = self.results / PLANNED
        whole = read_json(path) if path.exists() else {}
        if not isinstance(families := whole.get("families", {}), dict):
            raise ValueError(
                f"{path} is damaged: families must be an object, got a {type(families).__name__}; put a good copy there"
            )
        runs = whole.get("runs", [])
        if not isinstance(runs, list) or not all(
            isinstance(run, dict) and {"name", "seed"} <= run.keys() for run in runs
        ):
            raise ValueError(f"{path} is damaged: runs must be a list of names and seeds; put a good copy there")
        try:
            for run in runs:
                check_types(PlannedRun, run)
        except TypeError as error:
            raise ValueError(f"{path} is damaged: a run's {error}; put a good copy there") from error
        return runs

    def plan(
        self,
        runs: Sequence[tuple[Job, tuple[str, ...]]],
        today: date,
        families: Mapping[str, Sequence[str]] | None = None,
    ) -> tuple[int, int]:
        """Add runs and what is to be measured of them to the plan.

        Returns how many runs are new, and for how many of the known ones more is to be measured. A run that has already
        started cannot be planned. `families` are the comparisons that will be tested: those of a name that the plan has
        already stay as they are.
        """
        self.results.mkdir(parents=True, exist_ok=True)
        with locked(self.results):  # another process may be planning other runs
            return self._add_to_plan(runs, today, families or {})

    def _add_to_plan(
        self, runs: Sequence[tuple[Job, tuple[str, ...]]], today: date, families: Mapping[str, Sequence[str]]
    ) -> tuple[int, int]:
        known = self.planned()
        there = {(run["name"], run["seed"]) for run in known}
        fresh = [(job, parts) for job, parts in runs if job.key not in there]
        if late := [job for job, _ in fresh if self.state(job) != "missing"]:
            names = ", ".join(f"{job.recipe.name} with seed {job.seed}" for job in late[:3])
            raise ValueError(
                f"a plan must be written before its runs start, but {len(late)} of these have started: {names}; "
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
        asked = {job.key: parts for job, parts in runs if self.state(job) == "missing"}
        extended = 0
        for run in known:
            before = run.get("parts", [])
            more = [part for part in asked.get((run["name"], run["seed"]), ()) if part not in before]
            if more and "withdrawn" not in run:
                run["parts"] = [*before, *more]
                extended += 1
        if new or extended:
            path = self.results / PLANNED
            whole = read_json(path) if path.exists() else {}
            fixed = {name: {"fixed": today.isoformat(), "comparisons": list(own)} for name, own in families.items()}
            before = whole.get("families", {})
            later = {name: family for name, family in fixed.items() if name not in before}
            _write_text(path, _plan_text({**whole, "families": {**before, **later}, "runs": [*known, *new]}))
        return len(new), extended


def _plan_text(plan: Mapping[str, Any]) -> str:
    """One line per family and per run, so that two plans are merged line by line; the runs come last."""
    parts = []
    for key in sorted(plan, key=lambda key: key == "runs"):
        if plan[key] and isinstance(plan[key], dict):
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in plan[key].items())
            parts.append(f"{json.dumps(key)}: {{\n{lines}\n}}")
        elif plan[key]:
            lines = ",\n".join(f"  {json.dumps(value)}" for value in plan[key])
            parts.append(f"{json.dumps(key)}: [\n{lines}\n]")
    return f"{{{', '.join(parts)}}}\n"


def curves_of(lines: Sequence[Mapping[str, Any]], split: str) -> dict[str, list[float | None]]:
    """The curves: a number per epoch, to six digits."""
    keys = {name: name if name in lines[-1] else f"{split}_{name}" for name in CURVES}
    return {name: numbers([line.get(key) for line in lines]) for name, key in keys.items() if key in lines[-1]}


def remove_old_checkpoints(folder: Path, kept: Collection[Path] = ()) -> None:
    """Of a finished run keep these checkpoints, or the newest."""
    places = checkpoint.listed(folder)
    for old in [place for place in places if place not in (kept or places[:1])]:
        with suppress(OSError):
            old.unlink()


def _identity(job: Job) -> dict[str, Any]:
    """What identifies a run in a table."""
    recipe = job.recipe
    names = {"data": recipe.data, "model": recipe.model, "method": recipe.method, "seed": job.seed}
    return {**names, "settings": resolve_settings(recipe.method, recipe.settings), "augment": recipe.augment}


def differs(found: Mapping[str, Any], job: Job) -> list[str]:
    """How a result differs from the requested run; how fast it was computed does not count."""
    usual = {key: default_of(key) for key in LATER_FIELDS}  # in JSON only where they are not the default
    found, asked = {**usual, **found}, {**usual, **job.recipe.as_json(), **_identity(job)}
    ignored = {"name", *(key for key in SPEED if key != "precision")}
    return [
        f"{key} is {found.get(key)!r} there and {value!r} here"
        for key, value in asked.items()
        if key not in ignored and _sorted(found.get(key)) != _sorted(value)
    ]


def _sorted(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A key per line: small, and a change is one line."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in content.items())
    _write_text(path, f"{{\n{lines}\n}}\n")


def _write_text(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(text.encode())
    except OSError as error:
        full = is_full_disk(error)
        raise UnwrittenError(
            f"{path} could not be written: {'the disk is full' if full else error}; {'make room, and ' if full else ''}"
            "repeat the command, which trains nothing again that has been trained"
        ) from error
