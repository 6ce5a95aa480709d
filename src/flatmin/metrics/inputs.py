"""The inputs of every metric, checked before anything is measured: logits (N, K) and labels (N,).

A row of logits has probabilities if its largest entry is finite: −inf excludes a class, whose probability is then 0,
but cannot exclude all of them. A row with nan or +inf has none.

The check reads the values, so the host waits for the device once per metric. Without it, a wrong label would crash the
whole process on a GPU, and a nan would count as a prediction.
"""

from torch import Tensor

__all__ = ["check_inputs", "has_probabilities"]


def has_probabilities(logits: Tensor) -> Tensor:
    """Which rows have probabilities, (N,) of bool.

    >>> inf = float("inf")
    >>> has_probabilities(Tensor([[1.0, -inf], [-inf, -inf], [1.0, inf], [1.0, float("nan")]]))
    tensor([ True, False, False, False])
    """
    return logits.amax(dim=1).isfinite()  # a nan counts as the largest


def check_inputs(logits: Tensor, labels: Tensor) -> Tensor:
    """Labels as int64, one of 0 … K−1 for each row of logits; raises if a row has no probabilities."""
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or not logits.numel():
        raise ValueError(
            "logits must be (N, K) and labels (N,) with N and K at least 1, "
            f"got {tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    if labels.is_floating_point():
        raise TypeError(f"labels must be integer class indices, got {labels.dtype}")
    labels, classes = labels.long(), logits.shape[1]
    unknown, broken = (labels < 0) | (labels >= classes), ~has_probabilities(logits)
    if not bool((unknown | broken).any()):
        return labels
    if bool(unknown.any()):
        first, count = _first(unknown)
        raise ValueError(
            f"labels must be from 0 to {classes - 1} for {classes} classes, got {int(labels[first])} in row {first}, "
            f"the first of {count} such rows; leave out rows that have no label"
        )
    first, count = _first(broken)
    raise ValueError(
        "logits must not be nan or +inf, nor −inf for all classes, "
        f"got {count} such rows of {len(labels)}, the first being row {first}: has the model diverged?"
    )


def _first(flags: Tensor) -> tuple[int, int]:
    """The first index where a flag holds, and how many there are."""
    places = flags.nonzero()
    return int(places[0]), len(places)
