"""Training: epochs of steps, an evaluation after each, checkpoints in between. It yields events and prints nothing.

    for event in train(recipe, data, seed=0):
        match event: ...                                   flatmin_lab.runs.events

With a run folder, every epoch is a line in its metrics.jsonl, and an existing run is resumed bit for bit (on CUDA: if
the recipe is deterministic). A checkpoint is taken between two steps, and a run does not depend on when that happens:
the order of the images and their random numbers follow from seed, epoch and batch, and a checkpoint keeps the sums of
the epoch to the last bit. On a CPU the threads are part of this: see system/threads.py.

Several processes can train one model (`ranks`): the same recipe, its batches sharded; the main rank has the folder.

The headline is the last epoch's evaluation. The best test epoch, which the paper's published code reports, is chosen
using the test labels: it is kept for comparison only, and labelled as such.
"""

import math
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from time import monotonic
from typing import Any, cast

import torch
from torch import Tensor

from flatmin_lab import models
from flatmin_lab.data.augment.transforms import augmentation
from flatmin_lab.data.batches import Batches, HeldOut
from flatmin_lab.data.dataset import Dataset, Split
from flatmin_lab.data.registry import DATA_SETS
from flatmin_lab.recipes.lr_schedules import rate
from flatmin_lab.recipes.optimizers import OPTIMIZERS
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.recipes.user_files import check_unchanged, has_user_code, recorded
from flatmin_lab.runs import checkpoint
from flatmin_lab.runs import config as run_config
from flatmin_lab.runs.events import DivergedError, Epoch, Event, Finished, Note, Progress, Started, Stopped
from flatmin_lab.runs.folder import CODE, RunFolder
from flatmin_lab.runs.open_folder import open_run_folder
from flatmin_lab.runs.result import AVERAGE, build_result
from flatmin_lab.system.rng import RandomScope
from flatmin_lab.system.threads import FlopCount, choose_threads, computing_with, most_flops
from flatmin_lab.training.build import prepare_data
from flatmin_lab.training.captured_forward import CapturedForward
from flatmin_lab.training.data_parallel import broadcast_buffers, sharded_logits
from flatmin_lab.training.evaluation import image_scores, reliability_bins, score_logits
from flatmin_lab.training.learner import Learner
from flatmin_lab.training.model_check import check_outputs, check_single_output, check_training_outputs
from flatmin_lab.training.ranks import RankGroup, check_batches, check_same_run
from flatmin_lab.training.train_state import TrainState, run_facts

MAX_UNREAD_STEPS = 50  # steps after which the host reads what the device measured, at the latest
PROGRESS_SECONDS = 0.25  # between two Progress events
SINGLE_PROCESS = RankGroup()


def config_of(
    recipe: Recipe, data: Dataset, seed: int, device: torch.device | str = "cpu", ranks: RankGroup = SINGLE_PROCESS
) -> dict[str, Any]:
    """config.json of a run: recipe, seed and data, which identify it, and the machine."""
    known = {"recipe": recorded(recipe).as_json(), "seed": seed, "data_sha256": data.checksum}
    return known | run_facts(torch.device(device), ranks)


def train(
    recipe: Recipe,
    data: Dataset,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    folder: Path | str | None = None,
    resume: bool = False,
    stop: Callable[[], str | None] = lambda: None,
    capture: bool = True,
    checkpoint_epochs: int = 1,
    checkpoint_minutes: float = 10.0,
    threads: int | None = None,
    ranks: RankGroup = SINGLE_PROCESS,
) -> Iterator[Event]:
    """Train, and yield events; with `resume`, the run in `folder` continues where its last checkpoint is.

    `stop` is called between steps: when it returns a reason, the run is saved and ends. On a GPU a step is the replay
    of a CUDA graph; `capture=False` does without, with the same bits if the recipe is deterministic and in fp32. On
    several `ranks`, all call it alike; the main rank's `folder` counts, and a reason to stop on one stops all.
    While it computes, torch has this many `threads`: by default one for a small network on a CPU, as
    system/threads.py explains.
    """
    check_arguments(
        recipe,
        capture=capture,
        checkpoint_epochs=checkpoint_epochs,
        checkpoint_minutes=checkpoint_minutes,
        threads=threads,
    )
    events = training_steps(
        recipe,
        data,
        seed=seed,
        device=device,
        folder=folder,
        resume=resume,
        stop=stop,
        capture=capture,
        checkpoint_epochs=checkpoint_epochs,
        checkpoint_minutes=checkpoint_minutes,
        threads=threads,
        step_by_step=False,
        ranks=ranks,
    )
    return cast(Iterator[Event], events)


