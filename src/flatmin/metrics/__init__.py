"""How accurate and how calibrated a classifier is: pure functions of logits (N, K) and labels (N,), on their device.

    error          the share of wrong predictions
    nll            the mean of −log p(label)
    brier          the mean of Σₖ (pₖ − [k = label])²
    ece            the mean gap between confidence and accuracy, over bins of equal width
    adaptive_ece   the same over bins of equally many predictions
    reliability    the bins behind ece
    temperature    what to divide logits by to calibrate their confidence
    temperature_interval   how well the N rows determine it
    bootstrap      any of these with an interval: how much it may depend on the choice of the N rows
    has_probabilities   which rows of logits can be measured at all

The confidence is the largest probability. Bins are closed on the right, ((m−1)/M, m/M], as in the paper's appendix D.
Everything is computed in at least float32. A label that is not a class and a row of logits without probabilities are
errors on every device.
"""

from flatmin.metrics.bootstrap_interval import Interval, bootstrap
from flatmin.metrics.inputs import has_probabilities
from flatmin.metrics.scores import Reliability, adaptive_ece, brier, ece, error, nll, reliability
from flatmin.metrics.temperature_scaling import temperature, temperature_interval

__all__ = [
    "Interval",
    "Reliability",
    "adaptive_ece",
    "bootstrap",
    "brier",
    "ece",
    "error",
    "has_probabilities",
    "nll",
    "reliability",
    "temperature",
    "temperature_interval",
]
