"""Parts of the README that programs make from files: each replaces what is between its two markers.

<!-- cost table --> … <!-- end of cost table -->
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


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


def command(name: str, words: str | None, source: str, default: Path, make: Callable[[Path], str]) -> None:
    """The command line of a part: make it from a file or folder and write it to the README, or check it there."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(f"--{source}", dest="source", type=Path, default=default)
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    try:
        before = given.readme.read_text()
        after = put_into(before, name, make(given.source))
    except (ValueError, OSError) as error:
        parser.error(f"{error}")
    if given.check:
        if before != after:
            sys.exit(f"{given.readme} is out of date; run python benchmarks/{Path(sys.argv[0]).name}")
    elif before != after:
        given.readme.write_text(after)
