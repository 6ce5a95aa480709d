"""Many trainings at once in one process, by turns: a step of the first, a step of the second, …

    for number, record in together([Job(recipe, seed) for seed in range(8)], data, device="cuda"): ...

A small network leaves most of a GPU idle. Replicas share the process and one copy of the data, and each has a CUDA
stream, graphs and random generators of its own: the host starts a step on each in turn, and they run side by side. Each
is trained by the code of `train`, so its records, its folder and its bits are those that it has alone.

How many at once? As many as pay: with each new one the steps per second of all together must have grown, and there must
be memory for one more. Both are measured on real steps, which count like all others. On a CPU, one after the other:
there processes share the cores better (runs.py).
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.records import Note, Progress, Record, RunError, Stopped
from flatmin_lab.run_opening import check
from flatmin_lab.runs import Job
from flatmin_lab.train import config_of, moments

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
) -> Iterator[tuple[int, Record]]:
    """The records of all jobs as they come, each with its job's number; `count` of them at once, or as many as pay.

    A training that fails does not end the others: a note tells of it, and when they are done it is raised. Where `stop`
    gives a reason, those that were begun save and end; the others are not begun.
    """
    if count is not None and count < 1:
        raise ValueError(f"the number of trainings at once must be at least 1, got {count}")
    where, places = torch.device(device), list(folders or [None] * len(jobs))
    if len(places) != len(jobs) or len({place for place in places if place}) < sum(map(bool, places)):
        raise ValueError(f"every training needs a folder of its own, got {len(places)} for {len(jobs)}")
    there = data.to(where)
    for job, place in zip(jobs, places, strict=True):  # now, and not in hours
        if place is not None:
            check(Path(place), config_of(job.recipe, there, job.seed, where), resume=resume)
    settings: dict[str, Any] = {"device": where, "resume": resume, "stop": stop, "capture": capture}
    settings |= {"checkpoint_epochs": checkpoint_epochs, "checkpoint_minutes": checkpoint_minutes}

    def begin(number: int) -> Replica:
        job = jobs[number]
        return Replica(number, moments(job.recipe, there, seed=job.seed, folder=places[number], **settings), where)

    return _by_turns(deque(range(len(jobs))), begin, Room.on(where, count), stop)


class Replica:
    """A training with a CUDA stream of its own."""

    def __init__(self, number: int, records: Generator[Record | None, None, None], device: torch.device) -> None:
        self.number, self.records = number, records
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))  # the data may still be on its way

    def next(self) -> Record | None:
        """What comes next: a record, or None for a step; StopIteration at the end."""
        with self._on_stream():
            return next(self.records)

    def close(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()  # its memory goes to others, so nothing may be writing to it
        with self._on_stream():
            self.records.close()

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


class Room:
    """For how many replicas there is room: `count`, which rises while it is not yet `settled`.

    `free` tells how many bytes a new replica may take, `wait` waits until all steps so far are done.
    """

    def __init__(
        self,
        *,
        count: int = 1,
        settled: bool = True,
        free: Callable[[], int] = lambda: 0,
        wait: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.count, self.settled = count, settled
        self.free, self.wait, self.clock = free, wait, clock
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

        return Room(settled=False, free=free, wait=lambda: torch.cuda.synchronize(device))

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
            self.need = self.at_first - free
        if speed >= GAIN * self.best and free >= self.need:
            self.best, self.count = speed, self.count + 1
            self.spoilt = self.rounds = 0
        else:
            self.settled = True


def _by_turns(
    waiting: deque[int], begin: Callable[[int], Replica], room: Room, stop: Callable[[], str | None]
) -> Iterator[tuple[int, Record]]:
    active: list[Replica] = []
    failed: list[str] = []
    total = len(waiting)
    try:
        while active or waiting:
            while waiting and len(active) < room.count and not stop():
                active.append(begin(waiting.popleft()))
            if not active:
                break
            only_steps = True
            for replica in tuple(active):
                try:
                    record = replica.next()
                except (StopIteration, RunError) as end:
                    active.remove(replica)
                    replica.close()
                    record = None
                    if isinstance(end, RunError):
                        failed.append(str(end))
                        record = Note(f"this training failed: {end}")
                only_steps &= record is None or isinstance(record, Progress)
                if record is not None:
                    yield replica.number, record
            if waiting:
                room.round(len(active), only_steps=only_steps)
        for number in waiting:
            yield number, Stopped(stop() or "asked to stop", 0)
    finally:
        for replica in active:
            replica.close()
    if failed:
        raise RunError(failed[0] if total == 1 else f"{len(failed)} of {total} trainings failed: {failed[0]}")
