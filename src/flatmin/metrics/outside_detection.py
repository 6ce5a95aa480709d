"""Out-of-distribution detection: do scores tell inputs from inside the training distribution from those outside?

A detector accepts an input if its score is at least a threshold t; larger means more inside.

    TPR(t), FPR(t)    the share of inside and of outside inputs that are accepted
    auroc             P(inside > outside) + ½ P(inside = outside), over all pairs: the area under TPR over FPR
    fpr_at_tpr        FPR(t) at the largest t with TPR(t) ≥ tpr

Both depend on the order of the scores alone, so an increasing map of them changes nothing. Pairs are counted in whole
numbers, exact in any order of the inputs and on any device.
"""

from math import ceil

import torch
from torch import Tensor

from flatmin.core.tensors import compute_dtype, widest_dtype
from flatmin.metrics.inputs import check_scores

__all__ = ["auroc", "fpr_at_tpr"]


def auroc(inside: Tensor, outside: Tensor) -> Tensor:
    """The probability that an inside input, (N,), has a larger score than an outside one, (M,); a tie counts one half.

    1 if all inside scores are larger, ½ if the scores tell nothing. By ranks, in O((N + M) log M).

    >>> auroc(torch.tensor([0.9, 0.6]), torch.tensor([0.5, 0.6]))       # 3 pairs of 4 in order, one of them a tie
    tensor(0.8750)
    """
    inside, outside = _checked(inside, outside)
    ordered = outside.sort().values
    below = torch.searchsorted(ordered, inside)
    not_above = torch.searchsorted(ordered, inside, right=True)
    return _share((below + not_above).sum(), 2 * len(inside) * len(outside), like=inside)


def fpr_at_tpr(inside: Tensor, outside: Tensor, *, tpr: float = 0.95) -> Tensor:
    """The share of outside inputs that are accepted by the highest threshold that accepts `tpr` of the inside ones.

    With 0.95 it is known as FPR95. The threshold is one of the inside scores; whatever ties with it is accepted.

    >>> fpr_at_tpr(torch.tensor([0.9, 0.8, 0.7, 0.1]), torch.tensor([0.8, 0.3]), tpr=0.75)     # threshold 0.7
    tensor(0.5000)
    """
    if not 0 < tpr <= 1:
        raise ValueError(f"tpr must be above 0 and at most 1, got {tpr}; 0.95 is 95 %")
    inside, outside = _checked(inside, outside)
    threshold = inside.sort(descending=True).values[accepted_of(tpr, len(inside)) - 1]
    return _share((outside >= threshold).sum(), len(outside), like=outside)


def accepted_of(share: float, of: int) -> int:
    """How many must be accepted, the smallest k with k / of ≥ share; share · of may round to just above a whole one."""
    k = ceil(share * of)
    return k - 1 if k > 1 and (k - 1) / of >= share else k


def _checked(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one dtype, which holds each of their numbers exactly."""
    check_scores("inside", inside)
    check_scores("outside", outside)
    dtype = torch.promote_types(compute_dtype(inside), compute_dtype(outside))
    return inside.detach().to(dtype).contiguous(), outside.detach().to(dtype).contiguous()


def _share(count: Tensor, of: int, *, like: Tensor) -> Tensor:
    """A whole number over another, rounded once."""
    return (count.to(widest_dtype(like)) / of).to(like.dtype)
