"""The example of a loop with autocast, scaler, accumulation, clipping and an EMA of the weights learns its images."""

import re
import runpy
import sys

import pytest

from tests import ROOT

EXAMPLE = ROOT / "examples" / "plain_loop.py"


@pytest.mark.parametrize("epsilon", ["0", "0.1"])
def test_the_plain_loop_learns(
    epsilon: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--epsilon", epsilon])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    found = re.search(r"on new images (\d+\.\d)%", capsys.readouterr().out)
    assert found
    assert float(found[1]) < 5
