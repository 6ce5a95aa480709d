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
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from flatmin.core import distributed
from flatmin.core.messages import describe
from flatmin.optim.perturbed import PerturbedOptimizer
from flatmin.optim.radius.schedule import RadiusScheduler, radii_of, radius_of_new, scale_radii, with_new_radii
from flatmin.optim.wrapper import Group

AUTO, FIRST_RADIUS = "auto", 0.1  # epsilon="auto", and where it starts
RELEASE = 0.6  # the share of the perturbed part of a run in which ε is adjusted, if held-out data are to be trained on
MAX_FACTOR, MIN_FACTOR = 3.0, 2 / 3  # of one call
MIN_SHARE = 0.01  # of the first radius: ε never falls below that, because it could not grow from 0
MIN_AT_EDGE = 0.5  # share of steps at the edge of the ball below which a larger ε would change little


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
    in eval mode. On several ranks, all call it with the same held-out loss; save its state right after a call, or on
    every rank.

    If a `RadiusScheduler` sets the ε of the same optimizer, it applies its shares to the radius found here. Its growth
    must be "constant": this radius grows by itself.

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
        self.first = list(self.radii)
        if not any(self.first):
            raise ValueError(
                "a matched radius must start above 0, got 0 in all groups; write epsilon=0.1, and create the "
                "MatchedRadius before loading a checkpoint whose schedule has not started yet"
            )
        self._sums: Tensor | None = None  # of both losses, the share at the edge, and ones, on the device
        self._lacks_losses = False  # was there a step whose losses the optimizer has not seen?
        self._one: Tensor | None = None  # a 1 on the device
        self._watch()

    @classmethod
    def with_state(cls, optimizer: PerturbedOptimizer, state_dict: dict[str, Any]) -> "MatchedRadius":
        """That of a copy of its optimizer, whose ε may be 0 at the moment."""
        radius = cls.__new__(cls)
        radius.optimizer, radius.scheduler, radius._one = optimizer, None, None
        radius.load_state_dict(state_dict)
        radius._watch()
        return radius

    def _watch(self) -> None:
        self._handle = self.optimizer.register_step_post_hook(self._add)
        self.optimizer.watch_groups(self._group_added)

    def _applies_shares(self) -> HasRadii | None:
        """The scheduler that sets ε, if there is one; of several, the last that was made."""
        if self.scheduler is not None:
            found: HasRadii = self.scheduler
        else:
            watching = [one for one in self.optimizer.group_watchers() if isinstance(one, RadiusScheduler)]
            if not watching:
                return None
            found = watching[-1]
        if isinstance(found, RadiusScheduler) and found.schedule.growth != "constant":
            raise ValueError(
                f'a matched radius grows by itself, got a scheduler with growth="{found.schedule.growth}"; use '
                '"constant" there'
            )
        return found

    def _group_added(self, group: Group, has_radius: bool) -> None:
        if not has_radius and self._applies_shares() is None:
            group["epsilon"] = radius_of_new(self.optimizer, radii_of(self.optimizer)[:-1])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_handle"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has a copy of the optimizer, which has no hooks."""
        vars(self).update(state)
        self._watch()

    @property
    def radii(self) -> list[float]:
        """The ε of each group, or what its schedule grows to."""
        scheduler = self._applies_shares()
        return radii_of(self.optimizer) if scheduler is None else with_new_radii(self.optimizer, scheduler.radii)

    @torch.no_grad()
    def _add(self, *_: object) -> None:
        last = self.optimizer.last
        if last.on_ball is None or last.skipped is None:  # nothing was perturbed
            return
        home = last.on_ball.device
        if self._sums is None:
            self._sums = torch.zeros(4, dtype=_sum_dtype(home), device=home)
        if self._one is None or self._one.device != home:
            self._one = torch.ones((), device=home)
        losses = [loss.reshape(()).to(home) for loss in (last.loss, last.loss_perturbed) if _is_number(loss)]
        if len(losses) < 2:
            self._lacks_losses, losses = True, [0 * self._one] * 2
        row = torch.stack([*losses, last.on_ball, self._one])  # with the next line three kernels a step
        self._sums += torch.where(last.skipped, 0.0, row)

    def step(
        self, held_out_loss: float | Tensor, *, losses: tuple[float | Tensor, float | Tensor] | None = None
    ) -> float:
        """Adjust ε, and return the factor: 1 if nothing was perturbed since the last call, or if a loss is not finite.

        `losses` are the mean training losses at θ and at θ + Δ since the last call. A step with a closure that returns
        its loss measures them, and so does `optimizer.step(losses=(loss, loss_perturbed))` after `perturbed()` blocks;
        else, and for steps with `ascent=`, give them here.
        """
        scheduler, groups = self._applies_shares(), self.optimizer.process_groups
        if self._sums is None and not groups:
            return 1.0
        if self._lacks_losses and losses is None:
            raise ValueError(
                "the optimizer has not seen all losses at θ and at θ + Δ: after perturbed() blocks, write "
                "optimizer.step(losses=(loss, loss_perturbed)); with ascent=, or if the closure returns no tensor, "
                "give their means since the last call: step(held_out_loss, losses=(loss, loss_perturbed))"
            )
        if self._sums is None:  # other ranks may have had steps, as under join(): they wait for this one
            home = self.optimizer.devices()[0]
            self._sums = torch.zeros(4, dtype=_sum_dtype(home), device=home)
        if losses is not None:
            self._sums[:2] = self._sums[3] * self._sums.new_tensor([_number(loss) for loss in losses])
        held_out = self._sums.new_tensor([_number(held_out_loss)])
        numbers = distributed.mean_of_ranks(torch.cat([self._sums, held_out]), groups)
        *sums, count, new = numbers.tolist()
        self._sums, self._lacks_losses = None, False
        if not count:
            return 1.0
        loss, perturbed, at_edge = (total / count for total in sums)
        factor = _factor(loss, perturbed, at_edge, new)
        added = self.radii[len(self.first) :]
        self.first += [max(self.first) if radius and self.optimizer.ball == "global" else radius for radius in added]
        radii = [max(factor * now, MIN_SHARE * first) for now, first in zip(self.radii, self.first, strict=True)]
        if scheduler is None:
            scale_radii(self.optimizer, radii, 1.0)
        else:
            scheduler.set_radii(radii)
        return factor

    def state_dict(self) -> dict[str, Any]:
        """ε itself is in the optimizer's groups, or in the scheduler."""
        sums = None if self._sums is None else self._sums.tolist()
        return {"first": list(self.first), "sums": sums, "lacks_losses": self._lacks_losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.first, sums = list(state_dict["first"]), state_dict["sums"]
        self._lacks_losses = state_dict["lacks_losses"]
        home = self.optimizer.devices()[0]
        self._sums = None if sums is None else torch.tensor(sums, dtype=_sum_dtype(home), device=home)


def matched_until(start: float, release: float = RELEASE) -> float:
    """The share of a run after which ε stays as it is, if perturbing starts at `start`.

    >>> matched_until(0.0), matched_until(0.5)
    (0.6, 0.8)
    """
    return start + (1 - start) * release


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


def _check_owner(scheduler: RadiusScheduler, optimizer: PerturbedOptimizer) -> None:
    theirs: Any = scheduler.optimizer
    if isinstance(theirs, PerturbedOptimizer) and theirs.behind_proxy() is not optimizer:
        raise ValueError("scheduler must belong to the same optimizer, got one of another")


def _is_number(loss: Tensor | None) -> TypeGuard[Tensor]:
    return loss is not None and loss.numel() == 1


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
