"""Notebooks as the tests read them: cells, what they printed, and the images that they drew."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import ROOT

QUICK_START = ROOT / "examples" / "quick_start.ipynb"


def cells(notebook: Path, kind: str) -> list[dict[str, Any]]:
    """The cells of a kind, "code" or "markdown"."""
    found = json.loads(notebook.read_text())["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def printed(cell: Mapping[str, Any]) -> str:
    """What a cell printed; a file has lines where a kernel's answer has text."""
    texts = (output["text"] for output in cell["outputs"] if output["output_type"] == "stream")
    return "".join("".join(text) for text in texts)


def images(cell: Mapping[str, Any]) -> int:
    """How many images a cell drew."""
    return sum("image/png" in output.get("data", {}) for output in cell["outputs"])
