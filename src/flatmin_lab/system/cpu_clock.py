"""The CPU time of a run: what its threads computed, however long they waited for a core.

If several runs share the cores, wall-clock time depends on how many there are; CPU time is each run's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import process_time


class CpuClock:
    """Counts while it is `running`: the process may do other things in between, such as the steps of another run."""

    def __init__(self) -> None:
        self.counted = 0.0
        self.since: float | None = None

    def seconds(self) -> float:
        return self.counted + (0.0 if self.since is None else process_time() - self.since)

    @contextmanager
    def running(self) -> Iterator[None]:
        self.since = process_time()
        try:
            yield
        finally:
            self.counted, self.since = self.seconds(), None

    def load(self, seconds: float) -> None:
        """Continue from the seconds of a checkpoint."""
        self.counted = seconds
        self.since = None if self.since is None else process_time()
