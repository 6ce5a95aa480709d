"""A release says one version, cites the paper rightly, and leaves nothing out of what is published."""

import re
import sys
import zipfile
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import flatmin
from flatmin_lab.cli.app import app
from flatmin_lab.system.optional_deps import need, needed_by
from tests import ROOT
from tests.programs import dist_contents

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
CITATION: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text())
PAPER: dict[str, Any] = CITATION["preferred-citation"]
# of the Citation File Format 1.2.0: the keys that we use, and of which kind they are
TEXTS, LISTS = ("cff-version", "message", "title", "type", "abstract", "version", "license"), ("authors", "keywords")
KEYS: dict[str, type] = {**dict.fromkeys(TEXTS, str), **dict.fromkeys(LISTS, list), "date-released": date}
KEYS["preferred-citation"] = dict
PAPER_KEYS = {"type": str, "title": str, "authors": list, "collection-title": str, "conference": dict, "year": int}
PAPER_KEYS |= {"month": int, "start": int, "end": int, "url": str, "identifiers": list}


def test_the_version_stands_in_one_place_and_three_documents() -> None:
    number = re.compile(rf"(?<![\d.]){re.escape(flatmin.__version__)}(?![\d.])")
    kinds = {".py", ".toml", ".md", ".cff", ".txt", ".yml", ""}
    places = [ROOT / "pyproject.toml", ROOT / "Makefile", *ROOT.glob("*.md"), *ROOT.glob("*.cff")]
    places += [path for folder in ("src", "docs", "examples", "constraints") for path in (ROOT / folder).rglob("*")]
    named = {
        path.name for path in places if path.suffix in kinds and path.is_file() and number.search(path.read_text())
    }
    assert named == {"__init__.py", "CHANGELOG.md", "CITATION.cff"}
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()


def test_changelog_and_citation_have_the_version() -> None:
    newest = re.findall(r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)$", CHANGELOG, re.MULTILINE)[0]
    assert newest[0] == CITATION["version"] == flatmin.__version__
    assert str(CITATION.get("date-released", "unreleased")) == newest[1]


def test_the_changelog_has_every_public_name_and_command() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name in (*(f"flatmin.{name}" for name in flatmin.__all__), *(f"flatmin {name}" for name in commands)):
        assert re.search(rf"`{name}\b", CHANGELOG), name


def test_the_citation_file_keeps_the_format_s_rules() -> None:
    assert CITATION["cff-version"] == "1.2.0"
    assert {"cff-version", "message", "title", "authors"} <= CITATION.keys() <= KEYS.keys()
    assert {"type", "title", "authors"} <= PAPER.keys() <= PAPER_KEYS.keys()
    for kinds, values in ((KEYS, CITATION), (PAPER_KEYS, PAPER)):
        assert all(isinstance(value, kinds[key]) for key, value in values.items())
    assert (CITATION["type"], PAPER["type"]) == ("software", "conference-paper")
    for author in (*CITATION["authors"], *PAPER["authors"]):
        assert author.keys() in ({"name"}, {"family-names", "given-names"})
    assert PAPER["conference"].keys() == {"name"}
    assert all({"type", "value"} <= identifier.keys() for identifier in PAPER["identifiers"])


def test_citation_and_readme_name_the_same_paper() -> None:
    readme = (ROOT / "README.md").read_text()
    entry = dict(re.findall(r"^  (\w+) += \{(.+)\}", readme, re.MULTILINE))
    assert entry["title"] == PAPER["title"]
    assert entry["author"].split(" and ") == [
        f"{author['family-names']}, {author['given-names']}" for author in PAPER["authors"]
    ]
    assert entry["booktitle"] == PAPER["collection-title"]
    assert (entry["pages"], entry["year"]) == (f"{PAPER['start']}--{PAPER['end']}", str(PAPER["year"]))
    assert PAPER["url"] in readme
    assert CITATION["authors"][0]["name"] in (ROOT / "LICENSE").read_text()


def test_the_archive_is_told_of_all_that_lies_at_the_top() -> None:
    files = dist_contents.tracked()
    if files is None:
        pytest.skip("not a checkout, or no git")
    top = {name.partition("/")[0] for name in files}
    included = set(re.findall(r'"/([\w.]+)"', (ROOT / "pyproject.toml").read_text()))
    always = {".gitignore", "LICENSE", "README.md", "pyproject.toml"}  # hatchling's own
    assert top - included - always == {".ci"}


def test_a_wheel_that_forgets_a_template_is_found(tmp_path: Path) -> None:
    name = f"flatmin-{flatmin.__version__}"
    about, path = f"{name}.dist-info", tmp_path / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file in (ROOT / "src").rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts and file.name != "theory.html.jinja":
                wheel.write(file, file.relative_to(ROOT / "src"))
        wheel.write(ROOT / "LICENSE", f"{about}/licenses/LICENSE")
        wheel.writestr(f"{about}/METADATA", "")
        wheel.writestr(f"{about}/entry_points.txt", "flatmin = flatmin_lab.__main__:main")
    with pytest.raises(AssertionError, match=r"not in both: \['flatmin_lab/report/templates/theory.html.jinja'\]"):
        dist_contents.check_wheel(path)


def test_a_missing_package_is_named_and_a_broken_one_speaks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(
        ImportError, match=r"^tuning needs optuna, which is not installed here: pip install 'flatmin\[l"
    ):
        need("optuna", "tuning")
    with pytest.raises(ImportError, match=r"^no libgomp$"), needed_by("tuning"):
        raise ImportError("no libgomp")
