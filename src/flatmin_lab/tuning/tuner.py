"""Tuning: a method's knobs, such as AMP's ε and ζ, on the tenth of the training set that is held out for it.

    for draw, record in tune(search, data, folder=Path("tuning/digits"), trials=20): ...
    tuning_file.read(Path("tuning/digits/tuning.json")).chosen

A trial is a training with one choice of the knobs, as long as the training that will follow, because the best radius
grows with the length. It has a run folder of its own, so a tuning that was killed goes on where it was: trials that
have ended stay, those that had begun are trained on, and no more are begun than were asked for.

This process alone talks to the study; others, if there are any, only train. One that is to be pruned finds a file in
its folder, and stops. A trial that diverges has failed, and the others go on; any other error ends the tuning.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.execution.cluster.scheduler import Scheduler
from flatmin_lab.execution.process_pool import Stop, TaskFailure, run_in_pool
from flatmin_lab.runs import config as run_config
from flatmin_lab.runs.events import BusyError, Epoch, Failed, Finished, Record, RunError, Stopped
from flatmin_lab.runs.result_store import tidy
from flatmin_lab.system.files import lock, sweep
from flatmin_lab.system.machine import facts
from flatmin_lab.training.loop import train
from flatmin_lab.tuning import result_file
from flatmin_lab.tuning.ray_trials import schedule_trials
from flatmin_lab.tuning.result import Tuning
from flatmin_lab.tuning.result_file import FILE, TRIAL
from flatmin_lab.tuning.search_space import Search
from flatmin_lab.tuning.study import Draw, Study, opened
from flatmin_lab.tuning.trial import PRUNED, TrialTask, is_pruned, run_trial, train_trial


def tune(
    search: Search,
    data: Dataset,
    *,
    folder: Path,
    trials: int,
    storage: str | None = None,
    devices: Sequence[str] = ("cpu",),
    workers: int | None = None,
    root: Path | str = "data",
    checkpoint_epochs: int = 1,
    scheduler: Scheduler | None = None,
    stop: Stop = lambda: None,
) -> Iterator[tuple[Draw, Record]]:
    """The records of all trials as they come; a pruned one ends with Stopped("pruned").

    With one worker, which is the default for one device, the same call gives the same trials. More are processes of
    their own, which read the data from `root`; on a CPU each has one thread. With the `crew` of a cluster they are
    trained there, as many at once as it has room for.
    """
    here = devices[0] if scheduler is None else "cpu"
    if scheduler is None or scheduler.device == here:
        next(iter(train(search.recipe, data, seed=search.seed, device=here)))  # a recipe that cannot begin says so
    workers = workers or len(devices)
    with _held(folder), opened(search, data, folder=folder, storage=storage) as study:
        tuning = _Tuning(
            study=study,
            data=data,
            folder=folder,
            wanted=trials,
            devices=devices if scheduler is None else [scheduler.device],
            root=str(root),
            checkpoint_epochs=checkpoint_epochs,
            facts=facts(torch.device(here))
            | ({"threads": 1} if workers > 1 or scheduler is not None else {})
            | ({} if scheduler is None else {"hardware": scheduler.hardware}),
        )
        tuning.check()
        tasks = tuning.tasks()
        told: Iterator[tuple[TrialTask, tuple[int, Record] | TaskFailure]]
        if scheduler is not None:
            told = schedule_trials(tasks, tuning.left(), data, scheduler, tuning.pruned, stop)
        else:
            told = (
                _here(tasks, data, stop) if workers == 1 else run_in_pool(run_trial, tasks, workers=workers, stop=stop)
            )
        for task, said in told:
            if isinstance(said, TaskFailure):
                raise RunError(f"trial {task.draw.number} cannot be trained: {said.why}")
            if (record := tuning.heard(task, said[1])) is not None:
                yield task.draw, record
        tuning.write()


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The folder, for this process alone."""
    if run_config.exists(folder):
        raise FileExistsError(f"a tuning is a folder of runs, and {folder} is a run itself; choose another with --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = (folder / ".lock").open("ab")
    except OSError as error:
        raise RunError(f"{folder} cannot be written to ({error}); choose another folder with --out") from error
    with held:
        try:
            lock(held, f"another process is tuning in {folder}; wait for it to end, or choose another with --out")
        except BlockingIOError as error:
            raise BusyError(str(error)) from error
        sweep(folder)
        yield


@dataclass(eq=False, kw_only=True)
class _Tuning:
    """Which trial is where, and what the study is told of it."""

    study: Study
    data: Dataset
    folder: Path
    wanted: int
    devices: Sequence[str]
    root: str
    checkpoint_epochs: int
    facts: Mapping[str, Any]
    busy: dict[int, str] = field(default_factory=dict)  # the devices of those that run
    last: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # their last epochs
    pruned: set[int] = field(default_factory=set)

    @property
    def measure(self) -> str:
        return f"validation_{self.study.search.measure}"

    def check(self) -> None:
        """A file that tells of trials which the study does not know would be lost."""
        path = self.folder / FILE
        there = {trial.number for trial in result_file.read(path).trials} if path.exists() else set()
        if missing := there - {trial.number for trial in self.study.all()}:
            raise FileExistsError(
                f"{path} tells of {len(missing)} trials that its study does not know; "
                "give the --storage that it was made with, or choose another folder with --out"
            )

    # ---- what is to be trained

    def left(self) -> int:
        """How many trials are to be trained, begun ones included."""
        return max(self.wanted - sum(trial.state != "running" for trial in self.study.all()), 0)

    def tasks(self) -> Iterator[TrialTask]:
        """One after the other, when someone is free to train it."""
        begun = self.study.begun()
        self.write()
        for draw in begun:
            yield self._task(draw)
        while (new := self.study.draw(self.wanted)) is not None:
            yield self._task(new)

    def _task(self, draw: Draw) -> TrialTask:
        device = min(self.devices, key=list(self.busy.values()).count)
        self.busy[draw.number] = device
        folder = self.folder / f"{TRIAL}{draw.number}"
        search = self.study.search
        return TrialTask(
            draw, search.trial(draw.settings), search.seed, folder, device, self.root, self.checkpoint_epochs
        )

    # ---- what is heard of it

    def heard(self, task: TrialTask, record: Record) -> Record | None:
        """The record; a trial may have ended otherwise than its training thinks, and what came after does not count."""
        number = task.draw.number
        if isinstance(record, Epoch):
            if number in self.pruned:
                return None
            self.last[number] = record.numbers
            if self.study.is_bad(number, record.epoch, record.numbers[self.measure]):
                self._prune(task, record.epoch)
        if isinstance(record, Finished | Failed | Stopped):
            record = self._ended(task, record)
            self.busy.pop(number)
            if not isinstance(record, Stopped) or is_pruned(record):
                tidy(task.folder)
            self.write()
        return record

    def _ended(self, task: TrialTask, record: Finished | Failed | Stopped) -> Record:
        number = task.draw.number
        if number in self.pruned:
            return Stopped(PRUNED, 0)  # whatever its training did until it saw the file
        match record:
            case Finished(result) if result[self.measure] is not None:
                self.study.end(number, "finished", {**result, "epoch": result["epochs"]})
            case Finished():
                record = Failed(f"its {self.measure.replace('_', ' ')} is not finite")
                self.study.end(number, "failed", self.last.get(number), record.what)
            case Failed():
                self.study.end(number, "failed", self.last.get(number), record.what)
        return record

    def _prune(self, task: TrialTask, epoch: int) -> None:
        """The study is told first: what is pruned there is never trained on, whatever happens next."""
        number = task.draw.number
        self.pruned.add(number)
        self.study.end(number, "pruned", self.last[number])
        if task.folder.exists():  # or it is on another machine still, which is told otherwise
            (task.folder / PRUNED).write_text(f"after epoch {epoch}: worse than the median of the finished trials\n")

    def write(self) -> None:
        search = self.study.search
        recipe = search.recipe
        tuning = Tuning(
            method=recipe.method,
            data=recipe.data,
            model=recipe.model,
            epochs=recipe.epochs,
            measure=search.measure,
            seed=search.seed,
            pruning=search.pruning,
            wanted=self.wanted,
            space=search.space(),
            asked=search.asked,
            recipe=recipe,
            data_sha256=self.data.checksum,
            study=self.study.study.study_name,
            trials=self.study.all(),
            facts=self.facts,
        )
        result_file.write(self.folder, tuning)


def _here(tasks: Iterator[TrialTask], data: Dataset, stop: Stop) -> Iterator[tuple[TrialTask, tuple[int, Record]]]:
    """In this process, one after the other."""
    while not stop() and (task := next(tasks, None)) is not None:
        for record in train_trial(task, data, stop):
            yield task, (task.draw.number, record)
