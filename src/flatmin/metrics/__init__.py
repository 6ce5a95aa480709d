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

Does it know what it does not know? Functions of scores, one for each input, larger for a more familiar one:

    max_probability, negative_energy, negative_entropy    such scores, of logits
    auroc          the probability that an inside input has a larger score than one from outside the distribution
    fpr_at_tpr     the share of outside inputs accepted where 95 % of the inside ones are (FPR95)
    risk_coverage  the error among the most confident predictions, over their share
    aurc           the mean of that risk over all shares
    e_aurc         its excess over the best order of the same predictions
    two_sample_bootstrap   auroc or fpr_at_tpr with an interval

The confidence is the largest probability. Bins are closed on the right, ((m−1)/M, m/M], as in the paper's appendix D.
Everything is computed in at least float32. A label that is not a class and a row of logits without probabilities are
errors on every device.
"""

from flatmin.metrics.bootstrap_interval import Interval, bootstrap, two_sample_bootstrap
from flatmin.metrics.confidence_scores import CONFIDENCE_SCORES, max_probability, negative_energy, negative_entropy
from flatmin.metrics.inputs import has_probabilities
from flatmin.metrics.outside_detection import auroc, fpr_at_tpr
from flatmin.metrics.scores import Reliability, adaptive_ece, brier, ece, error, nll, reliability
from flatmin.metrics.selective_prediction import RiskCoverage, aurc, e_aurc, risk_coverage
from flatmin.metrics.temperature_scaling import temperature, temperature_interval

__all__ = [
    "CONFIDENCE_SCORES",
    "Interval",
    "Reliability",
    "RiskCoverage",
    "adaptive_ece",
    "aurc",
    "auroc",
    "bootstrap",
    "brier",
    "e_aurc",
    "ece",
    "error",
    "fpr_at_tpr",
    "has_probabilities",
    "max_probability",
    "negative_energy",
    "negative_entropy",
    "nll",
    "reliability",
    "risk_coverage",
    "temperature",
    "temperature_interval",
    "two_sample_bootstrap",
]
