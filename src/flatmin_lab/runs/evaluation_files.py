"""Evaluations of a trained run, kept in its folder for the report.

    evaluation.json       error, calibration, risk over coverage; if asked for, robustness, flatness, spectrum, outside
    landscape.json        the loss over a plane through the weights

Each names the checkpoint it was measured on. Evaluations of different checkpoints are never mixed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatmin_lab.system.files import atomic_write, locked
from flatmin_lab.system.json_data import read_json

EVALUATION, LANDSCAPE = "evaluation.json", "landscape.json"
OUTSIDE = "outside"  # in the first: a part for each outside data set, by name


def write_evaluation(folder: Path, name: str, found: Mapping[str, Any]) -> Path:
    """Write an evaluation; what earlier evaluations of the same checkpoint found stays."""
    path = folder / name
    with locked(folder):  # another process may have evaluated the same checkpoint
        known = read_evaluation(folder, name) or {}
        if known.get("checkpoint") != found["checkpoint"]:
            known = {}
        merged = {**known, **found}
        if OUTSIDE in found and isinstance(known.get(OUTSIDE), dict):
            merged[OUTSIDE] = {**known[OUTSIDE], **found[OUTSIDE]}
        with atomic_write(path) as file:
            file.write(json.dumps(merged, indent=1, allow_nan=False).encode())
    return path


def read_evaluation(folder: Path, name: str) -> dict[str, Any] | None:
    """The stored evaluation; None where there is none, or none that can be read."""
    try:
        return read_json(folder / name)
    except ValueError:
        return None
