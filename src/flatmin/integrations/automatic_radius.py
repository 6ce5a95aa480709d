"""`epsilon="auto"` of FlatMinima and AMPTrainer: ε is matched with the validation loss that the trainer measures.

The trainer evaluates the model on data that it does not train on, between steps, and reports the mean loss there. Each
time, a `MatchedRadius` adjusts ε. These data are never trained on, so this goes on until the end of the training.
"""

from collections.abc import Mapping
from typing import Any, Literal

from flatmin.optim import AMP, RMP
from flatmin.optim.radius import AUTO, FIRST_RADIUS, RadiusSchedule


def is_auto(epsilon: object) -> bool:
    return isinstance(epsilon, str) and epsilon == AUTO


def initial_radius(epsilon: float | Literal["auto"], method: type[AMP] | type[RMP], schedule: RadiusSchedule) -> float:
    """What ε starts with: itself, unless it is automatic."""
    if not isinstance(epsilon, str):
        return epsilon
    if epsilon != AUTO:
        raise ValueError(f'epsilon must be a number or "auto", got {epsilon!r}')
    if not issubclass(method, AMP):
        raise ValueError(f'epsilon="auto" works only with flatmin.AMP, got {method.__name__}; give it a number')
    if schedule.growth != "constant":
        raise ValueError(f'epsilon="auto" grows by itself, got growth="{schedule.growth}"; leave it out')
    return FIRST_RADIUS


def validation_loss(metrics: Mapping[str, Any], monitor: str) -> float:
    if monitor not in metrics:
        known = ", ".join(map(str, sorted(metrics))) or "nothing"
        raise ValueError(
            f'epsilon="auto" is matched with the metric {monitor!r}, but the evaluation reported {known}; name the '
            'loss on validation data: monitor="…"'
        )
    return float(metrics[monitor])
