"""The page about Hugging Face: its code runs, before and after each change.

And the examples with these frameworks: each runs, and learns what it is there to learn.
"""

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from tests import ROOT  # noqa: E402
from tests.integrations.trainers.small_transformer import arguments, sentences, small_gpt, weights  # noqa: E402
from tests.support.doc_blocks import blocks, code  # noqa: E402

PAGE = ROOT / "docs" / "trainers_huggingface.md"
ELSEWHERE = ("import SentenceTransformerTrainer", "import SFTTrainer")  # these have tests of their own
SNIPPETS = [text for text in code(PAGE) if not any(name in text for name in ELSEWHERE)]


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps its settings in one place for all of a process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def reader(folder: Path) -> dict[str, Any]:
    """What the reader of the page has at hand."""
    rows = sentences(8)
    return {
        "torch": torch,
        "model": small_gpt(),
        "dataset": rows,
        "args": arguments(folder, num_train_epochs=1),
        "accelerator": accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2),
        "loader": DataLoader(rows, batch_size=2),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("code", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippets_run_as_they_stand(code: str, tmp_path: Path) -> None:
    if "Seq2Seq" in code:
        transformers = pytest.importorskip("transformers")
        known = {**arguments(tmp_path, num_train_epochs=1).to_dict(), "accelerator_config": None}
        names = {**reader(tmp_path), "args": transformers.Seq2SeqTrainingArguments(**known)}
    else:
        names = reader(tmp_path)
    model = names["model"]
    start = weights(model)
    exec(compile(code, "snippet", "exec"), names)
    assert all(weight.isfinite().all() for weight in weights(model))
    if ".train()" in code or ".step(" in code:
        assert not all(torch.equal(a, b) for a, b in zip(start, weights(model), strict=True))


def test_there_are_snippets() -> None:
    assert len(blocks(PAGE, "diff")) == 4
    assert len(SNIPPETS) == 8


@pytest.mark.parametrize(
    ("name", "result", "most"),
    [
        ("with_transformers", r"loss on new sentences (\d\.\d+)", 1.6),  # 2.8 is a guess
        ("with_accelerate", r"error on new points (\d+\.\d)%", 10.0),
    ],
)
def test_examples_run_and_learn(
    name: str, result: str, most: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / "examples" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    found = re.search(result, capsys.readouterr().out)
    assert found
    assert float(found[1]) < most
