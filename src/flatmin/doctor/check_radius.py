"""Whether the ascent raises the loss, what ε and ζ mean for this training, and a first guess of ε.

The ascent step is ζ‖∇J‖ long and is cut to ε, so an ε above ζ‖∇J‖ has no effect. Near θ the loss rises by ‖∇J‖·‖Δ‖. The
guess is the radius at which that is a third of the loss,

    ε = L / (3‖∇J‖),   at most 0.1,

a rule of thumb, not a law. What is known: PreActResNet18 on CIFAR-10 gains from ε = 0.1 in 40 epochs and from 0.5 in
200 (as in the paper), while 36 epochs with 0.5 lose. The right radius depends on the length of training, which a few
observed steps do not show.
"""

from collections.abc import Sequence
from math import floor, log10, sqrt
from statistics import median

from flatmin.doctor.check_steps import ObservedStep
from flatmin.doctor.finding import Finding
from flatmin.doctor.training import Training
from flatmin.optim.amp import AMP

NAME = "radius"
MAX_GUESS = 0.1  # of ε: safe for most networks
MAX_LOSS_RATIO = 3.0  # of the loss at θ + Δ to that at θ: beyond it Δ leaves the neighbourhood of θ


def check_ascent(steps: Sequence[ObservedStep], training: Training) -> Finding:
    """Is the loss at θ + Δ above that at θ?"""
    name = "ascent"
    if not isinstance(training.optimizer, AMP):
        return Finding(name, "ok", f"{type(training.optimizer).__name__} does not ascend: its Δ is random")
    if reason := _why_incomparable(steps):
        return Finding(name, "cannot tell", reason, "fix that first")
    rises = [high - low for high, low in zip(_known(steps, "loss_perturbed"), _known(steps, "loss"), strict=True)]
    optimizer = training.optimizer
    maximises = any(group.get("maximize", optimizer.maximises) for group in optimizer.param_groups)
    up = sum(rise < 0 if maximises else rise > 0 for rise in rises)
    side = "below" if maximises else "above"
    seen = f"the loss at θ + Δ is {side} that at θ in {up} of {len(rises)} steps"
    if 2 * up > len(rises):
        return Finding(name, "ok", seen)
    if not any(rises):
        return Finding(name, "cannot tell", "the loss is the same at θ + Δ", "try a larger ε; see rounding too")
    change = "try a smaller ε, in case the ascent overshoots; and does the closure return the loss it differentiates?"
    return Finding(name, "warning", seen, change)


def _why_incomparable(steps: Sequence[ObservedStep]) -> str:
    """Why the losses of a step cannot be compared; empty if they can."""
    if len(_known(steps, "loss")) < len(steps):
        return "the closure returns no loss"
    if any(_known(steps, "skipped")):
        return "some steps were skipped: their gradients were not finite"
    return "" if all(step.same_masks for step in steps) else "the passes of a step draw different masks"


def check_ball(steps: Sequence[ObservedStep], training: Training) -> Finding:
    """Is ‖Δ‖ ≤ ε, over all balls together?"""
    longest, bound = max(_known(steps, "delta_norm"), default=0.0), _bound(training)
    seen = f"‖Δ‖ is at most {longest:.4g}, and the edge is at {bound:.4g}"
    if longest <= bound * (1 + 1e-6):
        return Finding("ball", "ok", seen)
    return Finding("ball", "error", seen, "this should never happen: is ε changed during a step?")


def first_guess(loss: float, grad_norm: float) -> float:
    """ε = L / (3‖∇J‖), at most 0.1, rounded down to 1, 2 or 5 times a power of ten.

    >>> first_guess(2.3, 1.5), first_guess(2.3, 40.0)
    (0.1, 0.01)
    """
    if not (loss > 0 and grad_norm > 0):
        return MAX_GUESS
    exact = min(MAX_GUESS, loss / (3 * grad_norm))
    power = 10.0 ** floor(log10(exact * (1 + 1e-9)))
    return float(f"{max(step for step in (1, 2, 5) if step * power <= exact * (1 + 1e-9)) * power:.0e}")


