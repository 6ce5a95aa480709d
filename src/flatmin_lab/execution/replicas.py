"""Many training runs at once in one process, taking turns: a step of the first, a step of the second, …

    for number, event in train_together([Job(recipe, seed) for seed in range(8)], data, device="cuda"): ...

A small network leaves most of a GPU idle. Replicas share the process and one copy of the data, and each has its own
CUDA stream, graphs and random generators: the host starts a step on each in turn, and the GPU runs them in
parallel. Each is trained by the code of `train`, so its events, its folder and its bits are those of a run alone.

How many at once? Replicas are added as long as each new one raises the total steps per second and there is memory for
another. Both are measured on real steps of the runs. A run waits while another one trains its beginning
(beginnings.py). On a CPU the runs follow each other: there a pool of processes
uses the cores better (process_pool.py).
"""

import traceback
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.execution.beginnings import Beginnings
from flatmin_lab.execution.deadline import AnyTime, Deadline, TimedRuns
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.runs import checkpoint
from flatmin_lab.runs.events import (
    BusyError,
    DivergedError,
    Event,
    Failed,
    Note,
    Progress,
    RunError,
    Started,
    Stopped,
)
from flatmin_lab.runs.open_folder import check
from flatmin_lab.system.files import is_full_disk
from flatmin_lab.training.loop import check_arguments, config_of, training_steps

WARMUP_ROUNDS = 5  # before a measurement: the first steps of a replica capture its graph
MEASURED_ROUNDS = 50  # that a measurement takes
MAX_DISCARDED = 8  # measurements dropped because an epoch ended or a checkpoint was saved; the next one counts
MIN_SPEEDUP = 1.03  # the factor by which the last replica must have raised the steps per second, to add another
MEMORY_RESERVE = 0.05  # the fraction of the GPU's memory that stays free


def train_together(
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
    threads: int | None = None,
    beginnings: Beginnings | None = None,
    deadline: Deadline | None = None,
) -> Iterator[tuple[int, Event]]:
    """Train `count` jobs at once, or as many as make it faster: their events as they come, each with its job's number.

    A run that fails does not end the others: it yields `Failed`, and its error is raised when all others have ended. A
    run without enough memory beside the others waits until one of them has ended. When `stop` returns a reason, running
    runs save a checkpoint and end, and no others are started. With `beginnings`, new runs begin where others have the
    same training behind them. With a `deadline`, runs of one kind are started only if they will end in time.
    """
    if count is not None and count < 1:
        raise ValueError(f"the number of runs at once must be at least 1, got {count}")
    where, paths = torch.device(device), [None] * len(jobs) if folders is None else list(folders)
    _check_folders(paths, len(jobs))
    on_device = data.to(where)
    for job, path in zip(jobs, paths, strict=True):  # now, and not in hours
        check_arguments(
            job.recipe,
            capture=capture,
            checkpoint_epochs=checkpoint_epochs,
            checkpoint_minutes=checkpoint_minutes,
            threads=threads,
        )
        if path is not None:
            check(Path(path), config_of(job.recipe, on_device, job.seed, where), resume=resume)
    settings: dict[str, Any] = {"device": where, "capture": capture, "threads": threads}
    settings |= {"checkpoint_epochs": checkpoint_epochs, "checkpoint_minutes": checkpoint_minutes}
    started: set[int] = set()
    idle: list[torch.cuda.Stream] = []

    def start(number: int) -> Replica:
        job, again = jobs[number], resume or number in started  # started, but out of memory: the folder is its own
        started.add(number)
        more: dict[str, Any] = {**settings, "stop": lambda: stop() or timed.given_up.get(number)}
        if beginnings is not None:  # as they are now
            more |= {"beginnings": beginnings.places(job), "kept_epochs": beginnings.kept_epochs(job)}
        events = training_steps(job.recipe, on_device, seed=job.seed, folder=paths[number], resume=again, **more)
        return Replica(number, events, where, idle)

    def choose(waiting: Collection[int], active: Sequence[Replica]) -> int | None:
        if timed.has_refused(active):
            return None
        others = [(jobs[replica.number], replica.step or 0) for replica in active]
        return timed.first_in_time([number for number in waiting if not waits(jobs[number], others)], active)

    def waits(job: Job, others: Sequence[tuple[Job, int]]) -> bool:
        return beginnings is not None and any(beginnings.waits_for(job, other, step) for other, step in others)

    def starts_at(number: int) -> int:
        folder = paths[number]
        own = [] if folder is None else checkpoint.listed(Path(folder))
        if own:
            return checkpoint.step_of(own[0])
        return 0 if beginnings is None else beginnings.start_step(jobs[number])

    timed: AnyTime = AnyTime()
    if deadline is not None and jobs:
        timed = TimedRuns(jobs, len(data.train), deadline, starts_at=starts_at, warmup=WARMUP_ROUNDS)
    return _take_turns(deque(range(len(jobs))), start, ReplicaLimit.for_device(where, count), stop, choose, timed)


