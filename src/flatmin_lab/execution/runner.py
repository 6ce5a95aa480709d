"""Recipe + seed → one result file: train, evaluate, store. Finished runs are skipped, interrupted ones are resumed.

The runs of a task train at once on a GPU (replicas.py). Each is evaluated when it has finished, from its last
checkpoint. A run that fails ends with `Failed`, and the others continue. Runs that begin the same way can share that
beginning (beginnings.py).
"""

from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.data.registry import load_once
from flatmin_lab.evaluation import load_run, post_training
from flatmin_lab.execution.beginnings import Beginnings
from flatmin_lab.execution.deadline import Deadline
from flatmin_lab.execution.replicas import train_together
from flatmin_lab.execution.task_queue import Stop
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.runs import checkpoint
from flatmin_lab.runs.config import OtherRunError
from flatmin_lab.runs.events import BusyError, Event, Failed, Finished, Measured, RunError, Stopped
from flatmin_lab.runs.open_folder import check
from flatmin_lab.runs.result import split_of
from flatmin_lab.runs.result_store import ResultStore, UnwrittenError, curves_of
from flatmin_lab.system.json_data import read_json
from flatmin_lab.training.loop import config_of
from flatmin_lab.training.ranks import RankGroup
from flatmin_lab.training.train_state import SAME_BITS, run_facts


class RunOptions(NamedTuple):
    """What all runs of a call have in common."""

    store: ResultStore
    root: str = "data"
    at_once: int | None = None  # runs on one device; None: on a GPU, as many as make it faster
    checkpoint_epochs: int = 10
    checkpoint_minutes: float = 10.0
    sharing: tuple[Job, ...] = ()  # runs of this and later calls that train a common beginning once
    deadline: Deadline | None = None  # only what will end by then is trained

    def beginnings(self, data: Dataset) -> Beginnings:
        device = data.train.x.device
        known = run_facts(device, RankGroup())
        here = {key: known.get(key) for key in SAME_BITS if key != "threads" or device.type != "cpu"}
        return Beginnings(self.store, self.sharing, len(data.train), here)  # on a CPU a run chooses its threads


class Run(NamedTuple):
    """A training run, and which measurements to take when it has finished."""

    job: Job
    parts: tuple[str, ...] = ()


class RunTask(NamedTuple):
    """Runs for one device, by their numbers, all with one data set."""

    runs: dict[int, Run]
    device: str
    options: RunOptions

    @property
    def numbers(self) -> Collection[int]:
        return self.runs.keys()

    def load_data(self) -> Dataset:
        return load_once(next(iter(self.runs.values())).job.recipe.data, self.options.root)

    def paths(self) -> list[Path]:
        """The folders and files that are read and written for them."""
        store, jobs = self.options.store, [run.job for run in self.runs.values()]
        return [path for job in jobs for path in (store.folder(job), store.file(job))]

    def moved_to(self, folder: Path) -> "RunTask":
        """The same runs, with all their paths in that folder, where no others are that they could begin from."""
        store = ResultStore(folder / "results", folder / "runs")
        return self._replace(options=self.options._replace(store=store, sharing=()))


def run_task_on_data(task: RunTask, dataset: Dataset, stop: Stop) -> Iterator[tuple[int, Event]]:
    """Train the runs of a task, and evaluate each when it has finished."""
    options, device = task.options, torch.device(task.device)
    data = dataset.to(device)
    numbers, folders = [], []
    for number, (job, _) in task.runs.items():
        folder = options.store.folder(job)
        try:
            check_folder(folder, config_of(job.recipe, data, job.seed, device))
        except (ValueError, OSError, RunError) as error:
            yield number, refusal(error, folder)
        else:
            numbers.append(number)
            folders.append(folder)
    events = train_together(
        [task.runs[number].job for number in numbers],
        data,
        device=device,
        folders=folders,
        count=options.at_once,
        resume=True,
        stop=stop,
        checkpoint_epochs=options.checkpoint_epochs,
        checkpoint_minutes=options.checkpoint_minutes,
        beginnings=options.beginnings(data),
        deadline=deepcopy(options.deadline),  # as in another process: what is measured reaches the queue as events
    )
    try:
        for index, event in events:
            number = numbers[index]
            ended = isinstance(event, Finished)
            for each in evaluate_run(task.runs[number], options, data, device, stop) if ended else [event]:
                yield number, each
    except RunError:  # raised at the end if runs failed; each has yielded its own Failed
        pass


def check_folder(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise where a run cannot have its folder, or has ended there without the weights that are to be evaluated."""
    check(folder, config, resume=True)
    if (folder / "result.json").exists() and not checkpoint.listed(folder):
        raise RunError(
            f"it was trained, but its checkpoints are gone from {folder}; put them back, or delete the folder, and the "
            "same command trains it again"
        )


def refusal(error: Exception, folder: Path) -> Failed:
    """The end of a run that cannot have its folder, which is not its own fault."""
    what = error.what if isinstance(error, OtherRunError) else f"{error}."
    way_out = "" if isinstance(error, RunError) else f" Move {folder} away, or choose another --runs"
    return Failed(f"{what}{way_out}", later=True, busy=isinstance(error, BusyError))


def evaluate_run(run: Run, options: RunOptions, data: Dataset, device: torch.device, stop: Stop) -> Iterator[Event]:
    """Evaluate a trained run and store the result; what the result file has already is not measured again."""
    job, store = run.job, options.store
    folder = store.folder(job)
    try:
        weights = load_run.find_finished_run(folder)
        known = store.result(job) or _full_result(weights, at_once=options.at_once)
        subject = load_run.subject_of(weights, data, use_ema=False, device=device)
        if "clean_train_nll" not in known:
            known = store.extend(job, known, post_training.measure_every_run(subject, job.recipe))
            yield Measured("always")
        effort = post_training.EFFORTS.get(job.recipe.name.partition("/")[0], post_training.Effort())
        how = post_training.Conditions(effort, job.recipe.data, options.root)
        for part in run.parts:
            if stop():
                yield Stopped(stop() or "", 0)
                return
            if part not in known:
                known = store.extend(job, known, post_training.measure(subject, part, how))
                yield Measured(part)
        options.beginnings(data).remove_unneeded(job, weights.path)
        yield Finished(known)
    except (load_run.UnfinishedError, UnwrittenError) as error:  # it says what to do
        yield Failed(str(error), later=True)
    except Exception as error:
        yield Failed(f"it was trained, but could not be evaluated: {type(error).__name__}: {error}", later=True)


def _full_result(weights: load_run.TrainedRun, *, at_once: int | None) -> dict[str, Any]:
    """result.json with its curves, and with how many runs shared the device, without which its seconds say nothing.

    The curves are those of the last checkpoint, whose content is verified; metrics.jsonl has the same lines.
    """
    result = read_json(weights.folder / "result.json")
    curves = curves_of(weights.checkpoint.state["lines"], split_of(result))
    return {**result, "at_once": at_once, "curves": curves}
