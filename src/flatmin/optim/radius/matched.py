"""A radius that nobody has to choose: ε is adjusted until the loss at θ + Δ matches the loss on new data.

    optimizer = AMP(base, epsilon="auto")
    …                                     an epoch of steps
    optimizer.radius.step(held_out_loss)

The loss on new data has its minimum a little away from that of the training loss, and AMP trains for the worst point
nearby. The ball is too small if the loss there is lower than on new data, and too large if it is higher. So at each
call

    ε ← ε √((L_held-out − L(θ)) / (L(θ + Δ) − L(θ)))          by a factor between 2/3 and 3

with the training losses as means over the steps since the last call. The square root allows for a rise between linear
and quadratic in ε, and for noisy held-out losses. ε may grow faster than it shrinks: with dropout, and while the loss
falls fast, the held-out loss is below the training losses, and ε must recover in time from what it lost then.

Held-out data need not be lost to training: the radius found in the first 60 % will do for the rest. Then stop calling
`step` and train on all data; ε stays.
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from flatmin.ball import combine, norms
from flatmin.core import distributed
from flatmin.core.messages import describe
from flatmin.optim.perturbed import PerturbedOptimizer
from flatmin.optim.radius.schedule import (
    RadiusScheduler,
    radii_of,
    radius_of_new,
    scale_radii,
    scheduler_of,
    with_new_radii,
)
from flatmin.optim.radius.step_record import SUMS, StepRecord, sum_dtype
from flatmin.optim.telemetry.step_info import whole
from flatmin.optim.wrapper import Group

AUTO, FIRST_RADIUS = "auto", 0.1  # epsilon="auto", and where it starts
RELEASE = 0.6  # the share of the perturbed part of a run in which ε is adjusted, if held-out data are to be trained on
MAX_FACTOR, MIN_FACTOR = 3.0, 2 / 3  # of one call
MIN_SHARE = 0.01  # of the first radius: ε never falls below that, because it could not grow from 0
MIN_AT_EDGE = 0.5  # share of steps with a ball whose edge Δ reaches, below which a larger ε would change little


class HasRadii(Protocol):
    """Something that applies a share of these radii in each step, such as a `RadiusScheduler`."""

    radii: list[float]

    def set_radii(self, radii: Sequence[float]) -> None: ...


class MatchedRadius:
    """Adjusts the ε of a flatmin.AMP to the held-out loss, as torch's ReduceLROnPlateau does the learning rate.

    AMP(base, epsilon="auto") has one, `optimizer.radius`, which starts with 0.1. To start elsewhere, make it yourself:

        optimizer = flatmin.AMP(base, epsilon=0.5, model=model)
        radius = flatmin.MatchedRadius(optimizer)

    Call `step` with the mean loss on data that are not trained on, once per epoch or more often: the loss that training
    minimises, with the same label smoothing, if any. A few hundred examples are enough. They must be like the training
    data (with as many wrong labels, if there are any), and the model must be in eval mode. On several ranks that train
    one model, all call it, and the losses are averaged; save its state right after a call, or on every rank. If the
    optimizer does not know which ranks do (it has no `model` that is a DistributedDataParallel), all ranks of the job
    compare their weights in the first call after a step: with equal weights they train one model, with different ones
    each its own, and if only some are equal, it is an error.

    If a `RadiusScheduler` sets the ε of the same optimizer (of several, the last that was made), it applies its shares
    to the radius found here. Its growth must be "constant": this radius grows by itself.

    scheduler   what applies the shares, if it is not a `RadiusScheduler`
    """

    def __init__(self, optimizer: PerturbedOptimizer, *, scheduler: HasRadii | None = None) -> None:
        if not (isinstance(optimizer, PerturbedOptimizer) and optimizer.starts_clean):
            raise TypeError(
                f"MatchedRadius adjusts the epsilon of a flatmin.AMP, got {describe(optimizer)}; give it the AMP "
                "itself (with Accelerate, `optimizer.optimizer`)"
            )
        self.optimizer, self.scheduler = optimizer.behind_proxy(), scheduler
        if scheduler is not None and not (hasattr(scheduler, "radii") and hasattr(scheduler, "set_radii")):
            raise TypeError(
                "scheduler must have radii and set_radii(), of which it applies a share in each step, got "
                f"{describe(scheduler)}; give it a RadiusScheduler, and leave out one of the learning rate"
            )
        if isinstance(scheduler, RadiusScheduler):
            _check_owner(scheduler, self.optimizer)
        ongoing = self._ongoing()
        if isinstance(ongoing, RadiusScheduler):
            _check_growth(ongoing)
        if self.optimizer.matching is None:
            start_recording(self.optimizer, self.radii, automatic=False)

    def _ongoing(self) -> HasRadii | None:
        """What sets ε in each step, if something does."""
        if self.scheduler is not None:
            return self.scheduler
        scheduler = scheduler_of(self.optimizer)
        return None if scheduler is None or scheduler.is_over else scheduler

    @property
    def radii(self) -> list[float]:
        """The ε of each group, or what its schedule grows to."""
        if (ongoing := self._ongoing()) is not None:
            return with_new_radii(self.optimizer, ongoing.radii)
        found = radii_of(self.optimizer)
        if any(found) or scheduler_of(self.optimizer) is not None:
            return found
        # all 0: a scheduler is gone that was between two perturbed steps, or before the first one
        return with_new_radii(self.optimizer, self.optimizer.scheduled_radii)

    @property
    def calls(self) -> int:
        """How often `step` was called."""
        return self._known.calls

    @property
    def _known(self) -> StepRecord:
        record = self.optimizer.matching
        assert record is not None
        return record

    def step(
        self, held_out_loss: float | Tensor, *, losses: tuple[float | Tensor, float | Tensor] | None = None
    ) -> float:
        """Adjust ε, and return the factor: 1 if nothing was perturbed since the last call, or if a loss is not finite.

        (Below 1 % of the radius that it started with, ε does not shrink.)

        `losses` are the mean training losses at θ and at θ + Δ since the last call. A step with a closure that returns
        its loss measures them, and so does `optimizer.step(losses=(loss, loss_perturbed))` after `perturbed()` blocks;
        else, and for steps with `ascent=`, give them here.
        """
        if isinstance(ongoing := self._ongoing(), RadiusScheduler):
            _check_growth(ongoing)
        new, given = _number("held_out_loss", held_out_loss), None if losses is None else _two(losses)
        if not any(self.radii):
            raise ValueError(
                "a radius that is adjusted must be above 0, got 0 in all groups (of a checkpoint without a "
                "perturbation?); give a group an epsilon above 0"
            )
        if (left := len(self.radii)) < (known := len(self._known.first)):
            raise ValueError(
                f"the radius was started with {known} parameter groups, and the optimizer has {left}; make a new "
                "optimizer for other groups"
            )
        record, groups = self._known, self._ranks()
        numbers = None if record.sums is None and not groups else self._mean_of_ranks(new, given, groups)
        if numbers is not None:
            *totals, count, steps, new, lacks_losses = numbers
            if lacks_losses:
                raise ValueError(
                    "the optimizer has not seen all losses at θ and at θ + Δ, each one number: after perturbed() "
                    "blocks, write optimizer.step(losses=(loss, loss_perturbed)); with ascent=, or if the closure "
                    "returns none, give their means since the last call: step(held_out_loss, losses=(loss, "
                    "loss_perturbed))"
                )
        record.take()
        record.calls += 1
        if numbers is None or not steps:
            return 1.0
        if count:
            mean_loss, mean_perturbed, at_edge = (total / count for total in totals)
            sign = -1 if self._maximises() else 1
            factor = _factor(sign * mean_loss, sign * mean_perturbed, at_edge, sign * new)
        else:
            factor = MIN_FACTOR  # every step was skipped: perhaps a smaller ball has a finite loss
        self._scale(factor)
        return factor

    def _mean_of_ranks(self, new: float, given: tuple[float, float] | None, groups: Sequence[Any]) -> list[float]:
        """The sums since the last call, the held-out loss, and whether losses are missing: means over the ranks.

        So all of them hear of what is missing on one. Under join() a rank may have had no step: its sums are 0.
        """
        record = self._known
        sums = record.sums
        if sums is None:
            home = self.optimizer.devices()[0]
            sums = torch.zeros(SUMS, dtype=sum_dtype(home), device=home)
        if given is not None:
            sums = torch.cat([sums[3] * sums.new_tensor(given), sums[2:]])
        lacks_losses = record.lacks_losses and given is None
        row = torch.cat([sums, sums.new_tensor([new, lacks_losses])])
        found: list[float] = distributed.mean_of_ranks(row, groups).tolist()
        return found

    def _ranks(self) -> Sequence[Any]:
        """The process groups of the ranks that train this model together."""
        groups = self.optimizer.process_groups
        if groups or not distributed.has_several_ranks():
            return groups
        record = self._known
        if record.shares_weights is None:  # gradients may be averaged where the optimizer does not see it
            weights = [p for group in self.optimizer.param_groups for p in group["params"]]
            home = self.optimizer.devices()[0]
            lengths = norms(weights).to(home, sum_dtype(home))  # one dtype, whatever that of the weights on each rank
            counts = lengths.new_tensor([float(record.sums is not None), float(len(weights))])
            mine = torch.cat([counts, lengths[:1], combine(lengths).reshape(1)])
            rows = distributed.numbers_of_ranks(mine.nan_to_num())  # nan is not equal to nan, but replicas may both be
            has_stepped, different = bool(rows[:, 0].any()), len(rows[:, 1:].unique(dim=0))
            if 1 < different < len(rows):
                raise ValueError(
                    f"all ranks must train one model, or each its own, got {different} different models on {len(rows)} "
                    "ranks; give flatmin.AMP the DistributedDataParallel module: model=ddp_model"
                )
            if different == 1 and not has_stepped:  # weights from the same seed, and nothing to average yet
                return ()
            record.shares_weights = different == 1
        return distributed.all_ranks() if record.shares_weights else ()

    def _maximises(self) -> bool:
        """Does the base go up, so that the loss at θ + Δ is the lower one?"""
        return any(group.get("maximize", self.optimizer.maximises) for group in self.optimizer.param_groups)

    def _scale(self, factor: float) -> None:
        record, radii = self._known, self.radii
        firsts = record.first + [0.0] * (len(radii) - len(record.first))  # of a group that was added, or was at 0
        shares = self.optimizer.ball == "global"
        pairs = zip(radii, firsts, strict=True)
        record.first = [(max(firsts) if shares else first or now) if now else first for now, first in pairs]
        pairs = zip(radii, record.first, strict=True)
        radii = [max(factor * now, min(now, MIN_SHARE * first)) for now, first in pairs]  # 0 is left alone
        scheduler = self.scheduler if self.scheduler is not None else scheduler_of(self.optimizer)
        if scheduler is None:
            scale_radii(self.optimizer, radii, 1.0)
        else:  # also one whose training is over, which may be stepped again
            scheduler.set_radii(radii)

    def state_dict(self) -> dict[str, Any]:
        """ε itself is in the optimizer's groups, or in the scheduler."""
        record = self._known
        sums = None if record.sums is None else record.sums.tolist()
        return {"first": list(record.first), "sums": sums, "lacks_losses": record.lacks_losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Before the optimizer's own, or after it."""
        given: Any = state_dict
        saved: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
        first, sums, lacks_losses = map(saved.get, ("first", "sums", "lacks_losses"))
        has_sums = "sums" in saved and (sums is None or (isinstance(sums, list) and len(sums) == SUMS))
        if not (isinstance(first, list) and isinstance(lacks_losses, bool) and has_sums):
            raise ValueError(
                f"this is not the state of a MatchedRadius, or that of another version, got {describe(state_dict)}; "
                "load the optimizer's alone, which has ε: only what was measured since the last adjustment is missing"
            )
        if len(first) > (groups := len(self.optimizer.param_groups)):
            raise ValueError(
                f"the state is that of a radius with {len(first)} parameter groups, got an optimizer with {groups}; "
                "load it with the groups that it was saved with"
            )
        record = self._known
        record.first, record.lacks_losses, record.is_loaded = list(first), lacks_losses, True
        record.sums = None
        if sums is not None:
            home = self.optimizer.devices()[0]
            record.sums = torch.tensor(sums, dtype=sum_dtype(home), device=home)


def start_recording(optimizer: PerturbedOptimizer, first: Sequence[float], *, automatic: bool) -> None:
    """Let its steps measure what a MatchedRadius needs, which starts with these radii."""
    if not any(first):
        raise ValueError(
            "a radius that is adjusted must start above 0, got 0 in all groups; give one of them an epsilon above 0 "
            "(with a schedule that has not started yet: before loading its checkpoint)"
        )
    optimizer.matching = StepRecord(first, automatic=automatic)
    record_steps(optimizer)


def record_steps(optimizer: PerturbedOptimizer) -> None:
    """For a new record, and for that of a copy. The hook holds no optimizer, so none is kept alive."""
    optimizer.register_step_post_hook(_add_last)


def _add_last(optimizer: Any, *_: object) -> None:
    optimizer.matching.add(optimizer.last)


def set_radius_of_new(optimizer: PerturbedOptimizer, group: Group) -> None:
    """A group was added without a radius: in one ball it has the one that has been found, not the first."""
    if scheduler_of(optimizer) is not None:  # that has done it
        return
    others = radii_of(optimizer)[:-1]
    if not any(others):  # a scheduler is gone that was between two perturbed steps
        others = list(optimizer.scheduled_radii)
        scale_radii(optimizer, others, 1.0)
    group["epsilon"] = radius_of_new(optimizer, others)


def matched_until(start: float, release: float = RELEASE) -> float:
    """The share of a run after which ε stays as it is, if perturbing starts at `start`.

    >>> matched_until(0.0), matched_until(0.5)
    (0.6, 0.8)
    """
    return start + (1 - start) * release


def _check_owner(scheduler: RadiusScheduler, optimizer: PerturbedOptimizer) -> None:
    if scheduler.wrapper is not None and scheduler.wrapper is not optimizer:
        raise ValueError("scheduler must belong to the same optimizer, got one of another")


def _check_growth(scheduler: RadiusScheduler) -> None:
    if scheduler.schedule.growth != "constant":
        raise ValueError(
            f'a matched radius grows by itself, got a scheduler with growth="{scheduler.schedule.growth}"; use '
            '"constant" there'
        )


def _two(losses: object) -> tuple[float, float]:
    if not (isinstance(losses, tuple | list) and len(losses) == 2):
        raise ValueError(
            f"losses must be two numbers, the means at θ and at θ + Δ, got {losses!r}; write "
            "step(held_out_loss, losses=(loss, loss_perturbed))"
        )
    return _number("the loss at θ", losses[0]), _number("the loss at θ + Δ", losses[1])


def _number(name: str, loss: object) -> float:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return float(whole(loss))
    if isinstance(loss, Real):
        return float(loss)
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else describe(loss)
    raise TypeError(f"{name} must be a mean, one number, got {found}; take the mean over all examples")


def _factor(loss: float, perturbed: float, at_edge: float, new: float) -> float:
    """What ε is multiplied by.

    >>> _factor(0.1, 0.2, 1.0, 0.2), _factor(0.1, 0.2, 1.0, 9.9), _factor(0.1, 0.2, 1.0, 0.05)
    (1.0, 3.0, 0.6666666666666666)
    >>> _factor(0.1, 0.2, 0.1, 0.9)                  # Δ seldom reaches the edge: ζ is what bounds it
    1.0
    """
    rise, gap = perturbed - loss, new - loss
    if not (math.isfinite(rise) and math.isfinite(gap)):
        return 1.0
    wanted = MAX_FACTOR if rise <= 0 < gap else 0.0 if gap <= 0 else math.sqrt(gap / rise)
    factor = min(max(wanted, MIN_FACTOR), MAX_FACTOR)
    return min(factor, 1.0) if at_edge < MIN_AT_EDGE else factor
