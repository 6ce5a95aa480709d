"""Parts of pages that programs make from files: each replaces what is between its two markers.

<!-- cost table --> … <!-- end of cost table -->
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = {  # where each part is
    "cost table": ROOT / "docs/speed.md",
    "results table": ROOT / "docs/findings.md",
    "gain table": ROOT / "README.md",
    "frontier table": ROOT / "docs/frontier.md",
    "cheap table": ROOT / "README.md",
    "regret table": ROOT / "docs/automatic_radius.md",
    "length table": ROOT / "docs/findings.md",
    "wrong labels table": ROOT / "docs/findings.md",
}


def put_into(text: str, name: str, content: str) -> str:
    """The text with the content between the markers of that name."""
    begin, end = markers(name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the page must have {begin} and after it {end}, once each; add the two lines")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{content}\n{end}{rest.partition(end)[2]}"


def markers(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->", f"<!-- end of {name} -->"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def command(words: str | None, source: str, default: Path, makers: Mapping[str, Callable[[Path], str]]) -> None:
    """The command line of some parts: make them from a file or folder and write them to their pages, or check them."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(f"--{source}", dest="source", type=Path, default=default)
    parser.add_argument("--page", type=Path, help="write them there, not to their own pages")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    old = []
    for name, make in makers.items():
        page = given.page or PAGES[name]
        try:
            before = page.read_text()
            after = put_into(before, name, make(given.source))
        except (ValueError, OSError) as error:
            parser.error(f"{error}")
        if before != after and given.check:
            old.append(f"the {name} in {page}")
        elif before != after:
            page.write_text(after)
    if old:
        sys.exit(f"out of date: {', '.join(old)}; run python benchmarks/{Path(sys.argv[0]).name}")
