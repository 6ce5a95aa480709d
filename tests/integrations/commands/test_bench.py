"""`flatmin bench` as a whole: every form has its rows, what fails says why, and the command writes what it prints."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from flatmin_lab.bench import table as bench_table
from flatmin_lab.bench.contenders import Contender, build_contender
from flatmin_lab.bench.workload import Workload
from flatmin_lab.cli.commands import bench_view
from tests.lab.bench.test_benchmark import measured, small
from tests.support.processes import flatmin, words


@pytest.fixture
def as_if_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU a captured step takes ordinary ones: enough to see who is built, and who takes turns with whom."""
    monkeypatch.setattr(bench_table, "why_left_out", lambda *_, **__: None)
    monkeypatch.setattr(Contender, "check", lambda *_: None)
    monkeypatch.setattr(bench_table, "free_mib", lambda _: 1e9)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())


@pytest.mark.usefixtures("as_if_captured")
def test_every_form_has_its_rows_and_models_at_once_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str]] = []

    def counted(work: Workload, method: str, form: str, *, data: bool = True) -> Contender:
        made.append((method, form))
        return build_contender(work, method, form, data=data)

    monkeypatch.setattr(bench_table, "build_contender", counted)
    (table,) = measured(small(methods=("erm", "amp"), at_once=(3, 2)))["tables"]
    rows = [(row["form"], row["models"]) for row in table["rows"] if row["method"] == "amp"]
    assert rows == [("eager", 1), ("graph", 1), ("compiled", 1), ("at-once", 2), ("at-once", 3)]
    assert made.count(("amp", "compiled")) == 3
    assert [part["form"] for part in table["data"]] == ["eager", "graph"]
    assert not table["left_out"]
    assert {"amp / erm, 3 at-once", "amp compiled / erm eager"} < table["ratios"].keys()


@pytest.mark.usefixtures("as_if_captured")
def test_what_fails_says_why_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(work: Workload, method: str, form: str, *, data: bool = True) -> Contender:
        if (method == "amp" or not data) and form == "graph":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much.\nMore of it.")
        made = build_contender(work, method, form, data=data)
        if method == "erm" and form == "compiled":
            calls = iter([*range(4)])  # enough to be built
            made.step = lambda *_: next(calls)
        return made

    monkeypatch.setattr(bench_table, "build_contender", fails)
    monkeypatch.setattr(bench_table, "free_mib", lambda _: -1.0)
    (table,) = measured(small(methods=("erm", "amp"), at_once=(2,)))["tables"]
    rows = {(row["method"], row["form"]): row for row in table["rows"]}
    assert rows["amp", "graph"]["failed"] == "out of memory"
    assert "failed" in rows["erm", "compiled"]
    assert "are free" in rows["amp", "at-once"]["failed"]
    assert all("ms" in rows["amp", form] for form in ("eager", "compiled"))
    assert "amp / erm, graph" not in table["ratios"]
    assert [part.get("failed") for part in table["data"]] == [None, "out of memory"]
    assert all(row["n"] <= 5 for row in table["rows"] if "n" in row)
    assert "CUDA graph failed: out of memory" in "".join(bench_view._lines(table))


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "new" / "bench.json"
    asked = ("--model", "mlp", "--batch-size", "4,8", "--methods", "erm", "--methods", "amp", "--steps", 5)
    result = flatmin("bench", *asked, "--device", "cpu", "--json", file)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert [table["batch_size"] for table in found["tables"]] == [4, 8]
    assert found["precision"] == "fp32"
    for text in ("AMP, eager", "mlp, batches of 8, fp32", "left out: erm graph", "ratios: amp / erm, eager", str(file)):
        assert text in words(result.output)
    assert {"hardware", "torch", "commit", "cuda", "cudnn", "triton", "cudnn_benchmark"} < found.keys()
