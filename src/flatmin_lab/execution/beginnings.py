"""Where runs can branch off: the checkpoints of others with the same beginning, which are kept until nobody needs them.

    beginnings = Beginnings(store, jobs, images=len(data.train))
    beginnings.kept_epochs(erm)           {100, 150}: after these epochs, others of the jobs can branch off
    beginnings.places(last_quarter)       […/erm-0/checkpoint-00150000.safetensors], the longest beginning first

A run is given these places when it starts, and `TrainState` decides by what the checkpoint itself says. A run waits
while another one of its process trains its beginning: it could not end earlier by training that beginning too. A
beginning from another machine, or of another commit, does not count: the run will not begin with it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from flatmin_lab.recipes.common_beginning import common_epochs
from flatmin_lab.recipes.recipe import Job, Recipe
from flatmin_lab.runs import checkpoint
from flatmin_lab.runs.result_store import ResultStore, remove_old_checkpoints


@dataclass(frozen=True)
class Beginnings:
    """Of these jobs, on a training set of so many images; without jobs, every run trains whole."""

    store: ResultStore
    jobs: Sequence[Job]
    images: int
    here: Mapping[str, Any] = field(default_factory=dict)  # what a checkpoint's facts must be, to be used here
    _common: dict[tuple[str, str], int] = field(default_factory=dict)
    _trained: dict[tuple[str, int], int] = field(default_factory=dict)

    def common(self, one: Job, other: Job) -> int:
        """The whole epochs that both begin with; 0 for one and the same run, and for those that are not listed."""
        if one.seed != other.seed or one.key == other.key or not {one.key, other.key} <= self._listed:
            return 0
        if one.recipe.validation:
            return 0  # its number of batches is not known here
        pair = (one.recipe.name, other.recipe.name)
        if pair not in self._common:
            self._common[pair] = common_epochs(one.recipe, other.recipe, batches=self._batches(one.recipe))
        return self._common[pair]

    def kept_epochs(self, job: Job) -> set[int]:
        """The epochs of this run after which a run that has not started yet can branch off."""
        return {epochs for other in self.jobs if (epochs := self.common(job, other)) and self._is_new(other)}

    def places(self, job: Job) -> list[Path]:
        """Where others are at the end of an epoch that the job begins with too, the longest first."""
        batches, found = self._batches(job.recipe), list[Path]()
        for other in self.jobs:
            last = self.common(job, other) * batches
            ends = checkpoint.listed(self.store.folder(other)) if last else []
            found += [path for path in ends if (step := checkpoint.step_of(path)) <= last and step % batches == 0]
        return sorted(found, key=checkpoint.step_of, reverse=True)

    def start_step(self, job: Job) -> int:
        """After how many steps a new run would begin now."""
        return max(map(checkpoint.step_of, filter(self._is_usable, self._longest(job))), default=0)

    def waits_for(self, job: Job, other: Job, step: int) -> bool:
        """Is another run, which has done so many steps, training more of the job's beginning than there is?"""
        epochs = self.common(job, other)
        # the checkpoint comes after the epoch's last step, and before the next one
        return bool(epochs) and step <= epochs * self._batches(job.recipe) and epochs > self._trained_epochs(job)

    def remove_unneeded(self, job: Job, measured: Path) -> None:
        """Delete the old checkpoints of a run that is evaluated, and those of the others that nobody needs any more."""
        alike = [other for other in self.jobs if (other.seed, other.recipe.data) == (job.seed, job.recipe.data)]
        others = [other for other in alike if other.key != job.key]  # of other data an epoch has another length
        needed = {place for other in others if self._is_new(other) for place in self._longest(other)}
        remove_old_checkpoints(self.store.folder(job), {measured, *needed})
        for other in others:
            places = checkpoint.listed(self.store.folder(other)) if self.store.file(other).exists() else []
            if len(places) > 1:
                remove_old_checkpoints(self.store.folder(other), {places[0], *needed})

    @cached_property
    def _listed(self) -> frozenset[tuple[str, int]]:
        return frozenset(job.key for job in self.jobs)

    def _is_new(self, job: Job) -> bool:
        return not self.store.file(job).exists() and not checkpoint.listed(self.store.folder(job))

    def _trained_epochs(self, job: Job) -> int:
        """Of the job's beginning, when this was first asked: it changes only with those that the job waits for."""
        if job.key not in self._trained:
            there = self.start_step(job) // self._batches(job.recipe) if self._is_new(job) else job.recipe.epochs
            self._trained[job.key] = there
        return self._trained[job.key]

    def _longest(self, job: Job) -> list[Path]:
        """The longest beginning of the job, and the longest that can be used here."""
        places = self.places(job)
        usable = next((place for place in places if self._is_usable(place)), None)
        return [*places[:1], *([] if usable is None else [usable])]

    def _is_usable(self, place: Path) -> bool:
        """Was it trained under the conditions that are here?"""
        try:
            state = checkpoint.read_state(place)
        except (OSError, checkpoint.DamagedError):
            return False
        found = state.get("facts", {})
        return not state.get("mixed") and all(found.get(key) == value for key, value in self.here.items())

    def _batches(self, recipe: Recipe) -> int:
        return math.ceil(self.images / recipe.batch_size)
