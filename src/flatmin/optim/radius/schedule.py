"""The radius ε during training: when perturbing starts, how ε grows, and which steps are perturbed.

    scheduler = RadiusScheduler(optimizer, total_steps, start=0.5)
    optimizer.step(closure)
    scheduler.step()

A perturbation costs a pass, and those before the first drop of the learning rate gain little. While ε is 0, a step is
the base's own: one call of the closure, one pass, one replay of a smaller CUDA graph.

`RadiusSchedule` is the share of ε as a function of the step, for loops that count steps; `RadiusScheduler` counts them.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, Literal, get_args
from weakref import finalize, ref

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flatmin.core.messages import describe
from flatmin.optim.wrapper import Group, OptimizerWrapper, whole_number

Growth = Literal["constant", "linear", "cosine"]
GROWTHS: tuple[str, ...] = get_args(Growth)

MIN_BATCHES, MIN_STEPS = 10, 1000  # of an epoch and of a training, where its scheduler is called once per epoch

_SHARES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: progress,
    "cosine": lambda progress: (1 - math.cos(math.pi * progress)) / 2,
}


@dataclass(frozen=True, kw_only=True)
class RadiusSchedule:
    """From `start` (a share of the training) on, every k-th step is perturbed, with a radius that is ε or grows to ε.

    >>> late = RadiusSchedule(start=0.5, every=2)
    >>> [late.share(step, 8) for step in range(8)]
    [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    >>> [RadiusSchedule(growth="linear").share(step, 4) for step in range(4)]
    [0.25, 0.5, 0.75, 1.0]
    """

    start: float = 0.0
    growth: Growth = "constant"
    every: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.start, bool) or not isinstance(self.start, int | float) or not 0 <= self.start < 1:
            raise ValueError(f"start must be a share of the training, at least 0 and below 1, got {self.start!r}")
        if self.growth not in GROWTHS:
            raise ValueError(f"unknown growth {self.growth!r}; choose from {', '.join(GROWTHS)}")
        whole_number("every", self.every, least=1)

    @property
    def moves(self) -> bool:
        """Does it change anything, or does every step use all of ε?"""
        return self != RadiusSchedule()

    def first_step(self, total_steps: int) -> int:
        """The first step that is perturbed, counted from 0: at the latest the last one."""
        return min(round(self.start * total_steps), total_steps - 1)

    def share(self, step: int, total_steps: int) -> float:
        """The share of ε in this step, counted from 0: above 0 in at least one, and all of ε after the last."""
        begin = self.first_step(total_steps)
        if step >= total_steps:
            return 1.0
        if step < begin or (step - begin) % self.every:
            return 0.0
        return _SHARES[self.growth]((step - begin + 1) / (total_steps - begin))


def scheduler_of(optimizer: OptimizerWrapper) -> "RadiusScheduler | None":
    """The RadiusScheduler of an optimizer, the last that was made and is still in use."""
    return next((one for one in reversed(optimizer.group_watchers()) if isinstance(one, RadiusScheduler)), None)


def radii_of(optimizer: Optimizer) -> list[float]:
    """The ε of each group. It must not be a tensor: whether it is 0 would be known only on its device."""
    radii = [group["epsilon"] for group in optimizer.param_groups]
    if any(isinstance(radius, Tensor) for radius in radii):
        raise TypeError(
            "a radius that changes must be a number, got a tensor as epsilon, with which every step is perturbed; "
            "write epsilon=0.1 (a captured step puts it on the device by itself)"
        )
    return radii


def with_new_radii(optimizer: Optimizer, radii: Sequence[float]) -> list[float]:
    """These radii, and the ε of the groups that were added since they were read."""
    return [*radii, *radii_of(optimizer)[len(radii) :]]


def radius_of_new(optimizer: Optimizer, radii: Sequence[float]) -> float:
    """Of a group that is added without one, beside groups with these: one ball has one radius."""
    own: float = optimizer.param_groups[-1]["epsilon"]
    return max(radii) if getattr(optimizer, "ball", None) == "global" and any(radii) else own


def scale_radii(optimizer: Optimizer, radii: Sequence[float], share: float) -> None:
    """Give each group this share of its radius."""
    for group, radius in zip(optimizer.param_groups, radii, strict=False):
        group["epsilon"] = share * radius


@dataclass
class _Counts:
    """The steps of the optimizer between two calls of a scheduler."""

    taken: int = 0  # since the last call
    before: int = 0  # between the two calls before
    was_called: bool = False
    has_warned: bool = False

    def shows_no_calls(self, total_steps: int) -> bool:
        """At a step: were all steps taken without a call? Fewer than MIN_STEPS may be the first of as many epochs."""
        return not self.was_called and self.taken == total_steps >= MIN_STEPS

    def shows_epochs(self, total_steps: int) -> bool:
        """At a call: are calls epochs, and total_steps the steps of all of them? Said once, and only where it is sure.

        A thousand epochs are rare, and so are calls after a fixed number of steps that is neither one nor an epoch.
        (After steps that fp16 skipped, loops do not call a scheduler: these numbers differ from call to call.)
        """
        taken, self.taken = self.taken, 0
        again, self.before = taken == self.before, taken
        if self.has_warned or not again or taken < MIN_BATCHES or total_steps < MIN_STEPS or total_steps % taken:
            return False
        self.has_warned = True
        return True


class RadiusScheduler(LRScheduler):
    """Changes the ε of a flatmin.AMP or flatmin.RMP, as torch's schedulers do the learning rate, alongside any of them.

        optimizer = flatmin.AMP(base, epsilon=0.1, model=model)
        scheduler = flatmin.RadiusScheduler(optimizer, total_steps=epochs * len(loader))

    total_steps  how many steps the optimizer will take (not how many micro-batches); call `step()` after each
    start        the share of the training before the first perturbation: a step costs one pass until then
    growth       from then on: "constant" at ε, or growing from 0 to ε, "linear" or along half a "cosine"
    every        perturb only every k-th step

    The radius of each group grows to the ε that the group has now, and is that ε again when training is over. It is a
    torch `LRScheduler`, for frameworks that ask for one, and leaves the learning rate alone.

    >>> import flatmin, torch
    >>> base = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    >>> optimizer = flatmin.AMP(base, epsilon=0.2)
    >>> scheduler = RadiusScheduler(optimizer, total_steps=4, start=0.5, growth="linear")
    >>> for _ in range(4):
    ...     print(scheduler.get_last_radius(), optimizer.perturbs)
    ...     scheduler.step()
    [0.0] False
    [0.0] False
    [0.1] True
    [0.2] True
    """

    def __init__(  # not LRScheduler's own: that one watches and counts the optimizer's steps for lr
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        start: float = 0.5,
        growth: Growth = "constant",
        every: int = 1,
    ) -> None:
        self.optimizer = optimizer
        if self.wrapper is None:  # the groups of a wrapper's base have an epsilon too, but it does not know the wrapper
            raise TypeError(
                f"RadiusScheduler changes the epsilon of a flatmin.AMP or flatmin.RMP, got {describe(optimizer)}; "
                "write RadiusScheduler(flatmin.AMP(optimizer, epsilon=0.1), total_steps), with the AMP itself and not "
                "its base"
            )
        self.total_steps = whole_number("total_steps", total_steps, least=1)
        self.schedule = RadiusSchedule(start=start, growth=growth, every=every)
        self.radii = radii_of(optimizer)
        self._check_growth(growth)
        if not any(self.radii) and getattr(optimizer, "defaults", {}).get("epsilon"):
            raise ValueError(
                "a RadiusScheduler takes its radius from the optimizer, got 0 in all groups; create it before loading "
                "a checkpoint whose schedule has not started yet, or give the optimizer epsilon=0 if 0 is meant"
            )
        self._calls = 0
        self._counts = _Counts()
        self._watch_groups()
        self._set()

    def _check_growth(self, growth: Growth) -> None:
        if growth != "constant" and getattr(self.wrapper, "matching", None) is not None:
            raise ValueError(
                f'a radius that is adjusted to held-out data grows by itself, got growth="{growth}"; use "constant"'
            )

    @property
    def wrapper(self) -> OptimizerWrapper | None:
        """The flatmin.AMP or flatmin.RMP itself, or the one that was prepared by Accelerate."""
        inner: Any = self.optimizer
        while inner is not None and not isinstance(inner, OptimizerWrapper):
            inner = getattr(inner, "optimizer", None)
        return None if inner is None else inner.behind_proxy()

    @property
    def is_over(self) -> bool:
        """Has the training ended that it was made for? Then ε is all of its radius."""
        return self.last_epoch >= self.total_steps

    @property
    def last_epoch(self) -> int:
        """Torch's name for how often step() was called."""
        return self._calls

    @last_epoch.setter
    def last_epoch(self, calls: int) -> None:
        """For others: torch's SequentialLR counts its parts back when it is made."""
        if calls < self._calls:
            raise TypeError(
                "a RadiusScheduler counts all steps of a training, so it cannot be one part of a SequentialLR, which "
                "steps one part at a time; call its step() beside the other scheduler's, or put both into a "
                "ChainedScheduler"
            )
        self._calls = calls

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has a copy of the optimizer, which nobody watches yet."""
        vars(self).update(state)
        self._counts = _Counts()
        self._watch_groups()

    def _watch_groups(self) -> None:
        """A copy of an optimizer that holds its scheduler is not ready yet: then from the next step on."""
        self._watches = False
        with suppress(AttributeError):
            if (wrapper := self.wrapper) is not None:
                wrapper.watch_groups(self._group_added)
                self._count_steps(wrapper)
            self._watches = True

    def _group_added(self, group: Group, has_radius: bool) -> None:
        if (wrapper := self.wrapper) is not None and scheduler_of(wrapper) is not self:
            return  # a later one sets it
        if self.is_over:  # since then the groups may have been given others
            self.radii = radii_of(self.optimizer)[:-1]
        if not has_radius:
            group["epsilon"] = radius_of_new(self.wrapper or self.optimizer, self.radii)
        self._set()

    def step(self, epoch: int | None = None) -> None:
        """Call it after `optimizer.step()`: sets the radius of the next step, or of step number `epoch`."""
        self._calls = self._calls + 1 if epoch is None else whole_number("epoch", epoch)
        self._counts.was_called = True
        if epoch is None and self._counts.shows_epochs(self.total_steps):
            taken = self._counts.before
            warnings.warn(
                f"RadiusScheduler.step() is called once for {taken} steps of the optimizer, but total_steps counts "
                f"these calls, so the schedule would end only after {taken * self.total_steps} steps; call it after "
                "every step, or give total_steps=epochs to call it once per epoch",
                RuntimeWarning,
                stacklevel=2,
            )
        self._set()

    def _count_steps(self, optimizer: OptimizerWrapper) -> None:
        me = ref(self)

        def count(*_: object) -> None:
            if (scheduler := me()) is not None:
                scheduler._step_taken()

        finalize(self, optimizer.register_step_post_hook(count).remove).atexit = False

    def _step_taken(self) -> None:
        self._counts.taken += 1
        if not (self._counts.shows_no_calls(self.total_steps) and self._calls == 0 and self.schedule.moves):
            return
        if (wrapper := self.wrapper) is not None and scheduler_of(wrapper) is self:
            warnings.warn(
                f"the optimizer has taken {self.total_steps} steps, the total_steps of its RadiusScheduler, whose "
                "step() was never called, so epsilon is still that of the first step; call it after every step",
                RuntimeWarning,
                stacklevel=2,
            )

    def _set(self) -> None:
        if not self._watches:
            self._watch_groups()
        self._step_count = self.last_epoch + 1  # torch's, which Accelerate compares with total_steps
        self.radii = with_new_radii(self.optimizer, self.radii)
        if (wrapper := self.wrapper) is not None:
            wrapper.scheduled_radii = list(self.radii)
            wrapper.radius_schedule = self._ahead() if self.schedule.moves and not self.is_over else None
        scale_radii(self.optimizer, self.radii, self.schedule.share(self.last_epoch, self.total_steps))

    def _ahead(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule,
            "radii": self.radii,
            "steps": self.last_epoch,
            "total_steps": self.total_steps,
        }

    def set_radii(self, radii: Sequence[float]) -> None:
        """Set the radii to grow to from now on, one per group."""
        groups, given = len(self.optimizer.param_groups), list[Any](radii)
        are_numbers = all(isinstance(radius, Real) and 0 <= float(radius) < math.inf for radius in given)
        if len(given) != groups or not are_numbers:
            raise ValueError(f"radii must be {groups} numbers of at least 0, one per group, got {given}")
        self.radii = [float(radius) for radius in given]  # one of numpy's would need torch.load(weights_only=False)
        self._set()

    def get_last_radius(self) -> list[float]:
        """The ε of the next step, one per group."""
        return radii_of(self.optimizer)

    def get_last_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.last_epoch,
            "total_steps": self.total_steps,
            "radii": list(self.radii),
            **asdict(self.schedule),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved, known = dict(state_dict), self.state_dict().keys()
        for how, keys in (("has no", known - saved.keys()), ("also has", saved.keys() - known)):
            if keys:
                raise ValueError(
                    f"this is not the state of a RadiusScheduler: it {how} {', '.join(sorted(keys))}; load what its "
                    "state_dict() returned"
                )
        steps, total_steps, radii = (saved.pop(key) for key in ("steps", "total_steps", "radii"))
        schedule = RadiusSchedule(**saved)
        self._check_growth(schedule.growth)
        self.schedule = schedule  # nothing was loaded until here, where nothing raises any more
        self._calls, self.total_steps, self.radii = steps, total_steps, list(radii)
        self._counts.taken = self._counts.before = 0
        self._set()
