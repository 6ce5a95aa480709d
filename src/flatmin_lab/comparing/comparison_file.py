"""comparison.json: the verdict, and what it is based on. Written after every run, for the page and for programs.

What identifies a comparison is in `identity`; a folder holds one. The values of single held-out examples are in the
files of the outcomes beside it.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flatmin.comparison import Contender, Difference, Outcome, Row, Verdict, show_interval
from flatmin_lab.recipes.recipe import differences
from flatmin_lab.recipes.user_files import checksum
from flatmin_lab.system.files import atomic_write
from flatmin_lab.system.json_data import read_json
from flatmin_lab.system.user_code import source_file, split_name

FILE = "comparison.json"
MAKE_TRAINING = "make_training"  # the function of a file that is named without one
TITLES = {"error": "error", "nll": "NLL", "ece": "ECE"}  # of measures; a user's own keep their names


@dataclass(frozen=True, kw_only=True)
class About:
    """What was compared, in words and in numbers."""

    title: str  # "convnet on digits"
    what: str  # one line
    held_out: str  # which data the runs are measured on
    wanted: int  # seeds
    identity: Mapping[str, Any]
    command: str = ""  # that repeats it
    facts: Mapping[str, Any] = field(default_factory=dict)  # of the machine


def content(
    about: About, contenders: Sequence[Contender], outcomes: Sequence[Outcome], verdict: Verdict, *, stopped: str = ""
) -> dict[str, Any]:
    """`stopped`: why there are fewer seeds than asked for."""
    return {
        "answer": verdict.answer,
        "sentence": verdict.sentence,
        "measure": verdict.measure,
        "best": verdict.best,
        "seeds": verdict.seeds,
        "stopped": stopped,
        **{key: value for key, value in asdict(about).items() if key not in ("identity", "facts")},
        "contenders": [asdict(contender) for contender in contenders],
        "rows": {measure: [_row(row) for row in rows] for measure, rows in verdict.rows.items()},
        "outcomes": [
            {key: value for key, value in asdict(outcome).items() if key != "per_example"} for outcome in outcomes
        ],
        "identity": dict(about.identity),
        **about.facts,
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "contender": row.contender.key,
        "mean": _finite(row.mean),
        "deviation": _finite(row.deviation),
        "values": list(row.values),
        "failed": row.failed,
        "from_plain": _difference(row.from_plain),
        "from_longer": _difference(row.from_longer),
    }


def _difference(found: Difference | None) -> dict[str, Any] | None:
    """Its mean and its 95 % interval; a single seed has no interval."""
    if found is None or not found.seeds:
        return None
    return {"mean": found.mean, "low": _finite(found.low), "high": _finite(found.high), "seeds": found.seeds}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def interval_text(measure: str, found: Mapping[str, Any] | None) -> str:
    """A difference of two rows and its interval, as the file has them."""
    return "" if found is None else show_interval(measure, found["mean"], found["low"], found["high"])


def check_same(folder: Path, identity: Mapping[str, Any]) -> None:
    """Raise if the folder holds another comparison, or something else that must not be mixed with it."""
    path = folder / FILE
    if not path.exists():
        if foreign := sorted(entry.name for entry in _entries(folder)):
            raise FileExistsError(
                f"a comparison needs a folder of its own, but {folder} holds {', '.join(foreign[:3])}; choose another "
                "with --out"
            )
        return
    _check_identity(folder, identity)


def own_identity(training: str) -> dict[str, str]:
    """What identifies a comparison of the user's own code: the function, and the content of its file."""
    path, (_, function) = source_file(training, MAKE_TRAINING), split_name(training, MAKE_TRAINING)
    return {"training": f"{path.name}:{function}", "SHA-256 of training": checksum(path)}


def begin_own(folder: Path, identity: Mapping[str, str]) -> None:
    """Say whose outcomes the folder is for, before there are any: the first of several calls may be killed."""
    if not (folder / FILE).exists():
        write(folder, {"identity": identity})


def check_same_own(folder: Path, identity: Mapping[str, str]) -> None:
    """Raise if the folder holds outcomes of other code; earlier versions recorded only how it was called."""
    if (folder / FILE).exists() and _identity(folder).keys() != {"training"}:
        _check_identity(folder, identity)


def _identity(folder: Path) -> dict[str, Any]:
    there = read_json(folder / FILE).get("identity")
    if not isinstance(there, dict):
        raise ValueError(
            f"{folder / FILE} is not a comparison that this flatmin can read; choose another folder with --out"
        )
    return there


def _check_identity(folder: Path, identity: Mapping[str, Any]) -> None:
    if apart := _apart(_identity(folder), identity):
        raise ValueError(
            f"{folder} holds another comparison: {'; '.join(apart)}. Use the same values to resume it, or choose "
            "another folder with --out"
        )


def _apart(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The differences in words; those of recipes field by field."""
    found = differences(there.get("recipe", {}), here.get("recipe", {}))
    rest = [{key: value for key, value in one.items() if key != "recipe"} for one in (there, here)]
    return found + differences(*rest)


def _entries(folder: Path) -> list[Path]:
    found = list(folder.iterdir()) if folder.is_dir() else []
    return [entry for entry in found if not entry.name.startswith(".")]


def write(folder: Path, found: Mapping[str, Any]) -> None:
    with atomic_write(folder / FILE) as file:
        file.write((json.dumps(found, indent=1, allow_nan=False) + "\n").encode())
