"""The report's section about the Hessian's spectrum, and the page about the line between two models."""

import html
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from flatmin_lab.report.loader import load_results
from flatmin_lab.report.pages.between import barrier_sentences, between_page
from flatmin_lab.report.pages.report import report_page
from flatmin_lab.report.pages.spectrum import spectrum_section
from tests.support import pages
from tests.support.pages import text_of
from tests.support.report_files import evaluation, result, spectrum, write


def test_methods_share_a_grid_and_a_width() -> None:
    found = spectrum_section([("erm", "ERM", [spectrum(), spectrum()]), ("amp", "AMP", [spectrum(4.0)])])
    assert found is not None
    data = found.figure.data
    step = data["grid"][1] - data["grid"][0]
    for values in data["densities"].values():
        assert sum(values) * step == pytest.approx(1, abs=1e-3)
    width = 0.01 * 8.5
    height = 0.01 / (width * math.sqrt(2 * math.pi))  # the share at 4, in both probes
    near = min(range(len(data["grid"])), key=lambda i: abs(data["grid"][i] - 4.0))
    assert data["densities"]["amp"][near] == pytest.approx(height, rel=0.05)
    assert data["densities"]["erm"][near] == pytest.approx(0, abs=1e-9)
    assert [(row.name, row.runs, row.largest) for row in found.rows] == [("ERM", 2, "8"), ("AMP", 1, "4")]
    assert found.rows[0].negative_curvature == "25.00\u00a0%"


def test_spectra_of_other_images_are_not_beside_the_others() -> None:
    found = spectrum_section(
        [("erm", "ERM", [spectrum(), spectrum(pictures=60)]), ("amp", "AMP", [spectrum(pictures=60, largest=3.0)])]
    )
    assert found is not None
    assert {row.name: row.runs for row in found.rows} == {"ERM": 1, "AMP": 1}
    assert "on 60 examples" in found.words
    assert spectrum_section([("erm", "ERM", [])]) is None


@pytest.mark.parametrize("value", [0.0, 2.0])
def test_a_spectrum_of_one_value_is_drawn_too(value: float) -> None:
    one = spectrum(values=[[value]], weights=[[1.0]], smallest=value, largest=value)
    found = spectrum_section([("erm", "ERM", [one])])
    assert found is not None
    assert max(found.figure.data["densities"]["erm"]) > 0


def test_the_report_has_a_section_where_spectra_were_measured(tmp_path: Path) -> None:
    for seed in range(2):
        write(tmp_path / f"erm-{seed}", result("erm", seed, 0.05), evaluation=evaluation(spectrum=spectrum()))
    write(tmp_path / "amp", result("amp", 0, 0.05), evaluation=evaluation())
    page = report_page(load_results([tmp_path]))
    shown = text_of(page)
    assert "Spectrum of the Hessian" in shown
    assert "ERM 2 8 -0.5 12 ± 0.71 25.00 %" in shown
    assert "The 1,000 eigenvalues" in shown
    assert re.search(r'download="[\w-]+-spectrum\.json"', page)
    (tmp_path / "erm-0" / "evaluation.json").write_text(json.dumps(evaluation()))
    (tmp_path / "erm-1" / "evaluation.json").write_text(json.dumps(evaluation()))
    assert "Spectrum of the Hessian" not in report_page(load_results([tmp_path]))


@pytest.mark.parametrize(
    "changes",
    [
        {"values": []},
        {"values": [[1.0]]},
        {"values": "all"},
        {"values": [[], []]},
        {"weights": [[0.1, None, 0.2], [0.5, 0.5]]},
        {"weights": [[0.1, 7.0, 0.2], [0.5, 0.5]]},
        {"weights": [[0.0, 0.0, 0.0], [0.5, 0.5]]},
        {"negative_curvature": 2},
        {"largest": None},
        {"parameters": 0},
    ],
    ids=str,
)
def test_a_spectrum_that_cannot_be_drawn_is_named_and_left_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    write(tmp_path / "erm", result("erm", 0, 0.05), evaluation=evaluation(spectrum=spectrum(**changes)))
    found = load_results([tmp_path])
    assert [one.path.name for one in found.unusable] == ["evaluation.json"]
    assert "Spectrum of the Hessian" not in report_page(found)


