"""A few rows of a table of cases in which every pair of values still meets: a covering array of strength two.

A law over k factors has as many cases as the product of their sizes. What breaks it is nearly always one value (a base
optimizer) or two that do not get on (a fused base with bfloat16 weights). Rows that hold every pair of values,

    ∀ factors i ≠ j, ∀ rows r of the table:  some chosen row c has  cᵢ = rᵢ  and  cⱼ = rⱼ,

find all of these, and they are about as many as the product of the two largest factors: 8 bases × 7 models × 5 methods
× 2 forms are 560 cases, and 56 rows. The table need not be a whole product: of the pairs, those that occur in it count.
"""

from collections.abc import Hashable, Sequence
from itertools import combinations

Pair = tuple[int, int, Hashable, Hashable]


def pairs(row: Sequence[Hashable]) -> set[Pair]:
    """Which two factors have which two values, for every two of them; a single factor is a pair with itself.

    >>> sorted(pairs([5, 7, 9])), pairs([5])
    ([(0, 1, 5, 7), (0, 2, 5, 9), (1, 2, 7, 9)], {(0, 0, 5, 5)})
    """
    twos = combinations(range(len(row)), 2) if len(row) > 1 else [(0, 0)]
    return {(i, j, row[i], row[j]) for i, j in twos}


def covering(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    """The numbers of the rows to take, in order: greedily, the first of those that hold the most pairs still missing.

    The same table always gives the same rows. Of one factor, or of two, it takes all.

    >>> covering([(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
    [0, 3, 5, 6]
    """
    held = [pairs(row) for row in rows]
    missing = set[Pair]().union(*held)
    chosen = list[int]()
    while missing:
        best = max(range(len(rows)), key=lambda number: len(held[number] & missing))
        chosen.append(best)
        missing -= held[best]
    return sorted(chosen)
