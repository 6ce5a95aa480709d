"""What others wrote gives what flatmin gives: every row of benchmarks/oracles.py."""

from importlib.util import find_spec

import pytest
import torch

import oracles
from oracles import ROWS, Row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.what} ({row.oracle})")
def test_the_largest_difference_to_an_oracle_is_below_a_millionth(row: Row) -> None:
    if row.package is not None and find_spec(row.package) is None:
        pytest.skip(f"{row.package} is an oracle that is not installed here; flatmin[dev] installs most of them")
    cases = 20 if row.oracle in ("torchmetrics", "foolbox") else 5  # a Hessian takes a second
    largest, comparisons = row.compare(cases, torch.device("cpu"))
    assert comparisons >= cases
    assert largest < 1e-6


def test_an_oracle_that_is_not_installed_is_left_out_and_said_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = Row("something", "nobody", "no_such_package", lambda cases, device: (1.0, cases))
    present = Row("something else", "brute force", None, lambda cases, device: (1e-9, cases))
    monkeypatch.setattr(oracles, "ROWS", [absent, present])
    oracles.show(oracles.measure(7, torch.device("cpu")))
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines[0].split(maxsplit=2) == ["something", "nobody", "left out: no_such_package is not installed here"]
    assert lines[1].split()[-2:] == ["1.0e-09", "7"]
