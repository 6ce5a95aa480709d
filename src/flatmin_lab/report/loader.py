"""Finished runs, read from their folders: the report is a view of them. What cannot be read is listed and left out.

A run is a folder with config.json and result.json; metrics.jsonl, evaluation.json and landscape.json add to it. Or it
is a single JSON file with all of that, as `flatmin reproduce` writes it. A tuning is a tuning.json; the runs beside it
are its trials, not runs of their own. The files are untrusted: each is checked before use (schema.py).
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flatmin_lab.bench.mode_cost import StepTimes, step_times
from flatmin_lab.comparing import comparison_file
from flatmin_lab.recipes.experiments import by_name
from flatmin_lab.recipes.protocols import FollowedProtocol
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.recipes.renamed import name_now
from flatmin_lab.report import schema
from flatmin_lab.runs import config as run_config
from flatmin_lab.runs import evaluation_files
from flatmin_lab.runs.result import AVERAGE, split_of
from flatmin_lab.runs.result_store import BENCH, COST, FAILED, PLANNED, differs
from flatmin_lab.system.files import read_regular
from flatmin_lab.tuning import result_file
from flatmin_lab.tuning.result import Tuning

RESULT_NAME = re.compile(r".+-\d+\.json")  # a result's name: its recipe and its seed
OUTCOME_NAME = re.compile(r".+-seed-\d+\.json")  # of a run in a comparison: its contender and its seed


@dataclass(frozen=True)
class Run:
    """One finished training run."""

    path: Path
    result: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]] = ()  # one per epoch
    evaluation: Mapping[str, Any] = field(default_factory=dict)  # attacks, flatness, spectrum and others, if measured
    landscape: Mapping[str, Any] | None = None
    boundary: Mapping[str, Any] | None = None  # of points in a plane

    @property
    def method(self) -> str:
        return str(self.result["method"])

    def averaged(self) -> "Run":
        """With the numbers of the averaged weights in place of the last ones, if there are any (`train --ema`)."""
        known = self.result.items()
        average = {key.removeprefix(AVERAGE): value for key, value in known if key.startswith(AVERAGE)}
        return replace(self, result={**self.result, **average}) if average else self

    @property
    def split(self) -> str:
        return split_of(self.result)

    @property
    def protocol(self) -> FollowedProtocol:
        return FollowedProtocol.read(str(self.result.get("protocol") or "own"))


@dataclass(frozen=True)
class UnusableFile:
    """A file or folder that could not be used, and why."""

    path: Path
    why: str


@dataclass(frozen=True)
class Failure:
    """A run that failed, as its failure file records it."""

    name: str
    seed: int
    error: str


@dataclass(frozen=True)
class LoadedResults:
    """Everything a report is made of."""

    runs: list[Run] = field(default_factory=list)
    tunings: list[tuple[Path, Tuning]] = field(default_factory=list)
    unusable: list[UnusableFile] = field(default_factory=list)
    planned: list[tuple[str, int]] = field(default_factory=list)  # names and seeds, recorded before they ran
    withdrawn: list[tuple[str, int, str]] = field(default_factory=list)  # of these: names, seeds, and why
    broken_off: list[tuple[str, int, str]] = field(default_factory=list)  # names, seeds, and what became of them
    families: dict[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)  # comparisons, and the day
    failures: list[Failure] = field(default_factory=list)
    costs: list[Mapping[str, Any]] = field(default_factory=list)
    step_times: list[StepTimes] = field(default_factory=list)  # of all kinds of steps


def load_results(paths: Iterable[Path]) -> LoadedResults:
    """Every run and tuning at or below these paths, sorted by name; one that is named twice counts once."""
    found = LoadedResults()
    places: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; give run folders of flatmin train, or result files")
        for place in _find_paths(path):
            places.setdefault(place.resolve(), place)
    for place in places.values():
        try:
            if place.name == result_file.FILE:
                found.tunings.append((place, result_file.read(place)))
            else:
                found.runs.append(
                    _folder(place, found.unusable) if place.is_dir() else read_result(place, found.unusable)
                )
        except (ValueError, OSError) as error:
            found.unusable.append(UnusableFile(place, str(error)))
    for path in paths:
        _add_plans_failures_costs(path, found)
    if not found.runs and not found.tunings and not found.unusable:
        shown = ", ".join(map(str, paths))
        raise FileNotFoundError(f"there is no run in {shown}; start one with `flatmin train --data digits`")
    return found


def _add_plans_failures_costs(path: Path, found: LoadedResults) -> None:
    """Add what was planned, what failed and what a step costs; unreadable files are listed."""
    for file in sorted(path.rglob("*.json")) if path.is_dir() else ():
        if file.name == PLANNED or file.name.endswith(FAILED) or file.name.startswith((COST, BENCH)):
            try:
                content = _read(file)
                if file.name == PLANNED:
                    found.planned.extend(schema.planned(content))
                    found.withdrawn.extend(schema.withdrawn(content))
                    found.broken_off.extend(schema.broken_off(content))
                    found.families.update(schema.families(content))
                elif file.name.startswith(BENCH):
                    found.step_times.extend(step_times(schema.benchmark(content)))
                elif file.name.startswith(COST):
                    found.costs.append(schema.cost({"protocol": file.resolve().parent.name, **content}))
                elif not file.with_name(
                    f"{file.name.removesuffix(FAILED)}.json"
                ).exists():  # else it has succeeded since
                    found.failures.append(Failure(*schema.failure(content)))
            except (ValueError, OSError) as error:
                found.unusable.append(UnusableFile(file, str(error)))


def _find_paths(path: Path) -> list[Path]:
    """Run folders, result files and tunings, sorted. A tuning's trial counts as a run only if it is named itself."""
    if path.is_file() or run_config.exists(path):
        return [path]
    folders = sorted(config.parent for config in path.rglob("config.json"))
    inside = set(folders)
    files = [
        file for file in sorted(path.rglob("*.json")) if not inside & set(file.parents) and _is_result_or_tuning(file)
    ]
    return [*(folder for folder in folders if not _is_trial(folder)), *files]


