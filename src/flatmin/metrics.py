"""How good a classifier is, and how honest: pure functions of logits (N, K) and labels (N,), on their device.

    error         the share of wrong answers
    nll           the mean of −log p(label)
    brier         the mean of Σₖ (pₖ − [k = label])²
    ece           the mean gap between confidence and accuracy, over bins of equal confidence
    reliability   what ece is made of: the bins

The confidence is the largest probability. Bins are closed on the right, ((m−1)/M, m/M], as in the paper's appendix D.
Everything is computed in float32 at least.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

__all__ = ["Reliability", "brier", "ece", "error", "nll", "reliability"]


def error(logits: Tensor, labels: Tensor) -> Tensor:
    """The share of wrong answers, a fraction.

    >>> error(torch.tensor([[2.0, 1.0], [2.0, 1.0]]), torch.tensor([0, 1]))
    tensor(0.5000)
    """
    labels = _checked(logits, labels)
    return 1 - _right(logits, labels).float().mean()


def nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood, the mean of −log p(label): cross-entropy.

    >>> nll(torch.zeros(1, 10), torch.tensor([3]))      # ln 10
    tensor(2.3026)
    """
    labels = _checked(logits, labels)
    return cross_entropy(_wide(logits), labels)


def brier(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of Σₖ (pₖ − [k = label])²: 0 if sure and right, 2 if sure and wrong.

    >>> brier(torch.tensor([[99.0, 0.0], [99.0, 0.0]]), torch.tensor([0, 1]))
    tensor(1.)
    """
    labels = _checked(logits, labels)
    probability = _wide(logits).softmax(dim=1)
    return (probability - one_hot(labels, logits.shape[1])).square().sum(dim=1).mean()


class Reliability(NamedTuple):
    """Per bin, (M,) each: how many answers, their mean confidence, the share that is right; 0 where a bin is empty."""

    number: Tensor
    confidence: Tensor
    accuracy: Tensor


def reliability(logits: Tensor, labels: Tensor, *, bins: int = 15) -> Reliability:
    """The answers sorted by confidence into bins of equal width.

    >>> reliability(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1]), bins=2)
    Reliability(number=tensor([0, 2]), confidence=tensor([0.0000, 0.9999]), accuracy=tensor([0.0000, 0.5000]))
    """
    labels = _checked(logits, labels)
    if bins < 1:
        raise ValueError(f"there must be at least one bin, got {bins}")
    confidence = _wide(logits).softmax(dim=1).amax(dim=1)
    edges = torch.arange(1, bins, device=logits.device, dtype=confidence.dtype) / bins
    bin_of = torch.bucketize(confidence, edges)  # confidence ≤ edge: closed on the right
    member = bin_of == torch.arange(bins, device=logits.device)[:, None]  # (M, N); sums of it have one order everywhere
    number = member.sum(dim=1)

    def mean(values: Tensor) -> Tensor:
        return torch.where(member, values, 0).sum(dim=1) / number.clamp(min=1)

    return Reliability(number, mean(confidence), mean(_right(logits, labels).to(confidence.dtype)))


def ece(logits: Tensor, labels: Tensor, *, bins: int = 15) -> Tensor:
    """Expected calibration error: the mean gap between confidence and accuracy, weighted by bin.

        ECE = Σₘ |Bₘ|/n · |acc(Bₘ) − conf(Bₘ)|,   Bₘ = {i : confidence ∈ ((m−1)/M, m/M]}

    >>> ece(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1]))   # sure twice, right once
    tensor(0.4999)
    """
    parts = reliability(logits, labels, bins=bins)
    return (parts.number * (parts.accuracy - parts.confidence).abs()).sum() / len(labels)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _right(logits: Tensor, labels: Tensor) -> Tensor:
    """Which answers are right. One with a nan is wrong, although its largest logit is somewhere."""
    return (logits.argmax(dim=1) == labels) & ~logits.isnan().any(dim=1)


def _checked(logits: Tensor, labels: Tensor) -> Tensor:
    """Labels as int64. Shapes alone are looked at: looking at values would make the host wait for the device."""
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or not len(labels):
        raise ValueError(
            "logits must be (N, K) and labels (N,) with N at least 1, "
            f"got {tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    if labels.is_floating_point():
        raise TypeError(f"labels must be whole numbers of the classes, got {labels.dtype}")
    return labels.long()
