"""Two minima: when AMP takes the shallower one because it is flatter. Corollaries 1 and 2.

Sums of exponentials are compared by their logarithms: exp(−ε²/2σ²) is 0 in floating point from ε²/2σ² = 746 on, and
long before that it is lost beside C.
"""

import math

import torch
from torch import Tensor

from flatmin.theory.surface import GaussianSurface, Number, double, radius_of


def prefers_flatter(first: GaussianSurface, second: GaussianSurface, *, epsilon: float) -> bool:
    """Corollary 1: ERM takes the first minimum, AMP the second. γ₁* < γ₂* but γ*₁,AMP > γ*₂,AMP, if and only if

        A₁ − A₂ > C₁ − C₂ > A₁·exp(−ε²/2σ₁²) − A₂·exp(−ε²/2σ₂²).

    >>> sharp, flat = GaussianSurface(0.0, 0.01, 1.0, 1.0), GaussianSurface(2.0, 0.25, 0.8, 1.0)
    >>> [prefers_flatter(sharp, flat, epsilon=epsilon) for epsilon in (0.0, 0.01, 0.1, 1.0, 10.0)]
    [False, False, True, True, True]
    """
    radius = radius_of(epsilon)
    if radius == 0 or math.fsum((first.A, -second.A, -first.C, second.C)) <= 0:
        return False
    one, two = first.amp_minimum_exponent(radius), second.amp_minimum_exponent(radius)
    if min(one, two) < 1:  # γ*_AMP = γ* − A·expm1(−ε²/2σ²): exact for the smallest ε
        raised = (-first.A * math.expm1(-one), second.A * math.expm1(-two))
        return math.fsum((first.C, -first.A, -second.C, second.A, *raised)) > 0
    # from here on in logarithms: exp(−ε²/2σ²) is 0 in floating point from 746 on, and the corollary still holds
    lead = math.log(first.A) - math.log(second.A) - (one - two)  # by how much A₁·exp(·) is above A₂·exp(·)
    higher = first.C - second.C
    if higher == 0 or (higher > 0) != (lead > 0):
        return higher > 0 or (higher == 0 and lead < 0)
    larger = max(math.log(first.A) - one, math.log(second.A) - two)
    gap = larger + (math.log(-math.expm1(-abs(lead))) if lead else -math.inf)  # log |A₁·exp(·) − A₂·exp(·)|
    return math.log(higher) > gap if higher > 0 else math.log(-higher) < gap


def in_operational_region(beta: Number, r: Number, *, ratio: Number) -> Tensor:
    """Corollary 2, where C₁ = C₂, A₂ = βA₁ and σ₂² = rσ₁²: AMP takes the second minimum, if and only if

        β > exp(−ratio)  and  r > 1/(1 + log β/ratio),   ratio = ε²/2σ₁².

    Both together are log β + ratio·(r−1)/r > 0, which is what is computed: nothing underflows. Tensors broadcast.

    >>> in_operational_region(0.8, torch.tensor([1.0, 1.2, 1.5, 9.0]), ratio=1.0)     # from r = 1.2872 on
    tensor([False, False,  True,  True])
    """
    share, width, reach = _share(beta), double(r), _ratio(ratio)
    if not ((width > 0) & width.isfinite()).all():
        raise ValueError(f"r must be above 0 and finite, got {r}; it is the ratio of two variances")
    return share.log() + reach * (width - 1) / width > 0


def operational_boundary(beta: Number, *, ratio: Number) -> Tensor:
    """The least r of Corollary 2, 1/(1 + log β/ratio), not itself in the region; inf if no r is enough.

    >>> operational_boundary(torch.tensor([0.1, 0.5, 0.8, 0.99]), ratio=1.0)
    tensor([   inf, 3.2589, 1.2872, 1.0102], dtype=torch.float64)
    """
    share, reach = _share(beta), _ratio(ratio)
    left = reach + share.log()
    return torch.where(left > 0, reach / left, math.inf)


def _share(beta: Number) -> Tensor:
    share = double(beta)
    if not ((share > 0) & (share < 1)).all():
        raise ValueError(f"beta must lie between 0 and 1, got {beta}; the first minimum is the deeper one")
    return share


def _ratio(ratio: Number) -> Tensor:
    reach = double(ratio)
    if not ((reach >= 0) & reach.isfinite()).all():
        raise ValueError(f"ratio must be at least 0 and finite, got {ratio}; it is epsilon² / (2 sigma_1²)")
    return reach
