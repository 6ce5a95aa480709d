"""An inverted Gaussian surface and its AMP loss: Theorem 1.

    γ(θ) = C − A·exp(−E(θ)),   E(θ) = (θ−μ)ᵀκ⁻¹(θ−μ)/2,   γ_AMP(θ) = max γ(θ+Δ) over ‖Δ‖ ≤ ε

The maximum is a trust-region problem: of all points of a sphere, the one with the largest E. In the basis of κ's
eigenvectors it is one equation in one unknown.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

Number = float | Tensor


def double(number: Number) -> Tensor:
    return torch.as_tensor(number, dtype=torch.float64, device="cpu")


def radius_of(epsilon: float) -> float:
    if not (epsilon >= 0 and math.isfinite(epsilon)):
        raise ValueError(f"epsilon must be at least 0 and finite, got {epsilon}")
    return float(epsilon)


_TINY = 1e-200  # a part of θ−μ along the narrowest direction below this share of ε moves no digit of the result
_NEWTON_STEPS = 100  # 15 was the most in 10⁶ random problems, including hard ones


@dataclass(frozen=True, eq=False)
class GaussianSurface:
    """An inverted Gaussian: γ(θ) = C − A·exp(−(θ−μ)ᵀκ⁻¹(θ−μ)/2).

    `mu` is (K,) and `kappa` (K, K), symmetric and positive definite; then θ is (..., K), any number of points at once.
    Or both are numbers, a location and a variance; then θ is any tensor of numbers. Gradients flow through θ.

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
        place = double(self.mu).clone()
        if place.ndim > 1 or not place.numel() or not place.isfinite().all():
            raise ValueError(f"mu must be a finite number or vector (K,), got {self.mu}")
        widths, axes = _eigenbasis(double(self.kappa), dimensions=place.numel())
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
        """The Δ of length ε at which γ(θ+Δ) is largest; one of them if there are several.

        >>> GaussianSurface(torch.zeros(2), torch.diag(torch.tensor([4.0, 1.0])), 1.0, 0.0).worst(torch.zeros(2), 0.5)
        tensor([0.0000, 0.5000], dtype=torch.float64)
        """
        offset = self._offset(theta)
        step = self._worst(offset, radius_of(epsilon)) @ self._axes.T
        return step.squeeze(-1) if self._mu.ndim == 0 else step

    def amp_exponent(self, theta: Number, epsilon: float) -> Tensor:
        """The largest E(θ+Δ) over ‖Δ‖ ≤ ε; in one dimension (|θ−μ|+ε)²/2σ²."""
        offset = self._offset(theta)
        return self._exponent(offset + self._worst(offset, radius_of(epsilon)))

    def amp_loss(self, theta: Number, epsilon: float) -> Tensor:
        """γ_AMP(θ), the largest γ(θ+Δ) over ‖Δ‖ ≤ ε. Its gradient is that of γ at θ+Δ: what AMP descends.

        >>> GaussianSurface(0.0, 1.0, 1.0, 1.0).amp_loss(torch.tensor([-1.0, 0.0, 1.0]), 0.5)
        tensor([0.6753, 0.1175, 0.6753], dtype=torch.float64)
        """
        return self.C - self.A * torch.exp(-self.amp_exponent(theta, epsilon))

    def amp_minimum_exponent(self, epsilon: float) -> float:
        """ε²/2σ²."""
        widths = radius_of(epsilon) / math.sqrt(self.narrowest)
        return widths * widths / 2  # `**` would raise if this is inf

    def amp_minimum(self, epsilon: float) -> float:
        """Theorem 1: the AMP loss is least at θ = μ too, and there γ*_AMP = C − A·exp(−ε²/2σ²).

        For q, a unit vector in the narrowest direction, the better of Δ = ±εq has E(θ+Δ) ≥ E(θ) + ε²/2σ², so no θ other
        than μ can do as well. The paper's proof leaves this out, and writes QᵀΛ⁻¹Q for κ⁻¹, where κ = QΛQᵀ has the
        inverse QΛ⁻¹Qᵀ; its result is right.

        >>> round(GaussianSurface(0.0, 1.0, 1.0, 1.0).amp_minimum(0.5), 4)      # 1 − exp(−1/8)
        0.1175
        """
        return self.C - self.A * math.exp(-self.amp_minimum_exponent(epsilon))

    def _offset(self, theta: Number) -> Tensor:
        """θ−μ in the basis of κ's eigenvectors."""
        place = double(theta)
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

        1/‖y(t)‖ is concave, so Newton's method on it, started left of the root, approaches the root from that side. If
        ‖y‖ < 1 for all t > 0, then d has no part in the narrowest direction (the hard case): t = 0, and y is made long
        enough in that direction. There ±y are equally bad.
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


def _eigenbasis(kappa: Tensor, *, dimensions: int) -> tuple[Tensor, Tensor]:
    """The eigenvalues of κ, in ascending order, and its eigenvectors; raises if κ is not a covariance."""
    if dimensions == 1 and kappa.numel() == 1:
        kappa = kappa.reshape(1, 1)
    if kappa.shape != (dimensions, dimensions):
        raise ValueError(f"kappa must be ({dimensions}, {dimensions}), to match mu, got {tuple(kappa.shape)}")
    if not kappa.isfinite().all():
        raise ValueError(f"kappa must be finite, got {kappa}")
    if (kappa - kappa.T).abs().max() > 1e-6 * kappa.abs().max():
        raise ValueError(f"kappa must be symmetric, got {kappa}; use (kappa + kappa.T) / 2")
    widths, axes = torch.linalg.eigh((kappa + kappa.T) / 2)
    if not widths[0] > torch.finfo(torch.float64).eps * dimensions * widths[-1]:
        raise ValueError(
            f"kappa must be positive definite, got eigenvalues {widths.tolist()}; "
            "leave directions in which the surface does not rise out of theta"
        )
    return widths, axes
