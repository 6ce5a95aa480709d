"""The paper's theorems as functions: why the worst loss in a ball prefers a flat minimum.

Near a minimum μ the risk is taken for an inverted Gaussian, as wide in each direction as κ says:

    γ(θ) = C − A·exp(−E(θ)),   E(θ) = (θ−μ)ᵀκ⁻¹(θ−μ)/2,   γ_AMP(θ) = max γ(θ+Δ) over ‖Δ‖ ≤ ε

    Theorem 1     min γ = C − A,   min γ_AMP = C − A·exp(−ε²/2σ²),   σ² the smallest eigenvalue of κ
    Corollary 1   so of two minima AMP may take the shallower, if it is flatter       prefers_flatter
    Corollary 2   and if C₁ = C₂ this happens for these depths β and widths r          in_operational_region
    Theorem 2     a step of AMP is a step on J + Ω, Ω a penalty on ‖∇J‖                gradient_norm_penalty
    Figure 1      the AMP risk in one dimension is a sliding maximum                   max_pooled
    Appendix C    AMP is not adversarial training: a kinked loss tells them apart      kinked

Everything is computed in float64. C − A·exp(−E) is C to the last bit from E = 37 on, so the exponents can be had too.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

__all__ = [
    "GaussianSurface",
    "gradient_norm_penalty",
    "in_operational_region",
    "kinked",
    "kinked_adversarial_loss",
    "kinked_amp_loss",
    "kinked_amp_minimiser",
    "max_pooled",
    "operational_boundary",
    "prefers_flatter",
    "two_minima",
]

Number = float | Tensor

_TINY = 1e-200  # a part of θ−μ along the narrowest direction below this share of ε moves no digit of the result
_NEWTON_STEPS = 100  # 15 were the most among 10⁶ random problems, the hard ones included


@dataclass(frozen=True, eq=False)
class GaussianSurface:
    """An inverted Gaussian: γ(θ) = C − A·exp(−(θ−μ)ᵀκ⁻¹(θ−μ)/2).

    `mu` is (K,) and `kappa` (K, K), symmetric and positive definite; then θ is (..., K), any number of points at once.
    Or both are numbers, a place and a variance; then θ is any tensor of numbers. Gradients flow through θ.

    >>> sharp, flat = GaussianSurface(0.0, 0.01, 1.0, 1.0), GaussianSurface(0.0, 0.25, 0.8, 1.0)
    >>> sharp.minimum() < flat.minimum()                            # the sharp one is deeper
    True
    >>> sharp.amp_minimum(0.3) < flat.amp_minimum(0.3)              # but not for a ball of radius 0.3
    False
    """

    mu: Number
    kappa: Number
    A: float
    C: float
    _mu: Tensor = field(init=False, repr=False)
    _widths: Tensor = field(init=False, repr=False)  # the eigenvalues of κ, the narrowest first
    _axes: Tensor = field(init=False, repr=False)  # Q, its eigenvectors as columns

    def __post_init__(self) -> None:
        if not (self.A > 0 and math.isfinite(self.A)):
            raise ValueError(f"A must be above 0 and finite, got {self.A}; an inverted Gaussian has a depth")
        if not math.isfinite(self.C):
            raise ValueError(f"C must be finite, got {self.C}")
        place = torch.as_tensor(self.mu, dtype=torch.float64)
        if place.ndim > 1 or not place.numel() or not place.isfinite().all():
            raise ValueError(f"mu must be a finite number or vector (K,), got {self.mu}")
        widths, axes = _eigenbasis(torch.as_tensor(self.kappa, dtype=torch.float64), dimensions=place.numel())
        for name, value in (("_mu", place), ("_widths", widths), ("_axes", axes)):
            object.__setattr__(self, name, value)

    @property
    def narrowest(self) -> float:
        """σ², the smallest eigenvalue of κ: the square of the width in the narrowest direction."""
        return float(self._widths[0])

    def exponent(self, theta: Number) -> Tensor:
        """E(θ) = (θ−μ)ᵀκ⁻¹(θ−μ)/2, which is 0 at μ and grows outwards."""
        return self._exponent(self._offset(theta))

    def value(self, theta: Number) -> Tensor:
        """γ(θ).

        >>> GaussianSurface(torch.zeros(2), torch.eye(2), 1.0, 1.0).value(torch.tensor([[0.0, 0.0], [0.0, 99.0]]))
        tensor([0., 1.], dtype=torch.float64)
        """
        return self.C - self.A * torch.exp(-self.exponent(theta))

    def minimum(self) -> float:
        """γ* = C − A, at θ = μ."""
        return self.C - self.A

    def worst(self, theta: Number, epsilon: float) -> Tensor:
        """The Δ of length ε at which γ(θ+Δ) is largest; one of them where there are several.

        >>> GaussianSurface(torch.zeros(2), torch.diag(torch.tensor([4.0, 1.0])), 1.0, 0.0).worst(torch.zeros(2), 0.5)
        tensor([0.0000, 0.5000], dtype=torch.float64)
        """
        offset = self._offset(theta)
        step = self._worst(offset, _radius(epsilon)) @ self._axes.T
        return step.squeeze(-1) if self._mu.ndim == 0 else step

    def amp_exponent(self, theta: Number, epsilon: float) -> Tensor:
        """The largest E(θ+Δ) over ‖Δ‖ ≤ ε; in one dimension (|θ−μ|+ε)²/2σ²."""
        offset = self._offset(theta)
        return self._exponent(offset + self._worst(offset, _radius(epsilon)))

    def amp_loss(self, theta: Number, epsilon: float) -> Tensor:
        """γ_AMP(θ), the largest γ(θ+Δ) over ‖Δ‖ ≤ ε. Its gradient is that of γ at θ+Δ: what AMP descends.

        >>> GaussianSurface(0.0, 1.0, 1.0, 1.0).amp_loss(torch.tensor([-1.0, 0.0, 1.0]), 0.5)
        tensor([0.6753, 0.1175, 0.6753], dtype=torch.float64)
        """
        return self.C - self.A * torch.exp(-self.amp_exponent(theta, epsilon))

    def amp_minimum_exponent(self, epsilon: float) -> float:
        """ε²/2σ²."""
        return (_radius(epsilon) / math.sqrt(self.narrowest)) ** 2 / 2

    def amp_minimum(self, epsilon: float) -> float:
        """Theorem 1: the AMP loss is least at θ = μ too, and there γ*_AMP = C − A·exp(−ε²/2σ²).

        For q, a unit vector in the narrowest direction, the better one of Δ = ±εq has E(θ+Δ) ≥ E(θ) + ε²/2σ², so no θ
        but μ can do as well. The paper's proof leaves this out, and writes QᵀΛ⁻¹Q for κ⁻¹, where κ = QΛQᵀ has the
        inverse QΛ⁻¹Qᵀ; its result is right.

        >>> round(GaussianSurface(0.0, 1.0, 1.0, 1.0).amp_minimum(0.5), 4)      # 1 − exp(−1/8)
        0.1175
        """
        return self.C - self.A * math.exp(-self.amp_minimum_exponent(epsilon))

    def _offset(self, theta: Number) -> Tensor:
        """θ−μ in the basis of κ's eigenvectors."""
        place = torch.as_tensor(theta, dtype=torch.float64, device="cpu")
        if self._mu.ndim == 1 and place.shape[-1:] != self._mu.shape:
            raise ValueError(f"theta must end in mu's dimension, (..., {len(self._mu)}), got {tuple(place.shape)}")
        if not place.isfinite().all():
            raise ValueError(f"theta must be finite, got {theta}")
        offset = place - self._mu
        return (offset if self._mu.ndim else offset.unsqueeze(-1)) @ self._axes

    def _exponent(self, offset: Tensor) -> Tensor:
        return (offset / self._widths.sqrt()).square().sum(dim=-1) / 2

    @torch.no_grad()
    def _worst(self, offset: Tensor, epsilon: float) -> Tensor:
        """The Δ that maximises Σ (dᵢ+Δᵢ)²/κᵢ on the sphere ‖Δ‖ = ε, d = θ−μ, all in the basis of κ's eigenvectors.

        Lagrange: (dᵢ+Δᵢ)/κᵢ = λΔᵢ, and it is the global maximum if and only if λ ≥ 1/κ₁, κ₁ = σ² the smallest. With
        y = Δ/ε, u = d/ε and λκ₁ = 1+t, this is

            yᵢ = (κ₁/κᵢ)·uᵢ / (t + 1 − κ₁/κᵢ),   t ≥ 0,   ‖y‖ = 1.

        1/‖y(t)‖ is concave, so Newton's method on it, started left of the root, comes nearer from that side at every
        step. If ‖y‖ < 1 for all t > 0, then d has no part in the narrowest direction (the hard case): t = 0, and y is
        made long enough in that direction. There ±y are equally bad.
        """
        share, gap = self._widths[0] / self._widths, (self._widths - self._widths[0]) / self._widths
        scale = offset.abs().amax(dim=-1, keepdim=True).clamp(min=epsilon)
        scale = torch.where(scale > 0, scale, 1.0)
        radius = (epsilon / scale).clamp(min=1e-100)  # a smaller ball sees a plane: y is the same
        pull = share * (offset / scale) / radius

        along = torch.linalg.vector_norm(torch.where(gap == 0, pull, 0.0), dim=-1, keepdim=True)
        whole = torch.linalg.vector_norm(pull, dim=-1, keepdim=True)
        t = torch.maximum(along, whole - gap.amax()).clamp(min=_TINY)  # left of the root: ‖y‖ ≥ 1 there
        hard = torch.linalg.vector_norm(pull / (t + gap), dim=-1, keepdim=True) < 1
        hard &= t == _TINY
        for _ in range(_NEWTON_STEPS):
            squares = (pull / (t + gap)).square()
            length = squares.sum(dim=-1, keepdim=True).sqrt()
            slope = (squares / (t + gap)).sum(dim=-1, keepdim=True)
            step = torch.where(hard, 0.0, (length - 1) * length.square() / slope)
            t = t + step
            if (step <= 4e-16 * t).all():
                break
        y = pull / (t + gap)
        rest = y[..., 1:].square().sum(dim=-1)
        filled = torch.copysign((1 - rest).clamp(min=0).sqrt(), y[..., 0])
        y[..., 0] = torch.where(hard.squeeze(-1), filled, y[..., 0])
        found: Tensor = epsilon * y / torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        return found


