"""Does the host wait for the device? Found out by torch, which raises where it does."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def never_waiting() -> Iterator[None]:
    """Raises where what is inside makes the host wait for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "synchronization debug mode is a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def without_sync(work: Callable[[], Any]) -> Any:
    """Raises where the work makes the host wait for the device."""
    work()  # tables are made and copied once
    torch.cuda.synchronize()
    with never_waiting():
        return work()
