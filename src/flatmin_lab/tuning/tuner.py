"""Tuning: chooses a method's hyper-parameters, such as AMP's ε and ζ, on a tenth of the training set that is held out.

    for draw, event in tune(search, data, folder=Path("tuning/digits"), trials=20): ...
    result_file.read(Path("tuning/digits/tuning.json")).chosen

A trial is a training run with one choice of the hyper-parameters, as long as the final run, because the best
radius grows with the length. It has a run folder of its own, so a killed tuning can be resumed: trials that have ended
stay, unfinished ones are resumed, and no more are started than were asked for.

One of them is ERM's, so that the result says what the chosen values gain over it, or that they gain nothing.

Only this process talks to the study; workers, if there are any, only train. A trial that is to be pruned is asked to
stop. A trial that diverges has failed, and the others continue; any other error ends the tuning.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.execution.executor import Executor, run_tasks
from flatmin_lab.execution.local import ThisProcess
from flatmin_lab.execution.task_queue import Stop
from flatmin_lab.runs.events import Epoch, Event, Failed, Finished, Started, Stopped
from flatmin_lab.runs.folder import read_image_scores
from flatmin_lab.runs.open_folder import folder_of_runs
from flatmin_lab.runs.result_store import remove_old_checkpoints
from flatmin_lab.training.loop import train
from flatmin_lab.tuning import result_file
from flatmin_lab.tuning.erm_comparison import Comparison, compare
from flatmin_lab.tuning.result import Tuning
from flatmin_lab.tuning.result_file import FILE, TRIAL_PREFIX
from flatmin_lab.tuning.search_space import SearchSpace
from flatmin_lab.tuning.study import Draw, Study, open_study
from flatmin_lab.tuning.trial import PRUNED, Pruned, TrialTask, train_trial
from flatmin_lab.tuning.trial_queue import TrialQueue

THIS_PROCESS = ThisProcess()


def tune(
    search: SearchSpace,
    data: Dataset,
    *,
    folder: Path,
    trials: int,
    storage: str | None = None,
    executor: Executor = THIS_PROCESS,
    root: Path | str = "data",
    checkpoint_epochs: int = 1,
    stop: Stop = lambda: None,
) -> Iterator[tuple[Draw, Event]]:
    """The events of all trials as they come; a pruned one ends with `Pruned`.

    With one worker, the default, the same call gives the same trials. Workers that are processes of their own read the
    data from `root`; on a CPU each has one thread.
    """
    if search.has_erm_trial and trials < 2:
        raise ValueError(
            f"a tuning of {search.recipe.method} needs 2 or more trials, since one of them is ERM's, got {trials}"
        )
    facts = dict(executor.facts())
    if executor.device in ("cpu", executor.device_here):
        # raises if it cannot be trained
        first = next(iter(train(search.recipe, data, seed=search.seed, device=executor.device)))
        if isinstance(first, Started) and first.threads is not None:
            facts["threads"] = min(facts["threads"], first.threads)  # workers have one, whatever this process has
    with (
        folder_of_runs(folder, "tuning", doing="tuning"),
        open_study(search, data, folder=folder, storage=storage) as study,
    ):
        tracker = _TrialTracker(
            study=study,
            data=data,
            folder=folder,
            wanted=trials,
            root=str(root),
            checkpoint_epochs=checkpoint_epochs,
            facts=facts,
        )
        tracker.check()
        queue = TrialQueue(tracker.draws(), tracker.remaining(), tracker.task, data, tracker.pruned, stop)
        for number, event in run_tasks(executor, train_trial, queue):
            task = queue.tasks[number]
            if (counted := tracker.receive(task, event)) is not None:
                yield task.draw, counted
        tracker.write()


@dataclass(eq=False, kw_only=True)
class _TrialTracker:
    """Hands out the trials, keeps track of those that run, and reports their events to the study."""

    study: Study
    data: Dataset
    folder: Path
    wanted: int
    root: str
    checkpoint_epochs: int
    facts: Mapping[str, Any]
    last_epochs: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # their metrics
    pruned: set[int] = field(default_factory=set)
    scores: dict[int, Tensor] = field(default_factory=dict)  # of each image, by the trial's number
    against_erm: Comparison | None = None

    @property
    def measure(self) -> str:
        return f"validation_{self.study.search.measure}"

    def check(self) -> None:
        """Read tuning.json; raise if it has trials that the study does not have: they would be overwritten."""
        path = self.folder / FILE
        found = result_file.read(path) if path.exists() else None
        self.against_erm = None if found is None else found.against_erm
        there = set() if found is None else {trial.number for trial in found.trials}
        if missing := there - {trial.number for trial in self.study.all_trials()}:
            here = self.study.study.study_name
            renamed = "" if found is None or found.study == here else f", and its folder the name {found.study}"
            raise FileExistsError(
                f"{path} has {len(missing)} trials that its study {here} does not have; "
                f"give the --storage it was made with{renamed}, or choose another folder with --out"
            )

    # ---- tasks

    def remaining(self) -> int:
        """How many trials are still to be trained, unfinished ones included."""
        return max(self.wanted - sum(trial.state != "running" for trial in self.study.all_trials()), 0)

    def draws(self) -> Iterator[Draw]:
        """One after the other, each drawn when a worker is free to train it."""
        unfinished = self.study.unfinished()
        self.write()
        yield from unfinished
        while (new := self.study.draw(self.wanted)) is not None:
            yield new

    def task(self, draw: Draw, device: str) -> TrialTask:
        folder = self.folder / f"{TRIAL_PREFIX}{draw.number}"
        search = self.study.search
        return TrialTask(
            draw,
            search.erm_recipe() if draw.is_erm else search.trial_recipe(draw.settings),
            search.seed,
            folder,
            device,
            self.root,
            self.checkpoint_epochs,
        )

    # ---- events

    def receive(self, task: TrialTask, event: Event) -> Event | None:
        """The event as it counts: a trial may be pruned before its run knows, and later events become None."""
        number = task.draw.number
        if isinstance(event, Epoch):
            if number in self.pruned:
                return None
            self.last_epochs[number] = event.numbers
            if self.study.should_prune(number, event.epoch, event.numbers[self.measure]):
                self._prune(number)
        if isinstance(event, Finished | Failed | Stopped):
            event = self._end(task, event)
            if not isinstance(event, Stopped) or isinstance(event, Pruned):
                remove_old_checkpoints(task.folder)
            self.write()
        return event

    def _end(self, task: TrialTask, event: Finished | Failed | Stopped) -> Event:
        number = task.draw.number
        if number in self.pruned:
            return Pruned(PRUNED, 0)  # whatever its run did until it stopped
        match event:
            case Finished(result) if result[self.measure] is not None:
                self.study.end(number, "finished", {**result, "epoch": result["epochs"]})
            case Finished():
                event = Failed(f"its {self.measure.replace('_', ' ')} is not finite")
                self.study.end(number, "failed", self.last_epochs.get(number), event.what)
            case Failed():
                self.study.end(number, "failed", self.last_epochs.get(number), event.what)
        return event

    def _prune(self, number: int) -> None:
        """In the study: a trial that is pruned there is never resumed, whatever happens next."""
        self.pruned.add(number)
        self.study.end(number, "pruned", self.last_epochs[number])

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
            space=search.ranges(),
            asked=search.asked,
            recipe=recipe,
            data_sha256=self.data.checksum,
            study=self.study.study.study_name,
            trials=self.study.all_trials(),
            facts=self.facts,
        )
        self.against_erm = self._compare(tuning)
        result_file.write(self.folder, replace(tuning, against_erm=self.against_erm))

    def _compare(self, tuning: Tuning) -> Comparison | None:
        """The chosen trial against ERM's. If the folders are gone, the earlier result stays."""
        chosen, erm = tuning.chosen, tuning.erm
        if chosen is None or erm is None or erm.state != "finished":
            return None
        finished = [trial.number for trial in tuning.trials if trial.state == "finished"]
        for number in finished:
            if number not in self.scores and (found := self._read_scores(number)) is not None:
                self.scores[number] = found
        known = {number: self.scores[number] for number in finished if number in self.scores}
        if not {chosen.number, erm.number} <= known.keys() or len(set(map(len, known.values()))) > 1:
            before = self.against_erm
            return before if before is not None and before.trial == chosen.number else None
        of_erm = known.pop(erm.number)
        others = tuning.count("finished", "pruned") - 1 - len(known)
        return compare(of_erm, known, chosen=chosen.number, others=others)

    def _read_scores(self, number: int) -> Tensor | None:
        return read_image_scores(self.folder / f"{TRIAL_PREFIX}{number}", self.study.search.measure)
