"""Runs (Recipe + seed → one result file) over a cluster: each ends exactly once, whatever dies in between.

    with joined("head:6379") as crew:
        for number, record in spread(runs, how, crew, sets): ...

The folders of the runs are here, and held here; a hand has a copy, and what it changes comes back. Where a hand is
lost, its runs are tried again from their last checkpoints, alone, so that none takes others with it a second time. A
run whose third hand is lost has failed. As with processes of one machine, a run gives the same bits wherever it is
trained.
"""

import math
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import IO, cast

import torch

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.execution.cluster.scheduler import Crew
from flatmin_lab.execution.cluster.task_queue import Ended, Losses, Lost, Said
from flatmin_lab.execution.cluster.worker_pool import NoNodeError
from flatmin_lab.execution.process_pool import Died, Stop
from flatmin_lab.execution.runner import How, Run, Task, on_data
from flatmin_lab.runs.config import OtherRunError
from flatmin_lab.runs.events import Event, Failed, Finished, RunError, Stopped
from flatmin_lab.runs.open_folder import check, lock_folder
from flatmin_lab.system.machine import facts
from flatmin_lab.training.loop import config_of

TOGETHER = 4  # trainings that share a GPU in one process, at most: more gain little


def spread(
    runs: Sequence[Run], how: How, crew: Crew, sets: Mapping[str, Dataset], *, stop: Stop = lambda: None
) -> Iterator[tuple[int, Event]]:
    """The records of all runs as they come, each with its number; what fails is written down."""
    with ExitStack() as held:
        queue = _Runs(runs, how, crew, sets, stop, held)
        try:
            for task, said, node in crew.work(on_data, queue):
                yield from queue.heard(task, said, node)
                yield from queue.told()
        except NoNodeError as error:
            for number in queue.left():
                yield queue.ended(number, Failed(str(error), later=True))
        yield from queue.told()
        for number in queue.left():
            yield number, Stopped(stop() or "asked to stop", 0)


class _Runs:
    """Which runs wait, which have ended, and how many hands each has lost."""

    def __init__(
        self,
        runs: Sequence[Run],
        how: How,
        crew: Crew,
        sets: Mapping[str, Dataset],
        stop: Stop,
        held: ExitStack,
    ) -> None:
        self.runs, self.crew, self.sets, self.stop, self.held = runs, crew, sets, stop, held
        self.how = how if crew.share.gpus else how._replace(at_once=1)  # a core of its own
        self.pending = list(range(len(runs)))  # in their order
        self.done: set[int] = set()
        self.losses = Losses()
        self.holding: dict[int, IO[bytes]] = {}
        self.given: dict[int, Task] = {}  # those that are being trained, by whose errand
        self.to_tell: list[tuple[int, Event]] = []

    def left(self) -> list[int]:
        return [number for number in range(len(self.runs)) if number not in self.done]

    def told(self) -> Iterator[tuple[int, Event]]:
        while self.to_tell:
            yield self.to_tell.pop(0)

    # ---- what is to be done

    def waiting(self) -> int:
        return 0 if self.stop() else len(self.pending)

    def asked(self, errand: Task) -> str | None:
        return self.stop()

    def take(self, hands: int, node: str, *, others: bool) -> tuple[Task, Dataset] | None:
        """On a GPU some that have one data set, no more than leaves work for the other hands.

        What a node has lost goes to another one, if there is one.
        """
        size = min(self.how.at_once or TOGETHER, math.ceil(len(self.pending) / max(hands, 1)))
        taken: list[int] = []
        for number in list(self.pending) if self.waiting() else ():
            if len(taken) == (size if self.crew.share.gpus else 1) or (taken and not self._goes_with(number, taken[0])):
                break
            if self.losses.barred(number, node, others=others):
                continue
            self.pending.remove(number)
            if self._may_begin(number):
                taken.append(number)
        if not taken:
            return None
        task = Task({number: self.runs[number] for number in taken}, self.crew.device, self.how)
        self.given |= dict.fromkeys(taken, task)
        return task, self._data(taken[0])

    def _goes_with(self, number: int, other: int) -> bool:
        return self._data(number) is self._data(other) and not self.losses.any(number) and not self.losses.any(other)

    def _data(self, number: int) -> Dataset:
        return self.sets[self.runs[number].job.recipe.data]

    def _may_begin(self, number: int) -> bool:
        """Is its folder this run's, and nobody else's at the moment? It is held from now on."""
        job, data = self.runs[number].job, self._data(number)
        folder = self.how.store.folder(job)
        try:
            check(folder, config_of(job.recipe, data, job.seed), resume=True)
            if number not in self.holding:
                self.holding[number] = self.held.enter_context(lock_folder(folder))
        except (ValueError, OSError, RunError) as error:
            what = error.what if isinstance(error, OtherRunError) else str(error)
            way_out = "" if isinstance(error, RunError) else f" Move {folder} away, or give other --runs"
            self.to_tell.append(self.ended(number, Failed(f"{what}{way_out}", later=True)))
            return False
        return True

    # ---- what becomes of it

    def heard(self, task: Task, said: Said, node: str) -> Iterator[tuple[int, Event]]:
        if isinstance(said, Ended):
            said = Lost(node[:6], "it ended without a word")
        if isinstance(said, Lost | Died):
            for number in [number for number, own in self.given.items() if own is task]:
                died = isinstance(said, Died)
                yield self.ended(number, Failed(said.why)) if died else self._missed(number, cast(Lost, said), node)
            return
        number, record = said
        if self.given.get(number) is not task:  # another hand has it by now
            return
        if isinstance(record, Failed) and record.later:  # nothing is wrong with it: that machine could not
            yield self._missed(number, Lost(node[:6], record.what), node)
        else:
            yield self.ended(number, record) if isinstance(record, Finished | Failed | Stopped) else (number, record)

    def _missed(self, number: int, lost: Lost, node: str) -> tuple[int, Event]:
        """Its hand has gone: again, from its last checkpoint, with another one."""
        self.given.pop(number)
        if reason := self.stop():
            return self.ended(number, Stopped(reason, 0))
        told = self.losses.add(number, lost, node)
        if isinstance(told, Failed):
            way_out = "its last checkpoint is kept; look at that node's memory and disk, and try again with --retry"
            return self.ended(number, Failed(f"{told.what}; {way_out}"))
        insort(self.pending, number)
        return number, told

    def ended(self, number: int, record: Event) -> tuple[int, Event]:
        store, job = self.how.store, self.runs[number].job
        if isinstance(record, Finished):
            store.write(job, record.result)
        elif isinstance(record, Failed) and not record.later:
            store.write_failure(
                job, record.what, record.step, {**facts(torch.device("cpu")), "hardware": self.crew.hardware}
            )
        self.done.add(number)
        self.given.pop(number, None)
        if number in self.holding:
            self.holding[number].close()
        return number, record