def _check_folders(paths: Sequence[Path | str | None], count: int) -> None:
    if len(paths) != count:
        raise ValueError(
            f"every run needs a folder of its own, got {len(paths)} folders for {count} runs; name {count}"
        )
    seen: set[Path] = set()
    for path in paths:
        if path is not None:
            if (real := Path(path).resolve()) in seen:
                raise ValueError(f"every run needs a folder of its own, got {path} twice; name another one")
            seen.add(real)


class Replica:
    """A run with a CUDA stream of its own: taken from the `idle` ones, and returned to them at the end.

    Torch has 32 streams per device and hands them out in turn, so new ones would soon be those of running replicas.
    """

    def __init__(
        self,
        number: int,
        events: Generator[Event | None, None, None],
        device: torch.device,
        idle: list[torch.cuda.Stream],
    ) -> None:
        self.number, self.events, self.idle = number, events, idle
        self.step: int | None = None  # how many the run has done, once it has started
        self.steps_taken = 0  # of these, in this process
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = idle.pop() if idle else torch.cuda.Stream(device)
            self.stream.wait_stream(torch.cuda.current_stream(device))  # the copy of the data may not be done yet

    def next(self) -> Event | None:
        """The next event, or None for a step; StopIteration at the end."""
        with self._on_stream():
            event = next(self.events)
        if isinstance(event, Started):
            self.step = event.step
        elif event is None:
            self.step, self.steps_taken = (self.step or 0) + 1, self.steps_taken + 1
        return event

    def close(self) -> None:
        try:
            if self.stream is not None:
                self.stream.synchronize()  # its memory is reused, so nothing may still write to it
                self.idle.append(self.stream)
        finally:
            with self._on_stream():
                self.events.close()

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


