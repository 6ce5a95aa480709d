"""Is a difference between two methods more than chance? Welch's test of two means with unequal standard deviations.

    t = (x̄ − ȳ) / √(s²ₓ/n + s²ᵧ/m),     with (s²ₓ/n + s²ᵧ/m)² / (s⁴ₓ/n²(n−1) + s⁴ᵧ/m²(m−1)) degrees of freedom

p is the probability of a t at least as large in absolute value if the means were equal. Of many comparisons some fall
below 0.05 by chance alone: Holm's correction makes up for that.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import mean, variance
from typing import NamedTuple, TypeVar

from scipy.special import stdtr  # the t distribution; scipy.stats has the whole test, and takes a second more to import

from flatmin_lab.recipes.paper_numbers import Value

Key = TypeVar("Key")
LEVEL = 0.05  # of significance
MIN_RUNS = 3  # with fewer there is no standard deviation and no test


class Welch(NamedTuple):
    t: float
    freedom: float
    p: float


def welch(x: Sequence[float], y: Sequence[float]) -> Welch | None:
    """Welch's test of two samples; None if either has fewer than two values, or neither has any spread.

    Exact ties prove nothing: errors are fractions of a small number of images.

    >>> round(welch([1.0, 2.0, 3.0], [5.0, 6.0, 7.0]).p, 4)
    0.008
    """
    if len(x) < 2 or len(y) < 2:
        return None
    a, b = variance(x) / len(x), variance(y) / len(y)
    if a + b == 0:
        return None
    apart = mean(x) - mean(y)
    t = apart / math.sqrt(a + b)
    share = a / (a + b)  # of the variance; its square cannot underflow
    freedom = 1 / (share**2 / (len(x) - 1) + (1 - share) ** 2 / (len(y) - 1))
    return Welch(t, freedom, 2 * float(stdtr(freedom, -abs(t))))


def holm(ps: Mapping[Key, float]) -> dict[Key, float]:
    """Holm's p-values: compared with 0.05, at most one family in twenty without any difference shows one.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    adjusted: dict[Key, float] = {}
    most = 0.0
    for rank, (key, p) in enumerate(sorted(ps.items(), key=lambda item: item[1])):
        most = max(most, min(1.0, (len(ps) - rank) * p))
        adjusted[key] = most
    return adjusted


def p_values_of(pairs: Mapping[Key, tuple[Sequence[float], Sequence[float]]]) -> dict[Key, float]:
    """The p-value of each pair of samples, after Holm; pairs that are too small or without spread are left out.

    >>> base = [1.0, 1.1, 1.2]
    >>> p_values_of({"far": ([5.0, 5.1, 5.2], base), "two": ([5.0, 5.1], base)}).keys()
    dict_keys(['far'])
    """
    tests = {key: welch(*pair) for key, pair in pairs.items() if min(map(len, pair)) >= MIN_RUNS}
    return holm({key: test.p for key, test in tests.items() if test is not None})


# ---- agreement with the paper: our mean lies within two standard deviations of the difference of two means


PAPER_TRIALS = 10  # runs behind each of the paper's means


def tolerance(count: int, std: float) -> float:
    """How far apart our mean of `count` runs and the paper's may lie; `std` is of a single run.

    >>> round(tolerance(10, 0.1), 4)
    0.0894
    """
    return 2 * std * math.sqrt(1 / count + 1 / PAPER_TRIALS)


def agrees(values: Sequence[float], paper: Value | None) -> bool | None:
    """Whether our mean agrees with the paper's; None without values, or without the paper's standard deviation.

    >>> agrees([5.1, 5.2], Value(5.02, 0.212)), agrees([4.2], Value(3.97, 0.091)), agrees([1.0], Value(1.25))
    (True, False, None)
    """
    if not values or paper is None or paper.std is None:
        return None
    return abs(mean(values) - paper.mean) <= tolerance(len(values), paper.std)


def agreement(values: Sequence[float], agree: bool | None) -> str:
    """In words; a single run cannot confirm a mean, only fail to contradict it.

    >>> agreement([5.1, 5.2], True), agreement([5.1], True), agreement([5.1], False), agreement([5.1], None)
    ('yes', 'not contradicted', 'no', '')
    """
    if agree is None:
        return ""
    return "no" if not agree else "yes" if len(values) > 1 else "not contradicted"
