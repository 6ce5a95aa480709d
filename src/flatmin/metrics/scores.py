"""Error, likelihood and calibration of a classifier: pure functions of logits (N, K) and labels (N,).

The confidence is the largest probability. Bins are closed on the right, ((m−1)/M, m/M], as in the paper's appendix D.
Everything is computed in at least float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from flatmin.core.tensors import compute_dtype
from flatmin.metrics.inputs import check_inputs


def error(logits: Tensor, labels: Tensor) -> Tensor:
    """The share of wrong predictions, a fraction.

    >>> error(torch.tensor([[2.0, 1.0], [2.0, 1.0]]), torch.tensor([0, 1]))
    tensor(0.5000)
    """
    labels = check_inputs(logits, labels)
    return (logits.argmax(dim=1) != labels).sum().float() / len(labels)


def nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood, the mean of −log p(label): cross-entropy. It is infinite if a label has a logit of −inf.

    >>> nll(torch.zeros(1, 10), torch.tensor([3]))      # ln 10
    tensor(2.3026)
    """
    labels = check_inputs(logits, labels)
    return cross_entropy(logits.to(compute_dtype(logits)), labels)


def brier(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of Σₖ (pₖ − [k = label])²: 0 if sure and right, 2 if sure and wrong.

    >>> brier(torch.tensor([[99.0, 0.0], [99.0, 0.0]]), torch.tensor([0, 1]))
    tensor(1.)
    """
    labels = check_inputs(logits, labels)
    probability = logits.to(compute_dtype(logits)).softmax(dim=1)
    return (probability - one_hot(labels, logits.shape[1])).square().sum(dim=1).mean()


class Reliability(NamedTuple):
    """Per bin, (M,) each: number of predictions, their mean confidence, the share that are right; 0 in an empty bin."""

    number: Tensor
    confidence: Tensor
    accuracy: Tensor


def reliability(logits: Tensor, labels: Tensor, *, bins: int = 15) -> Reliability:
    """The predictions sorted by confidence into bins of equal width.

    >>> reliability(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1]), bins=2)
    Reliability(number=tensor([0, 2]), confidence=tensor([0.0000, 0.9999]), accuracy=tensor([0.0000, 0.5000]))
    """
    confidence, right = _confidence(logits, labels, bins)
    edges = torch.arange(1, bins, device=logits.device, dtype=confidence.dtype) / bins
    bin_of = torch.bucketize(confidence, edges)  # confidence ≤ edge: closed on the right
    return _binned(bin_of, confidence, right.to(confidence.dtype), bins)


def ece(logits: Tensor, labels: Tensor, *, bins: int = 15) -> Tensor:
    """Expected calibration error: the mean gap between confidence and accuracy, weighted by bin.

        ECE = Σₘ |Bₘ|/n · |acc(Bₘ) − conf(Bₘ)|,   Bₘ = {i : confidence ∈ ((m−1)/M, m/M]}

    >>> ece(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1]))   # sure twice, right once
    tensor(0.4999)
    """
    return _gap(reliability(logits, labels, bins=bins))


def adaptive_ece(logits: Tensor, labels: Tensor, *, bins: int = 15) -> Tensor:
    """The same sum over bins with equally many predictions, least confident first (Nguyen and O'Connor 2015).

        Bₘ = {i : (m−1)/M ≤ rank(i)/n < m/M},   ranks 0 … n−1, so that sizes differ by at most one

    A good network's predictions crowd into the last bin of ece; here they fill all bins. Those of equal confidence
    count with their mean accuracy, so neither their order nor a bin edge between them matters.

    >>> adaptive_ece(torch.tensor([[0.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1]), bins=2)    # off by ½, and by 1
    tensor(0.7499)
    """
    confidence, right = _confidence(logits, labels, bins)
    confidence, order = confidence.sort()
    _, tie, size = confidence.unique_consecutive(return_inverse=True, return_counts=True)
    right_of = torch.zeros_like(size).index_add_(
        0, tie, right[order].to(size.dtype)
    )  # integers: the same sum in any order
    accuracy = (right_of.to(confidence.dtype) / size)[tie]
    bin_of = torch.arange(len(labels), device=logits.device) * bins // len(labels)
    return _gap(_binned(bin_of, confidence, accuracy, bins))


def _confidence(logits: Tensor, labels: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """The largest probability of each row, and whether its class is the label."""
    if bins < 1:
        raise ValueError(f"there must be at least one bin, got {bins}")
    labels = check_inputs(logits, labels)
    confidence = logits.to(compute_dtype(logits)).softmax(dim=1).amax(dim=1)
    return confidence, logits.argmax(dim=1) == labels


def _binned(bin_of: Tensor, confidence: Tensor, accuracy: Tensor, bins: int) -> Reliability:
    member = (
        bin_of == torch.arange(bins, device=bin_of.device)[:, None]
    )  # (M, N); its sums have the same order on every device
    number = member.sum(dim=1)

    def mean(values: Tensor) -> Tensor:
        return torch.where(member, values, 0).sum(dim=1) / number.clamp(min=1)

    return Reliability(number, mean(confidence), mean(accuracy))


def _gap(parts: Reliability) -> Tensor:
    return (parts.number * (parts.accuracy - parts.confidence).abs()).sum() / parts.number.sum()
