"""Training: epochs of steps, a measurement after each, checkpoints in between. It yields records and prints nothing.

    for record in train(recipe, data, seed=0):
        match record: ...                                  flatmin_lab.runs.events

With a run folder, every epoch is a line in its metrics.jsonl and every state worth keeping a checkpoint; a folder that
was begun is gone on with, to the same bits as if it had never been left (on CUDA: if the recipe is deterministic). A
checkpoint falls between two steps, and what it holds does not depend on when it is taken: the order of the pictures and
their random numbers follow from seed, epoch and batch, and the sums of an epoch are kept in it to the last bit.

Several processes can train one model (`team`): the same recipe, its batches shared out; the first one has the folder.

The headline is the last epoch's measurement. The best test epoch, which the paper's published code reports, is chosen
with the test labels: it is kept beside as a comparison and named so.
"""

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from time import monotonic
from typing import Any, cast

import torch
from torch import Tensor

from flatmin.core.model_state import eval_mode
from flatmin_lab.data.augment.transforms import augmentation
from flatmin_lab.data.batches import Batches
from flatmin_lab.data.dataset import Dataset, Split
from flatmin_lab.data.registry import DATA_SETS
from flatmin_lab.recipes.lr_schedules import rate
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.runs.events import DivergedError, Epoch, Finished, Note, Progress, Record, Started, Stopped
from flatmin_lab.runs.folder import RunFolder
from flatmin_lab.runs.open_folder import open_
from flatmin_lab.runs.result import result_of
from flatmin_lab.system.rng import Surroundings
from flatmin_lab.training.build import prepared
from flatmin_lab.training.captured_forward import Answers
from flatmin_lab.training.data_parallel import logits_shared, same_buffers
from flatmin_lab.training.evaluation import bins_of, measured
from flatmin_lab.training.learner import Learner
from flatmin_lab.training.ranks import Team, check_batches, compare
from flatmin_lab.training.train_state import Middle, team_facts

LOOK = 50  # steps after which the host asks for what the device measured, at the latest
BREATH = 0.25  # seconds between two reports of progress
ALONE = Team()


def config_of(
    recipe: Recipe, data: Dataset, seed: int, device: torch.device | str = "cpu", team: Team = ALONE
) -> dict[str, Any]:
    """What a run folder keeps of a training, to know it again."""
    known = {"recipe": recipe.as_json(), "seed": seed, "data_sha256": data.checksum}
    return known | team_facts(torch.device(device), team)


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
    team: Team = ALONE,
) -> Iterator[Record]:
    """Train, and yield what happens; in a run folder, which `resume` goes on with if it was begun.

    `stop` is asked between steps: a reason, once given, saves and ends. On a GPU a step is the replay of a CUDA graph;
    `capture=False` does without, to the same bits where the recipe is deterministic and in fp32. With a `team` of
    several, all ranks call it alike; the first one's `folder` counts, and a reason to stop on one is a reason for all.
    """
    check_asked(recipe, capture=capture, checkpoint_epochs=checkpoint_epochs, checkpoint_minutes=checkpoint_minutes)
    records = moments(
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
        step_by_step=False,
        team=team,
    )
    return cast(Iterator[Record], records)


def check_asked(recipe: Recipe, *, capture: bool, checkpoint_epochs: int, checkpoint_minutes: float) -> None:
    """Does what is asked for make sense?"""
    if checkpoint_epochs < 1 or not checkpoint_minutes >= 0:
        raise ValueError(
            "checkpoints come every 1 or more epochs and every 0 or more minutes, "
            f"got {checkpoint_epochs} and {checkpoint_minutes}"
        )
    if recipe.compile and not capture:
        raise ValueError(
            "what is compiled is the step that a CUDA graph captures, got compile without capture; "
            "leave out --compile or --no-capture"
        )


def moments(
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
    step_by_step: bool = True,
    team: Team = ALONE,
) -> Generator[Record | None, None, None]:
    """As `train`; step by step it also yields None after each step, so that many can be trained by turns."""
    surroundings = Surroundings(torch.device(device), deterministic=recipe.deterministic)
    with team.together(), surroundings.inside():
        training = _Training(recipe, data, seed, torch.device(device), stop, team, capture=capture)
        config = config_of(recipe, data, seed, device, team)
    compare(config, torch.device(device), team, checkpoint_epochs=checkpoint_epochs)
    # what is wrong with a recipe has come out by now, so a folder is begun only by a training that can begin
    with team.together():
        held = open_(Path(folder), config, resume=resume) if folder is not None and team.leads else None
    try:
        with team.together():
            result = None if held is None else held.result()
        if (result := team.told(result)) is not None:
            yield Finished(result)
            return
        run = training.run(held, checkpoint_epochs, checkpoint_minutes * 60)
        records = run if step_by_step else (record for record in run if record is not None)
        while True:
            with surroundings.inside():
                try:
                    record = next(records)
                except StopIteration:
                    return
            yield record
    finally:
        if held is not None:
            held.close()