def prefers_flatter(first: GaussianSurface, second: GaussianSurface, *, epsilon: float) -> bool:
    """Corollary 1: ERM takes the first minimum, AMP the second. γ₁* < γ₂* but γ*₁,AMP > γ*₂,AMP, if and only if

        A₁ − A₂ > C₁ − C₂ > A₁·exp(−ε²/2σ₁²) − A₂·exp(−ε²/2σ₂²).

    >>> sharp, flat = GaussianSurface(0.0, 0.01, 1.0, 1.0), GaussianSurface(2.0, 0.25, 0.8, 1.0)
    >>> [prefers_flatter(sharp, flat, epsilon=epsilon) for epsilon in (0.0, 0.01, 0.1, 1.0, 10.0)]
    [False, False, True, True, True]
    """
    radius = _radius(epsilon)
    if radius == 0 or math.fsum((first.A, -second.A, -first.C, second.C)) <= 0:
        return False
    one, two = first.amp_minimum_exponent(radius), second.amp_minimum_exponent(radius)
    if min(one, two) < 1:  # γ*_AMP = γ* − A·expm1(−ε²/2σ²): exact for the smallest ε
        raised = (-first.A * math.expm1(-one), second.A * math.expm1(-two))
        return math.fsum((first.C, -first.A, -second.C, second.A, *raised)) > 0
    # from here on in logarithms: exp(−ε²/2σ²) is 0 in floating point from 746 on, and the corollary still holds
    lead = math.log(first.A) - math.log(second.A) - (one - two)  # how far A₁·exp(·) is above A₂·exp(·)
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
    share, width, reach = _share(beta), _double(r), _ratio(ratio)
    if not ((width > 0) & width.isfinite()).all():
        raise ValueError(f"r must be above 0 and finite, got {r}; it is the ratio of two variances")
    return share.log() + reach * (width - 1) / width > 0


