"""One run: a contender trained with one seed, with the user's own parts, and measured on the way.

All contenders of a seed start from the same weights and see the same batches: batches are drawn from one stream of
random numbers and the model's masks from another, so more passes do not change the batches. In a longer run the
schedule is stretched: it takes as many steps as in the plain run, each of them later. If AMP starts late, it perturbs
nothing before that.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import isfinite
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from flatmin.comparison.contenders import AUTO, PASSES, Contender
from flatmin.comparison.held_out import Measured, loss_on_radius_data, measure
from flatmin.comparison.outcome import Outcome
from flatmin.core.messages import describe
from flatmin.core.random_state import HostRandom, random_state, seed_everything, set_random_state
from flatmin.core.tensors import plain
from flatmin.doctor.finding import during
from flatmin.doctor.training import preserve_generators
from flatmin.doctor.user_training import MakeTraining, UserTraining, batch_count, call
from flatmin.optim.amp import AMP
from flatmin.optim.perturbed import PerturbedOptimizer
from flatmin.optim.radius import FIRST_RADIUS, MatchedRadius, RadiusScheduler, matched_until, radii_of, scale_radii


class Start:
    """Raises if a run does not start anew: with the weights that the run before it has ended with."""

    def __init__(self) -> None:
        self._before = self._after = ""

    def check(self, training: UserTraining) -> None:
        found = weights_fingerprint(training)
        if found == self._after != self._before:
            raise ValueError(
                "every run of a comparison must start anew, but make_training returned the weights that the last run "
                "has ended with; create the model, or reset its weights, inside make_training"
            )
        self._before = found

    def remember(self, training: UserTraining) -> None:
        self._after = weights_fingerprint(training)


def train_contender(
    make_training: MakeTraining,
    contender: Contender,
    seed: int,
    *,
    epochs: int,
    evaluations: int,
    perturbed_from: float = 0.0,
    start: Start,
) -> Outcome:
    """Train it from scratch, and return the result. Steps before `perturbed_from`, a share of the run, are plain."""
    began = time.perf_counter()
    with preserve_generators():
        training = call(make_training, seed)
        start.check(training)
        optimizer = wrap(training, contender)
        loop = _Loop(training, optimizer, contender, seed, epochs, perturbed_from)
        curve, measured = loop.run(evaluations)
        start.remember(training)
    failed = measured.failure()
    return Outcome(
        contender.key,
        seed,
        measures={} if failed else measured.measures,
        per_example={} if failed else measured.per_example,
        curve=curve,
        seconds=time.perf_counter() - began,
        failed=failed,
    )


def wrap(training: UserTraining, contender: Contender) -> AMP:
    """The optimizer of a contender. A plain one is AMP with ε = 0, whose steps are the base's own, bit for bit."""
    given = training.optimizer
    if isinstance(given, PerturbedOptimizer):
        given = given.behind_proxy()
        if not isinstance(given, AMP):
            raise TypeError(f"a comparison takes a plain optimizer or a flatmin.AMP, got {describe(given)}")
        _check_schedulers(training)
        optimizer, shares = given, _shares(given)
    else:
        with during("flatmin.AMP(optimizer)"):
            optimizer = AMP(given, epsilon=FIRST_RADIUS, model=training.model)
        shares = [1.0] * len(optimizer.param_groups)
    radius = 0.0 if contender.is_plain else contender.epsilon or FIRST_RADIUS
    scale_radii(optimizer, shares, radius)
    return optimizer


def own_radius(training: UserTraining) -> tuple[float | None, int]:
    """The largest ε of the user's AMP, if it is a number, and the number of passes that a step of AMP takes."""
    given = training.optimizer
    if not isinstance(given, PerturbedOptimizer):
        return None, PASSES
    given = given.behind_proxy()
    own = None if has_automatic_radius(training) else max(radii_of(given)) or None
    return own, 1 + getattr(given, "inner_iter", 1)


def has_automatic_radius(training: UserTraining) -> bool:
    return isinstance(training.optimizer, AMP) and training.optimizer.has_automatic_radius


def _check_schedulers(training: UserTraining) -> None:
    for scheduler in (training.scheduler, training.scheduler_per_step):
        if isinstance(scheduler, RadiusScheduler):
            raise ValueError(
                "a comparison sets the radius itself, and a RadiusScheduler would reset it; leave it out of "
                "make_training, and for a late start give start=, --start (--every is for flatmin compare --data)"
            )


def _shares(optimizer: AMP) -> list[float]:
    """Each group's ε as a share of the largest; groups that are not perturbed stay unperturbed."""
    radii = radii_of(optimizer)
    return [radius / max(radii) if max(radii) > 0 else 1.0 for radius in radii]


def weights_fingerprint(training: UserTraining) -> str:
    """A hash of the weights as they are."""
    return hashlib.sha256(_summed_weights(training)).hexdigest()[:16]


def fingerprint(training: UserTraining) -> str:
    """A hash of the initial weights and the optimizer's settings."""
    found = hashlib.sha256(_summed_weights(training))
    groups = getattr(training.optimizer, "base", training.optimizer).param_groups
    settings = [{key: value for key, value in group.items() if isinstance(value, Number | str)} for group in groups]
    found.update(repr([sorted(group.items()) for group in settings]).encode())
    return found.hexdigest()[:16]