def check_arguments(
    recipe: Recipe, *, capture: bool, checkpoint_epochs: int, checkpoint_minutes: float, threads: int | None = None
) -> None:
    """Raise where the arguments contradict each other."""
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}; leave it out for the default")
    if checkpoint_epochs < 1 or not checkpoint_minutes >= 0:
        raise ValueError(
            "a checkpoint interval must be at least 1 epoch and at least 0 minutes, "
            f"got {checkpoint_epochs} and {checkpoint_minutes}"
        )
    if recipe.compile and not capture:
        raise ValueError(
            "only a step that is captured as a CUDA graph can be compiled, got compile without capture; "
            "leave out --compile or --no-capture"
        )


def training_steps(
    recipe: Recipe,
    data: Dataset,
    *,
    seed: int,
    device: torch.device | str,
    folder: Path | str | None,
    resume: bool,
    stop: Callable[[], str | None],
    capture: bool,
    checkpoint_epochs: int,
    checkpoint_minutes: float,
    threads: int | None = None,
    step_by_step: bool = True,
    ranks: RankGroup = SINGLE_PROCESS,
    beginnings: Sequence[Path] = (),
    kept_epochs: Collection[int] = (),
) -> Generator[Event | None, None, None]:
    """As `train`; with `step_by_step` it also yields None after each step, so that many runs can take turns.

    A new run takes the first of the checkpoints `beginnings` that is the same training until there. Its own after
    `kept_epochs` stay in its folder, so that others can begin with them.
    """
    scope = RandomScope(torch.device(device), deterministic=recipe.deterministic, with_host=has_user_code(recipe))
    place = None if folder is None else Path(folder)
    has_begun = bool(resume and place and checkpoint.listed(place))
    (has_begun,) = ranks.main_flags(has_begun)
    with ranks.raise_together():
        began_with = _threads_of(place) if resume and ranks.is_main else None
    began_with = ranks.broadcast(began_with)
    with ranks.raise_together(), scope.active():
        recipe = recorded(recipe)
        copies = None if place is None or not resume else place / CODE
        check_unchanged(recipe, copies=copies, without=("init",) if has_begun else ())
        training = _TrainingRun(
            recipe, data, seed, torch.device(device), stop, ranks, capture=capture, initial=not has_begun
        )
        threads = choose_threads(
            threads, flops=training.flops, on_cpu=training.device.type == "cpu", began_with=began_with
        )
        with computing_with(threads):
            config = {**config_of(recipe, data, seed, device, ranks), "inputs": training.inputs()}
    check_same_run(config, torch.device(device), ranks, checkpoint_epochs=checkpoint_epochs)
    # a bad recipe has raised by now, so a folder is created only for a run that can start
    with ranks.raise_together():
        held = open_run_folder(Path(folder), config, resume=resume) if folder is not None and ranks.is_main else None
    try:
        with ranks.raise_together():
            result = None if held is None else held.result()
        if (result := ranks.broadcast(result)) is not None:
            yield Finished(result)
            return
        training.kept_epochs = kept_epochs
        run = training.run(held, checkpoint_epochs, checkpoint_minutes * 60, beginnings)
        events = run if step_by_step else (event for event in run if event is not None)
        while True:
            with scope.active(), computing_with(threads), training.state.cpu_clock.running():
                try:
                    event = next(events)
                except StopIteration:
                    return
            yield event
    finally:
        if held is not None:
            held.close()


def _threads_of(folder: Path | None) -> int | None:
    """The number of threads that the folder's run started with, if there is one."""
    if folder is None or not run_config.exists(folder):
        return None
    found = run_config.read_config(folder).get("threads")
    return found if isinstance(found, int) and found >= 1 else None


