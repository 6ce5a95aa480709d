"""Temperature scaling (Guo et al. 2017): one number that calibrates a classifier without changing a prediction.

    T = argmin nll(logits / T)        over validation data

With β = 1/T and the margins mₖ = zₖ − z_label, the loss is E log Σₖ exp(β mₖ). It is convex in β: its slope E Σₖ pₖ mₖ
increases, at the rate E Var m. So the zero of the slope lies between any β with a negative and any with a positive
slope: Newton's step is taken if it stays in between; otherwise the interval of log β is bisected.

That rate also tells how well N rows determine T. The likelihood's information about log β is N β² E Var m, so

    log T ± z / √(N β² E Var m)
"""

import math
from statistics import NormalDist

import torch
from torch import Tensor

from flatmin.core.tensors import compute_dtype
from flatmin.metrics.bootstrap_interval import Interval
from flatmin.metrics.inputs import check_inputs

__all__ = ["temperature", "temperature_interval"]

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3  # where the optimum is 0 or infinite


@torch.no_grad()
def temperature(logits: Tensor, labels: Tensor) -> Tensor:
    """The T between 0.001 and 1000 for which nll(logits / T) is least, found in float64.

    Fit it on data that the model was not trained on (on training data it is over-confident) and that you do not report
    on (that would be fitting it to the test labels). T > 1 means that the model was over-confident.

    If no prediction is wrong, more confidence is always better and T is 0.001; if predictions are no better than
    chance, less confidence is better and T is 1000. If all logits of every row are equal, T has no effect and is 1.

    >>> four = torch.tensor([[2.0, 0.0]] * 4)                          # 88 % confident
    >>> temperature(four, torch.tensor([0, 0, 0, 1]))                  # right in 75 %: 2 / ln 3
    tensor(1.8205)
    """
    value = 1 / _inverse_temperature(*_margins(logits, labels))
    return torch.tensor(value, dtype=compute_dtype(logits), device=logits.device)


@torch.no_grad()
def temperature_interval(logits: Tensor, labels: Tensor, *, level: float = 0.95) -> Interval:
    """The temperature with the interval in which it probably lies: a few rows do not determine it.

    It comes from the likelihood: symmetric in log T, with a width set by the curvature of the loss and the number of
    rows. If T is one of the ends 0.001 and 1000, or has no effect, the interval reaches from end to end.

    >>> four = torch.tensor([[2.0, 0.0]] * 4)
    >>> [round(float(end), 2) for end in temperature_interval(four, torch.tensor([0, 0, 0, 1]))]
    [1.82, 0.23, 14.28]
    >>> many = temperature_interval(four.repeat(1000, 1), torch.tensor([0, 0, 0, 1]).repeat(1000))
    >>> [round(float(end), 2) for end in many]
    [1.82, 1.71, 1.94]
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}; 0.95 is 95 %")
    margins, moments = _margins(logits, labels)
    beta = _inverse_temperature(margins, moments)
    low, high = MIN_TEMPERATURE, MAX_TEMPERATURE
    information = len(margins) * beta**2 * _slope(margins, moments, beta)[1]
    if MIN_TEMPERATURE < 1 / beta < MAX_TEMPERATURE and information > 0:
        width = NormalDist().inv_cdf((1 + level) / 2) / math.sqrt(information)
        reach = math.exp(min(width, math.log(MAX_TEMPERATURE / MIN_TEMPERATURE)))  # no more than end to end
        low, high = max(low, 1 / beta / reach), min(high, reach / beta)
    ends = (torch.tensor(end, dtype=compute_dtype(logits), device=logits.device) for end in (1 / beta, low, high))
    return Interval(*ends)


def _margins(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """zₖ − z_label in float64, and the same with 0 in place of −inf, for moments."""
    labels = check_inputs(logits, labels)
    scores = logits.double()
    margins = scores - scores.gather(1, labels[:, None])
    if bool(margins.isnan().any() | margins.isposinf().any()):
        raise ValueError(
            "no temperature can be fitted where a label has a logit of −inf: its likelihood is 0 at every T; "
            f"got {int((margins == math.inf).any(dim=1).sum())} such rows"
        )
    return margins, margins.masked_fill(margins.isneginf(), 0)  # an excluded class has p = 0: 0 · −inf would be nan


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
    """The first and second derivative of the loss."""
    probability = (beta * margins).softmax(dim=1)
    mean = (probability * moments).sum(dim=1, keepdim=True)
    variance = (probability * (moments - mean).square()).sum(dim=1)
    slope, rise = torch.stack([mean.mean(), variance.mean()]).tolist()
    return slope, rise
