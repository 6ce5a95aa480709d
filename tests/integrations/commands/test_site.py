"""The site: everything public has a place in it, it needs no network, and it is readable on a phone.

Built once for all tests of this file, unless `make check` has just built it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import typer

import flatmin
from flatmin import attacks, ball, doctor, flatness, metrics, regularisers, theory
from flatmin_lab.cli.app import app
from tests import HANG_SECONDS, ROOT
from tests.support.pages import CONSOLE, found

pytest.importorskip("mkdocs", reason="installed with flatmin[docs]")
material = pytest.importorskip("material", reason="installed with flatmin[docs]")

SOURCES = ("README.md", "CHANGELOG.md", "mkdocs.yml", "docs", "src")
LABORATORY = (
    "training.train",
    "recipes.Recipe",
    "recipes.default_recipe",
    "data.load",
    "models.MODELS",
    "methods.METHODS",
)
PHONE, DESKTOP = 390, 1280


def is_fresh(site: Path) -> bool:
    """Was it built after everything that it is made from was written?"""
    page = site / "index.html"
    files = [path for name in SOURCES for path in [ROOT / name, *(ROOT / name).rglob("*.*")] if path.is_file()]
    files = [path for path in files if "__pycache__" not in path.parts]
    return page.exists() and page.stat().st_mtime > max(path.stat().st_mtime for path in files)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("docs") / "site"
    if is_fresh(ROOT / "site"):
        shutil.copytree(ROOT / "site", place)  # a page of the tests' own is put beside the others
        return place
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return place


class Fetched(HTMLParser):
    """What a page has the browser fetch: scripts, styles, fonts, images, frames; not the links of a reader."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {key: value or "" for key, value in attrs}
        keys = ("href",) if tag == "link" else ("src", "srcset", "data", "poster")
        self.found += [named[key] for key in keys if key in named and tag != "a"]


def pages(site: Path) -> list[Path]:
    return sorted(page for page in site.rglob("*.html") if page.name != "404.html")


def test_nothing_is_fetched_from_the_net(site: Path) -> None:
    assert len(pages(site)) > 25
    for page in [*pages(site), site / "404.html"]:
        for target in Fetched(page).found:
            assert not re.match(r"(https?:)?//", target), f"{page.relative_to(site)} fetches {target}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name


def test_every_page_that_is_named_in_the_site_is_there(site: Path) -> None:
    for page in pages(site):
        for target in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text(encoding="utf-8")):
            if not re.match(r"\w+:|//|/", target):
                assert (page.parent / target).exists(), f"{page.relative_to(site)} points to {target}"


def test_everything_public_has_a_place_in_the_reference(site: Path) -> None:
    """By the inventory that mkdocstrings writes, with an anchor for every object."""
    header = re.match(rb"(#.*\n){4}", content := (site / "objects.inv").read_bytes())
    assert header
    known = {line.split()[0] for line in zlib.decompress(content[header.end() :]).decode().splitlines()}
    modules = (attacks, ball, doctor, flatness, metrics, regularisers, theory)
    names = {f"flatmin.{name}" for name in flatmin.__all__ if not isinstance(getattr(flatmin, name), type(flatmin))}
    names |= {f"{module.__name__}.{name}" for module in modules for name in getattr(module, "__all__", ())}
    names |= {f"flatmin_lab.{name}" for name in LABORATORY}
    assert names <= known, sorted(names - known)


def test_a_docstring_becomes_markdown() -> None:
    hook = run_path(str(ROOT / "docs" / "site_hooks" / "docstrings.py"))
    text = "Adds.\n\n    a + b\n\nfirst    a number\nsecond   another, |b|,\n         or none\n\n>>> 1 + 1\n2"
    table = "| | |\n|---|---|\n| `first` | a number |\n| `second` | another, &#124;b&#124;, or none |"
    assert hook["markdown"](text) == f"Adds.\n\n    a + b\n\n{table}\n\n```pycon\n>>> 1 + 1\n2\n```"


