"""Does the host wait for the device? On a GPU torch can raise where it does; on the CPU its reads are counted."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


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


class HostReads(TorchDispatchMode):
    """Counts the reads of a number from the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
