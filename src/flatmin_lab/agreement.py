"""Does a mean of ours agree with the paper's? Within twice the deviation that the difference of two such means has.

    |ours − theirs| ≤ 2 · s · √(1/n + 1/10)

with the paper's deviation s over its ten trials, and n of ours. Of two that train alike 92 in 100 pairs agree: s is an
estimate from ten.
"""

import math
from collections.abc import Sequence
from statistics import mean

from flatmin_lab.recipes.paper_numbers import Value

TRIALS = 10  # the paper's


def tolerance(count: int, deviation: float) -> float:
    """How far apart two means may lie.

    >>> round(tolerance(10, 0.1), 4)
    0.0894
    """
    return 2 * deviation * math.sqrt(1 / count + 1 / TRIALS)


def agrees(values: Sequence[float], paper: Value | None) -> bool | None:
    """None where it cannot be said: no values, none of the paper's, or no deviation with it.

    >>> agrees([5.1, 5.2], Value(5.02, 0.212)), agrees([4.2], Value(3.97, 0.091)), agrees([1.0], Value(1.25))
    (True, False, None)
    """
    if not values or paper is None or paper.deviation is None:
        return None
    return abs(mean(values) - paper.mean) <= tolerance(len(values), paper.deviation)
