"""The report's section about confidence: means of the files' numbers, and nothing where nothing was measured."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from flatmin.metrics import CONFIDENCE_SCORES
from flatmin_lab.report.loader import load_results
from flatmin_lab.report.pages.report import report_page
from tests.support.pages import text_of
from tests.support.report_files import evaluation, result, write


def selective(aurc: float, risk: float) -> dict[str, Any]:
    return {"aurc": aurc, "e_aurc": 0.001, "coverage": [0.5, 1.0], "risk": [risk, 2 * risk]}


def outside(auroc: float, *, sha256: str = "ab", **changes: Any) -> dict[str, Any]:
    scores = {name: {"auroc": auroc, "fpr95": 1 - auroc} for name in CONFIDENCE_SCORES}
    return {"svhn": {"pictures": 26032, "sha256": sha256, **scores, **changes}}


def page_of(folder: Path) -> str:
    return report_page(load_results([folder]))


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Three seeds of ERM and of AMP with everything, and a run of MixUp with neither."""
    for seed in range(3):
        for method, auroc in (("erm", 0.90), ("amp", 0.95)):
            found = evaluation(selective=selective(0.01, 0.02), outside=outside(auroc + 0.01 * seed))
            write(tmp_path / f"{method}-{seed}", result(method, seed, 0.05), evaluation=found)
    write(tmp_path / "mixup", result("mixup", 0, 0.05), evaluation=evaluation())
    return tmp_path


def test_means_and_deviations_stand_in_the_tables(measured: Path) -> None:
    shown = text_of(page_of(measured))
    assert "Against SVHN, 26,032 examples:" in shown
    assert "AUROC, probability AUROC, energy AUROC, entropy FPR95, probability" in shown
    assert "ERM 3 91.0 ± 1.0 91.0 ± 1.0 91.0 ± 1.0 9.0 ± 1.0" in shown
    assert "AMP 3 96.0 ± 1.0" in shown
    assert "Not measured: MixUp." in shown
    assert "AURC, %" in shown
    assert "1.000 ± 0.000" in shown


def test_the_curve_is_the_mean_over_the_seeds(measured: Path) -> None:
    higher = evaluation(selective=selective(0.02, 0.05))
    (measured / "erm-0" / "evaluation.json").write_text(json.dumps(higher))
    (link,) = re.findall(r'download="[^"]*risk-coverage.json" href="data:[^,]*,([^"]+)"', page_of(measured))
    drawn = json.loads(base64.b64decode(link))
    assert drawn["erm"]["risk"] == pytest.approx([0.03, 0.06])
    assert drawn["amp"]["risk"] == pytest.approx([0.02, 0.04])
    assert "mixup" not in drawn


def test_the_roc_curve_is_the_mean_over_the_seeds_that_recorded_one(measured: Path) -> None:
    assert "ROC curve" not in text_of(page_of(measured))  # older files
    for seed, rate in ((0, 0.6), (1, 0.8)):
        known = {"auroc": 0.9, "fpr95": 0.1, "roc": [0.2, rate, 1.0]}
        found = evaluation(outside=outside(0.9, max_probability=known))
        (measured / f"amp-{seed}" / "evaluation.json").write_text(json.dumps(found))
    page = page_of(measured)
    (link,) = re.findall(r'download="[^"]*roc-svhn.json" href="data:[^,]*,([^"]+)"', page)
    assert json.loads(base64.b64decode(link)) == {"amp": pytest.approx([0.2, 0.7, 1.0])}
    assert "The ROC curve by the largest probability" in text_of(page)
    assert "told apart from SVHN (n\u00a0=\u00a02)" in page


def test_other_data_of_the_same_name_are_left_out(measured: Path) -> None:
    odd = evaluation(outside=outside(0.1, sha256="cd"))
    (measured / "erm-0" / "evaluation.json").write_text(json.dumps(odd))
    assert "ERM 2 91.0, 92.0" in text_of(page_of(measured))


def test_where_nothing_was_measured_nothing_is_said(tmp_path: Path) -> None:
    write(tmp_path / "erm", result("erm", 0, 0.05), evaluation=evaluation())
    shown = text_of(page_of(tmp_path))
    assert not any(word in shown for word in ("AURC", "outside", "coverage", "adaptive", "Adaptive"))


def test_adaptive_flatness_has_a_column_where_some_run_has_it(tmp_path: Path) -> None:
    flat = evaluation()["flatness"]
    adaptive = {**flat, "adaptive_epsilon": 0.5, "adaptive_worst_case_loss": 0.9}
    write(tmp_path / "erm", result("erm", 0, 0.05), evaluation=evaluation())
    write(tmp_path / "amp", result("amp", 0, 0.05), evaluation=evaluation(flatness=adaptive))
    shown = text_of(page_of(tmp_path))
    assert "rise, adaptive" in shown
    assert "0.300 not measured 9.0" in shown  # ERM's: its rise, the adaptive one, the top eigenvalue
    assert "0.300 0.800 9.0" in shown
    assert "in the ball ‖Δ ⊘ |θ|‖ ≤ 0.5" in shown
    assert "flatmin evaluate" not in shown.replace("flatmin landscape", "")  # nothing else is missing


@pytest.mark.parametrize(
    "odd",
    [
        {"selective": {"aurc": 2.0}},
        {"selective": {**selective(0.1, 0.1), "coverage": [1.0, 0.5]}},
        {"selective": {**selective(0.1, 0.1), "risk": ["x", 0.5]}},
        {"selective": []},
        {"outside": {"svhn": {"pictures": 0}}},
        {"outside": {"svhn": []}},
        {"outside": outside(0.5, max_probability={"auroc": 7})},
        {"outside": outside(0.5, max_probability={"auroc": 0.5, "fpr95": 0.5, "roc": [0.0, 0.9, 0.8, 1.0]})},
        {"outside": outside(0.5, max_probability={"auroc": 0.5, "fpr95": 0.5, "roc": [1.0]})},
        {"outside": outside(0.5, max_probability={"auroc": 0.5, "fpr95": 0.5, "roc": [0.0, "x"]})},
        {"outside": outside(0.5, sha256=3)},  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_numbers_that_are_none_are_listed_and_not_drawn(tmp_path: Path, odd: dict[str, Any]) -> None:
    write(tmp_path / "erm", result("erm", 0, 0.05), evaluation=evaluation(**odd))
    found = load_results([tmp_path])
    assert [one.path.name for one in found.unusable] == ["evaluation.json"]
    assert "1 file was left out" in text_of(report_page(found))
