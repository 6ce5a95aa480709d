"""Checks of every file that the report reads: what passes here can be compared and drawn.

Each function returns the part of a file that is used, or raises a ValueError that says what is wrong with it.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flatmin.ball import NORMS
from flatmin.metrics import CONFIDENCE_SCORES
from flatmin_lab.methods import METHODS
from flatmin_lab.runs.result import AVERAGE, split_of
from flatmin_lab.training.evaluation import BINS

REQUIRED: dict[str, type | tuple[type, ...]] = {
    "data": str,
    "model": str,
    "method": str,
    "seed": int,
    "epochs": int,
    "seconds": (int, float),
}
MAX_NUMBER = 1e30  # larger ones overflow means and contour levels


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def is_share(value: object) -> bool:
    return is_number(value) and 0 <= value <= 1  # type: ignore[operator]


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < MAX_NUMBER


def is_size(value: object) -> bool:
    return is_number(value) and value >= 0  # type: ignore[operator]


BIN_RULES = {"number": is_size, "confidence": is_share, "accuracy": is_share}  # of a reliability diagram


def result(found: dict[str, Any]) -> dict[str, Any]:
    """result.json; invalid reliability bins are dropped."""
    for name, kind in REQUIRED.items():
        if not isinstance(found.get(name), kind) or isinstance(found.get(name), bool):
            raise ValueError(f"it is not a result: {name} is {found.get(name)!r}")
    if found["method"] not in METHODS:
        raise ValueError(f"it has the unknown method {found['method']!r}; it may be from another version of flatmin")
    split = split_of(found)
    _check(found, f"{split}_error", is_share, "a share from 0 to 1")
    if any(name.startswith(AVERAGE) for name in found):
        _check(found, f"{AVERAGE}{split}_error", is_share, "a share from 0 to 1")
    for name in (f"{split}_smoothed_loss", "label_noise", "train_loss", "clean_train_nll", "ema"):
        _check(found, name, lambda value: value is None or is_number(value), "a number")
    for weights in ("", AVERAGE):
        for name in (f"{weights}{split}_nll", f"{weights}{split}_ece"):
            _check(found, name, lambda value: value is None or is_number(value), "a number")
        for name in (f"{weights}{split}_error_without_repeated", f"{weights}memorised"):
            _check(found, name, lambda value: value is None or is_share(value), "a share from 0 to 1")
    for name in ("augment", "data_sha256"):
        _check(found, name, lambda value: value is None or isinstance(value, str), "a name")
    _check(found, "seconds", is_number, "a number")
    _check(found, "cpu_seconds", lambda value: value is None or is_number(value), "a number")
    _check(found, "resumed", lambda value: value is None or is_count(value), "a whole number above 0")
    _check(found, "shared", lambda value: value is None or isinstance(value, dict), "an object")
    _check(found, "epochs", is_count, "a whole number above 0")
    settings = found.get("settings", {})
    if not isinstance(settings, dict):
        raise ValueError(f"it is not a result: its settings are {settings!r}")
    bins = found.get("reliability")
    return {**found, "settings": settings, "reliability": bins if _is_bins(bins) else None}


def _is_bins(bins: Any) -> bool:
    return isinstance(bins, dict) and all(
        isinstance(bins.get(name), list) and len(bins[name]) == BINS and all(map(holds, bins[name]))
        for name, holds in BIN_RULES.items()
    )


def evaluation(found: dict[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """The attacks, flatness, spectrum, risk over coverage and detection of outside data of evaluation.json."""
    parts: dict[str, Any] = {}
    for kind in ("attack", "attack_normalised"):
        attack = found.get(kind)
        if attack is not None:
            _object(attack, kind)
            for name in ("fgsm_error", "pgd_error"):
                _check(attack, name, is_share, "a share from 0 to 1")
            for name in ("radius", "step_size"):
                _check(attack, name, is_number, "a number")
            for name in ("steps", "pictures"):
                _check(attack, name, is_count, "a whole number above 0")
            _check(attack, "norm", lambda value: value in NORMS, "a norm")
            parts[kind] = attack
    for name, check in (
        ("flatness", _flatness),
        ("spectrum", _spectrum),
        ("batch_rise", _batch_rise),
        ("scaled", _scaled),
        ("selective", _selective),
        ("outside", _outside),
    ):
        if (part := found.get(name)) is not None:
            check(part)
            parts[name] = part
    return parts


def _flatness(flat: Any) -> None:
    """Losses around the weights and the Hessian; the adaptive ball is not in every file."""
    _object(flat, "flatness")
    _check(flat, "epsilon", is_number, "a number")
    _check(flat, "pictures", is_count, "a whole number above 0")
    _check({"adaptive_epsilon": 0.0, **flat}, "adaptive_epsilon", is_number, "a number")
    for name in ("loss", "worst_case_loss", "adaptive_worst_case_loss", "trace"):
        _check(flat, name, lambda value: value is None or is_number(value), "a number")
    values = flat.get("eigenvalues")
    if not isinstance(values, list) or not all(value is None or is_number(value) for value in values):
        raise ValueError(f"eigenvalues is {values!r}, not numbers")
    farther = flat.get("worst_by_radius", {})
    if not isinstance(farther, dict) or not all(value is None or is_number(value) for value in farther.values()):
        raise ValueError(f"worst_by_radius is {farther!r}, not numbers")


def _spectrum(found: Any) -> None:
    """Ritz values and weights of each probe, and what they give."""
    _object(found, "spectrum")
    for name in ("pictures", "parameters"):
        _check(found, name, is_count, "a whole number above 0")
    for name in ("smallest", "largest", "trace"):
        _check(found, name, is_number, "a number")
    _check({"trace_error": None, **found}, "trace_error", lambda value: value is None or is_number(value), "a number")
    _check(found, "negative_curvature", is_share, "a share from 0 to 1")
    for name, holds in (("values", is_number), ("weights", is_share)):
        rows = found.get(name)
        if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and row for row in rows):
            raise ValueError(f"{name} of the spectrum must be rows of numbers")
        if not all(map(holds, itertools.chain.from_iterable(rows))):
            raise ValueError(f"{name} of the spectrum must be numbers, and weights from 0 to 1")
    if list(map(len, found["values"])) != list(map(len, found["weights"])):
        raise ValueError("a value of the spectrum must have a weight")
    if not all(abs(sum(row) - 1) < 0.01 for row in found["weights"]):
        raise ValueError("the weights of a probe must add up to 1")


def _scaled(found: Any) -> None:
    """NLL and ECE after temperature scaling, which a half without an error does not have, and the temperatures."""
    _object(found, "scaled")
    for name in ("nll", "ece"):
        _check(found, name, lambda value: value is None or is_size(value), "a number from 0 on")
    fitted = found.get("temperatures")
    if not isinstance(fitted, list) or not fitted or not all(is_number(value) and value > 0 for value in fitted):
        raise ValueError(f"temperatures is {fitted!r:.80}, not numbers above 0")


def _selective(found: Any) -> None:
    """AURC, and the curve of risk over coverage."""
    _object(found, "selective")
    for name in ("aurc", "e_aurc"):
        _check(found, name, is_share, "a share from 0 to 1")
    coverage, risk = found.get("coverage"), found.get("risk")
    for name, values in (("coverage", coverage), ("risk", risk)):
        if not isinstance(values, list) or not values or not all(map(is_share, values)):
            raise ValueError(f"{name} is {values!r:.80}, not shares from 0 to 1")
    if len(coverage) != len(risk) or coverage != sorted(set(coverage)):
        raise ValueError("coverage must rise, and have a risk each")


def _outside(found: Any) -> None:
    """By outside data set and score, AUROC, FPR95 and, in newer files, the ROC curve."""
    _object(found, "outside")
    for name, detected in found.items():
        _object(detected, name)
        _check(detected, "pictures", is_count, "a whole number above 0")
        _check(detected, "sha256", lambda value: isinstance(value, str), "a checksum")
        for score in CONFIDENCE_SCORES:
            _object(detected.get(score), score)
            for part in ("auroc", "fpr95"):
                _check(detected[score], part, is_share, "a share from 0 to 1")
            if "roc" in detected[score]:
                _check(detected[score], "roc", _is_roc, "at least two shares from 0 to 1 that do not fall")


def _is_roc(values: Any) -> bool:
    """The TPR over equal steps of the FPR."""
    return isinstance(values, list) and len(values) > 1 and all(map(is_share, values)) and values == sorted(values)


def _batch_rise(found: Any) -> None:
    """By split and scale, the rise at each radius."""
    _object(found, "batch_rise")
    for split in (split for split in ("training", "test", "validation") if split in found):
        _object(found[split], split)
        for scale in ("filter", "global"):
            rises = found[split].get(scale)
            if not isinstance(rises, dict) or not all(v is None or is_number(v) for v in rises.values()):
                raise ValueError(f"batch_rise has {rises!r} for {scale}, not numbers")


def curves(found: Any, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each name one number per epoch, turned into lines as in a run folder."""
    _object(found, "curves")
    split, epochs = split_of(result), result["epochs"]
    for name, values in found.items():
        if not isinstance(values, list) or len(values) != epochs or not all(v is None or is_number(v) for v in values):
            raise ValueError(f"{name} must be {epochs} numbers, one per epoch")
    names = {name: f"{split}_{name}" if name in ("error", "nll", "ece") else name for name in found}
    return [{names[name]: values[epoch] for name, values in found.items()} for epoch in range(epochs)]


