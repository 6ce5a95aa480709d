"""tuning.json, beside the run folders of the trials: written after every trial, and checked when it is read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.runs.events import RunError
from flatmin_lab.system.files import atomic_write
from flatmin_lab.system.json_data import read_json
from flatmin_lab.system.json_types import check_types
from flatmin_lab.tuning.erm_comparison import Comparison
from flatmin_lab.tuning.result import State, Trial, Tuning
from flatmin_lab.tuning.search_space import Measure, hyper_parameters_of

FILE = "tuning.json"
TRIAL_PREFIX = "trial-"  # of the names of the run folders


def write(folder: Path, tuning: Tuning) -> None:
    try:
        with atomic_write(folder / FILE) as file:
            file.write((json.dumps(tuning.as_json(), indent=2, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise RunError(
            f"{folder / FILE} could not be written ({error.strerror}); make room and repeat the command, which "
            "resumes: the study has every trial that has ended"
        ) from error


def read(path: Path) -> Tuning:
    """The file, or the one in that folder; checked, since anyone may have written it."""
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the {FILE} that `flatmin tune` wrote")
    found = read_json(path)
    try:
        return _tuning(found)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is not a tuning that this flatmin can read: {why}") from error


def _tuning(found: dict[str, Any]) -> Tuning:
    check_types(Tuning, found)
    recipe = Recipe.from_json(found["recipe"])
    known = {f.name for f in fields(Tuning)} | {"chosen"}
    values = {name: found[name] for name in known - {"recipe", "trials", "against_erm", "facts", "chosen"}}
    for name, holds in (
        ("method", values["method"] == recipe.method),
        ("model", values["model"] == recipe.model),
        ("data", values["data"] == recipe.data),
        ("epochs", values["epochs"] == recipe.epochs),
        ("measure", values["measure"] in get_args(Measure)),
        ("wanted", _is_count(values["wanted"])),
        ("seed", isinstance(values["seed"], int)),
        ("pruning", isinstance(values["pruning"], bool)),
        ("space", bool(values["space"]) and all(map(_is_range, values["space"].values()))),
        ("asked", values["asked"].keys() <= {f.name for f in fields(Recipe)}),
        ("data_sha256", isinstance(values["data_sha256"], str)),
    ):
        if not holds:
            raise ValueError(f"its {name} is {values[name]!r}")
    trials = [_trial(one, values["space"].keys()) for one in found["trials"]]
    against_erm = _comparison(found.get("against_erm"), trials)
    facts = {key: value for key, value in found.items() if key not in known}
    tuning = Tuning(**values, recipe=recipe, trials=trials, against_erm=against_erm, facts=facts)
    hyper_parameters_of(recipe.method, list(tuning.space))  # raises if these are not settings of the method
    return tuning


def _is_range(found: Mapping[str, Any]) -> bool:
    if not isinstance(found, dict) or found.keys() != {"low", "high", "log"}:
        return False
    low, high, log = found["low"], found["high"], found["log"]
    return isinstance(log, bool) and _is_number(low) and _is_number(high) and low < high and (low > 0 or log is False)


def _trial(found: dict[str, Any], names: Any) -> Trial:
    if not isinstance(found, dict):
        raise TypeError(f"trials must be objects, got a {type(found).__name__}: {found!r:.80}")
    check_types(Trial, found)
    trial = Trial(**found)
    numbers = [trial.value, trial.error, trial.nll, trial.seconds]
    names = set() if trial.is_erm else names
    drawn = trial.settings.keys() == names or (trial.state == "running" and trial.settings.keys() <= names)
    whole = trial.state != "finished" or None not in (trial.value, trial.error)
    if (
        trial.state not in get_args(State)
        or not drawn
        or not all(map(_is_number, trial.settings.values()))
        or not all(number is None or _is_number(number) for number in numbers)
        or not whole
        or not all(map(_is_count, (trial.number, trial.epochs)))
        or not isinstance(trial.seed, int)
        or not isinstance(trial.why, str)
    ):
        raise ValueError(f"its trial {found} is inconsistent")
    return trial


def _comparison(found: Any, trials: Sequence[Trial]) -> Comparison | None:
    if found is None:  # older files have none
        return None
    if not isinstance(found, dict):
        raise TypeError(f"against_erm must be an object, got a {type(found).__name__}: {found!r:.80}")
    check_types(Comparison, found)
    if missing := [f.name for f in fields(Comparison) if f.name not in found]:
        raise ValueError(f"its against_erm has no {', '.join(missing)}")
    compared = Comparison(**{f.name: found[f.name] for f in fields(Comparison)})
    finished = {trial.number for trial in trials if trial.state == "finished" and not trial.is_erm}
    has_erm = any(trial.is_erm and trial.state == "finished" for trial in trials)
    if compared.trial not in finished or not has_erm or min(compared.images, compared.trials) < 1:
        raise ValueError(f"its against_erm is {found!r:.200}")
    return compared


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
