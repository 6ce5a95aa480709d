"""Ctrl-C, SIGTERM and a closed terminal, turned into a flag that a run checks between two steps.

    with stop_on_signals() as stop:
        for event in train(..., stop=stop): ...

After the first signal the run saves and ends; a second one interrupts it at once.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNAL_NAMES = {"SIGINT": "Ctrl-C", "SIGTERM": "SIGTERM", "SIGHUP": "a closed terminal"}
EXIT_CODES = {
    "Ctrl-C": 130,
    "SIGTERM": 143,
    "a closed terminal": 129,
}  # what a shell expects: 128 + the signal's number


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal raise an exception in the block, as Ctrl-C does, so that it can clean up."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(EXIT_CODES[SIGNAL_NAMES[signal.Signals(number).name]])

    with _handlers_installed(end, [name for name in SIGNAL_NAMES if name != "SIGINT"]):
        yield


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], str | None]]:
    """Yield a function that returns the name of the signal that came, or None. Only in the main thread."""
    came: list[str] = []

    def remember(number: int, frame: FrameType | None) -> None:
        name = SIGNAL_NAMES[signal.Signals(number).name]
        if came:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(EXIT_CODES[name])
        came.append(name)

    with _handlers_installed(remember, list(SIGNAL_NAMES)):
        yield lambda: came[0] if came else None


@contextmanager
def _handlers_installed(handler: Callable[[int, FrameType | None], None], names: list[str]) -> Iterator[None]:
    known = [getattr(signal, name) for name in names if hasattr(signal, name)]
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
