"""How flat is the minimum a model is in? The loss L around its weights θ, measured in several ways:

    line, plane        L(θ + αd) and L(θ + xd₁ + yd₂), along random directions scaled filter by filter
    worst_case_loss    max over ‖Δ‖ ≤ ε of L(θ + Δ), the AMP loss, from below
    mean_loss          the mean of L(θ + Δ) over the same ball
    sharpness          L(θ + ε∇L/‖∇L‖) − L(θ), which SAM minimises
                       all three also with adaptive=True: in ‖Δ ⊘ (|θ| + η)‖ ≤ ε, which rescaling layers does not change
    batch_rise         the rise along the gradient of mini-batches in train mode: what AMP sees
    gradient_norm      ‖∇L‖
    top_eigenvalues    of the Hessian of L, by Lanczos' method
    trace              of the Hessian, by Hutch++
    spectrum           the density of all eigenvalues, by stochastic Lanczos quadrature
    between            L on the line between two models, and the barrier there

    loss = flatness.empirical_risk(x, y)
    flatness.worst_case_loss(model, loss, epsilon=0.1).loss

Except in `batch_rise`, the model is in eval mode: BatchNorm's statistics are fixed, and nothing is dropped. Afterwards,
even after an exception, its weights, buffers, gradients and modes are bit for bit as they were.
"""

from flatmin.flatness.hutchpp import Trace, trace
from flatmin.flatness.interpolation import Between, between
from flatmin.flatness.lanczos import Eigenvalues, top_eigenvalue, top_eigenvalues
from flatmin.flatness.landscape import Line, Plane, directions, line, plane
from flatmin.flatness.loss_in_ball import MeanLoss, WorstCase, gradient_norm, mean_loss, sharpness, worst_case_loss
from flatmin.flatness.minibatch_sharpness import BatchRise, batch_rise
from flatmin.flatness.quadrature import Density, Spectrum, spectrum
from flatmin.flatness.risk import Loss, empirical_risk

__all__ = [
    "BatchRise",
    "Between",
    "Density",
    "Eigenvalues",
    "Line",
    "Loss",
    "MeanLoss",
    "Plane",
    "Spectrum",
    "Trace",
    "WorstCase",
    "batch_rise",
    "between",
    "directions",
    "empirical_risk",
    "gradient_norm",
    "line",
    "mean_loss",
    "plane",
    "sharpness",
    "spectrum",
    "top_eigenvalue",
    "top_eigenvalues",
    "trace",
    "worst_case_loss",
]
