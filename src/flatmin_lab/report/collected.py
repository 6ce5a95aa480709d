"""Finished runs, read from their folders: what the report is a view of. What cannot be read is named, and left out.

A run is a folder with config.json and result.json; metrics.jsonl, evaluation.json and landscape.json add to it. A
result may also be a single JSON file. Anyone may have written these files: nothing in them is trusted to be there.
"""

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatmin_lab import judgements, run_config
from flatmin_lab.methods import METHODS

NEEDED: dict[str, type | tuple[type, ...]] = {
    "data": str,
    "model": str,
    "method": str,
    "seed": int,
    "epochs": int,
    "seconds": (int, float),
}


@dataclass(frozen=True)
class Run:
    """One training."""

    path: Path
    result: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]] = ()  # an epoch each
    evaluation: Mapping[str, Any] | None = None
    landscape: Mapping[str, Any] | None = None

    @property
    def method(self) -> str:
        return str(self.result["method"])

    @property
    def split(self) -> str:
        """What it was measured on: test, or validation for a tuning run."""
        return "validation" if "validation_error" in self.result else "test"


@dataclass(frozen=True)
class Broken:
    """Something that could not be used, and why."""

    path: Path
    why: str


@dataclass(frozen=True)
class Collected:
    runs: list[Run] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)


def collect(paths: Iterable[Path]) -> Collected:
    """Every run at or below these paths, in the order of their names; a run that is named twice counts once."""
    found = Collected()
    places: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there; give folders that flatmin train made, or result files")
        for place in _places(path):
            places.setdefault(place.resolve(), place)
    for place in places.values():
        try:
            found.runs.append(_folder(place, found.broken) if place.is_dir() else _file(place))
        except (ValueError, OSError) as error:
            found.broken.append(Broken(place, str(error)))
    if not found.runs and not found.broken:
        shown = ", ".join(map(str, paths))
        raise FileNotFoundError(f"there is no run in {shown}; begin one with `flatmin train --data digits`")
    return found


def _places(path: Path) -> list[Path]:
    """Runs' folders and result files, sorted."""
    if path.is_file() or run_config.exists(path):
        return [path]
    folders = sorted(config.parent for config in path.rglob("config.json"))
    inside = set(folders)
    files = [file for file in sorted(path.rglob("*.json")) if not inside & set(file.parents) and _is_result(file)]
    return [*folders, *files]


def _is_result(path: Path) -> bool:
    try:
        return NEEDED.keys() <= run_config.read_json(path).keys()
    except ValueError:
        return False


def _file(path: Path) -> Run:
    return Run(path, _checked(run_config.read_json(path), path))


def _folder(path: Path, broken: list[Broken]) -> Run:
    config = run_config.stored(path)
    if not (path / "result.json").exists():
        raise ValueError(_unfinished(path, config))
    result = _checked(run_config.read_json(path / "result.json"), path / "result.json")
    lines: Sequence[Mapping[str, Any]] = ()
    try:
        lines = _lines(path / "metrics.jsonl")
    except (ValueError, OSError) as error:
        broken.append(Broken(path / "metrics.jsonl", f"no curves: {error}"))
    kept: dict[str, dict[str, Any]] = {}
    for name, check in ((judgements.EVALUATION, _evaluation), (judgements.LANDSCAPE, _landscape)):
        if (path / name).exists():
            try:
                kept[name] = check(run_config.read_json(path / name))
            except (ValueError, TypeError, KeyError, IndexError) as error:
                broken.append(Broken(path / name, f"not used: {error}"))
    for name, found in list(kept.items()):
        if found.get("epoch") != result["epochs"]:
            broken.append(Broken(path / name, f"not used: it is of epoch {found.get('epoch')} of {result['epochs']}"))
            del kept[name]
    return Run(path, result, lines, kept.get(judgements.EVALUATION), kept.get(judgements.LANDSCAPE))


def _unfinished(path: Path, config: Mapping[str, Any]) -> str:
    done = 0
    with suppress(ValueError, OSError):
        done = len(_lines(path / "metrics.jsonl"))
    epochs = config["recipe"].get("epochs")
    return f"not finished, {done} of {epochs} epochs; go on with: flatmin train --out {shlex.quote(str(path))} --resume"


def _checked(result: dict[str, Any], path: Path) -> dict[str, Any]:
    for name, kind in NEEDED.items():
        if not isinstance(result.get(name), kind) or isinstance(result.get(name), bool):
            raise ValueError(f"{path} is not a result: {name} is {result.get(name)!r}")
    if result["method"] not in METHODS:
        raise ValueError(f"{path} has the unknown method {result['method']!r}; it may be of another flatmin")
    split = "validation" if "validation_error" in result else "test"
    error = result.get(f"{split}_error")
    if error is None or not _is_number(error) or not 0 <= error <= 1:
        raise ValueError(f"{path} is not a result: {split}_error is {error!r}, not a share from 0 to 1")
    for name in ("nll", "ece"):
        value = result.get(f"{split}_{name}")
        if value is not None and not _is_number(value):
            raise ValueError(f"{path} is not a result: {split}_{name} is {value!r}")
    if not isinstance(result.get("settings", {}), dict):
        raise ValueError(f"{path} is not a result: its settings are {result['settings']!r}")
    return result


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    for line in lines:
        if not isinstance(line, dict) or not all(value is None or _is_number(value) for value in line.values()):
            raise ValueError(f"{path} has a line that is not of numbers")
    return lines


def _evaluation(found: dict[str, Any]) -> dict[str, Any]:
    for part, names in (
        ("attack", ("fgsm_error", "pgd_error", "radius", "steps", "pictures")),
        ("flatness", ("worst_case_loss", "loss", "epsilon", "trace", "pictures")),
    ):
        if part in found:
            for name in names:
                value = found[part][name]
                if value is not None and not _is_number(value):
                    raise ValueError(f"{part}'s {name} is {value!r}")
    return found


def _landscape(found: dict[str, Any]) -> dict[str, Any]:
    points = len(found["axis"])
    for split in found["splits"].values():
        for row in [split["line"], *(split["plane"] or [])]:
            if len(row) != points or not all(value is None or _is_number(value) for value in row):
                raise ValueError(f"a row of the landscape is not of {points} numbers")
    if not all(_is_number(value) for value in found["axis"]):
        raise ValueError("its axis is not of numbers")
    return found
