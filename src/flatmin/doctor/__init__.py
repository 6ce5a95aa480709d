"""Does a training loop meet AMP's requirements? A doctor for your own loops.

    for finding in flatmin.doctor.examine(make_training):
        print(finding.verdict, finding.name, finding.seen, finding.change)

`make_training()` returns `(model, optimizer, closure)`, or `(model, optimizer, closure, scaler)`, or a mapping with
more parts (user_training.py); it is called a few times, and what it returns is trained for a few steps and discarded.
The examination goes from the closure to the step and ends at the first error, because later checks would show nothing.

user_training.py        what make_training may return: the parts of a training setup
training.py             these parts, with AMP, on one batch; a snapshot of them
closure_call.py         one call of the closure, observed
closure_variables.py    what the closure refers to
check_*.py              the checks: each returns findings
finding.py              what a check found
"""

import warnings
from collections.abc import Iterator

from flatmin.core.distributed import has_several_ranks
from flatmin.core.random_state import SharedGeneratorWarning
from flatmin.doctor import check_ranks, check_steps
from flatmin.doctor.check_baseline import check_epsilon_zero, measure_cost
from flatmin.doctor.check_determinism import check_repeats, rounding_of
from flatmin.doctor.check_gradients import (
    check_clipping,
    check_gradients_exist,
    check_loss,
    check_mode,
    check_parameters,
    check_scaler,
    check_zero_grad,
    observe_elsewhere,
    observe_on_top,
)
from flatmin.doctor.check_radius import check_ascent, check_ball, check_epsilon, first_guess
from flatmin.doctor.check_schedule import check_schedule
from flatmin.doctor.closure_call import observe, settle_scale
from flatmin.doctor.finding import Crash, Finding, Verdict, during, has_error, own_lines
from flatmin.doctor.training import (
    Training,
    TrainingSnapshot,
    check_make_training,
    keeps_trained_weights,
    new_training,
    preserve_generators,
)
from flatmin.doctor.user_training import MakeTraining

__all__ = ["Crash", "Finding", "MakeTraining", "Verdict", "during", "examine", "first_guess", "has_error", "own_lines"]


def examine(make_training: MakeTraining) -> list[Finding]:
    """Examine a training setup, and return the findings in the order of the checks.

    >>> import torch
    >>> def make_training():
    ...     model = torch.nn.Linear(3, 2)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
    ...     def closure():
    ...         optimizer.zero_grad()
    ...         loss = torch.nn.functional.cross_entropy(model(x), y)
    ...         loss.backward()
    ...         return loss
    ...     return model, optimizer, closure
    >>> findings = examine(make_training)
    >>> {finding.verdict for finding in findings}
    {'ok'}
    >>> [finding.seen for finding in findings if finding.name == "zero_grad"]
    ['the closure zeroes the gradients']
    """
    found: list[Finding] = []
    with preserve_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore", SharedGeneratorWarning)  # there is a finding for it
        try:
            for part in _stages(make_training):
                found += part
                if check_ranks.any_rank(has_error(part)):  # all ranks stop together
                    break
        except check_ranks.OtherRankCrashError as error:
            found.append(error.finding())
        except Crash as crash:
            found.append(crash.finding())
            check_ranks.all_gather(None, crashed=True)
        except BaseException:
            check_ranks.all_gather(None, crashed=True)
            raise
    return found


def _stages(make_training: MakeTraining) -> Iterator[list[Finding]]:
    """Stage by stage, each relying on what the earlier ones have shown."""
    training, another = new_training(make_training), new_training(make_training)
    keeps_weights = keeps_trained_weights(make_training, training, another)
    yield [check_make_training(training, another, keeps_weights=keeps_weights), *check_schedule(training)]
    if has_several_ranks():
        finding = check_ranks.check_settings(check_ranks.all_gather(check_ranks.settings(training)))
        if finding.verdict != "ok":
            yield [finding]
    yield from _closure(training)
    del training  # a model may fill half of a device
    yield _steps(another)
    yield [check_epsilon_zero(make_training)]
    if not another.is_idle():
        yield [measure_cost(another)]


def _closure(training: Training) -> Iterator[list[Finding]]:
    """Calls of the closure, all from the same state."""
    settle_scale(training)
    snapshot = TrainingSnapshot(training)
    first = observe(training)
    yield [
        check_mode(training),
        check_loss(first),
        check_scaler(first, training.scaler),
        check_gradients_exist(first, training),
        check_parameters(training),
    ]
    if has_several_ranks():
        yield [check_ranks.check_synchronised(check_ranks.all_gather(check_ranks.gradients(first, training)))]
    yield [check_repeats(first, training, snapshot)]
    snapshot.put_back()
    yield [check_zero_grad(first, observe_on_top(first, training), training, rounding_of(training))]
    yield [check_clipping([first, *observe_elsewhere(training, snapshot)])]


def _steps(training: Training) -> list[Finding]:
    if training.is_idle():
        return [Finding("radius", "ok", "ε = 0 or N = 0: a step is the optimizer's own; nothing more to examine")]
    settle_scale(training)
    seen = check_steps.observe_steps(training)
    return [check(seen, training) for check in (*check_steps.STEP_CHECKS, check_ball, check_ascent, check_epsilon)]
