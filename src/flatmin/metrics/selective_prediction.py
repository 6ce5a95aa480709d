"""Selective prediction: a classifier answers what it is confident of and abstains from the rest. How often is it wrong?

Order the n predictions by confidence, the most confident first, and answer the first i of them:

    coverage(i) = i / n
    risk(i)     = wrong ones among the first i / i
    AURC        = 1/n Σᵢ risk(i)                     the area under risk over coverage (Geifman et al. 2019)
    E-AURC      = AURC − AURC of the best order      the excess over that of all right ones first (the same)

Where predictions tie, any order of them would do: risk(i) is the mean over all of these orders. So nothing here depends
on the order in which the predictions are given, to the last bit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flatmin.core.tensors import compute_dtype, widest_dtype
from flatmin.metrics.inputs import check_scores

__all__ = ["RiskCoverage", "aurc", "e_aurc", "risk_coverage"]


class RiskCoverage(NamedTuple):
    """The curve, (n,) each: the share that is answered, the share of it that is wrong, the lowest confidence in it."""

    coverage: Tensor
    risk: Tensor
    threshold: Tensor


def risk_coverage(confidence: Tensor, wrong: Tensor) -> RiskCoverage:
    """The risk at every coverage 1/n, 2/n, …, 1; at 1 it is the error. `wrong` is a flag for each prediction.

    A threshold accepts all that tie with it: whoever answers where the confidence is at least `threshold[i]` has the
    coverage and the risk of the last entry with that threshold.

    >>> curve = risk_coverage(torch.tensor([0.9, 0.5, 0.8]), torch.tensor([False, True, False]))
    >>> curve.coverage, curve.risk
    (tensor([0.3333, 0.6667, 1.0000]), tensor([0.0000, 0.0000, 0.3333]))
    """
    _check(confidence, wrong)
    exact = widest_dtype(confidence)
    ascending, order = (-confidence.detach().to(compute_dtype(confidence))).sort()  # the most confident first
    wrong_before = torch.cat([wrong.new_zeros(1, dtype=torch.int64), wrong[order].cumsum(dim=0)])
    # the predictions that tie with one are those from `first` on, before `end`; whole numbers, the same in any order
    first, end = (torch.searchsorted(ascending, ascending, right=right) for right in (False, True))
    share_wrong = (wrong_before[end] - wrong_before[first]).to(exact) / (end - first)
    answered = torch.arange(1, len(wrong) + 1, device=wrong.device)
    expected_wrong = wrong_before[first] + (answered - first) * share_wrong
    found = answered.to(exact) / len(wrong), expected_wrong / answered, -ascending
    return RiskCoverage(*(values.to(ascending.dtype) for values in found))


def aurc(confidence: Tensor, wrong: Tensor) -> Tensor:
    """The mean risk over all coverages: about the error where confidence tells nothing, lower where it tells something.

    >>> aurc(torch.tensor([0.9, 0.5, 0.8]), torch.tensor([False, True, False]))     # (0 + 0 + ⅓) / 3
    tensor(0.1111)
    """
    return risk_coverage(confidence, wrong).risk.mean()


def e_aurc(confidence: Tensor, wrong: Tensor) -> Tensor:
    """How far AURC lies above that of the best order, all right predictions first: what better confidences could gain.

    AURC grows with the error; this is 0 for any error if no wrong prediction is as confident as a right one.

    >>> e_aurc(torch.tensor([0.9, 0.5, 0.8]), torch.tensor([False, True, False]))
    tensor(0.)
    """
    return aurc(confidence, wrong) - aurc((~wrong).to(compute_dtype(confidence)), wrong)


def _check(confidence: Tensor, wrong: Tensor) -> None:
    check_scores("confidence", confidence)
    if wrong.dtype != torch.bool:
        raise TypeError(f"wrong must be a bool for each prediction, got {wrong.dtype}; logits.argmax(dim=1) != labels")
    if wrong.shape != confidence.shape:
        raise ValueError(
            f"confidence and wrong must have one entry for each prediction, "
            f"got shapes {tuple(confidence.shape)} and {tuple(wrong.shape)}"
        )
