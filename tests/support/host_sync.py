"""Does the host wait for the device? torch can raise where it does."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def fail_on_host_sync() -> Iterator[None]:
    """Raises if anything inside makes the host wait for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "synchronization debug mode is a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def run_without_host_sync(work: Callable[[], Any]) -> Any:
    """Runs `work` twice; raises if the second run makes the host wait for the device."""
    work()  # tables are built and copied once
    torch.cuda.synchronize()
    with fail_on_host_sync():
        return work()
