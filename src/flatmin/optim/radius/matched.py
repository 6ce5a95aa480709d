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
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from flatmin.ball import norms
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
from flatmin.optim.radius.step_record import StepRecord, sum_dtype
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

    Call `step` with the mean loss on data that are not trained on, once per epoch or more often. A few hundred examples
    are enough. They must be like the training data (with as many wrong labels, if there are any), and the model must be
    in eval mode. On several ranks that train one model, all call it, and the losses are averaged; save its state right
    after a call, or on every rank.

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
        # all 0 if a scheduler is gone that was between two perturbed steps, or before the first one
        return found if any(found) else with_new_radii(self.optimizer, self.optimizer.scheduled_radii)

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

        `losses` are the mean training losses at θ and at θ + Δ since the last call. A step with a closure that returns
        its loss measures them, and so does `optimizer.step(losses=(loss, loss_perturbed))` after `perturbed()` blocks;
        else, and for steps with `ascent=`, give them here.
        """
        if isinstance(ongoing := self._ongoing(), RadiusScheduler):
            _check_growth(ongoing)
        record, groups = self._known, self.optimizer.process_groups or self._ranks_of_the_weights()
        record.calls += 1
        if record.sums is None and not groups:
            return 1.0
        given = [_number(held_out_loss)]
        if losses is not None:
            if len(losses) != 2:
                raise ValueError(
                    f"losses must be two numbers, the means at θ and at θ + Δ, got {len(losses)}; write "
                    "step(held_out_loss, losses=(loss, loss_perturbed))"
                )
            given += map(_number, losses)
        sums = record.sums
        if sums is None:  # other ranks may have had steps, as under join(): they wait for this one
            home = self.optimizer.devices()[0]
            sums = torch.zeros(4, dtype=sum_dtype(home), device=home)
        if losses is not None:
            sums = torch.cat([sums[3] * sums.new_tensor(given[1:]), sums[2:]])
        lacks = record.lacks_losses and losses is None
        numbers = distributed.mean_of_ranks(torch.cat([sums, sums.new_tensor([given[0], lacks])]), groups)
        *totals, count, new, lacking = numbers.tolist()
        if lacking:  # on any rank: then all raise, and none waits for another
            raise ValueError(
                "the optimizer has not seen all losses at θ and at θ + Δ: after perturbed() blocks, write "
                "optimizer.step(losses=(loss, loss_perturbed)); with ascent=, or if the closure returns no tensor, "
                "give their means since the last call: step(held_out_loss, losses=(loss, loss_perturbed))"
            )
        record.take()
        if not count:
            return 1.0
        mean_loss, mean_perturbed, at_edge = (total / count for total in totals)
        factor = _factor(mean_loss, mean_perturbed, at_edge, new)
        self._scale(factor)
        return factor

    def _ranks_of_the_weights(self) -> list[Any]:
        """The ranks whose gradients are averaged where this optimizer does not see it: their weights are equal."""
        if not distributed.has_several_ranks():
            return []
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        return distributed.groups_with_equal(norms(weights).to(self.optimizer.devices()[0]))

    def _scale(self, factor: float) -> None:
        record, radii = self._known, self.radii
        added = radii[len(record.first) :]
        shares = self.optimizer.ball == "global"
        record.first += [max(record.first) if radius and shares else radius for radius in added]
        radii = [max(factor * now, MIN_SHARE * first) for now, first in zip(radii, record.first, strict=True)]
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
        record, sums = self._known, state_dict["sums"]
        record.first, record.lacks_losses = list(state_dict["first"]), state_dict["lacks_losses"]
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
    """A group was added without a radius: it has the one that has been found, not the first."""
    if scheduler_of(optimizer) is None:  # else that has done it
        group["epsilon"] = radius_of_new(optimizer, radii_of(optimizer)[:-1])


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


def _number(loss: float | Tensor) -> float:
    return float(loss.detach() if isinstance(loss, Tensor) else loss)


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
