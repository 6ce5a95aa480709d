"""The notebook runs as it stands, and prints and draws what is committed with it."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import HANG_SECONDS, ROOT
from tests.support.notebooks import QUICK_START, cells, images, printed

nbformat: Any = pytest.importorskip("nbformat", reason="installed with flatmin[integrations]")
nbclient: Any = pytest.importorskip("nbclient", reason="installed with flatmin[integrations]")


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The code cells after a run in a kernel of its own, which writes nowhere else."""
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "src"))
        patch.setenv("JUPYTER_PLATFORM_DIRS", "1")
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
            (place := folder / name.lower()).mkdir()
            patch.setenv(name, str(place))
        return run(folder)


def run(folder: Path) -> list[Any]:
    notebook = nbformat.read(QUICK_START, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    client = nbclient.NotebookClient(
        notebook, timeout=HANG_SECONDS, coalesce_streams=True, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_it_prints_what_is_committed_but_for_rounding(executed: list[Any]) -> None:
    """The words to the letter, the numbers to a few points: another machine rounds otherwise."""
    without_numbers = partial(re.sub, r"\d+(\.\d+)?", "")
    for ours, theirs in zip(executed, cells(QUICK_START, "code"), strict=True):
        assert without_numbers(printed(ours)) == without_numbers(printed(theirs))
        for one, other in zip(*(re.findall(r"\d+\.?\d*", printed(cell)) for cell in (ours, theirs)), strict=True):
            assert abs(float(one) - float(other)) < 5


def test_it_draws_what_is_committed(executed: list[Any]) -> None:
    assert [images(cell) for cell in executed] == [images(cell) for cell in cells(QUICK_START, "code")]


def test_amp_is_ahead_as_the_text_says(executed: list[Any]) -> None:
    text = "".join(map(printed, executed))
    for pattern in (r"test error ([\d.]+)", r"wrong labels learnt ([\d.]+)", r"of the weights ([\d.]+)"):
        erm, amp = (float(number) for number in re.findall(pattern, text))
        assert amp < erm