class _Training:
    """A training: its data, its learner, and where it is."""

    def __init__(
        self,
        recipe: Recipe,
        data: Dataset,
        seed: int,
        device: torch.device,
        stop: Callable[[], str | None],
        team: Team,
        *,
        capture: bool,
    ) -> None:
        if recipe.data in DATA_SETS and data.name != recipe.data:
            raise ValueError(f"the recipe is for {recipe.data}, got the data set {data.name}")
        self.recipe, self.seed, self.device, self.stop, self.team = recipe, seed, device, stop, team
        self.folder: RunFolder | None = None
        self.keeps = False  # is there a folder, on the first rank?
        self.uncaptured = capture and team.size > 1
        capture = capture and team.size == 1  # a graph with messages between ranks in it was never tried
        self.checksum = data.checksum
        self.data, self.which, self.wrong, self.normalise = prepared(recipe, data.to(device), seed)
        self.batches = Batches(
            split=self.data.train,
            batch_size=recipe.batch_size,
            normalise=self.normalise,
            augment=augmentation(recipe.augment, self.data),
            seed=seed,
        )
        self.learner = Learner(recipe, self.data, self.batches, seed=seed, device=device, capture=capture)
        averaged = [] if self.learner.average is None else [self.learner.average.module]
        self.answers = [Answers(model, capture=capture) for model in (self.learner.model, *averaged)]
        check_batches(self.learner.model, size=recipe.batch_size, count=len(self.data.train), ranks=team.size)
        with torch.no_grad(), eval_mode(self.learner.model):  # does the model take these pictures?
            self.learner.model(self.normalise(self.data.train.x[:1]))
        self.learner.rehearse(team)
        self.middle = Middle(self.learner, device, team)

    @property
    def step(self) -> int:
        return self.middle.step

    @property
    def steps(self) -> int:
        return self.recipe.epochs * len(self.batches)

    def run(
        self, folder: RunFolder | None, checkpoint_epochs: int, checkpoint_seconds: float
    ) -> Iterator[Record | None]:
        """What happens, and None after each step."""
        self.folder, self.keeps = folder, self.team.any(folder is not None)
        middle = self.middle
        self.learner.join()
        yield from self._go_on()
        for answers in self.answers:
            answers.prepare(self.data.test, self.normalise)
        reported = monotonic()
        while middle.epoch < self.recipe.epochs:
            for index, u in self.batches.parts(middle.epoch, start=middle.batch):
                if reason := self._asked():
                    yield from self._stopped(reason)
                    return
                self._step(index, u)
                yield from self._notes()
                now = monotonic()
                is_late, is_old = self.team.leading(now - reported > BREATH, now - middle.saved_at > checkpoint_seconds)
                if is_late or len(middle.tally.pending) >= LOOK:
                    self._look(wait=self.team.size > 1)  # where all must have seen the same
                if is_late:
                    yield Progress(epoch=middle.epoch + 1, step=self.step, numbers=middle.tally.means())
                    reported = now
                if is_old and middle.batch < len(self.batches):
                    yield from self._save()
                yield None
            line = self._end_of_epoch()
            if line is None:
                yield from self._stopped(self.team.first(self.stop()) or "asked to stop")
                return
            is_due = middle.epoch % checkpoint_epochs == 0 or middle.epoch == self.recipe.epochs
            saved = list(self._save()) if is_due else []  # before anyone is told, who might fail
            yield Epoch(epoch=middle.epoch, step=self.step, numbers=line)
            yield from saved
            if self.folder is not None:
                yield from self.folder.told()
        logits = self._logits(self.answers[0], self.data.test, stop=self.stop)
        if logits is None:
            yield Stopped(self.team.first(self.stop()) or "asked to stop", self.step)
            return
        with self.team.together():
            known = team_facts(self.device, self.team)
            result = result_of(self.recipe, self.seed, self.checksum, middle.lines, known)
            result["reliability"] = bins_of(logits, self.data.test.y)
            if self.folder is not None:
                self.folder.finish(result)
        yield Finished(result)

    def _asked(self) -> str | None:
        """Is any rank asked to stop? Asked between two steps, and answered alike on all."""
        reason = self.stop()
        return self.team.first(reason) if self.team.any(bool(reason)) else None

    # ---- a step, an epoch

    def _step(self, index: Tensor, u: Tensor) -> None:
        self.middle.tally.add(len(index), self.learner.step(index, u, self._lr(self.step)))
        self.middle.batch += 1

    def _notes(self) -> Iterator[Record]:
        while self.learner.notes:
            yield Note(self.learner.notes.pop(0))

    def _lr(self, step: int) -> float:
        recipe, warmup = self.recipe, round(self.recipe.warmup * len(self.batches))
        settings = {"milestones": recipe.milestones, "gamma": recipe.gamma} if recipe.schedule == "multi_step" else {}
        return rate(recipe.schedule, recipe.lr, step, self.steps, warmup=warmup, **settings)

    def _look(self, *, wait: bool = True) -> None:
        broken = self.team.first(self.middle.tally.look(wait=wait))
        if broken is not None:
            step = self.step - broken.ago
            raise self._broken(f"the loss of step {step} (epoch {self.middle.epoch + 1}) is {broken.loss}", step)

    def _broken(self, what: str, step: int) -> DivergedError:
        if self.folder is not None:
            self.folder.diverged(what, step)
        kept = self.folder.kept() if self.folder is not None else None
        again = f"The checkpoint {kept} is kept." if kept else "There is no checkpoint."
        return DivergedError(
            f"{what}: training stops. {again} "
            f"Try a smaller --lr (it was {self._lr(step - 1):g}), --clip-norm, or another --precision",
            what,
        )

    def _check_weights(self) -> None:
        """An infinite gradient at a finite loss: the loss would tell a step later."""
        if self.team.any(not self.learner.is_finite()):
            raise self._broken(f"a weight after step {self.step} is infinite or nan", self.step)

    def _end_of_epoch(self) -> dict[str, Any] | None:
        """The epoch's line, or None if the measurement was broken off: then nothing has changed, and it comes again."""
        self._look()
        self._check_weights()
        found: dict[str, Any] = {}
        for answers, prefix in zip(self.answers, (self.which, f"average_{self.which}"), strict=False):
            part = self._measure(answers, prefix)
            if part is None:
                return None
            found |= part
        means = {
            (f"train_{name}" if name in ("loss", "error") else name): m for name, m in self.middle.tally.means().items()
        }
        line = {"epoch": self.middle.epoch + 1, "step": self.step, "lr": self._lr(self.step - 1), **means, **found}
        line["seconds"] = round(self.middle.seconds(), 3)
        self.middle.end_epoch(line)
        with self.team.together():
            if self.folder is not None:
                self.folder.add_metrics(line)
        return line

    def _logits(self, answers: Answers, split: Split, **more: Any) -> Tensor | None:
        same_buffers([answers.model], self.team)
        return logits_shared(answers, split, self.normalise, team=self.team, **more)

    def _measure(self, answers: Answers, prefix: str) -> dict[str, Any] | None:
        logits = self._logits(answers, self.data.test, stop=self.stop)
        if logits is None:
            return None
        found: dict[str, Any] = {
            f"{prefix}_{name}": value for name, value in measured(logits, self.data.test.y).items()
        }
        if len(self.wrong):
            learnt = self._logits(answers, self.data.train.at(self.wrong))
            assert learnt is not None
            repeated = learnt.argmax(dim=1) == self.data.train.y[self.wrong]
            found[f"{prefix.removesuffix(self.which)}memorised"] = repeated.float().mean().item()
        return found

    # ---- in and out of the folder

    def _go_on(self) -> Iterator[Record]:
        yield from self.middle.go_on(self.folder)
        parameters = sum(p.numel() for p in self.learner.model.parameters())
        yield Started(step=self.step, steps=self.steps, epochs=self.recipe.epochs, parameters=parameters)
        if self.recipe.compile and self.device.type != "cuda":
            yield Note(f"--compile applies on a GPU only: on {self.device.type} nothing is compiled")
        if self.uncaptured and self.device.type == "cuda":
            nothing = ", and nothing is compiled" if self.recipe.compile else ""
            yield Note(f"among {self.team.size} processes steps run without CUDA graphs{nothing}")

    def _save(self) -> Iterator[Record]:
        """Nothing that is not finite is saved."""
        self.middle.saved_at = monotonic()
        if self.keeps:
            self._look()
            self._check_weights()
            with self.team.together():
                saved = [] if self.folder is None else [self.middle.save(self.folder)]
            yield from saved

    def _stopped(self, reason: str) -> Iterator[Record]:
        if self.step:
            yield from self._save()
        yield Stopped(reason, self.step)
