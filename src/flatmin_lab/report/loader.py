"""Finished runs, read from their folders: what the report is a view of. What cannot be read is named, and left out.

A run is a folder with config.json and result.json; metrics.jsonl, evaluation.json and landscape.json add to it. Or it
is one JSON file with all of that in it, as `flatmin reproduce` writes it. A tuning is a tuning.json; the runs beside it
are its trials, and no runs of their own. Anyone may have written these files: each is checked before it is believed.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatmin_lab.report import schema
from flatmin_lab.runs import config as run_config
from flatmin_lab.runs import evaluation_files
from flatmin_lab.runs.result import split_of
from flatmin_lab.runs.result_store import COST, FAILED, PLANNED
from flatmin_lab.tuning import result_file
from flatmin_lab.tuning.result import Tuning

NUMBERED = re.compile(r".+-\d+\.json")  # as a result is called: its recipe and its seed


@dataclass(frozen=True)
class Run:
    """One training."""

    path: Path
    result: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]] = ()  # an epoch each
    evaluation: Mapping[str, Any] = field(default_factory=dict)  # "attack" and "flatness", as far as they are known
    landscape: Mapping[str, Any] | None = None
    boundary: Mapping[str, Any] | None = None  # of points in a plane

    @property
    def method(self) -> str:
        return str(self.result["method"])

    @property
    def split(self) -> str:
        return split_of(self.result)


@dataclass(frozen=True)
class Broken:
    """Something that could not be used, and why."""

    path: Path
    why: str


@dataclass(frozen=True)
class Failure:
    """A training that could not go on, as it was written down."""

    name: str
    seed: int
    error: str


@dataclass(frozen=True)
class Collected:
    runs: list[Run] = field(default_factory=list)
    tunings: list[tuple[Path, Tuning]] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)
    planned: list[tuple[str, int]] = field(default_factory=list)  # names and seeds, written down before they ran
    failures: list[Failure] = field(default_factory=list)
    costs: list[Mapping[str, Any]] = field(default_factory=list)


def collect(paths: Iterable[Path]) -> Collected:
    """Every run and tuning at or below these paths, in the order of their names; one named twice counts once."""
    found = Collected()
    places: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there; give folders that flatmin train made, or result files")
        for place in _places(path):
            places.setdefault(place.resolve(), place)
    for place in places.values():
        try:
            if place.name == result_file.FILE:
                found.tunings.append((place, result_file.read(place)))
            else:
                found.runs.append(_folder(place, found.broken) if place.is_dir() else read_result(place, found.broken))
        except (ValueError, OSError) as error:
            found.broken.append(Broken(place, str(error)))
    for path in paths:
        _add_ledger(path, found)
    if not found.runs and not found.tunings and not found.broken:
        shown = ", ".join(map(str, paths))
        raise FileNotFoundError(f"there is no run in {shown}; begin one with `flatmin train --data digits`")
    return found


def _add_ledger(path: Path, found: Collected) -> None:
    """What was planned, what failed and what a step costs, as far as it can be understood."""
    for file in sorted(path.rglob("*.json")) if path.is_dir() else ():
        if file.name == PLANNED or file.name.endswith(FAILED) or file.name.startswith(COST):
            try:
                content = _read(file)
                if file.name == PLANNED:
                    found.planned.extend(schema.planned(content))
                elif file.name.startswith(COST):
                    found.costs.append(schema.cost({"protocol": file.resolve().parent.name, **content}))
                elif not file.with_name(f"{file.name.removesuffix(FAILED)}.json").exists():  # it has succeeded since
                    found.failures.append(Failure(*schema.failure(content)))
            except (ValueError, OSError) as error:
                found.broken.append(Broken(file, str(error)))


def _places(path: Path) -> list[Path]:
    """Runs' folders, result files and tunings, sorted. A trial of a tuning is a run only where it is named itself."""
    if path.is_file() or run_config.exists(path):
        return [path]
    folders = sorted(config.parent for config in path.rglob("config.json"))
    inside = set(folders)
    files = [file for file in sorted(path.rglob("*.json")) if not inside & set(file.parents) and _is_ours(file)]
    return [*(folder for folder in folders if not _is_trial(folder)), *files]


def _is_trial(folder: Path) -> bool:
    return folder.name.startswith(result_file.TRIAL_PREFIX) and (folder.parent / result_file.FILE).is_file()


def _is_ours(path: Path) -> bool:
    """A result or a tuning, and what must have been one: it is named if it cannot be read."""
    if path.name.startswith(COST):  # whose hardware may end in a number
        return False
    return path.name == result_file.FILE or bool(NUMBERED.fullmatch(path.name)) or _is_result(path)


def _is_result(path: Path) -> bool:
    with suppress(ValueError, OSError):
        return path.is_file() and schema.NEEDED.keys() <= _read(path).keys()
    return False


def _read(path: Path) -> dict[str, Any]:
    try:
        content = _json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path.name} is damaged: it is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is damaged: it must hold an object, got {type(content).__name__}")
    return content


def _json(text: str | bytes) -> Any:
    """Without half characters, which no page can hold."""
    try:
        content = json.loads(text)
        return json.loads(json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def read_result(path: Path, broken: list[Broken] | None = None) -> Run:
    """A result that is one file: what was measured afterwards, and the curves, are in it."""
    content = _read(path)
    result = schema.result(content)
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
                (broken if broken is not None else []).append(Broken(path, f"its {part} is not used: {error}"))
    return Run(path, result, parts["curves"], parts["evaluation"], parts["landscape"], parts["boundary"])


def _folder(path: Path, broken: list[Broken]) -> Run:
    config = run_config.stored(path)
    if not (path / "result.json").exists():
        raise ValueError(_unfinished(path, config))
    result = schema.result(_read(path / "result.json"))
    lines: Sequence[Mapping[str, Any]] = ()
    try:
        lines = _lines(path / "metrics.jsonl")
    except (ValueError, OSError) as error:
        broken.append(Broken(path / "metrics.jsonl", f"no curves of this run: {error}"))
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
                broken.append(Broken(path / name, f"not used: {error}"))
    return Run(path, result, lines, kept.get(evaluation_files.EVALUATION, {}), kept.get(evaluation_files.LANDSCAPE))


def _unfinished(path: Path, config: Mapping[str, Any]) -> str:
    """Not finished, or broken off because it diverged: that is a result of the method too, and is said."""
    state: dict[str, Any] = {}
    done = 0
    with suppress(ValueError, OSError):
        state = _read(path / "state.json")
    with suppress(ValueError, OSError):
        done = len(_lines(path / "metrics.jsonl"))
    recipe = config["recipe"]
    if isinstance(state.get("diverged"), str):
        return f"this training of {recipe.get('method')} diverged, and is in no mean: {state['diverged']}"
    again = f"flatmin train --out {shlex.quote(str(path))} --resume"
    return f"not finished, {done} of {recipe.get('epochs')} epochs; go on with: {again}"


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip():
            try:
                content = _json(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON") from error
            if not isinstance(content, dict) or not all(v is None or schema.is_number(v) for v in content.values()):
                raise ValueError(f"line {number} is not of numbers")
            found.append(content)
    return found
