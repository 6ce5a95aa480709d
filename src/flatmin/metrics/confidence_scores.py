"""How familiar an input looks to a classifier: scores (N,) of logits (N, K), larger for what is more familiar.

    max_probability     maxₖ pₖ                      the confidence (Hendrycks and Gimpel 2017)
    negative_energy     log Σₖ exp zₖ                −E(x) at temperature 1 (Liu et al. 2020)
    negative_entropy    Σₖ pₖ log pₖ                 −H(p): 0 where one class has it all, −log K where none is preferred

The first and the third depend on the probabilities alone; the energy also tells logits that are large from logits that
are small, which the softmax forgets.

Everything is computed in float32 at least. A row without probabilities is an error, on every device.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from flatmin.core.tensors import compute_dtype
from flatmin.metrics.inputs import check_logits

__all__ = ["CONFIDENCE_SCORES", "max_probability", "negative_energy", "negative_entropy"]


def max_probability(logits: Tensor) -> Tensor:
    """The largest probability of each row: the confidence of its prediction.

    In float32 it is 1 from a margin of about 17 between the logits on, so the most confident rows tie; logits in
    float64 (`logits.double()`) tell them apart up to a margin of 37.

    >>> max_probability(torch.tensor([[0.0, 0.0], [9.0, 0.0]]))
    tensor([0.5000, 0.9999])
    """
    check_logits(logits)
    return logits.to(compute_dtype(logits)).softmax(dim=1).amax(dim=1)


def negative_energy(logits: Tensor) -> Tensor:
    """The logarithm of the sum of the exponentials of each row.

    >>> negative_energy(torch.tensor([[0.0, 0.0], [9.0, 9.0]]))        # ln 2, and 9 more
    tensor([0.6931, 9.6931])
    """
    check_logits(logits)
    return logits.to(compute_dtype(logits)).logsumexp(dim=1)


def negative_entropy(logits: Tensor) -> Tensor:
    """Minus the entropy of the probabilities of each row, in nats. A class with probability 0 adds nothing.

    With mₖ = zₖ − max z and R = Σ exp mₖ over all classes but the largest, H = log(1 + R) − Σ mₖ exp mₖ / (1 + R):
    nothing cancels, so rows whose largest probability rounds to 1 are told apart too.

    >>> negative_entropy(torch.tensor([[0.0, 0.0], [20.0, 0.0], [21.0, 0.0]]))      # −ln 2, then almost certain
    tensor([-6.9315e-01, -4.3284e-08, -1.6682e-08])
    """
    check_logits(logits)
    scores = logits.to(compute_dtype(logits))
    margin = scores - scores.amax(dim=1, keepdim=True)
    other = margin.exp().scatter(1, scores.argmax(dim=1, keepdim=True), 0.0)
    rest = other.sum(dim=1)
    weighted = torch.where(other > 0, other * margin, 0.0).sum(dim=1)  # an excluded class: 0 · −inf would be nan
    return weighted / (1 + rest) - rest.log1p()


CONFIDENCE_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "max_probability": max_probability,
    "negative_energy": negative_energy,
    "negative_entropy": negative_entropy,
}