def _is_trial(folder: Path) -> bool:
    return folder.name.startswith(result_file.TRIAL_PREFIX) and (folder.parent / result_file.FILE).is_file()


def _is_result_or_tuning(path: Path) -> bool:
    """Is it a result or a tuning, or named like one? Then it is listed if it cannot be read."""
    if path.name.startswith((COST, BENCH)):  # its hardware may end in a number, as a result's name does
        return False
    if OUTCOME_NAME.fullmatch(path.name) and (path.parent / comparison_file.FILE).is_file():
        return False  # of a run of `flatmin compare`, whose folder lies beside it
    return path.name == result_file.FILE or bool(RESULT_NAME.fullmatch(path.name)) or _is_result(path)


def _is_result(path: Path) -> bool:
    with suppress(ValueError, OSError):
        return path.is_file() and schema.REQUIRED.keys() <= _read(path).keys()
    return False


def _read(path: Path) -> dict[str, Any]:
    try:
        content = _json(read_regular(path))
    except ValueError as error:
        raise ValueError(f"{path.name} is damaged: it is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is damaged: it must hold an object, got {type(content).__name__}")
    return content


def _json(text: str | bytes) -> Any:
    """Parse JSON; lone surrogates are replaced, as no page can hold them."""
    try:
        content = json.loads(text)
        return json.loads(json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _by_its_name_now(result: dict[str, Any]) -> dict[str, Any]:
    """Give a result from before its recipe was renamed the current name and protocol."""
    old = str(result.get("recipe"))
    recipe = by_name().get(name_now(old) or "")
    if recipe is None or differs(result, Job(recipe, result["seed"])):
        return result
    return {**result, "recipe": recipe.name, "renamed_from": old, "protocol": str(recipe.protocol)}


def read_result(path: Path, unusable: list[UnusableFile] | None = None) -> Run:
    """A result in a single file, which includes the measurements after training and the curves."""
    content = _read(path)
    result = _by_its_name_now(schema.result(content))
    parts: dict[str, Any] = {"curves": [], "evaluation": {}, "landscape": None, "boundary": None}
    for part, check in (
        ("curves", schema.curves),
        ("evaluation", schema.evaluation),
        ("landscape", schema.landscape),
        ("boundary", schema.boundary),
    ):
        inside = content if part == "evaluation" else content.get(part)
        if inside is not None:
            try:
                parts[part] = check(inside, result)
            except ValueError as error:
                (unusable if unusable is not None else []).append(
                    UnusableFile(path, f"its {part} is not used: {error}")
                )
    return Run(path, result, parts["curves"], parts["evaluation"], parts["landscape"], parts["boundary"])


def _folder(path: Path, unusable: list[UnusableFile]) -> Run:
    config = run_config.read_config(path)
    if not (path / "result.json").exists():
        raise ValueError(_unfinished(path, config))
    result = _by_its_name_now(schema.result(_read(path / "result.json")))
    lines: Sequence[Mapping[str, Any]] = ()
    try:
        lines = _lines(path / "metrics.jsonl")
    except (ValueError, OSError) as error:
        unusable.append(UnusableFile(path / "metrics.jsonl", f"no curves of this run: {error}"))
    kept: dict[str, dict[str, Any]] = {}
    for name, check in (
        (evaluation_files.EVALUATION, schema.evaluation),
        (evaluation_files.LANDSCAPE, schema.landscape),
    ):
        if (path / name).exists():
            try:
                found = _read(path / name)
                schema.check_end(found, result["epochs"])
                kept[name] = check(found, result)
            except (ValueError, OSError) as error:
                unusable.append(UnusableFile(path / name, f"not used: {error}"))
    return Run(path, result, lines, kept.get(evaluation_files.EVALUATION, {}), kept.get(evaluation_files.LANDSCAPE))


def _unfinished(path: Path, config: Mapping[str, Any]) -> str:
    """Why a run has no result: it is unfinished, or it diverged, which says something about the method too."""
    state: dict[str, Any] = {}
    done = 0
    with suppress(ValueError, OSError):
        state = _read(path / "state.json")
    with suppress(ValueError, OSError):
        done = len(_lines(path / "metrics.jsonl"))
    recipe = config["recipe"]
    if isinstance(state.get("diverged"), str):
        return f"this run of {recipe.get('method')} diverged, and is left out of all means: {state['diverged']}"
    again = f"flatmin train --out {shlex.quote(str(path))} --resume"
    return f"not finished, {done} of {recipe.get('epochs')} epochs; resume with: {again}"


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for number, line in enumerate(read_regular(path).decode().splitlines(), start=1):
        if line.strip():
            try:
                content = _json(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON") from error
            if not isinstance(content, dict) or not all(v is None or schema.is_number(v) for v in content.values()):
                raise ValueError(f"line {number} does not hold numbers")
            found.append(content)
    return found
