"""What any CUDA graph capture needs: a check that the host never waits, and a generator that survives a failure.

A capture fails where the host reads a number back from the device, and a failed capture leaves torch's random
generator unusable. `no_host_sync` finds such a read in a warm-up run, before the capture; `capturable_generator` gives
the generator a fresh state if the capture fails anyway.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch

from flatmin.core.messages import one_line

GENERATOR_REPLACEMENTS = [0]  # failed captures that cost a generator its state: graphs that draw from it are stale
SYNC_WARNING = "called a synchronizing"  # how torch's warning begins


class CannotCaptureError(RuntimeError):
    """A step does something that a CUDA graph cannot contain."""


@contextmanager
def capturable_generator(default: torch.Generator, device: torch.device) -> Iterator[None]:
    """Around a capture: if it fails, torch's generator works again afterwards, and the current stream is as before."""
    before, stream = default.get_state(), torch.cuda.current_stream(device)
    try:
        yield
    except BaseException as error:
        torch.cuda.set_stream(stream)
        fresh = torch.Generator(device)
        fresh.set_state(before)
        default.graphsafe_set_state(fresh)
        GENERATOR_REPLACEMENTS[0] += 1
        if not isinstance(error, Exception) or isinstance(error, torch.OutOfMemoryError | CannotCaptureError):
            raise
        raise CannotCaptureError(f"a graph cannot contain what it does ({one_line(error)})") from error


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Raises at the end if the host waited for the device: a capture would fail there, and leave its state behind.

    It listens for warnings rather than errors, because the mode is global: another thread, loading data, may wait.
    """
    before, this_thread, waits = torch.cuda.get_sync_debug_mode(), get_ident(), list[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("warn")  # which warns that it is a prototype
        warnings.filterwarnings("always", message=SYNC_WARNING)
        show = warnings.showwarning

        def record(message: Warning | str, *rest: Any, **more: Any) -> None:
            if get_ident() != this_thread:
                show(message, *rest, **more)
            elif SYNC_WARNING in str(message):
                waits.append(str(message))

        warnings.showwarning = record
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    if waits:
        raise CannotCaptureError("it reads a number back from the device, to decide or to print")
