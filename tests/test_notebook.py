"""The notebook as it is committed: small, with its images, and without a trace of the machine that ran it."""

import re
from pathlib import Path

from tests.support.notebooks import QUICK_START, cells, images

MAX_BYTES = 300_000  # of a file that people clone and code hosts show


def test_it_is_small() -> None:
    assert QUICK_START.stat().st_size < MAX_BYTES


def test_a_reader_who_does_not_run_it_sees_the_images() -> None:
    drawing = [
        cell for cell in cells(QUICK_START, "code") if re.search(r"subplots|figures\.\w+\(", "".join(cell["source"]))
    ]
    assert len(drawing) == 5
    assert [images(cell) for cell in drawing] == [1] * 5


def test_it_was_run_from_the_first_cell_to_the_last_without_an_error_or_a_warning() -> None:
    code = cells(QUICK_START, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data", "execute_result"}
    assert {output["name"] for output in outputs if output["output_type"] == "stream"} == {"stdout"}


def test_it_says_nothing_of_the_machine() -> None:
    text = re.sub(r'"image/png": "[^"]*"', "", QUICK_START.read_text())
    assert not re.search(r"/(home|root|tmp|work|Users)/|[A-Z]:\\\\", text)


def test_its_links_lead_to_files_and_headings() -> None:
    text = "".join(line for cell in cells(QUICK_START, "markdown") for line in cell["source"])
    links = re.findall(r"\]\(([^)#]+)#?([^)]*)\)", text)
    assert len(links) >= 5
    for link, heading in links:
        page = QUICK_START.parent / link
        assert page.is_file(), link
        assert not heading or heading in headings(page), f"{link}#{heading}"


def headings(page: Path) -> list[str]:
    """As links name them."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in found]
