"""The result of one run of a comparison, and its file: an interrupted comparison resumes from these files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """A contender, trained with one seed, and measured on held-out data after its last epoch.

    measures      by name; lower is better
    per_example   for measures that are means over the held-out examples: the value for each, always in the same order
    curve         measures during training: each point has "epoch" (counted as in a plain run) and some numbers
    failed        why it has no measures: it diverged
    """

    contender: str
    seed: int
    measures: Mapping[str, float]
    per_example: Mapping[str, Sequence[float]] = field(default_factory=dict)
    curve: Sequence[Mapping[str, float]] = ()
    seconds: float = 0.0
    failed: str | None = None

    def write(self, folder: Path) -> None:
        """Write its file, completely or not at all."""
        write_whole(folder / file_name(self.contender, self.seed), json.dumps(asdict(self)))


def write_whole(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def file_name(contender: str, seed: int) -> str:
    return f"{contender}-seed-{seed}.json"


def read_outcome(folder: Path, contender: str, seed: int) -> Outcome | None:
    """What an earlier call has written; None if there is nothing, or it cannot be read."""
    try:
        found: dict[str, Any] = json.loads((folder / file_name(contender, seed)).read_text())
        return Outcome(**found)
    except (OSError, ValueError, TypeError):
        return None
