"""Temperature scaling (Guo et al. 2017): one number that calibrates a classifier and changes no prediction.

    T = argmin nll(logits / T)        over validation data

With β = 1/T and the margins mₖ = zₖ − z_label, the loss is E log Σₖ exp(β mₖ). It is convex in β: its slope E Σₖ pₖ mₖ
increases, at the rate E Var m. So the zero of the slope lies between any β of negative and any of positive slope, and
Newton's step is taken if it stays in between; if not, the interval of log β is bisected.
"""

import math

import torch
from torch import Tensor

from flatmin.core.tensors import compute_dtype
from flatmin.metrics.inputs import check_inputs

__all__ = ["temperature"]

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3  # where the optimum is 0 or infinite


@torch.no_grad()
def temperature(logits: Tensor, labels: Tensor) -> Tensor:
    """The T between 0.001 and 1000 for which nll(logits / T) is least, found in float64.

    Fit it on data that the model was not trained on (there it is over-confident) and that you do not report on (that
    would be choosing it with the test labels). T > 1 means that the model was over-confident.

    If no prediction is wrong, more confidence is always better and T is 0.001; if they are no better than chance, less
    confidence is, and T is 1000. If all logits of every row are equal, T has no effect and is 1.

    >>> four = torch.tensor([[2.0, 0.0]] * 4)                          # 88 % confident
    >>> temperature(four, torch.tensor([0, 0, 0, 1]))                  # right in 75 %: 2 / ln 3
    tensor(1.8205)
    """
    labels = check_inputs(logits, labels)
    scores = logits.double()
    margins = scores - scores.gather(1, labels[:, None])
    if bool(margins.isnan().any() | margins.isposinf().any()):
        raise ValueError(
            "no temperature can be fitted where a label has a logit of −inf: its likelihood is 0 at every T; "
            f"got {int((margins == math.inf).any(dim=1).sum())} such rows"
        )
    moments = margins.masked_fill(margins.isneginf(), 0)  # an excluded class has p = 0: 0 · −inf would be nan
    return torch.tensor(1 / _inverse_temperature(margins, moments), dtype=compute_dtype(logits), device=logits.device)


def _inverse_temperature(margins: Tensor, moments: Tensor) -> float:
    """β = 1/T, by Newton's method between two ends."""
    low, high = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE
    if not bool(moments.any()):
        return 1.0
    if _slope(margins, moments, high)[0] <= 0:
        return high
    if _slope(margins, moments, low)[0] >= 0:
        return low
    beta = 1.0
    for turn in range(100):
        slope, rise = _slope(margins, moments, beta)
        low, high = (beta, high) if slope < 0 else (low, beta)
        newton = beta - slope / rise if rise > 0 else math.nan
        # fifty bisections are enough, so a slow Newton iteration is given up
        following = newton if low < newton < high and turn < 50 else math.sqrt(low * high)
        if abs(following - beta) <= 1e-9 * beta:
            return following
        beta = following
    return beta


def _slope(margins: Tensor, moments: Tensor, beta: float) -> tuple[float, float]:
    """The loss' first and second derivative."""
    probability = (beta * margins).softmax(dim=1)
    mean = (probability * moments).sum(dim=1, keepdim=True)
    variance = (probability * (moments - mean).square()).sum(dim=1)
    slope, rise = torch.stack([mean.mean(), variance.mean()]).tolist()
    return slope, rise
