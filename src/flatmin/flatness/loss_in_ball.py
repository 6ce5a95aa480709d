"""The loss in the ball of radius ε around θ: its maximum, its mean, and its rise along the gradient.

    worst      max over ‖Δ‖ ≤ ε of L(θ + Δ): the AMP loss, approached from below by projected ascent
    mean       of L(θ + Δ), Δ uniform in the ball
    sharpness  L(θ + ε∇L/‖∇L‖) − L(θ), the first step of SAM

At a minimum the gradient is 0, and ascent from the centre finds nothing; so it also starts from random points of the
ball. The highest loss of all is kept: a lower bound, which more starts and more steps can only raise. θ + Δ is rounded
towards θ in the weights' own dtype, so it is in the ball; weights in half precision stay where they are if the ball is
smaller than their spacing.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatmin.ball import BALLS, NORMS, Ball, Norm, combine, norms, project_, radii, uniform_
from flatmin.flatness.risk import Loss, LossPart, parts_of
from flatmin.flatness.weights import Weights, check_radius, derived_generator


class WorstCase(NamedTuple):
    """`loss`, the highest found; `centre`, L(θ); `starts`, the highest from each start, the centre first."""

    loss: Tensor
    centre: Tensor
    starts: Tensor
    delta: list[Tensor]  # where it was found, one tensor per parameter

    @property
    def rise(self) -> Tensor:
        """How much higher the loss is there than at the centre."""
        return self.loss - self.centre


class MeanLoss(NamedTuple):
    """Mean and standard deviation of the losses at random points of the ball."""

    mean: Tensor
    deviation: Tensor
    losses: Tensor


def worst_case_loss(
    model: nn.Module,
    loss: Loss,
    *,
    epsilon: float,
    steps: int = 20,
    restarts: int = 4,
    step_size: float | None = None,
    ball: Ball = "global",
    norm: Norm = "l2",
    parameters: Iterable[Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> WorstCase:
    """The highest loss that projected ascent finds in the ball: from the centre, and from `restarts` random points.

        Δ ← Π(Δ + α ∇L/‖∇L‖)         in L∞ the gradient's sign;   α is `step_size`, or ε

    The step is long because the worst point lies on the edge, where short steps are slow: on small networks 20 steps of
    ε found up to a third more loss than 20 of ε/8. It costs (1 + restarts) · (steps + 1) passes.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> found = worst_case_loss(layer, lambda model: (model(torch.ones(1, 1)) - 3).square().sum(), epsilon=0.5)
    >>> bool(found.loss > found.centre)
    True
    """
    check_radius(epsilon)
    _check_kind(ball, norm)
    if step_size is not None and not 0 < step_size < float("inf"):
        raise ValueError(f"step_size must be above 0 and finite, got {step_size}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if restarts < 0:
        raise ValueError(f"restarts must be at least 0, got {restarts}")
    weights, parts, derived = Weights(model, parameters), parts_of(loss), derived_generator(generator)
    length = epsilon if step_size is None else step_size
    climbs = []
    with weights.movable():
        centre = weights.value(parts)
        for start in range(1 + restarts):
            delta = weights.zeros()
            if start:
                uniform_(delta, epsilon, ball=ball, norm=norm, generator=derived)
            climbs.append(_climb(weights, parts, delta, epsilon, length, steps, ball, norm))
    best, where = max(climbs, key=lambda climb: float(climb[0].nan_to_num(-torch.inf)))
    return WorstCase(best, centre, torch.stack([highest for highest, _ in climbs]), where)


def _climb(
    weights: Weights,
    parts: Sequence[LossPart],
    delta: list[Tensor],
    epsilon: float,
    length: float,
    steps: int,
    ball: Ball,
    norm: Norm,
) -> tuple[Tensor, list[Tensor]]:
    """The highest loss on the way up from Δ, the start included, and where it was."""
    highest: Tensor | None = None
    where: list[Tensor] = []
    for step in range(steps + 1):
        project_([delta], [epsilon], ball=ball, norm=norm)
        weights.move_within(delta)
        gradient: list[Tensor] = []
        if step < steps:
            found, gradient = weights.value_and_gradient(parts)
        else:  # the last point needs none
            found = weights.value(parts)
        if highest is None or bool(found > highest) or bool(highest.isnan()):
            highest, where = found, [d.clone() for d in delta]
        if gradient:
            _step_(delta, gradient, length, ball, norm)
    assert highest is not None
    return highest, where


@torch.no_grad()
def _step_(delta: list[Tensor], gradient: list[Tensor], length: float, ball: Ball, norm: Norm) -> None:
    """A step of this length uphill, in each ball; none where the gradient is 0."""
    if norm == "linf":
        for d, g in zip(delta, gradient, strict=True):
            d.add_(g.sign(), alpha=length)
        return
    (radius,) = radii([norms(gradient)], ball=ball)
    factors = torch.where(radius > 0, length / radius, 0.0).expand(len(delta)).unbind()
    for d, g, factor in zip(delta, gradient, factors, strict=True):
        d.add_(g.to(d.dtype) * factor.to(d.device))


def mean_loss(
    model: nn.Module,
    loss: Loss,
    *,
    epsilon: float,
    samples: int = 20,
    ball: Ball = "global",
    norm: Norm = "l2",
    parameters: Iterable[Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> MeanLoss:
    """The mean loss over random points of the ball: what RMP minimises, while AMP minimises the worst."""
    check_radius(epsilon)
    _check_kind(ball, norm)
    if samples < 2:
        raise ValueError(f"samples must be at least 2, got {samples}")
    weights, parts, derived = Weights(model, parameters), parts_of(loss), derived_generator(generator)
    found = []
    with weights.movable():
        for _ in range(samples):
            delta = weights.zeros()
            uniform_(delta, epsilon, ball=ball, norm=norm, generator=derived)
            weights.move_within(delta)
            found.append(weights.value(parts))
    losses = torch.stack(found)
    return MeanLoss(losses.mean(), losses.std(), losses)


def gradient_norm(model: nn.Module, loss: Loss, *, parameters: Iterable[Tensor] | None = None) -> Tensor:
    """‖∇L(θ)‖ over all parameters.

    >>> layer = nn.Linear(2, 1)
    >>> gradient_norm(layer, lambda model: model(torch.tensor([2.0, 2.0])).sum())      # (2, 2) and 1 for the bias
    tensor(3.)
    """
    weights = Weights(model, parameters)
    with weights.movable():
        _, gradient = weights.value_and_gradient(parts_of(loss))
    return combine(norms(gradient))


def sharpness(model: nn.Module, loss: Loss, *, epsilon: float, parameters: Iterable[Tensor] | None = None) -> Tensor:
    """L(θ + ε∇L/‖∇L‖) − L(θ): how much the loss rises up to the edge of the ball, along the gradient."""
    check_radius(epsilon)
    weights, parts = Weights(model, parameters), parts_of(loss)
    with weights.movable():
        centre, gradient = weights.value_and_gradient(parts)
        delta = weights.zeros()
        _step_(delta, gradient, epsilon, "global", "l2")
        weights.move(delta)
        return weights.value(parts) - centre


def _check_kind(ball: Ball, norm: Norm) -> None:
    if ball not in BALLS or norm not in NORMS:
        raise ValueError(f"ball must be one of {', '.join(BALLS)}, and norm of {', '.join(NORMS)}, got {ball}, {norm}")
