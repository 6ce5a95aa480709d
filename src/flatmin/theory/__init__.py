"""The paper's theorems as functions: why the worst loss in a ball prefers a flat minimum.

Near a minimum μ the risk is modelled as an inverted Gaussian, with widths given by κ:

    γ(θ) = C − A·exp(−E(θ)),   E(θ) = (θ−μ)ᵀκ⁻¹(θ−μ)/2,   γ_AMP(θ) = max γ(θ+Δ) over ‖Δ‖ ≤ ε

    Theorem 1     min γ = C − A,   min γ_AMP = C − A·exp(−ε²/2σ²),   σ² the smallest eigenvalue of κ
    Corollary 1   so AMP may take the shallower of two minima, if it is flatter       prefers_flatter
    Corollary 2   and if C₁ = C₂ this happens for these depths β and widths r          in_operational_region
    Theorem 2     a step of AMP is a step on J + Ω, Ω a penalty on ‖∇J‖                gradient_norm_penalty
    Figure 1      the AMP risk in one dimension is a sliding maximum                   max_pooled
    Appendix C    AMP is not adversarial training: a kinked loss shows the difference  kinked

Everything is computed in float64. C − A·exp(−E) equals C to the last bit from E = 37 on, so exponents are available
too.
"""

from flatmin.theory.examples import (
    kinked,
    kinked_adversarial_loss,
    kinked_amp_loss,
    kinked_amp_minimiser,
    max_pooled,
    two_minima,
)
from flatmin.theory.minima import in_operational_region, operational_boundary, prefers_flatter
from flatmin.theory.penalty import gradient_norm_penalty
from flatmin.theory.surface import GaussianSurface

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
