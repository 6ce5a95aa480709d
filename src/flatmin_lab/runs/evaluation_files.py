"""What was measured of a run after its training, kept in its folder for the report.

    evaluation.json       error and calibration; robustness and flatness, where they were asked for
    landscape.json        the loss over a plane through the weights

Each says which checkpoint it is of. What was measured of another checkpoint is not mixed with it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatmin_lab.system.files import atomic_write
from flatmin_lab.system.json_data import read_json

EVALUATION, LANDSCAPE = "evaluation.json", "landscape.json"


def write_evaluation(folder: Path, name: str, found: Mapping[str, Any]) -> Path:
    """Write it down; what an earlier look at the same checkpoint found besides stays."""
    path = folder / name
    known = read_evaluation(folder, name) or {}
    if known.get("checkpoint") != found["checkpoint"]:
        known = {}
    with atomic_write(path) as file:
        file.write(json.dumps({**known, **found}, indent=1, allow_nan=False).encode())
    return path


def read_evaluation(folder: Path, name: str) -> dict[str, Any] | None:
    """What is kept there; None where there is nothing, or nothing that can be read."""
    try:
        return read_json(folder / name)
    except ValueError:
        return None