def operational_boundary(beta: Number, *, ratio: Number) -> Tensor:
    """The least r of Corollary 2, 1/(1 + log β/ratio), not itself in the region; inf where no r is enough.

    >>> operational_boundary(torch.tensor([0.1, 0.5, 0.8, 0.99]), ratio=1.0)
    tensor([   inf, 3.2589, 1.2872, 1.0102], dtype=torch.float64)
    """
    share, reach = _share(beta), _ratio(ratio)
    left = reach + share.log()
    return torch.where(left > 0, reach / left, math.inf)


def gradient_norm_penalty(norm: Number, *, epsilon: float, inner_lr: float, as_printed: bool = False) -> Tensor:
    """Theorem 2: with one inner step, AMP descends J + Ω to first order, where Ω is Huber's function of ‖∇J‖.

        Ω = (ζ/2)‖∇J‖²  where ζ‖∇J‖ ≤ ε,   else  ε‖∇J‖ − ε²/2ζ            (its slope is ‖Δ‖ = min(ζ‖∇J‖, ε))

    For ∇J(θ+Δ) ≈ ∇J + ∇²J·Δ, and ∇Ω = ∇²J·∇J·(dΩ/d‖∇J‖)/‖∇J‖ = ∇²J·Δ. "First order" is in ‖Δ‖: outside the knee a
    small ζ is not enough, ε has to be small. For a quadratic J it is exact.

    As printed in the paper, Ω is ζ‖∇J‖² and ε‖∇J‖. It does not jump, but inside it is twice too steep, so that its
    slope falls from 2ε to ε at the knee: a step on it is not AMP's. Outside, the two differ by a constant.

    >>> gradient_norm_penalty(torch.tensor([1.0, 2.0, 3.0]), epsilon=0.5, inner_lr=0.25)
    tensor([0.1250, 0.5000, 1.0000], dtype=torch.float64)
    >>> gradient_norm_penalty(torch.tensor([1.0, 2.0, 3.0]), epsilon=0.5, inner_lr=0.25, as_printed=True)
    tensor([0.2500, 1.0000, 1.5000], dtype=torch.float64)
    """
    length = _double(norm)
    if not (length >= 0).all():
        raise ValueError(f"norm must be at least 0, got {norm}; it is the length of a gradient")
    if not (inner_lr >= 0 and math.isfinite(inner_lr)):
        raise ValueError(f"inner_lr must be at least 0 and finite, got {inner_lr}")
    knee = _radius(epsilon) / inner_lr if inner_lr else math.inf
    inside = length.clamp(max=knee)
    return inner_lr * inside * (length if as_printed else length - inside / 2)