# ---- the line between two models


def line(losses: list[float | None], barrier: float | None, **changes: Any) -> dict[str, Any]:
    errors = [0.0, 0.5, 0.0]
    split = {"pictures": 1000, "losses": losses, "errors": errors, "barrier": barrier, "highest": 0.5}
    split["error_barrier"] = 0.5
    splits = {"training": split, "test": split}
    return {"points": 3, "ts": [0.0, 0.5, 1.0], "kind": "pictures", "renewed": None, "splits": splits, **changes}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            line([0.1, 2.0, 0.3], 1.8),
            "On 1,000 training images: a barrier of 1.800 at t = 0.5. The loss rises that far above the straight line "
            "between the losses of the two ends, 0.100 and 0.300; the error rises by up to 50.0 percentage points.",
        ),
        (line([0.1, 0.1, 0.3], 0.0), "On 1,000 training images: no barrier."),
        (line([0.1, None, 0.3], None), "the loss is not finite everywhere on the line"),
        (line([0.1, 0.2, None], None), "the loss is not finite everywhere on the line"),
        (line([0.1, 2.0, 0.3], 1.8, kind="points"), "On 1,000 training points: a barrier"),
    ],
)
def test_the_barrier_is_said_in_a_sentence(found: dict[str, Any], said: str) -> None:
    first, second = barrier_sentences(found)
    assert said in first
    assert second == first.replace("training", "test")
    page = between_page(("erm", "amp"), found, {"flatmin": "0", "commit": None, "torch": "2", "hardware": "a machine"})
    assert said in text_of(page)


def test_the_page_says_where_the_statistics_come_from_and_escapes_names() -> None:
    facts = {"flatmin": "0", "commit": None, "torch": "2", "hardware": "a machine"}
    renewed = {"pictures": 950, "augmented": True}
    page = between_page(("<b>", "<b>"), line([0.1, 2.0, 0.3], 1.8, renewed=renewed), facts)
    assert "on 950 training images, augmented as in training." in text_of(page)
    assert "<strong>&lt;b&gt; (1)</strong>" in page
    plain = between_page(("a", "b"), line([0.1, 2.0, 0.3], 1.8), facts)
    assert "recomputed" not in plain


FRAMED = """
setTimeout(() => {
  const root = document.querySelector("iframe").contentDocument.documentElement;
  const wide = [root, ...root.querySelectorAll(".wide")].map((part) => part.scrollWidth - part.clientWidth);
  document.body.innerHTML = "<pre id=said>" + JSON.stringify(wide) + "</pre>";
}, 500);
"""


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_window(tmp_path: Path, width: int) -> None:
    """In a frame of that width: a window without a screen has a least one."""
    facts = {"flatmin": "0", "commit": "abc1234-dirty", "torch": "2", "hardware": "a machine"}
    long_name = "runs/a-folder-whose-name-does-not-end-and-has-no-space/checkpoint-00000174.safetensors"
    write(tmp_path / "runs" / "erm", result("erm", 0, 0.05), evaluation=evaluation(spectrum=spectrum()))
    made = (
        between_page((long_name, long_name), line([0.1, 2.0, 0.3], 1.8), facts),
        report_page(load_results([tmp_path / "runs"])),
    )
    for place, page in enumerate(made):
        frame = tmp_path / f"{place}.html"
        inside = f'<iframe width="{width}" height="900" srcdoc="{html.escape(page, quote=True)}"></iframe>'
        frame.write_text(f"<html><head></head><body>{inside}</body></html>", encoding="utf-8")
        visit = pages.visit(frame, FRAMED, width=1400)
        assert visit.console == []
        assert not any(json.loads(re.findall(r'<pre id="said">(.*?)</pre>', visit.dom, re.DOTALL)[0]))
