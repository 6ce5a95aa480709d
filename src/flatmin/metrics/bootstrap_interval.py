"""How much a measure depends on the choice of test rows: the bootstrap (Efron 1979).

The N rows are one of many possible samples. Draw N of them with replacement, and measure again: repeated often, the
values vary about as much as the measure itself would over other test sets. The interval contains the middle ones.

    low, high = the (1−level)/2 and (1+level)/2 quantiles of measure(resampled rows)
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flatmin.metrics.inputs import check_inputs

__all__ = ["Interval", "bootstrap"]


class Interval(NamedTuple):
    """A measured value, and the interval in which it probably lies."""

    value: Tensor
    low: Tensor
    high: Tensor


@torch.no_grad()
def bootstrap(
    measure: Callable[[Tensor, Tensor], Tensor],
    logits: Tensor,
    labels: Tensor,
    *,
    samples: int = 1000,
    level: float = 0.95,
    generator: torch.Generator | None = None,
) -> Interval:
    """The measure with its percentile interval, from `samples` resamplings of the rows.

    It is about the choice of test rows, not about training: the value for another seed may well lie outside. A sum of
    absolute gaps, as in ece, grows with noise, so its interval is too high: for 1000 rows of a calibrated model, 0.034
    to 0.077 around 0.039 on average, and it did not contain the value itself in 9 of 40 data sets.

    The ends are two of the resampled values, the outer ones if a quantile falls between two. Without a generator, the
    rows are drawn with seed 0, so the same call gives the same interval, and torch's global generator is not touched. A
    CPU generator draws the same rows for data on any device.

    >>> from flatmin.metrics import error
    >>> half = bootstrap(error, torch.tensor([[1.0, 0.0]] * 100), torch.arange(100) % 2)
    >>> [round(float(end), 2) for end in half]                          # ½ ± 2 · √(½ · ½ / 100)
    [0.5, 0.4, 0.6]
    """
    if samples < 1:
        raise ValueError(f"a bootstrap needs at least one sample, got {samples}")
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}; 0.95 is 95 %")
    labels = check_inputs(logits, labels)
    random = torch.Generator().manual_seed(0) if generator is None else generator
    found = []
    for _ in range(samples):
        drawn = torch.randint(len(labels), (len(labels),), generator=random, device=random.device).to(logits.device)
        found.append(measure(logits[drawn], labels[drawn]))
    ordered = torch.stack(found).sort(dim=0).values
    tail = (1 - level) / 2 * (samples - 1)
    return Interval(measure(logits, labels), ordered[int(tail)], ordered[samples - 1 - int(tail)])
