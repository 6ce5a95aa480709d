"""Is this training set up as AMP needs it? A doctor for loops of one's own.

    for finding in flatmin.doctor.examine(make_training):
        print(finding.verdict, finding.name, finding.seen, finding.change)

`make_training()` returns `(model, optimizer, closure)`, or `(model, optimizer, closure, scaler)`; it is called a few
times, and what it returns is trained a few steps and thrown away. The examination goes from the closure to the step: an
error on the way ends it, because what follows would tell nothing.
"""

from collections.abc import Iterator

from flatmin.core.distributed import several
from flatmin.doctor import check_ranks, check_steps
from flatmin.doctor.check_baseline import cost, epsilon_zero
from flatmin.doctor.check_determinism import repeated, rounding_of
from flatmin.doctor.check_gradients import (
    complete,
    observe_elsewhere,
    observe_on_top,
    present,
    returned_loss,
    scaler_in_use,
    training_mode,
    unclipped,
    zeroed,
)
from flatmin.doctor.check_radius import climbs, first_guess, inside, radius
from flatmin.doctor.closure_call import observe, settle
from flatmin.doctor.finding import Crash, Finding, Verdict, during, has_error, own_lines
from flatmin.doctor.training import MakeTraining, Moment, SetUp, alike, fresh, generators_kept

__all__ = ["Crash", "Finding", "MakeTraining", "Verdict", "during", "examine", "first_guess", "has_error", "own_lines"]


def examine(make_training: MakeTraining) -> list[Finding]:
    """What was found, in the order in which it was looked at.

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
    with generators_kept():
        try:
            for part in _parts(make_training):
                found += part
                if check_ranks.anywhere(has_error(part)):  # all ranks stop together
                    break
        except check_ranks.Elsewhere as elsewhere:
            found.append(elsewhere.finding())
        except Crash as crash:
            found.append(crash.finding())
            check_ranks.gathered(None, crashed=True)
        except BaseException:
            check_ranks.gathered(None, crashed=True)
            raise
    return found


def _parts(make_training: MakeTraining) -> Iterator[list[Finding]]:
    """One part after the other, each with what the ones before it have shown to hold."""
    set_up, another = fresh(make_training), fresh(make_training)
    yield [alike(set_up, another)]
    if several() and (finding := check_ranks.agree(check_ranks.gathered(check_ranks.settings(set_up)))).verdict != "ok":
        yield [finding]
    yield from _closure(set_up)
    del set_up  # a model may fill half of a device
    yield _steps(another)
    yield [epsilon_zero(make_training)]
    if not another.is_idle():
        yield [cost(another)]


def _closure(set_up: SetUp) -> Iterator[list[Finding]]:
    """Calls of the closure, all from one moment."""
    settle(set_up)
    moment = Moment(set_up)
    first = observe(set_up)
    yield [
        training_mode(set_up),
        returned_loss(first),
        scaler_in_use(first, set_up.scaler),
        present(first, set_up),
        complete(set_up),
    ]
    if several():
        yield [check_ranks.reduced(check_ranks.gathered(check_ranks.gradients(first, set_up)))]
    yield [repeated(first, set_up, moment)]
    moment.put_back()
    yield [zeroed(first, observe_on_top(first, set_up), set_up, rounding_of(set_up))]
    yield [unclipped([first, *observe_elsewhere(set_up, moment)])]


def _steps(set_up: SetUp) -> list[Finding]:
    if set_up.is_idle():
        return [Finding("radius", "ok", "ε = 0 or N = 0: a step is the optimizer's own; there is no more to examine")]
    settle(set_up)
    seen = check_steps.watch(set_up)
    return [judge(seen, set_up) for judge in (*check_steps.JUDGES, inside, climbs, radius)]
