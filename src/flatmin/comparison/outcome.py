"""The result of one run of a comparison, and its file: an interrupted comparison resumes from these files."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


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
    """What an earlier call has written; None if there is nothing, or it cannot be read as the outcome of this run."""
    try:
        found = Outcome(**json.loads((folder / file_name(contender, seed)).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return found if (found.contender, found.seed) == (contender, seed) and _is_sound(found) else None


def _is_sound(found: Outcome) -> bool:
    """Whether everything is of its kind: a file may be from elsewhere, or changed."""
    has_ended = isinstance(found.failed, str) or (found.failed is None and bool(found.measures))
    return (
        has_ended
        and _are_numbers(found.measures)
        and isinstance(found.per_example, dict)
        and all(isinstance(each, list) and all(map(_is_number, each)) for each in found.per_example.values())
        and isinstance(found.curve, list)
        and all(_are_numbers(point) and "epoch" in point for point in found.curve)
        and _is_number(found.seconds)
    )


def _are_numbers(found: object) -> bool:
    return isinstance(found, dict) and all(map(_is_number, found.values()))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
