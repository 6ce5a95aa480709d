"""A time by which runs must have ended: which of them are started, and which are given up.

A run is started only if it will end in time, and those that it trains beside as well. Before a pass of its kind has
been measured, nobody knows: then it is started on trial, and given up as soon as its own steps show that it would end
too late. A run that was started with a known pace is never given up: at worst it ends a little late.

What result files say would not do: their seconds depend on what trained beside a run, which they do not name.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import NamedTuple, Protocol

from flatmin.comparison.verdict import duration
from flatmin_lab.execution.pace import (
    Costs,
    Pace,
    Work,
    ends_in_time,
    kind_of,
    passes_of,
    seconds_to_end,
    work_of,
)
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.runs.events import Epoch, Event, Finished, Postponed, Progress, Stopped, Timed

MEASURED_SECONDS = 5.0  # of steps, before they say how fast a run is


@dataclass
class Deadline:
    """So many minutes after the start of a command, which ends at `ends_at` by the clock that machines share."""

    minutes: float
    ends_at: float
    pace: Pace = field(default_factory=Pace)

    def seconds_left(self) -> float:
        return self.ends_at - time()


class ActiveRun(Protocol):
    """A run that trains: its number, how many steps it has done, and how many of them in this process."""

    number: int
    step: int | None
    steps_taken: int


class Late(NamedTuple):
    """How many passes a run has left, and by how many seconds it would end too late."""

    passes: float
    seconds: float


class AnyTime:
    """Runs of one device without a deadline: they start in their order, and none is given up."""

    def __init__(self) -> None:
        self.given_up: dict[int, str] = {}  # why, by number

    def has_refused(self, active: Sequence[ActiveRun]) -> bool:
        """Could no run be started beside these? It stays so until one of them ends, or the step after an epoch."""
        return False

    def first_in_time(self, ready: Sequence[int], active: Sequence[ActiveRun]) -> int | None:
        """The first of the runs that are ready which would end in time beside those that train."""
        return next(iter(ready), None)

    def after_turn(
        self, run: ActiveRun, event: Event | None, seconds: float, active: Sequence[ActiveRun]
    ) -> Sequence[Timed]:
        """What a turn of so many seconds has shown; it may also have shown that runs are too late (`given_up`)."""
        return ()

    def as_end(self, number: int, event: Event) -> Event:
        """The event; a run that stopped because it was given up is postponed."""
        return event

    def not_started(self, number: int) -> Stopped:
        """How a run ends that was not started."""
        return Stopped("asked to stop", 0)


class TimedRuns(AnyTime):
    """The runs of one device, all of one kind, that must end before the deadline.

    `starts_at` says after which step a run would start now, and `warmup` how many of its steps belong to its start.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        images: int,
        deadline: Deadline,
        *,
        starts_at: Callable[[int], int],
        warmup: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        super().__init__()
        self.jobs, self.deadline, self.starts_at, self.warmup, self.clock = jobs, deadline, starts_at, warmup, clock
        self.kind = kind_of(jobs[0].recipe)
        share = 0.9 if jobs[0].recipe.validation else 1.0
        self.batches = math.ceil(share * images / jobs[0].recipe.batch_size)
        self.steps = [job.recipe.epochs * self.batches for job in jobs]
        self.on_trial: set[int] = set()
        self.starting: dict[int, float] = {}  # the seconds of a start so far
        self.refused_beside: list[int] | None = None  # the runs beside which none could be started
        self.at_epoch: set[int] = set()
        self._measure_anew(())

    def has_refused(self, active: Sequence[ActiveRun]) -> bool:
        return self.refused_beside == [run.number for run in active]

    def first_in_time(self, ready: Sequence[int], active: Sequence[ActiveRun]) -> int | None:
        costs, left = self.deadline.pace.costs(self.kind), self.deadline.seconds_left()
        beside = [self._work_left(run) for run in active]
        for number in ready if left > 0 else ():
            work = work_of(self.jobs[number].recipe, self.starts_at(number), self.steps[number])
            if costs is None or ends_in_time(work, beside, costs.most, left):
                self.starting[number] = 0.0
                if not self.deadline.pace.knows(self.kind):
                    self.on_trial.add(number)
                return number
        self.refused_beside = [run.number for run in active]
        return None

    def after_turn(
        self, run: ActiveRun, event: Event | None, seconds: float, active: Sequence[ActiveRun]
    ) -> Sequence[Timed]:
        if {other.number for other in active} != self.begun_with.keys():
            self._measure_anew(active, ago=seconds)
        if run.number not in self.starting:
            self.longest_turn[run.number] = max(self.longest_turn.get(run.number, 0.0), seconds)
        found: list[Timed] = []
        if isinstance(event, Epoch | Progress) and self.on_trial and not self.starting:
            found += self._give_up(active)
        if isinstance(event, Finished):
            self.waited += seconds
            found += [*self._measured(active), Timed(self.kind, "end", 1, seconds)]
            self._measure_anew(active)
        elif run.number in self.starting:
            self.starting[run.number] += seconds
            self.waited += seconds
            self.begun_with[run.number] = run.step or 0
            if run.steps_taken >= self.warmup:
                found.append(Timed(self.kind, "start", 1, self.starting.pop(run.number)))
        elif isinstance(event, Epoch):
            found += self._after_epoch(active)
        if isinstance(event, Epoch):
            self.at_epoch.add(run.number)
        elif event is None and run.number in self.at_epoch:  # now others can begin with its checkpoint
            self.at_epoch.discard(run.number)
            self.refused_beside = None
        for timed in found:
            self.deadline.pace.add(timed)
        return found

    def as_end(self, number: int, event: Event) -> Event:
        if isinstance(event, Stopped) and event.reason == self.given_up.get(number):
            return Postponed(event.reason, event.step, given_up=True)
        return event

    def not_started(self, number: int) -> Stopped:
        return Postponed("it would not end in time", self.starts_at(number))

    # ---- measuring

    def _measure_anew(self, active: Sequence[ActiveRun], *, ago: float = 0.0, synced: bool = False) -> None:
        """From now on. Within an epoch a GPU has not done all the steps that it was given: it is not `synced`."""
        self.begun_with = {run.number: run.step or 0 for run in active}
        self.starting = {number: self.starting[number] for number in self.begun_with if number in self.starting}
        self.began, self.waited, self.epochs, self.synced = self.clock() - ago, 0.0, 0, synced
        self.longest_turn: dict[int, float] = {}  # of each run

    def _after_epoch(self, active: Sequence[ActiveRun]) -> list[Timed]:
        self.epochs += 1
        found = self._measured(active) if self._seconds() >= MEASURED_SECONDS else []
        if found or not (self.synced or self.starting):
            self._measure_anew(active, synced=True)
        return found

    def _measured(self, active: Sequence[ActiveRun]) -> list[Timed]:
        """The passes from one end of an epoch to another, with an evaluation of each run."""
        passes = self._passes(active)
        is_whole = self.synced and self.epochs >= len(active) and passes
        return [Timed(self.kind, len(active), passes, self._seconds())] if is_whole else []

    def _seconds(self) -> float:
        """Without starts and ends of runs."""
        return self.clock() - self.began - self.waited

    def _passes(self, active: Sequence[ActiveRun]) -> float:
        return sum(passes_of(self._work_since(run)) - passes_of(self._work_left(run)) for run in active)

    def _work_since(self, run: ActiveRun) -> Work:
        number = run.number
        return work_of(self.jobs[number].recipe, self.begun_with[number], self.steps[number])

    def _work_left(self, run: ActiveRun) -> Work:
        step = self.starts_at(run.number) if run.step is None else run.step
        return work_of(self.jobs[run.number].recipe, step, self.steps[run.number])

    # ---- giving up

    def _give_up(self, active: Sequence[ActiveRun]) -> list[Timed]:
        """Of the runs on trial that are too late, the one with the most passes left, until all can end in time.

        If that is not known from whole epochs, what the steps so far have taken is the least, without the longest one
        of each run, in which its smaller last batch may have been compiled; others are to know it.
        """
        left, going_on = self.deadline.seconds_left(), [run for run in active if run.number not in self.given_up]
        is_known, found = self.deadline.pace.knows(self.kind), list[Timed]()
        if not is_known:
            seconds, passes = self._seconds() - sum(self.longest_turn.values()), self._passes(active)
            if seconds < MEASURED_SECONDS or not passes:
                return []
            found = [Timed(self.kind, len(active), passes, seconds, whole=False)]
            least = most = Costs(lambda together: seconds / passes)
        elif (costs := self.deadline.pace.costs(self.kind)) is not None:
            least, most = costs
        before = len(self.given_up)
        while late := self._late(going_on, least, left):
            number = max(late, key=lambda number: late[number].passes)
            self.given_up[number] = f"it would end {duration(late[number].seconds)} too late"
            self.on_trial.discard(number)
            going_on = [run for run in going_on if run.number != number]
        if is_known:
            self.on_trial &= self._late(going_on, most, left).keys()
        return found if len(self.given_up) > before else []

    def _late(self, active: Sequence[ActiveRun], costs: Costs, left: float) -> dict[int, Late]:
        """The runs on trial that would end too late."""
        works = [self._work_left(run) for run in active]
        ended = zip(active, works, seconds_to_end(works, costs), strict=True)
        late = {run.number: Late(passes_of(work), end - left) for run, work, end in ended if end > left}
        return {number: how for number, how in late.items() if number in self.on_trial}
