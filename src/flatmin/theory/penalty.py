"""AMP as a penalty on the norm of the gradient: Theorem 2."""

import math

import torch
from torch import Tensor

from flatmin.theory.surface import Number, double, radius_of


def gradient_norm_penalty(norm: Number, *, epsilon: float, inner_lr: float, as_printed: bool = False) -> Tensor:
    """Theorem 2: with one inner step, AMP descends J + Ω to first order, where Ω is Huber's function of ‖∇J‖.

        Ω = (ζ/2)‖∇J‖²  where ζ‖∇J‖ ≤ ε,   else  ε‖∇J‖ − ε²/2ζ            (its slope is ‖Δ‖ = min(ζ‖∇J‖, ε))

    For ∇J(θ+Δ) ≈ ∇J + ∇²J·Δ, and ∇Ω = ∇²J·∇J·(dΩ/d‖∇J‖)/‖∇J‖ = ∇²J·Δ. "First order" is in ‖Δ‖: outside the knee a
    small ζ is not enough, ε has to be small. For a quadratic J it is exact.

    As printed in the paper, Ω is ζ‖∇J‖² and ε‖∇J‖. It does not jump, but inside it is twice as steep, so that its
    slope falls from 2ε to ε at the knee: a step on it is not AMP's. Outside, the two differ by a constant.

    >>> import torch
    >>> gradient_norm_penalty(torch.tensor([1.0, 2.0, 3.0]), epsilon=0.5, inner_lr=0.25)
    tensor([0.1250, 0.5000, 1.0000], dtype=torch.float64)
    >>> gradient_norm_penalty(torch.tensor([1.0, 2.0, 3.0]), epsilon=0.5, inner_lr=0.25, as_printed=True)
    tensor([0.2500, 1.0000, 1.5000], dtype=torch.float64)
    """
    length = double(norm)
    if not (length >= 0).all():
        raise ValueError(f"norm must be at least 0, got {norm}; it is the norm of a gradient")
    if not (inner_lr >= 0 and math.isfinite(inner_lr)):
        raise ValueError(f"inner_lr must be at least 0 and finite, got {inner_lr}")
    knee = radius_of(epsilon) / inner_lr if inner_lr else math.inf
    inside = torch.where(length <= knee, length, knee)  # at the knee, clamp's slope depends on the version of torch
    return inner_lr * inside * (length if as_printed else length - inside / 2)
