"""`epsilon="auto"` in FlatMinima and AMPTrainer: ε is matched with the validation loss that the trainer measures.

The trainer evaluates the model on data that it does not train on, between steps, and reports the mean loss there. Each
time, `optimizer.radius` adjusts ε. These data are never trained on, so this goes on until the end of the training. An
AMP with epsilon="auto" that the user made is adjusted too, if the loss is reported.
"""

from collections.abc import Mapping
from typing import Any, Literal

from flatmin.core import distributed
from flatmin.optim import AMP, RMP
from flatmin.optim.radius import AUTO, MatchedRadius, RadiusSchedule


def is_auto(epsilon: object) -> bool:
    return isinstance(epsilon, str) and epsilon == AUTO


def check_epsilon(
    epsilon: float | Literal["auto"] | None, method: type[AMP] | type[RMP], schedule: RadiusSchedule
) -> None:
    """Raise where a trainer cannot do what was asked for; a number is checked by the optimizer."""
    if not isinstance(epsilon, str):
        return
    if epsilon != AUTO:
        raise ValueError(f'epsilon must be a number or "auto", got {epsilon!r}')
    if not issubclass(method, AMP):
        raise ValueError(f'epsilon="auto" works only with flatmin.AMP, got {method.__name__}; give it a number')
    if schedule.growth != "constant":
        raise ValueError(f'epsilon="auto" grows by itself, got growth="{schedule.growth}"; leave it out')


def matched_radius(optimizer: object) -> MatchedRadius | None:
    """What adjusts the ε of this optimizer, if it is automatic."""
    return optimizer.radius if isinstance(optimizer, AMP) and optimizer.has_automatic_radius else None


def check_loss_on_ranks(radius: MatchedRadius, monitor: str, *, is_there: bool) -> None:
    """Raises on every rank if only some of them have a loss to match ε with: these would wait for the others."""
    if not distributed.has_several_ranks():
        return
    distributed.check_same(
        {"monitored loss": f"a new {monitor!r}" if is_there else f"no new {monitor!r}"},
        distributed.all_ranks(),
        device=radius.optimizer.devices()[0],
        way_out="log it on every rank, with sync_dist=True in place of rank_zero_only=True",
    )


def unadjusted(monitor: str, way_out: str) -> str:
    """A warning at the end of a training."""
    return f'epsilon="auto" adjusted nothing, because no evaluation in this training reported {monitor!r}; {way_out}'


def validation_loss(metrics: Mapping[str, Any], monitor: str) -> float:
    if monitor not in metrics:
        known = ", ".join(map(str, sorted(metrics))) or "nothing"
        raise ValueError(
            f'epsilon="auto" is matched with the metric {monitor!r}, but the evaluation reported {known}; name the '
            'loss on validation data: monitor="…"'
        )
    return float(metrics[monitor])