def test_columns_become_a_table_and_equations_do_not() -> None:
    markdown = run_path(str(ROOT / "docs" / "site_hooks" / "docstrings.py"))["markdown"]
    columns = "    line, plane   |J|*\n    Theorem 1     a,  b    c_d\n                  and e\n    f(x) = y      g"
    rows = "| `line`, `plane` | &#124;J&#124;\\* |\n| Theorem 1 | a, b · c\\_d and e |\n| `f(x) = y` | g |"
    assert markdown(columns) == f"| | |\n|---|---|\n{rows}"
    for text in (
        "    a = b,   c = d",
        "    a = b   and c\n    d = e,    and f",
        "    a = f(b)   # one\n    c = f(d)   # two",
    ):
        assert markdown(text) == text


def words(page: Path) -> str:
    """Its text without tags, on one line."""
    text = page.read_text(encoding="utf-8")
    return " ".join(unescape(re.sub(r"<[^>]+>", "", text)).split())


def test_signatures_are_as_they_are_meant(site: Path) -> None:
    """What catches wrong calls is hidden; a NamedTuple has its fields; what is said of a field is in a table."""
    optimizers, flatness_ = words(site / "reference" / "optimizers.html"), words(site / "reference" / "flatness.html")
    assert "perturbed(*, scaler: GradScaler | None = None) -> PerturbedBlock" in optimizers
    assert "misplaced" not in optimizers
    assert "Trace(value: Tensor, error: Tensor, products: int)" in flatness_
    assert "delta where it was found, one tensor per parameter" in flatness_
    laboratory = words(site / "reference" / "laboratory.html")
    assert "lr: float = 0.1," in laboratory
    assert (
        "weight_decay Weight decay (the paper: 1e-4); other optimizers have their own default. Must be at least 0 and "
        "finite." in laboratory
    )
    assert "flatmin.flatness.Trace.value" not in (site / "reference" / "flatness.html").read_text(encoding="utf-8")


def test_the_home_page_is_called_so_and_does_not_say_how_to_build_itself(site: Path) -> None:
    assert "site/index.html" not in words(site / "index.html")
    for page in pages(site):
        assert not re.search(r"<a [^>]*>README</a>", page.read_text(encoding="utf-8")), page.name


def test_every_feature_that_is_compared_names_its_tests() -> None:
    text = (ROOT / "docs" / "compared.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    features = [row[0] for row in rows if len(row) == 7][1:]
    proofs = {row[0]: row[1] for row in rows if len(row) == 2}
    assert len(features) > 30
    for feature in features:
        assert re.fullmatch(r"`test_\w+`(, `test_\w+`)*", proofs[feature]), feature


def test_long_names_in_tables_break_between_words_and_nowhere_else(site: Path) -> None:
    text = (site / "compared.html").read_text(encoding="utf-8")
    assert "test_<wbr>a_<wbr>copy_<wbr>steps_<wbr>its_<wbr>own_<wbr>weights" in text
    assert "<code>KeyError</code>" in text
    assert all("<wbr>" not in block for block in re.findall(r"<pre.*?</pre>", text, re.DOTALL))


def test_every_flag_of_the_command_is_on_its_page(site: Path) -> None:
    text = (site / "command.html").read_text(encoding="utf-8")
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        assert f">flatmin {name}<" in text
        for param in command.params:
            assert all(option in text for option in param.opts if option.startswith("--")), (name, param.name)


def test_pictures_are_small_and_as_their_program_draws_them(tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "docs" / "pictures.py"), str(tmp_path)]
    subprocess.run(program, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=True)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == ["ball.png", "minima.png", "packages.png"]
    assert (ROOT / "docs" / "spiral.png").stat().st_size < 100_000
    for name in drawn:
        kept = (ROOT / "docs" / name).stat().st_size
        assert kept < 100_000
        assert abs(kept - (tmp_path / name).stat().st_size) < 0.2 * kept  # another matplotlib, other letters


