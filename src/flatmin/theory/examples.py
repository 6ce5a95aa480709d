"""Examples in one dimension: the AMP risk as a sliding maximum (figure 1), and a loss on which AMP and adversarial
training have different minima (appendix C, figure 9).
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from flatmin.theory.surface import Number, double, radius_of


def max_pooled(risk: Tensor, *, spacing: float, epsilon: float) -> Tensor:
    """Figure 1: the AMP risk of a one-dimensional risk, given (..., n) on an even grid: its maximum over [θ−ε, θ+ε].

    The maximum is over the grid's own points. ε is rounded down to whole spacings, so the result can be too low by as
    much as the risk rises over one spacing. The window stops at the ends of the grid: within ε of an end, the risk
    beyond it is not included.

    >>> max_pooled(torch.tensor([3.0, 0.0, 3.0, 2.0, 1.0, 2.0, 3.0]), spacing=1.0, epsilon=1.0)
    tensor([3., 3., 3., 3., 2., 3., 3.], dtype=torch.float64)
    """
    if not (spacing > 0 and math.isfinite(spacing)):
        raise ValueError(f"spacing must be above 0 and finite, got {spacing}; it is the step of the grid")
    values = double(risk)
    if values.ndim == 0 or values.shape[-1] == 0:
        raise ValueError(f"risk must be (..., n), n at least 1, got {tuple(values.shape)}")
    count = values.shape[-1]
    reach = min(math.floor(radius_of(epsilon) / spacing * (1 + 1e-12)), count - 1)  # 0.3/0.1 is 2.999…
    rows = values.reshape(-1, 1, count)
    pooled = max_pool1d(rows, 2 * reach + 1, stride=1, padding=reach)  # its padding is −∞
    return pooled.reshape(values.shape)


def two_minima(theta: Number) -> Tensor:
    """A risk like figure 1's: a sharp, deep minimum at −1 (depth 1, width 0.1), a flat, shallow one at 1 (0.8, 0.5).

    >>> grid = torch.linspace(-2, 3, 501)
    >>> risk = two_minima(grid)
    >>> grid[risk.argmin()], grid[max_pooled(risk, spacing=0.01, epsilon=0.2).argmin()]     # ERM's choice, AMP's
    (tensor(-1.), tensor(1.))
    """
    place = double(theta)
    sharp = torch.exp(-((place + 1) / 0.1).square() / 2)
    return 1 - sharp - 0.8 * torch.exp(-((place - 1) / 0.5).square() / 2)


def kinked(z: Number) -> Tensor:
    """Appendix C: g(z) = z where z ≥ 0, else −2z. The loss of a weight θ on the one example x = 1 is g(θx).

    >>> kinked(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([2., 0., 1.], dtype=torch.float64)
    """
    place = double(z)
    return torch.maximum(place, -2 * place)


def kinked_amp_loss(theta: Number, *, epsilon: float) -> Tensor:
    """The largest g(θ+δ) over |δ| ≤ ε: max(θ+ε, 2ε−2θ), least at θ = ε/3, where it is 4ε/3.

    >>> kinked_amp_loss(torch.tensor([0.0, 0.1, 0.2]), epsilon=0.3)
    tensor([0.6000, 0.4000, 0.5000], dtype=torch.float64)
    """
    place, radius = double(theta), radius_of(epsilon)
    return torch.maximum(kinked(place - radius), kinked(place + radius))  # g is convex: largest at an end


def kinked_adversarial_loss(theta: Number, *, epsilon: float) -> Tensor:
    """The largest g(θ(x+δ)) over |δ| ≤ ε, x = 1: least at θ = 0, where it is 0, whatever ε is.

    >>> kinked_adversarial_loss(torch.tensor([-0.1, 0.0, 0.1]), epsilon=0.3)
    tensor([0.2600, 0.0000, 0.1300], dtype=torch.float64)
    """
    place, radius = double(theta), radius_of(epsilon)
    return torch.maximum(kinked(place * (1 - radius)), kinked(place * (1 + radius)))


def kinked_amp_minimiser(*, epsilon: float) -> float:
    """ε/3: AMP moves away from the steep side. ERM and adversarial training stay at 0.

    >>> kinked_amp_minimiser(epsilon=0.75)
    0.25
    """
    return radius_of(epsilon) / 3
