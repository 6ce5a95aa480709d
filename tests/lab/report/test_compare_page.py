"""The page of a comparison has the answer first, every contender, the intervals and the command; it fits a phone."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from flatmin.comparison import Outcome, contenders_for, judge
from flatmin_lab.comparing.comparison_file import About, content
from flatmin_lab.report.figures.compare import TITLE_WIDTH, styles_of
from flatmin_lab.report.pages.compare import compare_page, curves, gaps
from tests.support import pages

CONTENDERS = contenders_for([0.03, 0.1, 0.3], auto=True)
LEVELS = {"plain": 0.2, "plain-longer": 0.19, "amp-0.03": 0.15, "amp-0.1": 0.1, "amp-0.3": 0.3, "amp-auto": 0.12}
COMMAND = (
    "flatmin compare --data /home/a/very/long/path/to/a/folder/of/pictures/that/does/not/end --seeds 3 --minutes 20"
)
ABOUT = About(
    title="convnet on <pictures>",
    what="convnet on pictures",
    held_out="some of them",
    wanted=3,
    identity={},
    command=COMMAND,
    facts={"flatmin": "0.1", "torch": "2", "commit": None, "hardware": "a machine"},
)


def found_of(seeds: int = 3, *, failed: str | None = None, curve: bool = True) -> dict[str, Any]:
    """As if these trainings had been run; with `failed`, that contender diverged with its last seed."""
    outcomes = []
    for contender in CONTENDERS:
        for seed in range(seeds):
            measures = {"error": LEVELS[contender.key] + 0.001 * seed, "nll": 0.5, "ece": 0.02}
            if contender.key == failed and seed == seeds - 1:
                outcomes.append(Outcome(contender.key, seed, {}, failed="the loss of step 3 is nan"))
                continue
            line = [{"epoch": epoch, "training loss": 1 / epoch, **measures} for epoch in range(1, 5)] if curve else []
            outcomes.append(Outcome(contender.key, seed, measures, curve=line, seconds=1.0))
    return content(ABOUT, CONTENDERS, outcomes, judge(CONTENDERS, outcomes), stopped="")


def test_the_answer_comes_first_and_every_contender_has_its_numbers() -> None:
    found = found_of()
    text = pages.text_of(compare_page(found))
    assert found["answer"] == "yes"
    assert text.index(found["sentence"]) < text.index("The table")
    for contender in CONTENDERS:
        assert contender.name in text
    assert "10.10 ± 0.10" in text
    assert "−10.00 (no spread)" in text  # the same with every seed
    assert COMMAND in text
    assert "convnet on <pictures>" in text  # as it is, and not as markup


def test_a_training_that_diverged_is_said() -> None:
    text = pages.text_of(compare_page(found_of(failed="amp-0.3")))
    assert "AMP, ε = 0.3 (1 diverged)" in text


def test_of_one_seed_there_are_no_intervals_and_without_outcomes_no_table() -> None:
    found = found_of(1)
    assert found["rows"]["error"][1]["from_plain"]["low"] is None
    assert "−10.00 (" not in pages.text_of(compare_page(found))
    text = pages.text_of(compare_page(found_of(0)))
    assert "Cannot tell: no run has finished yet" in text
    assert "The table" not in text


def test_what_is_drawn_has_the_numbers_of_the_table_and_passes_in_place_of_epochs() -> None:
    found = found_of()
    drawn = {gap.name: gap for gap in gaps(found, "error")}
    assert list(drawn) == ["plain, 2×", "AMP, ε = 0.03", "AMP, ε = 0.1", "AMP, ε = 0.3", "AMP, ε found"]
    assert drawn["AMP, ε = 0.1"].from_plain == pytest.approx((-10, -10, -10))
    assert drawn["AMP, ε = 0.1"].from_longer == pytest.approx((-9, -9, -9))
    assert drawn["plain, 2×"].from_longer is None
    ends = {curve.key: [points[-1][0] for points in curve.seeds] for curve in curves(found, "error")}
    assert ends["plain"] == ends["plain-longer"] == [4] * 3  # its curve counts epochs, of one pass each
    assert ends["amp-0.1"] == [8] * 3
    assert curves(found_of(curve=False), "error") == []


def test_no_two_contenders_look_alike() -> None:
    styles = styles_of([contender.key for contender in CONTENDERS])
    assert len(set(styles.values())) == len(CONTENDERS)


def named(measure: str) -> dict[str, Any]:
    """A comparison by one measure of the user's own, which is the same in all runs."""
    outcomes = [Outcome(one.key, seed, {measure: 0.25}, seconds=1.0) for one in CONTENDERS for seed in range(3)]
    return content(ABOUT, CONTENDERS, outcomes, judge(CONTENDERS, outcomes), stopped="")


def test_a_long_name_of_a_measure_is_in_the_figure_whole() -> None:
    name = "mean squared error of the <b>temperatures</b> of tomorrow & the day after"
    figure = compare_page(named(name)).partition('<div class="row forests">')[2].partition("</svg>")[0]
    lines = re.findall(r">([^<>]+)</text>", figure)
    assert html.unescape(" ".join(lines)).endswith(name)
    assert max(map(len, map(html.unescape, lines))) <= TITLE_WIDTH


@pytest.mark.parametrize("width", [1200, 390])
def test_one_figure_alone_is_as_large_as_one_of_several(tmp_path: Path, width: int) -> None:
    page = tmp_path / "comparison.html"
    page.write_text(compare_page(named("loss")), encoding="utf-8")
    script = """
    const box = document.querySelector(".forests svg").getBoundingClientRect();
    document.body.innerHTML = "<pre id=said>" + JSON.stringify({width: box.width}) + "</pre>";
    """
    seen = re.search(r"<pre id=.said.>(.*?)</pre>", pages.visit(page, script, width=width).dom)
    assert seen is not None
    assert json.loads(seen[1])["width"] < 30 * 16


@pytest.mark.parametrize("width", [1200, 390])
def test_nothing_is_wider_than_the_window(tmp_path: Path, width: int) -> None:
    """In a frame of that width: a window without a screen has a least one."""
    page = tmp_path / "comparison.html"
    page.write_text(compare_page(found_of()), encoding="utf-8")
    frame = tmp_path / "frame.html"
    inside = html.escape(page.read_text(encoding="utf-8"), quote=True)
    frame.write_text(
        f'<html><head></head><body><iframe width="{width}" height="900" srcdoc="{inside}"></iframe></body></html>',
        encoding="utf-8",
    )
    script = """
    setTimeout(() => {
      const root = document.querySelector("iframe").contentDocument.documentElement;
      const wide = [...root.querySelectorAll(".wide")].map((part) => part.scrollWidth - part.clientWidth);
      const said = {apart: root.scrollWidth - root.clientWidth, wide};
      document.body.innerHTML = "<pre id=said>" + JSON.stringify(said) + "</pre>";
    }, 500);
    """
    visit = pages.visit(frame, script, width=1300)
    assert visit.console == []
    said = json.loads(html.unescape(re.findall(r'<pre id="said">(.*?)</pre>', visit.dom, re.DOTALL)[0]))
    assert said == {"apart": 0, "wide": [0, 0]}
