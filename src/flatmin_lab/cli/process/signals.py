"""Ctrl-C, SIGTERM and a closed terminal, turned into a flag that a run checks between two steps.

    with stop_on_signals() as stop:
        for event in train(..., stop=stop): ...

After the first signal the run saves and ends; a second one interrupts it at once.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import FrameType


class StopSignal(str, Enum):
    """A signal that stops a run, in words; it may have arrived at another rank."""

    SIGINT = "Ctrl-C"
    SIGTERM = "SIGTERM"
    SIGHUP = "a closed terminal"

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)  # Python's versions differ in what an Enum's own __str__ does

    @property
    def exit_code(self) -> int:
        """What a shell expects."""
        return 128 + signal.Signals[self.name]


def exit_code(reason: str) -> int:
    """The command's exit code after runs that were stopped for that reason."""
    return reason.exit_code if isinstance(reason, StopSignal) else 1


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal raise an exception in the block, as Ctrl-C does, so that it can clean up."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(StopSignal[signal.Signals(number).name].exit_code)

    with _handlers_installed(end, [StopSignal.SIGTERM, StopSignal.SIGHUP]):
        yield


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], StopSignal | None]]:
    """Yield a function that returns the signal that came, or None. Only in the main thread."""
    came: list[StopSignal] = []

    def remember(number: int, frame: FrameType | None) -> None:
        stopped_by = StopSignal[signal.Signals(number).name]
        if came:
            raise KeyboardInterrupt if stopped_by is StopSignal.SIGINT else SystemExit(stopped_by.exit_code)
        came.append(stopped_by)

    with _handlers_installed(remember, list(StopSignal)):
        yield lambda: came[0] if came else None


@contextmanager
def _handlers_installed(handler: Callable[[int, FrameType | None], None], which: list[StopSignal]) -> Iterator[None]:
    known = [getattr(signal, each.name) for each in which if hasattr(signal, each.name)]
    # a signal that is ignored (by nohup), or whose handler was not set from Python, is left alone
    before = {
        number: signal.getsignal(number) for number in known if signal.getsignal(number) not in (signal.SIG_IGN, None)
    }
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
