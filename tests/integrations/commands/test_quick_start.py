"""The first program that a reader copies prints what the page says it does."""

import re
from functools import partial

import pytest

from tests import ROOT
from tests.support.doc_blocks import blocks, code, is_program

PAGE = ROOT / "docs" / "quick_start.md"


def test_the_program_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The words to the letter, and the numbers to a few points: another machine rounds otherwise."""
    (program,) = [text for text in code(PAGE) if is_program(text)]
    (said,) = [block.text for block in blocks(PAGE, "text")]
    exec(compile(program, "quick_start", "exec"), {})
    printed = capsys.readouterr().out
    without_numbers = partial(re.sub, r"[\d.]+%", "")
    assert without_numbers(printed) == without_numbers(said)
    for ours, theirs in zip(re.findall(r"([\d.]+)%", printed), re.findall(r"([\d.]+)%", said), strict=True):
        assert abs(float(ours) - float(theirs)) < 3
    plain_, perturbed = (float(error) for error in re.findall(r"error ([\d.]+)%", printed))
    assert perturbed < plain_
