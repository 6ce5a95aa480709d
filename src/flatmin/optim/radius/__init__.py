"""The radius ε during training.

schedule.py     when perturbing starts, how ε grows, and which steps are perturbed
matched.py      ε adjusted until the loss at θ + Δ matches the loss on held-out data
step_record.py  what steps have measured since it was last adjusted
"""

from flatmin.optim.radius.matched import AUTO, FIRST_RADIUS, MatchedRadius, matched_until
from flatmin.optim.radius.schedule import (
    Growth,
    RadiusSchedule,
    RadiusScheduler,
    radii_of,
    radius_of_new,
    scale_radii,
)

__all__ = [
    "AUTO",
    "FIRST_RADIUS",
    "Growth",
    "MatchedRadius",
    "RadiusSchedule",
    "RadiusScheduler",
    "matched_until",
    "radii_of",
    "radius_of_new",
    "scale_radii",
]