def boundary(found: Any, result: Mapping[str, Any]) -> dict[str, Any]:
    """A grid, and the second class's probability on it."""
    _object(found, "boundary")
    side, shares = found.get("side"), found.get("shares")
    if not isinstance(side, list) or len(side) < 3 or not all(map(is_number, side)) or side != sorted(set(side)):
        raise ValueError("its side must be at least three rising numbers")
    if not isinstance(shares, list) or len(shares) != len(side):
        raise ValueError(f"it must have {len(side)} rows")
    for row in shares:
        if not isinstance(row, list) or len(row) != len(side) or not all(map(is_share, row)):
            raise ValueError(f"a row must have {len(side)} shares from 0 to 1")
    checked: dict[str, Any] = found
    return checked


def planned(found: Mapping[str, Any]) -> list[tuple[str, int]]:
    """planned.json: names and seeds."""
    return [(run["name"], run["seed"]) for run in _listed(found, "runs", "a planned run")]


def withdrawn(found: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    """The planned runs that will not be run after all: names, seeds, and why."""
    runs = [run for run in _listed(found, "runs", "a planned run") if "withdrawn" in run]
    for run in runs:
        _check(run, "withdrawn", lambda value: isinstance(value, str), "a text")
    return [(run["name"], run["seed"], run["withdrawn"]) for run in runs]


def broken_off(found: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    """The runs of planned.json that were started and given up: names, seeds, and what became of them."""
    runs = _listed({"broken_off": [], **found}, "broken_off", "a run that was aborted")
    for run in runs:
        _check(run, "why", lambda value: isinstance(value, str), "a text")
    return [(run["name"], run["seed"], run["why"]) for run in runs]


def families(found: Mapping[str, Any]) -> dict[str, tuple[tuple[str, ...], str]]:
    """The families of comparisons of planned.json: by name, the comparisons and the day they were fixed."""
    known = found.get("families", {})
    _object(known, "families")
    for name, family in known.items():
        _object(family, f"the family {name}")
        _check(family, "fixed", lambda value: isinstance(value, str), "a day")
        rule = "a list of comparisons"
        _check(family, "comparisons", lambda own: isinstance(own, list) and all(isinstance(c, str) for c in own), rule)
    return {name: (tuple(family["comparisons"]), family["fixed"]) for name, family in known.items()}


def _listed(found: Mapping[str, Any], key: str, what: str) -> list[Mapping[str, Any]]:
    """Runs with a name and a seed."""
    runs = found.get(key)
    if not isinstance(runs, list):
        raise ValueError(f"it has no list of {key}")
    for run in runs:
        _object(run, what)
        _check(run, "name", lambda value: isinstance(value, str), "a name")
        _check(run, "seed", _is_seed, "a whole number")
    return runs


def failure(found: Mapping[str, Any]) -> tuple[str, int, str]:
    """A failed run: its name, seed and error."""
    for name in ("name", "error"):
        _check(found, name, lambda value: isinstance(value, str), "a text")
    _check(found, "seed", _is_seed, "a whole number")
    return found["name"], found["seed"], found["error"]


def cost(found: dict[str, Any]) -> dict[str, Any]:
    """The cost of a step of ERM and of AMP."""
    for name in ("hardware", "data", "precision", "protocol"):
        _check(found, name, lambda value: isinstance(value, str), "a name")
    _check(found, "epochs", is_count, "a whole number above 0")
    _check(found, "ratio", is_number, "a number")
    for name in ("model", "form", "torch"):
        _check({name: "", **found}, name, lambda value: isinstance(value, str), "a name")
    _check(found, "commit", lambda value: value is None or isinstance(value, str), "a name")  # None: outside a checkout
    _check({"batch_size": 1, **found}, "batch_size", is_count, "a whole number above 0")
    methods = found.get("methods")
    _object(methods, "methods")
    for method in ("erm", "amp"):
        _object(found["methods"].get(method), method)
        for name in ("ms", "hours"):
            _check(found["methods"][method], name, lambda value: is_number(value) and value > 0, "a number above 0")
    return found


def benchmark(found: dict[str, Any]) -> dict[str, Any]:
    """What `flatmin bench` measured: a time for each row, or none where it failed."""
    for name in ("hardware", "precision"):
        _check(found, name, lambda value: isinstance(value, str), "a name")
    tables = found.get("tables")
    if not isinstance(tables, list):
        raise ValueError(f"tables is {tables!r}, not a list; write one with flatmin bench --json")
    for table in tables:
        _object(table, "a table")
        _check(table, "model", lambda value: isinstance(value, str), "a name")
        _check(table, "batch_size", is_count, "a whole number above 0")
        rows = table.get("rows")
        if not isinstance(rows, list):
            raise ValueError(f"rows is {rows!r}, not a list")
        for row in rows:
            _object(row, "a row")
            for name in ("method", "form"):
                _check(row, name, lambda value: isinstance(value, str), "a name")
            _check(row, "models", is_count, "a whole number above 0")
            if "ms" in row:
                _check(row, "ms", lambda value: is_number(value) and value > 0, "a number above 0")
    return found


def _is_seed(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def landscape(found: Any, result: Mapping[str, Any]) -> dict[str, Any]:
    """An axis, and for each split a line and perhaps a plane of that size."""
    _object(found, "landscape")
    axis = found.get("axis")
    if not isinstance(axis, list) or len(axis) < 3 or not all(map(is_number, axis)) or axis != sorted(set(axis)):
        raise ValueError("its axis must be at least three rising numbers")
    _check(found, "reach", is_number, "a number")
    for name in ("seed", "points"):
        _check(found, name, lambda value: isinstance(value, int), "a whole number")
    if found["points"] != len(axis):
        raise ValueError(f"its axis must have {found['points']} points, got {len(axis)}")
    splits = found.get("splits")
    if not isinstance(splits, dict) or not splits:
        raise ValueError("it has no splits")
    for name, split in splits.items():
        _object(split, name)
        _check(split, "pictures", is_count, "a whole number above 0")
        _row(split.get("line"), len(axis))
        if "plane" not in split:
            raise ValueError(f"{name} has no plane")
        plane = split["plane"]
        if plane is not None:
            if not isinstance(plane, list) or len(plane) != len(axis):
                raise ValueError(f"the plane of {name} must have {len(axis)} rows")
            for row in plane:
                _row(row, len(axis))
    checked: dict[str, Any] = found
    return checked


def _row(row: object, points: int) -> None:
    if not isinstance(row, Sequence) or len(row) != points or not all(v is None or is_number(v) for v in row):
        raise ValueError(f"a row of the landscape must have {points} numbers")


def check_end(found: Mapping[str, Any], epochs: int) -> None:
    """Check that the last weights were measured."""
    if found.get("epoch") != epochs:
        raise ValueError(f"it was measured after epoch {found.get('epoch')!r}, but training ended after {epochs}")


def _object(value: object, name: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r}, not an object")


def _check(found: Mapping[str, Any], name: str, holds: Callable[[Any], bool], rule: str) -> None:
    value = found.get(name)
    try:
        right = holds(value)
    except TypeError:  # a type that cannot be compared or hashed
        right = False
    if not right:
        raise ValueError(f"{name} is {value!r}, not {rule}")