def max_pooled(risk: Tensor, *, spacing: float, epsilon: float) -> Tensor:
    """Figure 1: the AMP risk of a one-dimensional risk, given (..., n) on an even grid: its maximum over [θ−ε, θ+ε].

    The maximum is over the grid's own points. ε counts in whole spacings, rounded down, so the result can be too low by
    what the risk rises over one spacing. At the ends the window stops with the grid: within ε of an end, what lies
    beyond it is not seen.

    >>> max_pooled(torch.tensor([3.0, 0.0, 3.0, 2.0, 1.0, 2.0, 3.0]), spacing=1.0, epsilon=1.0)
    tensor([3., 3., 3., 3., 2., 3., 3.], dtype=torch.float64)
    """
    if not (spacing > 0 and math.isfinite(spacing)):
        raise ValueError(f"spacing must be above 0 and finite, got {spacing}; it is the distance of two grid points")
    values = _double(risk)
    if values.ndim == 0 or values.shape[-1] == 0:
        raise ValueError(f"risk must be (..., n), n at least 1, got {tuple(values.shape)}")
    count = values.shape[-1]
    reach = min(math.floor(_radius(epsilon) / spacing * (1 + 1e-12)), count - 1)  # 0.3/0.1 is 2.999…
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
    place = _double(theta)
    sharp = torch.exp(-((place + 1) / 0.1).square() / 2)
    return 1 - sharp - 0.8 * torch.exp(-((place - 1) / 0.5).square() / 2)


