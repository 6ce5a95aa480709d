"""How long do runs take, and would another one end in time?

Time is counted in plain runs, by their passes: a run with AMP counts as two of them. How long one takes is known once a
task has ended. Runs that share a GPU are one task, and are timed together.
"""

import time
from collections.abc import Callable


class TimeBudget:
    """The seconds that this call has; None for as many as it needs."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.clock = seconds, clock
        self.began = clock()
        self.passes = self.spent = 0.0  # of the tasks that have ended

    def record(self, passes: float, seconds: float) -> None:
        """A task has ended."""
        self.passes, self.spent = self.passes + passes, self.spent + seconds

    def estimate(self, passes: float) -> float | None:
        """The seconds of that many passes on one worker; None until something has ended."""
        return passes * self.spent / self.passes if self.passes else None

    def fits(self, passes: float) -> bool:
        """Would they end in time, as far as we know?"""
        needed = self.estimate(passes)
        return self.seconds is None or needed is None or self.clock() - self.began + needed <= self.seconds
