"""Many trainings at once in one process, by turns: a step of the first, a step of the second, …

    for number, record in together([Job(recipe, seed) for seed in range(8)], data, device="cuda"): ...

A small network leaves most of a GPU idle. Replicas share the process and one copy of the data, and each has a CUDA
stream, graphs and random generators of its own: the host starts a step on each in turn, and they run side by side. Each
is trained by the code of `train`, so its records, its folder and its bits are those that it has alone.

How many at once? As many as pay: with each new one the steps per second of all together must have grown, and there must
be memory for one more. Both are measured on real steps, which count like all others. On a CPU, one after the other:
there processes share the cores better (runs.py).
"""

import errno
import traceback
from bisect import insort
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.runs.events import BusyError, Event, Failed, Note, Progress, RunError, Started, Stopped
from flatmin_lab.runs.open_folder import check
from flatmin_lab.training.loop import check_arguments, config_of, training_steps

WARM = 5  # rounds of steps before a measurement: the first steps of a replica capture its graph
WINDOW = 50  # rounds that a measurement takes
SPOILT = 8  # how often something else than steps may break a measurement off; the next one takes it in
GAIN = 1.03  # by what a replica must have raised the steps per second for another one to be let in
RESERVE = 0.05  # the share of the GPU's memory that stays free


def together(
    jobs: Sequence[Job],
    data: Dataset,
    *,
    device: torch.device | str = "cpu",
    folders: Sequence[Path | str | None] | None = None,
    count: int | None = None,
    resume: bool = False,
    stop: Callable[[], str | None] = lambda: None,
    capture: bool = True,
    checkpoint_epochs: int = 1,
    checkpoint_minutes: float = 10.0,
) -> Iterator[tuple[int, Event]]:
    """The records of all jobs as they come, each with its job's number; `count` of them at once, or as many as pay.

    A training that fails, however it does, does not end the others: `Failed` tells of it, and when they are done it is
    raised. One that finds no memory beside the others waits until one of them has ended. Where `stop` gives a reason,
    those that were begun save and end; the others are not begun.
    """
    if count is not None and count < 1:
        raise ValueError(f"the number of trainings at once must be at least 1, got {count}")
    where, places = torch.device(device), [None] * len(jobs) if folders is None else list(folders)
    _check_apart(places, len(jobs))
    there = data.to(where)
    for job, place in zip(jobs, places, strict=True):  # now, and not in hours
        check_arguments(
            job.recipe, capture=capture, checkpoint_epochs=checkpoint_epochs, checkpoint_minutes=checkpoint_minutes
        )
        if place is not None:
            check(Path(place), config_of(job.recipe, there, job.seed, where), resume=resume)
    settings: dict[str, Any] = {"device": where, "stop": stop, "capture": capture}
    settings |= {"checkpoint_epochs": checkpoint_epochs, "checkpoint_minutes": checkpoint_minutes}
    begun: set[int] = set()
    idle: list[torch.cuda.Stream] = []

    def begin(number: int) -> Replica:
        job, again = jobs[number], resume or number in begun  # begun, but without memory: the folder is its own
        begun.add(number)
        records = training_steps(job.recipe, there, seed=job.seed, folder=places[number], resume=again, **settings)
        return Replica(number, records, where, idle)

    return _by_turns(deque(range(len(jobs))), begin, Room.on(where, count), stop)


def _check_apart(places: Sequence[Path | str | None], count: int) -> None:
    if len(places) != count:
        raise ValueError(
            f"every training needs a folder of its own, got {len(places)} folders for {count} trainings; name {count}"
        )
    seen: set[Path] = set()
    for place in places:
        if place is not None:
            if (real := Path(place).resolve()) in seen:
                raise ValueError(f"every training needs a folder of its own, got {place} twice; name another one")
            seen.add(real)


class Replica:
    """A training with a CUDA stream of its own: one of the `idle` ones, which it joins again in the end.

    Torch has 32 streams on a device and gives them out in turn, so new ones would soon be those of replicas that run.
    """

    def __init__(
        self,
        number: int,
        records: Generator[Event | None, None, None],
        device: torch.device,
        idle: list[torch.cuda.Stream],
    ) -> None:
        self.number, self.records, self.idle = number, records, idle
        self.step: int | None = None  # how many are done, once it has started
        self.taken = 0  # of these here
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = idle.pop() if idle else torch.cuda.Stream(device)
            self.stream.wait_stream(torch.cuda.current_stream(device))  # the data may still be on its way

    def next(self) -> Event | None:
        """What comes next: a record, or None for a step; StopIteration at the end."""
        with self._on_stream():
            record = next(self.records)
        if isinstance(record, Started):
            self.step = record.step
        elif record is None:
            self.step, self.taken = (self.step or 0) + 1, self.taken + 1
        return record

    def close(self) -> None:
        try:
            if self.stream is not None:
                self.stream.synchronize()  # its memory goes to others, so nothing may be writing to it
                self.idle.append(self.stream)
        finally:
            with self._on_stream():
                self.records.close()

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


