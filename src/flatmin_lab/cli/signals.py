"""Ctrl-C, SIGTERM and a closed terminal, turned into a question that a training asks between two steps.

    with asked_to_stop() as stop:
        for record in train(..., stop=stop): ...

The first signal is remembered, and the training saves and ends; a second one breaks in at once.
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
}  # what a shell expects: 128 and the signal's number


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal end the block as an exception, as Ctrl-C does, so that it can tidy up."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(EXIT_CODES[SIGNAL_NAMES[signal.Signals(number).name]])

    with _handlers_installed(end, [name for name in SIGNAL_NAMES if name != "SIGINT"]):
        yield


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], str | None]]:
    """In the main thread: the signals are ours inside the block, and what they were before after it."""
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
    # one that is ignored (nohup does that), or was not set from Python, stays so
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
