"""The results that the project keeps make a report with one command."""

from pathlib import Path

from tests.lab.report.test_evidence import KEPT
from tests.support.processes import flatmin


def test_the_report_of_the_kept_results_is_one_command(tmp_path: Path) -> None:
    shown = flatmin("report", KEPT, "--out", tmp_path / "page.html")
    assert shown.exit_code == 0, shown.output
    assert "The paper's tables" in (tmp_path / "page.html").read_text()
