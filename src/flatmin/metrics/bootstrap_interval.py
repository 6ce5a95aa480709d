"""How much a measure depends on the choice of test rows: the bootstrap (Efron 1979).

The N rows are one of many possible samples. Draw N of them with replacement, and measure again: repeated often, the
values vary about as much as the measure itself would over other test sets. The interval contains the middle ones.

    low, high = the (1−level)/2 and (1+level)/2 quantiles of measure(resampled rows)

A measure that compares two samples, such as auroc, has both resampled, each by itself.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flatmin.metrics.inputs import check_inputs

__all__ = ["Interval", "bootstrap", "two_sample_bootstrap"]


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
    _check_settings(samples, level)
    labels = check_inputs(logits, labels)
    value, random = _checked(measure(logits, labels)), _generator(generator)
    found = []
    for _ in range(samples):
        drawn = drawn_rows(logits, random)
        found.append(measure(logits[drawn], labels[drawn]))
    return percentile_interval(value, torch.stack(found), level)


@torch.no_grad()
def two_sample_bootstrap(
    measure: Callable[[Tensor, Tensor], Tensor],
    inside: Tensor,
    outside: Tensor,
    *,
    samples: int = 1000,
    level: float = 0.95,
    generator: torch.Generator | None = None,
) -> Interval:
    """A measure of two samples, such as auroc, with its percentile interval; the rows of each are resampled.

    The samples may be scores (N,) and (M,), or logits (N, K) and (M, K) that `measure` turns into scores. A measure
    may return several numbers, (D,): each has its own interval, from the same rows. Without a generator the rows are
    those of seed 0, as in `bootstrap`.

    >>> from flatmin.metrics import auroc
    >>> found = two_sample_bootstrap(auroc, torch.linspace(0.2, 1, 50), torch.linspace(0, 0.8, 50))
    >>> [round(float(end), 2) for end in found]
    [0.72, 0.61, 0.81]
    """
    _check_settings(samples, level)
    for name, rows in (("inside", inside), ("outside", outside)):
        if not rows.ndim or not len(rows):
            raise ValueError(f"{name} must have at least one row, got shape {tuple(rows.shape)}")
    value, random = _checked(measure(inside, outside)), _generator(generator)
    found = [measure(inside[drawn_rows(inside, random)], outside[drawn_rows(outside, random)]) for _ in range(samples)]
    return percentile_interval(value, torch.stack(found), level)


def _check_settings(samples: int, level: float) -> None:
    if samples < 1:
        raise ValueError(f"a bootstrap needs at least one sample, got {samples}")
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}; 0.95 is 95 %")


def _checked(value: object) -> Tensor:
    """Before the first resample, not after the last."""
    if not isinstance(value, Tensor):
        raise TypeError(f"the measure must return a tensor, got {type(value).__name__}; wrap it in torch.tensor(…)")
    return value


def _generator(given: torch.Generator | None) -> torch.Generator:
    return torch.Generator().manual_seed(0) if given is None else given


def drawn_rows(rows: Tensor, random: torch.Generator) -> Tensor:
    """The indices of as many rows, drawn with replacement."""
    return torch.randint(len(rows), (len(rows),), generator=random, device=random.device).to(rows.device)


def percentile_interval(value: Tensor, found: Tensor, level: float) -> Interval:
    """The value, and the middle ones of those found for the resamples, (samples, …)."""
    ordered = found.sort(dim=0).values
    tail = int((1 - level) / 2 * (len(found) - 1))
    return Interval(value, ordered[tail], ordered[len(found) - 1 - tail])