class _TrainingRun:
    """A run: its data, its learner, and its state."""

    def __init__(
        self,
        recipe: Recipe,
        data: Dataset,
        seed: int,
        device: torch.device,
        stop: Callable[[], str | None],
        ranks: RankGroup,
        *,
        capture: bool,
        initial: bool = True,
    ) -> None:
        if recipe.data in DATA_SETS and data.name != recipe.data:
            raise ValueError(f"the recipe is for {recipe.data}, got the data set {data.name}")
        self.recipe, self.seed, self.device, self.stop, self.ranks = recipe, seed, device, stop, ranks
        self.folder: RunFolder | None = None
        self.keeps = False  # does the main rank have a folder?
        self.kept_epochs: Collection[int] = ()  # after which a checkpoint stays
        self.uncaptured = capture and ranks.size > 1
        capture = capture and ranks.size == 1  # graphs with communication between ranks are untested
        self.checksum = data.checksum
        prepared = prepare_data(recipe, data.to(device), seed)
        self.data, self.which, self.wrong, self.normalise, held_out = prepared
        self.held_out = None if held_out is None else HeldOut(held_out, recipe.held_out_epochs)
        self.batches = Batches(
            split=self.data.train,
            batch_size=recipe.batch_size,
            normalise=self.normalise,
            augment=augmentation(recipe.augment, self.data),
            seed=seed,
            held_out=self.held_out,
        )
        self.learner = Learner(
            recipe, self.data, self.batches, seed=seed, device=device, capture=capture, initial=initial
        )
        averaged = [] if self.learner.ema is None else [self.learner.ema.module]
        self.forwards = [CapturedForward(model, capture=capture) for model in (self.learner.model, *averaged)]
        check_batches(self.learner.model, size=recipe.batch_size, count=len(self.data.train), processes=ranks.size)
        x, classes = self.normalise(self.data.train.x[:2]), self.data.num_classes
        built_in = models.is_built_in(recipe.model)
        with FlopCount() if built_in and device.type == "cpu" else nullcontext() as counted:
            self.learner.notes += check_outputs(self.learner.model, x, self.data.train.kind, classes)
        if not built_in:
            check_single_output(self.learner.model, x, classes)
            check_training_outputs(self.learner.model, x, classes)
        parameters = sum(p.numel() for p in self.learner.model.parameters())
        flops = counted.flops / len(x) if counted is not None else most_flops(parameters, self.data.train.shape)
        self.flops = flops * recipe.batch_size  # of a batch's forward pass
        self.learner.rehearse(ranks)
        self.state = TrainState(self.learner, device, ranks)

    def inputs(self) -> dict[str, Any]:
        """What the model takes and returns, for those who use it without the data."""
        mean, std = self.normalise.mean.tolist(), self.normalise.std.tolist()
        shape, kind = list(self.data.train.shape), "images" if self.data.train.is_images else "points"
        return {"kind": kind, "shape": shape, "classes": list(self.data.names), "mean": mean, "std": std}

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def steps(self) -> int:
        return self.recipe.epochs * len(self.batches)

    def run(
        self,
        folder: RunFolder | None,
        checkpoint_epochs: int,
        checkpoint_seconds: float,
        beginnings: Sequence[Path] = (),
    ) -> Iterator[Event | None]:
        """The events, and None after each step."""
        self.folder, self.keeps = folder, self.ranks.any(folder is not None)
        if folder is not None:
            folder.kept_steps = {epoch * len(self.batches) for epoch in self.kept_epochs}
        state = self.state
        self.learner.join()
        yield from self._resume(beginnings)
        for forward in self.forwards:
            forward.prepare(self.data.test, self.normalise)
        reported = monotonic()
        while state.epoch < self.recipe.epochs:
            for index, u in self.batches.parts(state.epoch, start=state.batch):
                if reason := self._stop_reason():
                    yield from self._stop(reason)
                    return
                self._step(index, u)
                if self.step == 1 and self.keeps and self.recipe.optimizer not in OPTIMIZERS:
                    self.learner.state()  # can a user's own optimizer be saved? better to know now than after an epoch
                self._match_within_epoch()
                yield from self._notes()
                now = monotonic()
                is_late, is_old = self.ranks.main_flags(
                    now - reported > PROGRESS_SECONDS, now - state.saved_at > checkpoint_seconds
                )
                if is_late or len(state.metrics.pending) >= MAX_UNREAD_STEPS:
                    self._collect(wait=self.ranks.size > 1)  # all ranks must have seen the same
                if is_late:
                    yield Progress(epoch=state.epoch + 1, step=self.step, numbers=state.metrics.means())
                    reported = now
                if is_old and state.batch < len(self.batches):
                    yield from self._save()
                yield None
            line = self._end_of_epoch()
            if line is None:
                yield from self._stop(self.ranks.first(self.stop()) or "asked to stop")
                return
            is_due = state.epoch % checkpoint_epochs == 0 or state.epoch in (*self.kept_epochs, self.recipe.epochs)
            saved = list(self._save()) if is_due else []  # before the event is yielded: its receiver might fail
            yield Epoch(epoch=state.epoch, step=self.step, numbers=line)
            yield from saved
            if self.folder is not None:
                yield from self.folder.take_notes()
        logits = self._logits(self.forwards[0], self.data.test, stop=self.stop)
        if logits is None:
            yield Stopped(self.ranks.first(self.stop()) or "asked to stop", self.step)
            return
        with self.ranks.raise_together():
            result = self._write_result(logits)
        yield Finished(result)

    def _stop_reason(self) -> str | None:
        """The reason to stop of any rank, between two steps; the same on all ranks."""
        reason = self.stop()
        return self.ranks.first(reason) if self.ranks.any(bool(reason)) else None

    # ---- steps and epochs

    def _step(self, index: Tensor, u: Tensor) -> None:
        share = self.learner.method.schedule.share(self.step, self.steps)
        self.state.metrics.add(len(index), self.learner.step(index, u, self._lr(self.step), share))
        self.state.batch += 1

    def _notes(self) -> Iterator[Event]:
        while self.learner.notes:
            yield Note(self.learner.notes.pop(0))

    def _lr(self, step: int) -> float:
        recipe, warmup = self.recipe, round(self.recipe.warmup * len(self.batches))
        settings = {"milestones": recipe.milestones, "gamma": recipe.gamma} if recipe.schedule == "multi_step" else {}
        return rate(recipe.schedule, recipe.lr, step, self.steps, warmup=warmup, **settings)

    def _collect(self, *, wait: bool = True) -> None:
        broken = self.ranks.first(self.state.metrics.collect(wait=wait))
        if broken is not None:
            step = self.step - broken.steps_ago
            raise self._diverged(f"the loss of step {step} (epoch {self.state.epoch + 1}) is {broken.loss}", step)

    def _diverged(self, what: str, step: int) -> DivergedError:
        if self.folder is not None:
            self.folder.write_divergence(what, step)
        kept = self.folder.newest_name() if self.folder is not None else None
        again = f"The checkpoint {kept} is kept." if kept else "There is no checkpoint."
        return DivergedError(
            f"{what}: training stops. {again} "
            f"Try a smaller --lr (it was {self.recipe.lr:g}), --clip-norm, or another --precision",
            what,
        )

    def _check_weights(self) -> None:
        """An infinite gradient at a finite loss: the loss would show it a step later."""
        if self.ranks.any(not self.learner.is_finite()):
            raise self._diverged(f"a weight after step {self.step} is infinite or nan", self.step)

    def _end_of_epoch(self) -> dict[str, Any] | None:
        """The epoch's line; None if its evaluation was interrupted: then nothing has changed, and it is repeated."""
        self._collect()
        self._check_weights()
        found: dict[str, Any] = {}
        for forward, prefix in zip(self.forwards, (self.which, f"{AVERAGE}{self.which}"), strict=False):
            part = self._measure(forward, prefix)
            if part is None:
                return None
            found |= part
        found |= self._match_radius()
        means = {
            (f"train_{name}" if name in ("loss", "error") else name): m
            for name, m in self.state.metrics.means().items()
        }
        line = {"epoch": self.state.epoch + 1, "step": self.step, "lr": self._lr(self.step - 1), **means, **found}
        line["seconds"] = round(self.state.seconds(), 3)
        if self.device.type == "cpu" and self.ranks.size == 1 and self.state.has_cpu_time:
            line["cpu_seconds"] = round(self.state.cpu_clock.seconds(), 3)
        self.state.end_epoch(line)
        with self.ranks.raise_together():
            if self.folder is not None:
                self.folder.add_metrics(line)
        return line

    def _match_within_epoch(self) -> None:
        """Move AMP's radius, if it is matched several times per epoch, in equal distances; the last time at its end."""
        done, total, method = self.state.batch, len(self.batches), self.learner.method
        is_due = done < total and done * method.matches // total > (done - 1) * method.matches // total
        if is_due and self.step > method.schedule.start * self.steps:
            self._match_radius()

    def _match_radius(self) -> dict[str, Any]:
        """Move AMP's radius, if it follows the loss on held-out data; that loss, and the radius until now.

        Once the held-out images are trained on, the radius stays.
        """
        if self.held_out is None or self.learner.matched is None:
            return {}
        radius, loss = max(self.learner.radii), None
        if self.state.epoch < self.held_out.epochs:
            split = self.data.train.at(self.held_out.indices)
            logits = self._logits(self.forwards[0], split)
            assert logits is not None
            loss = score_logits(logits, split.y)["nll"]
            self.learner.matched.step(math.nan if loss is None else loss)
        return {"held_out_nll": loss, "epsilon": radius}

    def _logits(self, forward: CapturedForward, split: Split, **more: Any) -> Tensor | None:
        broadcast_buffers([forward.model], self.ranks)
        return sharded_logits(forward, split, self.normalise, ranks=self.ranks, **more)

    def _measure(self, forward: CapturedForward, prefix: str) -> dict[str, Any] | None:
        logits = self._logits(forward, self.data.test, stop=self.stop)
        if logits is None:
            return None
        found: dict[str, Any] = {
            f"{prefix}_{name}": value for name, value in score_logits(logits, self.data.test.y).items()
        }
        if len(self.wrong):
            learnt = self._logits(forward, self.data.train.at(self.wrong))
            assert learnt is not None
            repeated = learnt.argmax(dim=1) == self.data.train.y[self.wrong]
            found[f"{prefix.removesuffix(self.which)}memorised"] = repeated.float().mean().item()
        return found

    # ---- the run folder

    def _resume(self, beginnings: Sequence[Path]) -> Iterator[Event]:
        yield from self.state.resume(self.folder, beginnings)
        parameters = sum(p.numel() for p in self.learner.model.parameters())
        yield Started(
            step=self.step,
            steps=self.steps,
            epochs=self.recipe.epochs,
            parameters=parameters,
            threads=torch.get_num_threads() if self.device.type == "cpu" else None,
            began_from=self.state.began_from,
        )
        if self.recipe.compile and self.device.type != "cuda":
            yield Note(f"--compile applies on a GPU only: on {self.device.type} nothing is compiled")
        if self.uncaptured and self.device.type == "cuda":
            nothing = ", and nothing is compiled" if self.recipe.compile else ""
            yield Note(f"with {self.ranks.size} processes, steps run without CUDA graphs{nothing}")

    def _write_result(self, logits: Tensor) -> dict[str, Any]:
        """The result, which is written last: a run that has one is finished."""
        known = run_facts(self.device, self.ranks)
        parts: dict[str, Any] = {"resumed": self.state.resumed, "shared": self.state.shared}
        result = build_result(self.recipe, self.seed, self.checksum, self.state.lines, known, **parts)
        result["reliability"] = reliability_bins(logits, self.data.test.y)
        if self.folder is not None:
            if self.recipe.validation:
                self.folder.write_image_scores(image_scores(logits, self.data.test.y))
            self.folder.write_result(result)
        return result

    def _save(self) -> Iterator[Event]:
        """Save a checkpoint, never one with weights that are not finite."""
        self.state.saved_at = monotonic()
        if self.keeps:
            self._collect()
            self._check_weights()
            with self.ranks.raise_together():
                saved = [] if self.folder is None else [self.state.save(self.folder)]
            yield from saved

    def _stop(self, reason: str) -> Iterator[Event]:
        if self.step:
            yield from self._save()
        yield Stopped(reason, self.step)
