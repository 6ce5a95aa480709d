"""The example and the benchmarks run from the command line, and say what is wrong with a wrong argument."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MPLBACKEND": "Agg"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)


def test_the_spiral_prints_a_table_and_saves_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="installed with flatmin[lab]")
    result = program(
        "examples/spiral.py", "--seeds", "2", "--steps", "5", "--out", str(tmp_path / "new" / "spiral.png")
    )
    assert result.returncode == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()[1:3]] == ["ERM", "AMP"]
    assert (tmp_path / "new" / "spiral.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong", [["--seeds", "0"], ["--steps", "-1"], ["--epsilon", "-0.5"]])
def test_the_spiral_names_a_wrong_argument(tmp_path: Path, wrong: list[str]) -> None:
    pytest.importorskip("matplotlib", reason="installed with flatmin[lab]")
    result = program("examples/spiral.py", *wrong, "--out", str(tmp_path / "spiral.png"))
    assert result.returncode == 2
    assert f"got {wrong[1]}" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_benchmark_of_augmentation_has_every_row_at_both_sizes(tmp_path: Path) -> None:
    result = program("benchmarks/data_path.py", "--turns", "2", "--json", str(tmp_path / "data.json"))
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "data.json").read_text())["rows"]
    assert {row["batch"] for row in rows} == {50, 500}
    assert all(f"{row['name']}, batch {row['batch']}" in result.stdout for row in rows)
    assert all(row[which][1] > 0 for row in rows for which in ("ours", "pillow", "copy"))


def test_the_benchmark_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    result = program("benchmarks/wrapper_overhead.py", "--steps", "2", "--json", str(tmp_path / "overhead.json"))
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "overhead.json").read_text())["rows"]
    assert all(row["ms"] > 0 for row in rows.values())
    assert all(name in result.stdout for name in rows)
