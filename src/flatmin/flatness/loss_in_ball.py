"""The loss in the ball of radius ε around θ: its maximum, its mean, and its rise along the gradient.

    worst      max over ‖Δ‖ ≤ ε of L(θ + Δ): the AMP loss, approached from below by projected ascent
    mean       of L(θ + Δ), Δ uniform in the ball
    sharpness  L(θ + ε∇L/‖∇L‖) − L(θ), the first step of SAM

At a minimum the gradient is 0, and ascent from the centre finds nothing; so it also starts from random points of the
ball. The highest loss of all is kept: a lower bound, which more starts and more steps can only raise. θ + Δ is rounded
towards θ in the weights' own dtype, so it is in the ball; weights in half precision stay where they are if the ball is
smaller than their spacing.

With `adaptive=True` it is the ball ‖Δ ⊘ (|θ| + η)‖ ≤ ε, which does not depend on how a network's layers are scaled
(neighbourhood.py). Its radius is relative: at ε = √d each of d weights may move by its own size.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatmin.ball import Ball, Norm, combine, norms
from flatmin.flatness.neighbourhood import Neighbourhood
from flatmin.flatness.risk import Loss, LossPart, parts_of
from flatmin.flatness.weights import Weights, derived_generator


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
    adaptive: bool = False,
    eta: float | None = None,
    parameters: Iterable[Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> WorstCase:
    """The highest loss that projected ascent finds in the ball: from the centre, and from `restarts` random points.

        Δ ← Π(Δ + α ∇L/‖∇L‖)         in L∞ the gradient's sign;   α is `step_size`, or ε

    The step is long because the worst point lies on the edge, where short steps are slow: on small networks 20 steps of
    ε found up to a third more loss than 20 of ε/8. It costs (1 + restarts) · (steps + 1) passes.

    `adaptive` searches ‖Δ ⊘ (|θ| + η)‖ ≤ ε instead, with the same steps in Δ ⊘ (|θ| + η); `eta` is η, 0 by default.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> found = worst_case_loss(layer, lambda model: (model(torch.ones(1, 1)) - 3).square().sum(), epsilon=0.5)
    >>> bool(found.loss > found.centre)
    True
    """
    weights, parts = Weights(model, parameters), parts_of(loss)
    around = Neighbourhood.around(weights, epsilon, ball=ball, norm=norm, adaptive=adaptive, eta=eta)
    if step_size is not None and not 0 < step_size < float("inf"):
        raise ValueError(f"step_size must be above 0 and finite, got {step_size}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if restarts < 0:
        raise ValueError(f"restarts must be at least 0, got {restarts}")
    length, derived = epsilon if step_size is None else step_size, derived_generator(generator)
    climbs = []
    with weights.movable():
        centre = weights.value(parts)
        for start in range(1 + restarts):
            point = weights.zeros()
            if start:
                around.draw_(point, derived)
            climbs.append(_climb(weights, parts, around, point, length, steps))
    best, where = max(climbs, key=lambda climb: float(climb[0].nan_to_num(-torch.inf)))
    return WorstCase(best, centre, torch.stack([highest for highest, _ in climbs]), where)


def _climb(
    weights: Weights,
    parts: Sequence[LossPart],
    around: Neighbourhood,
    point: list[Tensor],
    length: float,
    steps: int,
) -> tuple[Tensor, list[Tensor]]:
    """The highest loss on the way up from a point, itself included, and the Δ where it was."""
    highest: Tensor | None = None
    where: list[Tensor] = []
    for step in range(steps + 1):
        around.project_(point)
        delta = around.move_to_(point, weights)
        gradient: list[Tensor] = []
        if step < steps:
            found, gradient = weights.value_and_gradient(parts)
        else:  # the last point needs none
            found = weights.value(parts)
        if highest is None or bool(found > highest) or bool(highest.isnan()):
            highest, where = found, [d.clone() for d in delta]
        if gradient:
            around.ascend_(point, gradient, length)
    assert highest is not None
    return highest, where


def mean_loss(
    model: nn.Module,
    loss: Loss,
    *,
    epsilon: float,
    samples: int = 20,
    ball: Ball = "global",
    norm: Norm = "l2",
    adaptive: bool = False,
    eta: float | None = None,
    parameters: Iterable[Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> MeanLoss:
    """The mean loss over random points of the ball: what RMP minimises, while AMP minimises the worst.

    `adaptive` and `eta` are those of `worst_case_loss`: Δ is uniform in ‖Δ ⊘ (|θ| + η)‖ ≤ ε.
    """
    weights, parts = Weights(model, parameters), parts_of(loss)
    around = Neighbourhood.around(weights, epsilon, ball=ball, norm=norm, adaptive=adaptive, eta=eta)
    if samples < 2:
        raise ValueError(f"samples must be at least 2, got {samples}")
    found, derived = [], derived_generator(generator)
    with weights.movable():
        for _ in range(samples):
            point = weights.zeros()
            around.draw_(point, derived)
            around.move_to_(point, weights)
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


def sharpness(
    model: nn.Module,
    loss: Loss,
    *,
    epsilon: float,
    adaptive: bool = False,
    eta: float | None = None,
    parameters: Iterable[Tensor] | None = None,
) -> Tensor:
    """L(θ + ε∇L/‖∇L‖) − L(θ): how much the loss rises up to the edge of the ball, along the gradient.

    `adaptive` takes the step of ASAM, Δ = ε T² ∇L / ‖T ∇L‖ with T = |θ| + η.
    """
    weights, parts = Weights(model, parameters), parts_of(loss)
    around = Neighbourhood.around(weights, epsilon, adaptive=adaptive, eta=eta)
    with weights.movable():
        centre, gradient = weights.value_and_gradient(parts)
        point = weights.zeros()
        around.ascend_(point, gradient, epsilon)
        weights.move(around.delta(point))
        return weights.value(parts) - centre
