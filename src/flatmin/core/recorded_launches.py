"""Kernel launches that recur in every step: recorded once, then launched all at once.

Beyond its passes, an eager step of AMP launches some sixty small kernels, and Python takes longer to launch each than a
GPU takes to run it. Nearly every step launches the same kernels as the last, on tensors at the same addresses. So when
a piece of work occurs for the second time with the same tensors, its launches are recorded as a CUDA graph, and
replayed from then on: the same kernels, the same bits, in one launch. Work on tensors that are never twice at the same
addresses, or that cannot be recorded, runs as if this file did not exist. So does everything on other devices, and
inside the user's own capture.
"""

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from flatmin.core.capturable import capturable_generator
from flatmin.core.packed_tensors import PackedTensors

# what a piece of work returns: tensors that outlive the step, and those that only the rest of the step reads
Results = tuple[Sequence[Tensor], Sequence[Tensor]]
Work = Callable[[Sequence[float | Tensor]], Results]
NO_RESULTS: Results = ((), ())

MAX_RECORDINGS = 8  # of one piece of work: where addresses vary more, recording would cost more than it saves
MAX_SEEN = 64
_LOCK = Lock()  # one capture at a time: threads share the stream


class RecordedLaunches:
    """One piece of work on the current GPU, recorded for each set of tensors with which it recurs."""

    def __init__(self) -> None:
        self._recordings: dict[Hashable, _Recording] = {}
        self._seen: set[Hashable] = set()
        self._tried = 0

    def run(self, key: Hashable, work: Work, numbers: Sequence[Any] = ()) -> Results:
        """`work(numbers)`. The key contains all that decides what is launched: addresses, shapes, settings.

        Numbers are not part of it: a recording reads them from the device, where they are written when they change.
        """
        if torch.cuda.is_current_stream_capturing():
            return work(numbers)
        recording = self._recordings.get(key)
        if recording is None and key in self._seen and self._tried < MAX_RECORDINGS:
            recording = self._record(key, work, numbers)
        if recording is None:
            if len(self._seen) < MAX_SEEN:
                self._seen.add(key)
            return work(numbers)
        return recording.replay(numbers)

    def _record(self, key: Hashable, work: Work, numbers: Sequence[Any]) -> "_Recording | None":
        self._tried += 1
        try:
            recording = _Recording(work, numbers)
        except Exception:  # cannot be recorded here, for whatever reason: the work runs launch by launch
            self._tried = MAX_RECORDINGS
            return None
        self._recordings[key] = recording
        return recording


class _Recording:
    """The launches of `work`, as a CUDA graph. It holds none of the caller's tensors: the caller has them."""

    def __init__(self, work: Work, numbers: Sequence[Any]) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.numbers = DeviceNumbers(numbers, torch.float32, device)
        self.graph = torch.cuda.CUDAGraph()
        with _LOCK, _no_garbage_collection(), capturable_generator(torch.cuda.default_generators[device.index], device):
            stream, current = _capture_stream(device), torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                self._capture(work)
            current.wait_stream(stream)

    def _capture(self, work: Work) -> None:
        self.graph.capture_begin(capture_error_mode="thread_local")
        try:
            kept, self.passing = work(self.numbers.on_device.unbind())
            self.packed = PackedTensors(kept) if kept else None
        except BaseException:
            with suppress(RuntimeError):  # the capture may be broken too: the first error is the one to raise
                self.graph.capture_end()
            raise
        self.graph.capture_end()

    def replay(self, numbers: Sequence[Any]) -> Results:
        self.numbers.write(numbers)
        self.graph.replay()
        return [] if self.packed is None else self.packed.unpack(), self.passing


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: torch has only 32 streams, and another thread may be using any of them."""
    return torch.cuda.Stream(device)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Freeing memory on the device would break a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class DeviceNumbers:
    """Numbers from the host in device memory, copied again when they change."""

    def __init__(self, numbers: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._on_host = numbers
        self.on_device = torch.tensor(numbers, dtype=dtype, device="cpu").to(device, non_blocking=True)

    def write(self, numbers: Any) -> None:
        if numbers != self._on_host:
            self.on_device.copy_(torch.tensor(numbers, dtype=self.on_device.dtype, device="cpu"), non_blocking=True)
            self._on_host = numbers
