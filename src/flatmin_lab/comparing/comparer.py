"""The comparison: trains what is missing, seed by seed, and updates the verdict after each run.

    comparison = Comparison(entries, data, Path("comparisons/digits"), about_entries(entries, data, seeds=3))
    for training, event in comparison.run(executor): ...
    comparison.verdict().sentence

Every run has a run folder and an outcome file, so a killed comparison can be resumed: finished runs stay, and started
ones are resumed from their last checkpoint. All contenders of a seed have the same held-out data, the same initial
weights and the same batches; only the one that finds its radius while training leaves out, at first, the images it
needs for that.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from flatmin.comparison import Outcome, Verdict, judge, read_outcome
from flatmin.comparison.verdict import duration
from flatmin_lab.comparing import comparison_file
from flatmin_lab.comparing.comparison_file import About
from flatmin_lab.comparing.contender_recipes import Entry
from flatmin_lab.comparing.time_budget import TimeBudget
from flatmin_lab.comparing.training_queue import Training, TrainingQueue
from flatmin_lab.comparing.training_task import train_contenders
from flatmin_lab.data.dataset import Dataset
from flatmin_lab.execution.executor import Executor, run_tasks
from flatmin_lab.execution.task_queue import Stop
from flatmin_lab.models.user_model import short_name
from flatmin_lab.recipes.user_files import comparable
from flatmin_lab.runs.events import Event, Failed, Finished, RunError
from flatmin_lab.runs.open_folder import folder_of_runs
from flatmin_lab.training.loop import train


def identity_of(entries: Sequence[Entry], data: Dataset) -> dict[str, Any]:
    """What identifies a comparison: the recipe, the contenders, the data."""
    return {
        "recipe": comparable(entries[-1].recipe),
        "contenders": [entry.contender.key for entry in entries],
        "data_sha256": data.checksum,
    }


def about_entries(entries: Sequence[Entry], data: Dataset, *, seeds: int) -> About:
    """A comparison on the laboratory's data, in words."""
    recipe = entries[0].recipe
    count = len(data.train) - len(data.held_out(0).train)
    return About(
        title=f"{short_name(recipe.model)} on {data.name}",
        what=(
            f"{recipe.model} on {recipe.data}, {recipe.optimizer}, {recipe.epochs} epochs, batches of "
            f"{recipe.batch_size}, {recipe.precision}"
        ),
        held_out=(
            f"{count} of {len(data.train)} training {'images' if data.train.is_images else 'points'}, drawn anew for "
            "each seed and not trained on; the test set is not used"
        ),
        wanted=seeds,
        identity=identity_of(entries, data),
    )


@dataclass
class Comparison:
    """A comparison on the laboratory's data: `run` trains what is missing."""

    entries: Sequence[Entry]
    data: Dataset
    folder: Path
    about: About
    budget: TimeBudget = field(default_factory=lambda: TimeBudget(None))
    measure: str | None = None
    root: str = "data"
    checkpoint_epochs: int = 1
    outcomes: list[Outcome] = field(default_factory=list)
    stopped: str = ""  # why there are fewer seeds than asked for
    at_once: int | None = None  # runs, one process each; None on a GPU

    def run(self, executor: Executor, *, stop: Stop = lambda: None) -> Iterator[tuple[Training, Event]]:
        """The events of all runs as they come; those that had already ended have none."""
        if executor.device in ("cpu", executor.device_here):
            for entry in (self.entries[0], self.entries[-1]):  # raises if it cannot be trained
                next(iter(train(entry.recipe, self.data, seed=0, device=executor.device)))
        self.at_once = executor.capacity(len(self.entries))[0] if executor.device == "cpu" else None
        with folder_of_runs(self.folder, "comparison", doing="comparing"):
            comparison_file.check_same(self.folder, self.about.identity)
            trainings = [Training(entry, seed) for seed in range(self.about.wanted) for entry in self.entries]
            there = [read_outcome(self.folder, one.entry.contender.key, one.seed) for one in trainings]
            self.outcomes = [outcome for outcome in there if outcome is not None]
            missing = [training for training, outcome in zip(trainings, there, strict=True) if outcome is None]
            self.write()
            queue = TrainingQueue(
                missing,
                self.data,
                self.budget,
                stop,
                folder=self.folder,
                root=self.root,
                checkpoint_epochs=self.checkpoint_epochs,
            )
            for number, event in run_tasks(executor, train_contenders, queue):
                training = missing[number]
                if isinstance(event, Finished) or (isinstance(event, Failed) and event.diverged):
                    self._add(training)
                elif isinstance(event, Failed):
                    raise RunError(f"{training.entry.contender.name}, seed {training.seed}: {event.what}")
                yield training, event
            if queue.out_of_time:
                self.stopped = self._explain(executor)
            self.write()

    def _add(self, training: Training) -> None:
        outcome = read_outcome(self.folder, training.entry.contender.key, training.seed)
        assert outcome is not None
        self.outcomes.append(outcome)
        order = {entry.contender.key: number for number, entry in enumerate(self.entries)}
        self.outcomes.sort(key=lambda one: (one.seed, order[one.contender]))
        self.write()

    def verdict(self) -> Verdict:
        contenders = [entry.contender for entry in self.entries]
        return judge(
            contenders,
            self.outcomes,
            measure=self.measure,
            new_examples=True,
            seconds_a_seed=self._seconds_a_seed_so_far(),
        )

    def content(self) -> Mapping[str, Any]:
        """comparison.json."""
        contenders = [entry.contender for entry in self.entries]
        return comparison_file.content(self.about, contenders, self.outcomes, self.verdict(), stopped=self.stopped)

    def write(self) -> None:
        comparison_file.write(self.folder, self.content())

    def _seconds_a_seed_so_far(self) -> float | None:
        """From the runs that have ended; on a GPU, where they overlap, from the time that has passed."""
        if not self.at_once:
            return self.budget.estimate(sum(entry.contender.passes for entry in self.entries))
        found: dict[str, list[float]] = {}
        for outcome in self.outcomes:
            found.setdefault(outcome.contender, []).append(outcome.seconds)
        means = [fmean(seconds) for seconds in found.values()]
        return max(*means, sum(means) / self.at_once) if len(means) > 1 else None

    def seconds_a_seed(self, executor: Executor) -> float | None:
        """About how long all contenders of a seed take; None until a run has ended."""
        passes = [entry.contender.passes for entry in self.entries]
        at_once, _ = executor.capacity(len(passes))
        shared = max(*passes, sum(passes) / at_once) if executor.device == "cpu" else sum(passes)
        return self.budget.estimate(shared)

    def _explain(self, executor: Executor) -> str:
        """What did not fit into the time, and what would."""
        seconds, done = self.seconds_a_seed(executor) or 0.0, self.verdict().seeds
        given = duration(self.budget.seconds or 0.0)
        whole = f"one seed of all {len(self.entries)} contenders takes about {duration(seconds)}"
        if done:
            return f"{done} of {self.about.wanted} seeds were trained in {given}, because {whole}."
        epochs = self.entries[0].recipe.epochs
        return (
            f"Not even one seed fits into {given}: {whole}. Give more --minutes, lower --epochs (now "
            f"{epochs}), or name fewer --radii."
        )
