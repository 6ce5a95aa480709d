"""A base step that does nothing if a flag on the device is set.

A gradient that is not finite must not reach the weights, nor the optimizer's moments, where it would stay. Reading the
flag on the host would cost a sync every step; so the step is always taken, and undone on the device:

    a fused base    gets the flag as `found_inf`, as from a torch.amp.GradScaler, and its kernels return at once
    any other base  steps with zero gradients (its moments decay, nothing turns nan), then θ is restored from its copy

Hooks of the base run in between and see the weights before they are restored; hooks of the wrapper see them after.
With a GradScaler the decision is the scaler's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from flatmin.core.copies import Copies
from flatmin.core.tensors import select_, zero_unless_
from flatmin.optim.update.grad_scaler import Owners, step_fused, step_scaled


def step_unless(
    skip: Tensor,
    owners: Owners,
    params: Sequence[Tensor],
    theta: Copies[Tensor],
    scaler: GradScaler | None,
    *,
    dropped: bool = False,
) -> None:
    """`base.step()`; if `skip` holds, `params` (those with a gradient) and the base's state stay as they are.

    `theta` has copies of parameters; missing ones are added. `dropped`: if `skip` holds, gradients are already zero.
    """
    _, base = owners
    gradients = [p.grad for p in params if p.grad is not None]
    if scaler is not None:
        with _clear_fresh_state(skip, base, params):
            step_scaled(skip, owners, gradients, scaler)
    elif skips_by_itself(base):
        with _clear_fresh_state(skip, base, params):
            step_fused(base, None, skip.float())
    else:
        if not theta.holds_just(params):
            theta.take({p: p for p in params if p not in theta})
        if not dropped:
            zero_unless_(gradients, ~skip)
        base.step()
        if not theta.put_back_again(params, flag=skip):
            select_([(p, theta[p]) for p in params], skip)


def skips_by_itself(base: Optimizer) -> bool:
    """Can its kernels return at once if told to? Torch's fused ones can; a copy of one no longer says so."""
    says_so = getattr(base, "_step_supports_amp_scaling", False) or type(base).__module__.startswith("torch.optim.")
    return says_so and all(group.get("fused") for group in base.param_groups)


@contextmanager
def _clear_fresh_state(skip: Tensor, base: Optimizer, params: Sequence[Tensor]) -> Iterator[None]:
    """Zero the state that a skipped first step creates: torch's fused SGD leaves its momentum uninitialised then."""
    stateless = [p for p in params if not base.state.get(p)]
    yield
    states = [base.state.get(p, {}) for p in stateless]
    zero_unless_([value for state in states for value in state.values() if isinstance(value, Tensor)], ~skip)
