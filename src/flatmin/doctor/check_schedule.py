"""Whether a `RadiusScheduler` is called as often as it counts, as far as make_training says who calls it.

A scheduler that nothing calls leaves ε where it starts, often at 0. One that counts all steps of a training and is
called once per epoch gets nowhere near its end; one that counts epochs and is called after each step is over too soon.
"""

from collections.abc import Iterator
from typing import Any

from flatmin.doctor.finding import Finding
from flatmin.doctor.training import Training
from flatmin.doctor.user_training import UserTraining, batch_count
from flatmin.optim.radius.schedule import scheduler_of

NAME = "schedule"


def check_schedule(training: Training) -> Iterator[Finding]:
    """Nothing, if no scheduler changes ε."""
    if training.optimizer.radius_schedule is None:
        return
    made, scheduler = training.made, scheduler_of(training.optimizer)
    calls, when = None, ""
    if scheduler is not None and _contains(made.scheduler, scheduler):
        calls, when = made.epochs, "epoch"
    elif scheduler is not None and _contains(made.scheduler_per_step, scheduler):
        calls, when = _steps(made), "step"
    if scheduler is None or not when:
        seen = "a RadiusScheduler changes ε, and make_training does not say who calls its step()"
        change = "call it after every optimizer.step(); returned as scheduler_per_step or scheduler, it can be checked"
        yield Finding(NAME, "cannot tell", seen, change)
    elif calls is None or calls == scheduler.total_steps:
        seen = f"the RadiusScheduler is called after each {when}, and counts {scheduler.total_steps} calls"
        yield Finding(NAME, "ok", seen)
    else:
        seen = (
            f"the RadiusScheduler is called after each {when}, {calls} times, but its total_steps is "
            f"{scheduler.total_steps}"
        )
        yield Finding(NAME, "warning", seen, _way_out(made, when, calls, scheduler.total_steps))


def _contains(given: Any, scheduler: object) -> bool:
    """Is it this scheduler, or a ChainedScheduler, which steps all of its parts?"""
    return given is scheduler or any(part is scheduler for part in getattr(given, "_schedulers", ()))


def _steps(made: UserTraining) -> int | None:
    """Of the whole training; None if it is not known."""
    batches = 1 if made.batches is None else batch_count(made.batches)
    return None if made.epochs is None or batches is None else made.epochs * batches


def _way_out(made: UserTraining, when: str, calls: int, total_steps: int) -> str:
    if when == "epoch" and total_steps == _steps(made):
        return "return it as scheduler_per_step, and call it after every step, which it counts"
    if when == "step" and total_steps == made.epochs:
        return "return it as scheduler, and call it once per epoch, which it counts; or count steps"
    return f"give it total_steps={calls}"
