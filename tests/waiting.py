"""Does the host wait for the device? Found out by torch, which raises where it does."""

import warnings
from collections.abc import Callable
from typing import Any

import torch


def without_sync(work: Callable[[], Any]) -> Any:
    """Raises where the work makes the host wait for the device."""
    work()  # tables are made and copied once
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "synchronization debug mode is a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
        try:
            return work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