def _summed_weights(training: UserTraining) -> bytes:
    """Names, shapes and sums."""
    state = {name: value for name, value in training.model.state_dict().items() if isinstance(value, Tensor)}
    totals = {name: plain(value).cpu().double().sum().item() for name, value in state.items()}
    return "".join(f"{name} {tuple(value.shape)} {totals[name]:.9g}" for name, value in state.items()).encode()


class _Stream:
    """A separate stream of random numbers: while it is active, all draws come from it and advance no other."""

    def __init__(self, seed: int, devices: list[torch.device]) -> None:
        before = _States(devices)
        seed_everything(seed)
        self._states = _States(devices)
        before.put_back()

    @contextmanager
    def active(self) -> Iterator[None]:
        before = _States(self._states.devices)
        self._states.put_back()
        try:
            yield
        finally:
            self._states = _States(self._states.devices)
            before.put_back()


class _States:
    """The states of all generators, as they are now."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._host, self.devices = HostRandom(), {device: random_state(device) for device in devices}

    def put_back(self) -> None:
        self._host.put_back()
        for device, state in self.devices.items():
            set_random_state(device, state)


def can_match(epochs: int, perturbed_from: float) -> bool:
    """Does an epoch with perturbed steps end before the radius has to be found?

    >>> can_match(1, 0.0), can_match(2, 0.0), can_match(4, 0.75), can_match(20, 0.75)
    (False, True, False, True)
    """
    return int(matched_until(perturbed_from) * epochs) > perturbed_from * epochs


class _Loop:
    def __init__(
        self,
        training: UserTraining,
        optimizer: AMP,
        contender: Contender,
        seed: int,
        epochs: int,
        perturbed_from: float,
    ) -> None:
        self.training, self.optimizer, self.length = training, optimizer, contender.length
        self._total = round(self.length * epochs)
        self._batch_count = batch_count(training.batches)
        self._late: RadiusScheduler | None = None
        if perturbed_from and not contender.is_plain:  # it counts steps, or epochs whose length is not known
            self._late = RadiusScheduler(optimizer, self._total * (self._batch_count or 1), start=perturbed_from)
        self._matched_until = matched_until(perturbed_from) * self._total
        devices = [device for device in optimizer.devices() if device.type != "cpu"]
        self._batches = _Stream(2 * seed + 1, devices)
        seed_everything(2 * seed)
        self._radius = MatchedRadius(optimizer) if contender.key == AUTO else None
        self._steps = self._stepped = self._epochs = self._epochs_stepped = 0
        self._loss: Tensor | None = None
        self._losses = 0

    def run(self, evaluations: int) -> tuple[list[dict[str, float]], Measured]:
        total = self._total
        count = min(evaluations, total)
        due = {round(total * (n + 1) / count) for n in range(count)}
        curve: list[dict[str, float]] = []
        for epoch in range(1, total + 1):
            self._epoch()
            if self._radius is not None and epoch <= self._matched_until:
                self._match()
            if epoch in due:
                measured = measure(self.training)
                point = {"training loss": self._mean_loss(), **measured.measures}
                curve.append({"epoch": epoch, **{name: value for name, value in point.items() if isfinite(value)}})
                if measured.failure() is not None:
                    break
        return curve, measured

    def _epoch(self) -> None:
        closures, count = self.training.closures(), 0
        while True:
            with self._batches.active():
                closure = next(closures, None)
            if closure is None:
                break
            count += 1
            with during("optimizer.step(closure)"):
                self._step(closure)
            if self._late is not None and self._batch_count is not None:
                self._late.step()
        if self._late is not None and self._batch_count is None:
            self._late.step()
        self._epochs += 1
        if not count:
            raise ValueError(
                f"the batches of make_training must be there in every epoch, but epoch {self._epochs} had none; "
                "return a loader or a list, or a function that makes a new iterator"
            )
        self._epochs_stepped = self._follow(self.training.scheduler, self._epochs, self._epochs_stepped)

    def _step(self, closure: Callable[[], Any]) -> None:
        self.optimizer.zero_grad()
        self.optimizer.step(closure, scaler=self.training.scaler)
        if self.training.scaler is not None:
            self.training.scaler.update()
        self._steps += 1
        self._stepped = self._follow(self.training.scheduler_per_step, self._steps, self._stepped)
        loss = self.optimizer.last.loss
        if loss is not None and loss.numel() == 1:
            self._loss = loss.detach().float() + (0 if self._loss is None else self._loss)
            self._losses += 1

    def _follow(self, scheduler: Any, now: int, stepped: int) -> int:
        """Step the schedule if it is due: stretched, it has as many steps as in the plain run."""
        due = int(now / self.length)
        if scheduler is not None:
            for _ in range(due - stepped):
                scheduler.step()
        return due

    def _match(self) -> None:
        if self._radius is not None:
            self._radius.step(loss_on_radius_data(self.training))

    def _mean_loss(self) -> float:
        """The mean loss of the steps since the last call."""
        mean = float("nan") if self._loss is None else float(self._loss) / self._losses
        self._loss, self._losses = None, 0
        return mean