class ReplicaLimit:
    """How many replicas may run at once: `count`, which rises until it is `settled`.

    `free` returns how many bytes a new replica may take, `peak` how many the first one took at most (its start, with an
    ordinary step, a warm-up and then the graph's own memory, needs more than it keeps); `wait` waits for all steps so
    far.
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
        self.initial_free = 0 if settled else free()
        self.bytes_per_replica: int | None = None  # unknown until the first measurement
        self.best_speed = 0.0  # steps per second before the last replica was added
        self.discarded = self.rounds = 0
        self.measured_since = 0.0

    @staticmethod
    def for_device(device: torch.device, count: int | None) -> "ReplicaLimit":
        if count is not None or device.type != "cuda":
            return ReplicaLimit(count=count or 1)

        def free() -> int:
            torch.cuda.empty_cache()  # what torch caches is free too
            left, total = torch.cuda.mem_get_info(device)
            return left - int(MEMORY_RESERVE * total)

        def peak() -> int:
            return torch.cuda.max_memory_reserved(device) - before

        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        return ReplicaLimit(settled=False, free=free, peak=peak, wait=lambda: torch.cuda.synchronize(device))

    def finish_round(self, replicas: int, *, only_steps: bool) -> None:
        """All replicas have had a turn: a step each, unless `only_steps` is false."""
        if self.settled or replicas < self.count:
            return
        if not only_steps and self.discarded < MAX_DISCARDED:
            self.discarded, self.rounds = self.discarded + 1, 0
            return
        self.rounds += 1
        if self.rounds == WARMUP_ROUNDS:
            self.wait()
            self.measured_since = self.clock()
        elif self.rounds == WARMUP_ROUNDS + MEASURED_ROUNDS:
            self.wait()
            self._decide(replicas * MEASURED_ROUNDS / (self.clock() - self.measured_since))

    def _decide(self, speed: float) -> None:
        free = self.free()
        if self.bytes_per_replica is None:
            # torch's peak leaves out what the driver takes
            self.bytes_per_replica = max(self.peak(), self.initial_free - free)
        if speed >= MIN_SPEEDUP * self.best_speed and 0 < self.bytes_per_replica <= free:
            self.best_speed, self.count = speed, self.count + 1
            self.discarded = self.rounds = 0
        else:
            self.settled = True

    def lower(self) -> None:
        """One fewer, for good: there was no memory for the last one."""
        self.count, self.settled = max(1, self.count - 1), True


def _take_turns(
    waiting: deque[int],
    start: Callable[[int], Replica],
    limit: ReplicaLimit,
    stop: Callable[[], str | None],
    choose: Callable[[Collection[int], Sequence[Replica]], int | None] = lambda waiting, _: next(iter(waiting), None),
    timed: AnyTime = AnyTime(),  # noqa: B008  it never changes
) -> Iterator[tuple[int, Event]]:
    active: list[Replica] = []
    failed: list[Exception] = []
    total = len(waiting)
    try:
        while active or waiting:
            while len(active) < limit.count and (number := choose(waiting, active)) is not None and not stop():
                waiting.remove(number)
                active.append(start(number))
            if not active:  # asked to stop, or no time is left: a run waits for another one only while that is active
                break
            only_steps = True
            for replica in tuple(active):
                since = perf_counter()
                event, error = _turn(replica, active)
                if error is not None and active and _is_out_of_memory(replica, error):
                    limit.lower()
                    insort(waiting, replica.number)
                    event = Note("not enough memory beside the other runs; it waits until one of them has ended")
                elif error is not None:
                    failed.append(error)
                    event = _failed(error, replica.step)
                only_steps &= event is None or isinstance(event, Progress)
                if event is not None:
                    yield replica.number, timed.as_end(replica.number, event)
                for measured in timed.after_turn(replica, event, perf_counter() - since, active):
                    yield replica.number, measured
            if waiting:
                limit.finish_round(len(active), only_steps=only_steps)
        reason = stop() if waiting else None
        yield from ((number, Stopped(reason, 0) if reason else timed.not_started(number)) for number in waiting)
    except BaseException as first:
        errors = [error for replica in active if (error := _close(replica)) is not None]
        if errors and isinstance(first, GeneratorExit):
            raise errors[0] from None
        raise
    if failed:
        what = _describe_error(failed[0])
        raise RunError(what if total == 1 else f"{len(failed)} of {total} runs failed: {what}") from failed[0]


def _turn(replica: Replica, active: list[Replica]) -> tuple[Event | None, Exception | None]:
    """Its next event, or the error it failed with; one that has ended is removed from `active`."""
    try:
        return replica.next(), None
    except StopIteration:
        active.remove(replica)
        return None, _close(replica)
    except Exception as error:
        active.remove(replica)
        _close(replica)
        return None, _without_frames(error)


def _close(replica: Replica) -> Exception | None:
    """Close it, and return an error rather than raise it, so that the others are closed too."""
    try:
        replica.close()
    except Exception as error:
        return _without_frames(error)
    return None


def _is_out_of_memory(replica: Replica, error: Exception) -> bool:
    """Did it run out of memory while it started? Later it would have steps to lose."""
    return isinstance(error, torch.OutOfMemoryError) and replica.steps_taken < WARMUP_ROUNDS


def _without_frames(error: Exception) -> Exception:
    """Clear what its traceback's frames hold: a whole run, whose memory others need."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    return error


def _failed(error: Exception, step: int | None) -> Failed:
    """The event of a run that failed. `later` where the machine is at fault: folder in use, disk full, GPU broken."""
    busy = isinstance(error, BusyError)
    cause = error if isinstance(error, OSError) else error.__cause__
    of_disk = is_full_disk(cause) or (isinstance(error, RunError) and isinstance(cause, OSError))
    later, diverged = busy or of_disk or _is_of_gpu(error), isinstance(error, DivergedError)
    return Failed(_describe_error(error), step, later=later, busy=busy, diverged=diverged)


def _is_of_gpu(error: Exception) -> bool:
    """Torch has a type for the errors of the CUDA runtime; those of cuBLAS and cuDNN are known only by their words."""
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def _describe_error(error: Exception) -> str:
    text = str(error) or type(error).__name__
    plain = isinstance(error, RunError | ValueError | OSError | torch.OutOfMemoryError)
    return text if plain else f"{type(error).__name__}: {text}"
