"""ε during training, in a trainer that counts the steps: `start`, `growth` and `every` of FlatMinima and AMPTrainer.

In each step the schedule's share of the full radius is written into the optimizer's groups. So whatever else writes
there in the meantime (a hook, a `MatchedRadius`) would be overwritten, and is refused.
"""

from torch.optim import Optimizer

from flatmin.optim.radius import RadiusSchedule, radii_of, scale_radii, with_new_radii


class ScheduledRadius:
    """Gives an optimizer the scheduled share of its ε in each step.

    All of ε is what the groups have at construction: a checkpoint that is loaded later may have a share of it.
    """

    def __init__(self, optimizer: Optimizer, schedule: RadiusSchedule) -> None:
        self._optimizer, self._schedule = optimizer, schedule
        self._radii = radii_of(optimizer)
        self.begin()

    def begin(self) -> None:
        """Training begins, or resumes: a checkpoint may have been loaded since the last step."""
        self._applied: list[float] = []

    def apply(self, step: int, total_steps: int) -> None:
        found = radii_of(self._optimizer)[: len(self._applied)]
        if found != self._applied:
            raise ValueError(
                f"start, growth and every set epsilon in each step, but it was set to {found} in the meantime, where "
                f"they had set {self._applied}; leave them out, or give the trainer a flatmin.AMP with a "
                "flatmin.RadiusScheduler (to adjust its radius: MatchedRadius(optimizer, scheduler=scheduler))"
            )
        self._radii = with_new_radii(self._optimizer, self._radii)
        scale_radii(self._optimizer, self._radii, self._schedule.share(step, total_steps))
        self._applied = radii_of(self._optimizer)

    def restore(self) -> None:
        """All of ε again, after training."""
        scale_radii(self._optimizer, self._radii, 1.0)
        self.begin()