# All pages, one after the other, in a frame as wide as a phone: chromium's own window is 500 pixels wide at least. What
# is wider than the frame makes it scroll sideways. And one question to the search.
VISITS = """<body><iframe></iframe><pre id="said">unfinished</pre><script>
const pages = PAGES, wide = [], frame = document.querySelector("iframe");
frame.style = "border: 0; width: WIDTHpx; height: 800px";
const later = (time) => new Promise((done) => setTimeout(done, time));
const opened = (page) => new Promise((done) => { frame.onload = done; frame.src = page; });
const changed = (box, text) => { box.value = text; box.dispatchEvent(new Event("keyup", { bubbles: true })); };
(async () => {
  for (const page of pages) {
    await opened(page);
    const root = frame.contentDocument.documentElement;
    if (root.scrollWidth > root.clientWidth) wide.push([page, root.scrollWidth]);
  }
  await opened("index.html");
  const inside = frame.contentDocument, box = inside.querySelector("input[name=query]");
  inside.querySelector("[data-md-toggle=search]").click();
  box.focus();
  await later(1500);
  changed(box, "radius");
  await later(3000);
  const answers = [...inside.querySelectorAll(".md-search-result__link")].map((link) => link.getAttribute("href"));
  said.textContent = JSON.stringify({ wide, visited: pages.length, answers });
})();
</script></body>"""


# What readers type, and where the answer is.
ANSWERS = {
    "epsilon": "choosing_epsilon.html",
    "nan": "faq.html#the-loss-is-nan-or-steps-are-skipped",
    "adam": "faq.html#which-optimizer-works-adam-adamw-sgd-others",
    "slow": "faq.html#it-is-twice-as-slow",
    "lora": "faq.html#fine-tuning-and-lora",
    "wandb": "faq.html#wandb-mlflow-tensorboard",
    "out of memory": "faq.html#out-of-memory",
    "StepLog": "reference/optimizers.html#flatmin.StepLog",
}
QUESTIONS = """<body><iframe></iframe><pre id="said">unfinished</pre><script>
const answers = {}, frame = document.querySelector("iframe");
frame.style = "border: 0; width: WIDTHpx; height: 800px";
const later = (time) => new Promise((done) => setTimeout(done, time));
const opened = (page) => new Promise((done) => { frame.onload = done; frame.src = page; });
(async () => {
  for (const question of ASKED) {
    await opened("index.html?q=" + encodeURIComponent(question));
    await later(4000);
    const links = frame.contentDocument.querySelectorAll(".md-search-result__link");
    answers[question] = [...links].map((link) => link.getAttribute("href"));
  }
  said.textContent = JSON.stringify({ answers });
})();
</script></body>"""


def seen_by_browser(site: Path, page: str) -> dict[str, Any]:
    """What a page beside the site's own says in the end; nothing may be logged meanwhile."""
    start = site / "visits.html"
    start.write_text(page, encoding="utf-8")
    with tempfile.TemporaryDirectory() as profile:
        command = [found(), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
        command += ["--enable-logging=stderr", "--v=0", "--virtual-time-budget=60000", f"--user-data-dir={profile}"]
        command += [f"--window-size={DESKTOP},900", "--dump-dom", start.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_SECONDS)
    start.unlink()
    said = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.DOTALL)
    assert said
    assert CONSOLE.findall(done.stderr) == []
    seen: dict[str, Any] = json.loads(unescape(said[1]))
    return seen


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_no_page_is_wider_than_its_window_and_the_search_answers_from_files(site: Path, width: int) -> None:
    names = [page.relative_to(site).as_posix() for page in pages(site)]
    seen = seen_by_browser(site, VISITS.replace("PAGES", json.dumps(names)).replace("WIDTH", str(width)))
    assert seen["wide"] == []
    assert seen["visited"] == len(names)
    assert len(seen["answers"]) > 3


def test_the_search_finds_what_readers_ask_for(site: Path) -> None:
    """First the page, then its section that has the word; before those of other pages."""
    page = QUESTIONS.replace("ASKED", json.dumps(list(ANSWERS))).replace("WIDTH", str(DESKTOP))
    found_first = seen_by_browser(site, page)["answers"]
    for question, answer in ANSWERS.items():
        first = [link.removeprefix(f"{site.as_uri()}/") for link in found_first[question][:2]]
        assert answer in first, question
        assert first[0] == answer.partition("#")[0], question