def check_epsilon(steps: Sequence[ObservedStep], training: Training) -> Finding:
    optimizer = training.optimizer
    groups = optimizer.perturbed_groups()
    epsilon = ", ".join(f"{radius:g}" for radius in sorted({float(group["epsilon"]) for group in groups}))
    skipped = sum(bool(step.last["skipped"]) for step in steps)
    if skipped and training.scaler is None:
        seen = f"ε = {epsilon}: a gradient was not finite in {skipped} of {len(steps)} steps"
        return Finding(NAME, "error", seen, "use a tenth of it, or less; 0.1 is a good start for most networks")
    if not isinstance(optimizer, AMP):
        lengths = f"‖Δ‖ = {_median(steps, 'delta_norm'):.3g}, ‖∇J‖ = {_median(steps, 'grad_norm'):.3g}"
        return Finding(NAME, "ok", f"ε = {epsilon}: {lengths}")
    zeta, length = float(groups[0]["inner_lr"]), _median(steps, "grad_norm")
    norms = _known(steps, "grad_norm")
    seen = (
        f"ε = {epsilon}, ζ = {zeta:g}: ‖∇J‖ is {length:.3g} ({min(norms):.3g} to {max(norms):.3g}), so an ascent "
        f"step is {zeta * length:.3g} long and is cut to ε in {_mean(steps, 'on_ball'):.0%} of the steps"
    )
    if reason := _why_incomparable(steps):
        return Finding(NAME, "cannot tell", f"{seen}; {reason}", _advice(None, training))
    loss, perturbed = _median(steps, "loss"), _median(steps, "loss_perturbed")
    seen += f"; the loss goes from {loss:.3g} to {perturbed:.3g}"
    if loss > 0:
        seen += f" ({(perturbed - loss) / loss:+.1%})"
    guess = first_guess(loss, length) / sqrt(_balls(training)) if optimizer.norm == "l2" else None
    if perturbed > MAX_LOSS_RATIO * loss > 0:
        change = "ε is too large, unless the model is already trained and its loss near 0. "
        return Finding(NAME, "warning", seen, change + _advice(guess, training))
    if _mean(steps, "on_ball") == 0:
        seen += "; ε is never reached: ζ limits Δ, and a larger ε changes nothing"
    return Finding(NAME, "ok", seen, _advice(guess, training))


def _advice(guess: float | None, training: Training) -> str:
    if training.optimizer.norm != "l2":
        return "there is no rule of thumb for L∞; tune ε at the length that you will train"
    start = f"a first guess, from these steps alone: ε = {guess:.2g}" if guess else "a first guess: ε = 0.1"
    return f"{start}; a long run can take more (the paper: 0.5 for 200 epochs). Tune it at the length you will train"


def _bound(training: Training) -> float:
    groups, ball = training.optimizer.perturbed_groups(), training.optimizer.ball
    radii = [float(group["epsilon"]) for group in groups]
    if ball == "global" or training.optimizer.norm == "linf":
        return max(radii)
    counts = [len(group["params"]) if ball == "tensor" else 1 for group in groups]
    return sqrt(sum(count * radius**2 for count, radius in zip(counts, radii, strict=True)))


def _balls(training: Training) -> int:
    """The number of balls: over all of them together, ‖Δ‖ reaches ε times its square root."""
    groups = training.optimizer.perturbed_groups()
    return {"global": 1, "group": len(groups), "tensor": sum(len(group["params"]) for group in groups)}[
        training.optimizer.ball
    ]


def _known(steps: Sequence[ObservedStep], name: str) -> list[float]:
    return [value for step in steps if (value := step.last[name]) is not None]


def _median(steps: Sequence[ObservedStep], name: str) -> float:
    return median(_known(steps, name) or [0.0])


def _mean(steps: Sequence[ObservedStep], name: str) -> float:
    known = _known(steps, name)
    return sum(known) / len(known) if known else 0.0