def kinked(z: Number) -> Tensor:
    """Appendix C: g(z) = z where z ≥ 0, else −2z. The loss of a weight θ on the one example x = 1 is g(θx).

    >>> kinked(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([2., 0., 1.], dtype=torch.float64)
    """
    place = _double(z)
    return torch.maximum(place, -2 * place)


def kinked_amp_loss(theta: Number, *, epsilon: float) -> Tensor:
    """The largest g(θ+δ) over |δ| ≤ ε: max(θ+ε, 2ε−2θ), least at θ = ε/3, where it is 4ε/3.

    >>> kinked_amp_loss(torch.tensor([0.0, 0.1, 0.2]), epsilon=0.3)
    tensor([0.6000, 0.4000, 0.5000], dtype=torch.float64)
    """
    place, radius = _double(theta), _radius(epsilon)
    return torch.maximum(kinked(place - radius), kinked(place + radius))  # g is convex: largest at an end


def kinked_adversarial_loss(theta: Number, *, epsilon: float) -> Tensor:
    """The largest g(θ(x+δ)) over |δ| ≤ ε, x = 1: least at θ = 0, where it is 0, whatever ε is.

    >>> kinked_adversarial_loss(torch.tensor([-0.1, 0.0, 0.1]), epsilon=0.3)
    tensor([0.2600, 0.0000, 0.1300], dtype=torch.float64)
    """
    place, radius = _double(theta), _radius(epsilon)
    return torch.maximum(kinked(place * (1 - radius)), kinked(place * (1 + radius)))


def kinked_amp_minimiser(*, epsilon: float) -> float:
    """ε/3: AMP moves away from the steep side. ERM and adversarial training stay at 0.

    >>> kinked_amp_minimiser(epsilon=0.75)
    0.25
    """
    return _radius(epsilon) / 3


def _eigenbasis(kappa: Tensor, *, dimensions: int) -> tuple[Tensor, Tensor]:
    """The eigenvalues of κ in ascending order and its eigenvectors, of a matrix that is fit to be one."""
    if dimensions == 1 and kappa.numel() == 1:
        kappa = kappa.reshape(1, 1)
    if kappa.shape != (dimensions, dimensions):
        raise ValueError(f"kappa must be ({dimensions}, {dimensions}), as mu is, got {tuple(kappa.shape)}")
    if not kappa.isfinite().all():
        raise ValueError(f"kappa must be finite, got {kappa}")
    if (kappa - kappa.T).abs().max() > 1e-6 * kappa.abs().max():
        raise ValueError(f"kappa must be symmetric, got {kappa}; use (kappa + kappa.T) / 2")
    widths, axes = torch.linalg.eigh((kappa + kappa.T) / 2)
    if not widths[0] > torch.finfo(torch.float64).eps * dimensions * widths[-1]:
        raise ValueError(
            f"kappa must be positive definite, got eigenvalues {widths.tolist()}; "
            "a direction in which the surface does not rise is left out of theta"
        )
    return widths, axes


def _double(number: Number) -> Tensor:
    return torch.as_tensor(number, dtype=torch.float64)


def _radius(epsilon: float) -> float:
    if not (epsilon >= 0 and math.isfinite(epsilon)):
        raise ValueError(f"epsilon must be at least 0 and finite, got {epsilon}")
    return float(epsilon)


def _share(beta: Number) -> Tensor:
    share = _double(beta)
    if not ((share > 0) & (share < 1)).all():
        raise ValueError(f"beta must lie between 0 and 1, got {beta}; the first minimum is the deeper one")
    return share


def _ratio(ratio: Number) -> Tensor:
    reach = _double(ratio)
    if not ((reach >= 0) & reach.isfinite()).all():
        raise ValueError(f"ratio must be at least 0 and finite, got {ratio}; it is epsilon² / (2 sigma_1²)")
    return reach
