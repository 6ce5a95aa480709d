"""What one training of a comparison came to, and its file: a comparison that was interrupted goes on from those."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """A contender, trained with one seed, and measured on held-out data after its last epoch.

    measures      by name; lower is better
    per_example   of measures that are means over the held-out examples: the value of each, in the same order always
    curve         measures during the training: each has "epoch" (in epochs of the plain training) and some numbers
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
        """Write its file, whole or not at all."""
        write_whole(folder / file_name(self.contender, self.seed), json.dumps(asdict(self)))


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def file_name(contender: str, seed: int) -> str:
    return f"{contender}-seed-{seed}.json"


def read_outcome(folder: Path, contender: str, seed: int) -> Outcome | None:
    """What an earlier call has written; None if there is nothing, or nothing that can be read."""
    try:
        found: dict[str, Any] = json.loads((folder / file_name(contender, seed)).read_text())
        return Outcome(**found)
    except (OSError, ValueError, TypeError):
        return None
