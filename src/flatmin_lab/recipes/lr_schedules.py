"""Learning rates as pure functions of the step: no state to save or advance, so a run can resume at any step.

    rate("multi_step", 0.1, step, steps)         at `step` (from 0) of `steps`

    constant      the top rate
    multi_step    divided by ten after half and after three quarters (the paper: after epochs 100 and 150 of 200)
    linear        1 − t, down to 0
    cosine        ½(1 + cos πt), down to 0
    one_cycle     up by a cosine over the first 30 %, from 1/25, then down to 1/250,000

A warm-up multiplies any of them by a ramp from 1/w to 1 over the first w steps; one_cycle has its own.
"""

import math
from collections.abc import Callable, Sequence


def constant(step: int, steps: int) -> float:
    return 1.0


def multi_step(step: int, steps: int, *, milestones: Sequence[float] = (0.5, 0.75), gamma: float = 0.1) -> float:
    """`milestones` are fractions of the run.

    >>> [multi_step(step, 200) for step in (99, 100, 150)]
    [1.0, 0.1, 0.010000000000000002]
    """
    return float(gamma ** sum(step >= round(milestone * steps) for milestone in milestones))


def linear(step: int, steps: int) -> float:
    return 1 - step / steps


def cosine(step: int, steps: int) -> float:
    return (1 + math.cos(math.pi * step / steps)) / 2


def one_cycle(step: int, steps: int, *, rise: float = 0.3, start: float = 1 / 25, end: float = 1e-4 / 25) -> float:
    """Smith's super-convergence with the numbers of torch's OneCycleLR; momentum does not change."""
    top, last = rise * steps - 1, steps - 1
    if step <= top:
        return _cosine_between(start, 1.0, step / top if top > 0 else 1.0)
    return _cosine_between(1.0, end, (step - top) / (last - top) if last > top else 1.0)


def _cosine_between(begin: float, end: float, share: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * share)) / 2


SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": constant,
    "multi_step": multi_step,
    "linear": linear,
    "cosine": cosine,
    "one_cycle": one_cycle,
}


def rate(name: str, top: float, step: int, steps: int, *, warmup: int = 0, **settings: object) -> float:
    """The learning rate of a step: the top rate, times the schedule, times the ramp of the warm-up."""
    ramp = min(1.0, (step + 1) / warmup) if warmup else 1.0
    return top * ramp * SCHEDULES[name](step, steps, **settings)