class Room:
    """For how many replicas there is room: `count`, which rises while it is not yet `settled`.

    `free` tells how many bytes a new replica may take, `peak` how many the first one took at most (its beginning, with
    an ordinary step, a warm-up and then the graph's own memory, needs more than it keeps), `wait` waits until all steps
    so far are done.
    """

    def __init__(
        self,
        *,
        count: int = 1,
        settled: bool = True,
        free: Callable[[], int] = lambda: 0,
        peak: Callable[[], int] = lambda: 0,
        wait: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.count, self.settled = count, settled
        self.free, self.peak, self.wait, self.clock = free, peak, wait, clock
        self.at_first = 0 if settled else free()
        self.need: int | None = None  # bytes of a replica
        self.best = 0.0  # steps per second before the last one came
        self.spoilt = self.rounds = 0
        self.since = 0.0

    @staticmethod
    def on(device: torch.device, count: int | None) -> "Room":
        if count is not None or device.type != "cuda":
            return Room(count=count or 1)

        def free() -> int:
            torch.cuda.empty_cache()  # what torch keeps in stock is free too
            left, total = torch.cuda.mem_get_info(device)
            return left - int(RESERVE * total)

        def peak() -> int:
            return torch.cuda.max_memory_reserved(device) - before

        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        return Room(settled=False, free=free, peak=peak, wait=lambda: torch.cuda.synchronize(device))

    def round(self, replicas: int, *, only_steps: bool) -> None:
        """All replicas have had a turn, which was a step, or something else for one of them."""
        if self.settled or replicas < self.count:
            return
        if not only_steps and self.spoilt < SPOILT:
            self.spoilt, self.rounds = self.spoilt + 1, 0
            return
        self.rounds += 1
        if self.rounds == WARM:
            self.wait()
            self.since = self.clock()
        elif self.rounds == WARM + WINDOW:
            self.wait()
            self._decide(replicas * WINDOW / (self.clock() - self.since))

    def _decide(self, speed: float) -> None:
        free = self.free()
        if self.need is None:
            self.need = max(self.peak(), self.at_first - free)  # the driver's part is not in torch's peak
        if speed >= GAIN * self.best and 0 < self.need <= free:
            self.best, self.count = speed, self.count + 1
            self.spoilt = self.rounds = 0
        else:
            self.settled = True

    def too_small(self) -> None:
        """The last one that came found no memory."""
        self.count, self.settled = max(1, self.count - 1), True


def _by_turns(
    waiting: deque[int], begin: Callable[[int], Replica], room: Room, stop: Callable[[], str | None]
) -> Iterator[tuple[int, Event]]:
    active: list[Replica] = []
    failed: list[Exception] = []
    total = len(waiting)
    try:
        while active or waiting:
            while waiting and len(active) < room.count and not stop():
                active.append(begin(waiting.popleft()))
            if not active:
                break
            only_steps = True
            for replica in tuple(active):
                record, error = _turn(replica, active)
                if error is not None and active and _finds_no_memory(replica, error):
                    room.too_small()
                    insort(waiting, replica.number)
                    record = Note("there is no memory for it beside the others; it waits until one of them has ended")
                elif error is not None:
                    failed.append(error)
                    record = Failed(_said(error), replica.step, later=_is_passing(error))
                only_steps &= record is None or isinstance(record, Progress)
                if record is not None:
                    yield replica.number, record
            if waiting:
                room.round(len(active), only_steps=only_steps)
        for number in waiting:
            yield number, Stopped(stop() or "asked to stop", 0)
    except BaseException as first:
        errors = [error for replica in active if (error := _closed(replica)) is not None]
        if errors and isinstance(first, GeneratorExit):
            raise errors[0] from None
        raise
    if failed:
        what = _said(failed[0])
        raise RunError(what if total == 1 else f"{len(failed)} of {total} trainings failed: {what}") from failed[0]


def _turn(replica: Replica, active: list[Replica]) -> tuple[Event | None, Exception | None]:
    """What comes next of it, or what it failed with; one that has ended is no longer active."""
    try:
        return replica.next(), None
    except StopIteration:
        active.remove(replica)
        return None, _closed(replica)
    except Exception as error:
        active.remove(replica)
        _closed(replica)
        return None, _without_memory(error)


def _closed(replica: Replica) -> Exception | None:
    """Close it; what that failed with is told, so that the others can be closed too."""
    try:
        replica.close()
    except Exception as error:
        return _without_memory(error)
    return None


def _finds_no_memory(replica: Replica, error: Exception) -> bool:
    """While it begins: later it has steps to lose."""
    return isinstance(error, torch.OutOfMemoryError) and replica.taken < WARM


def _without_memory(error: Exception) -> Exception:
    """Its traceback without what the frames hold: that is a whole training, which others need the memory of."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    return error


def _is_passing(error: Exception) -> bool:
    """Whether it says something about the moment, and nothing about the training."""
    full = isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, BusyError) or full or "CUDA error" in str(error)


def _said(error: Exception) -> str:
    text = str(error) or type(error).__name__
    plain = isinstance(error, RunError | ValueError | OSError | torch.OutOfMemoryError)
    return text if plain else f"{type(error).__name__}: {text}"
