"""ε during training, in a trainer that counts the steps: `start`, `growth` and `every` of FlatMinima and AMPTrainer.

During a step the groups of the optimizer have the schedule's share of ε, and between steps all of it. So checkpoints
contain all of ε, and a hook or a `MatchedRadius` may change it between steps. In a checkpoint that is saved within a
step, as for a job that is about to be preempted, the trainers replace the share.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from flatmin.optim.perturbed import PerturbedOptimizer
from flatmin.optim.radius import RadiusSchedule, radii_of, radius_of_new, scale_radii
from flatmin.optim.wrapper import Group


class ScheduledRadius:
    """Gives an optimizer the scheduled share of its ε for the time of a step."""

    def __init__(self, optimizer: PerturbedOptimizer, schedule: RadiusSchedule) -> None:
        self._optimizer, self._schedule = optimizer, schedule
        self._radii: list[float] = []  # all of ε, during a step
        self._share = 1.0  # of it, in that step
        self._given = radii_of(optimizer)  # before a checkpoint is loaded; raises if it is a tensor
        optimizer.watch_groups(self._group_added)

    def begin_step(self, step: int, total_steps: int) -> None:
        """Called for each micro-batch of a step, and by tuners without the end of a step that failed."""
        self.restore()
        self._radii = radii_of(self._optimizer)
        if self._given and not any(self._radii):  # of a checkpoint that was saved within a step without a perturbation
            self._radii = self._given
        self._given = []
        self._share = self._schedule.share(step, total_steps)
        scale_radii(self._optimizer, self._radii, self._share)
        self._shares = radii_of(self._optimizer)

    def _group_added(self, group: Group, has_radius: bool) -> None:
        """Within a step, by a hook at its beginning: the new group has its share in this step too."""
        if not self._radii:
            return
        radius: float = group["epsilon"] if has_radius else radius_of_new(self._optimizer, self._radii)
        group["epsilon"] = self._share * radius
        self._radii, self._shares = [*self._radii, radius], [*self._shares, group["epsilon"]]

    def end_step(self) -> None:
        found = radii_of(self._optimizer)[: len(self._radii)]
        if self._radii and found != self._shares:
            raise ValueError(
                f"start, growth and every had set epsilon to {self._shares} for a step, but it was set to {found} "
                "before the end of it; set it between steps: in Lightning in on_train_epoch_end or a hook of the "
                "validation, in a Hugging Face callback in on_step_end"
            )
        self.restore()

    def complete(self, groups: Iterable[dict[str, Any]]) -> None:
        """All of ε in the groups of a checkpoint that was saved within a step."""
        for group, radius in zip(groups, self._radii, strict=False):
            group["epsilon"] = radius

    @contextmanager
    def completed(self) -> Iterator[None]:
        """All of ε in the optimizer itself, while a checkpoint is saved within a step."""
        shares = radii_of(self._optimizer)
        try:
            self.complete(self._optimizer.param_groups)
            yield
        finally:
            scale_radii(self._optimizer, shares, 1.0)

    def restore(self) -> None:
        """All of ε again, also after an error."""
        scale_radii(self._optimizer, self._radii, 1.0)
        self._radii = []
