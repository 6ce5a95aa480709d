"""The neighbourhood of θ in which the loss is measured: a ball of perturbations, or one that adapts to the weights.

    plain       ‖Δ‖ ≤ ε                    every weight may move as far as every other
    adaptive    ‖Δ ⊘ (|θ| + η)‖ ≤ ε        each in proportion to its size (Kwon et al. 2021)

Multiply one layer of a ReLU network by c and divide the next by c: it computes the same function. The plain ball around
it then holds other functions than before, the adaptive one with η = 0 the same. A weight of 0 does not move in it; with
η > 0 it does.

With T = |θ| + η and Δ = T ⊙ u, the adaptive ball is the plain one for u, and the gradient in u is T ⊙ ∇L. So points are
kept as u: projected, drawn and moved uphill as ever. Where T is 0, u is 0 and does not count as a dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatmin.ball import BALLS, NORMS, Ball, Norm, norms, project_, radii, uniform_
from flatmin.core.tensors import compute_dtype
from flatmin.flatness.weights import Weights, check_radius


@dataclass(frozen=True)
class Neighbourhood:
    """`scale` is T, a tensor for each parameter; None: the plain ball, in which u is Δ itself."""

    epsilon: float
    ball: Ball = "global"
    norm: Norm = "l2"
    scale: Sequence[Tensor] | None = None

    @staticmethod
    @torch.no_grad()
    def around(
        weights: Weights,
        epsilon: float,
        *,
        ball: Ball = "global",
        norm: Norm = "l2",
        adaptive: bool = False,
        eta: float | None = None,
    ) -> "Neighbourhood":
        """Of these weights as they are; η is 0 unless it is given."""
        check_radius(epsilon)
        if ball not in BALLS or norm not in NORMS:
            raise ValueError(
                f"ball must be one of {', '.join(BALLS)} and norm of {', '.join(NORMS)}, got {ball}, {norm}"
            )
        if eta is not None and not adaptive:
            raise ValueError(f"eta belongs to an adaptive ball, got {eta}; add adaptive=True, or leave it out")
        if eta is not None and not 0 <= eta < float("inf"):
            raise ValueError(f"eta must be at least 0 and finite, got {eta}")
        scale = [p.detach().to(compute_dtype(p)).abs() + (eta or 0.0) for p in weights.tensors] if adaptive else None
        return Neighbourhood(epsilon, ball, norm, scale)

    @torch.no_grad()
    def draw_(self, point: list[Tensor], generator: torch.Generator) -> None:
        """A uniform point, in place."""
        if self.scale is None:
            uniform_(point, self.epsilon, ball=self.ball, norm=self.norm, generator=generator)
            return
        movable = [t > 0 for t in self.scale]
        drawn = [u[where] for u, where in zip(point, movable, strict=True)]
        uniform_([one for one in drawn if len(one)], self.epsilon, ball=self.ball, norm=self.norm, generator=generator)
        for u, where, one in zip(point, movable, drawn, strict=True):
            u.zero_()[where] = one

    def project_(self, point: list[Tensor]) -> None:
        """To the nearest u in the ball, in place."""
        project_([point], [self.epsilon], ball=self.ball, norm=self.norm)

    def delta(self, point: list[Tensor]) -> list[Tensor]:
        """Δ = T ⊙ u."""
        return point if self.scale is None else [u * t for u, t in zip(point, self.scale, strict=True)]

    def move_to_(self, point: list[Tensor], weights: Weights) -> list[Tensor]:
        """The weights to θ + Δ, rounded towards θ; u becomes that of the rounded Δ, which is returned."""
        delta = self.delta(point)
        weights.move_within(delta)
        if self.scale is not None:
            for u, d, t in zip(point, delta, self.scale, strict=True):
                u.copy_(torch.where(t > 0, d / t, 0.0))
        return delta

    @torch.no_grad()
    def ascend_(self, point: list[Tensor], gradient: Sequence[Tensor], length: float) -> None:
        """A step of this length uphill, in each ball; none where the gradient is 0."""
        if self.scale is not None:
            gradient = [g.to(t.dtype) * t for g, t in zip(gradient, self.scale, strict=True)]
        if self.norm == "linf":
            for u, g in zip(point, gradient, strict=True):
                u.add_(g.sign(), alpha=length)
            return
        (radius,) = radii([norms(gradient)], ball=self.ball)
        factors = torch.where(radius > 0, length / radius, 0.0).expand(len(point)).unbind()
        for u, g, factor in zip(point, gradient, factors, strict=True):
            u.add_(g.to(u.dtype) * factor.to(u.device))
