"""The radius ε over a training.

schedule.py     from when on weights are perturbed, how ε grows, and in which of the steps
matched.py      ε moved until the loss at θ + Δ meets the loss on held-out data
"""

from flatmin.optim.radius.matched import MatchedRadius
from flatmin.optim.radius.schedule import (
    Growth,
    RadiusSchedule,
    RadiusScheduler,
    radii_of,
    scale_radii,
    with_new_radii,
)

__all__ = ["Growth", "MatchedRadius", "RadiusSchedule", "RadiusScheduler", "radii_of", "scale_radii", "with_new_radii"]
