"""The inputs of every metric, checked before anything is measured: logits (N, K) and labels (N,), or scores (N,).

A row of logits has probabilities if its largest entry is finite: −inf excludes a class, whose probability is then 0,
but cannot exclude all of them. A row with nan or +inf has none.

The check reads the values, so the host waits for the device once per metric. Without it, a wrong label would crash the
whole process on a GPU, and a nan would count as a prediction.
"""

from torch import Tensor

__all__ = ["check_inputs", "check_logits", "check_scores", "has_probabilities"]


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
    raise _without_probabilities(broken)


def check_logits(logits: Tensor) -> None:
    """Raise unless these are logits (N, K) whose rows all have probabilities."""
    if logits.ndim != 2 or not logits.numel():
        raise ValueError(f"logits must be (N, K) with N and K at least 1, got {tuple(logits.shape)}")
    broken = ~has_probabilities(logits)
    if bool(broken.any()):
        raise _without_probabilities(broken)


def check_scores(name: str, scores: Tensor) -> None:
    """Raise unless these are scores (N,) that can be put in order: an infinite one can, nan cannot."""
    if not scores.is_floating_point():
        raise TypeError(f"{name} must be floating-point scores, got {scores.dtype}; call .float() on them")
    if scores.ndim != 1 or not len(scores):
        raise ValueError(f"{name} must be scores of shape (N,) with N at least 1, got {tuple(scores.shape)}")
    unordered = scores.isnan()
    if bool(unordered.any()):
        first, count = _first(unordered)
        raise ValueError(
            f"{name} must not be nan, got {count} of {len(scores)}, the first in row {first}; "
            "leave these rows out, or give them a score"
        )


def _without_probabilities(broken: Tensor) -> ValueError:
    first, count = _first(broken)
    return ValueError(
        "logits must not be nan or +inf, nor −inf for all classes, "
        f"got {count} such rows of {len(broken)}, the first being row {first}: has the model diverged?"
    )


def _first(flags: Tensor) -> tuple[int, int]:
    """The first index where a flag holds, and how many there are."""
    places = flags.nonzero()
    return int(places[0]), len(places)
