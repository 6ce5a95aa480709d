"""A few rows of a table of cases in which every pair of values still meets: a covering array of strength two.

A law over k factors has as many cases as the product of their sizes. What breaks it is nearly always one value (a base
optimizer) or two that do not get on (a fused base with bfloat16 weights). Rows that hold every pair of values,

    ∀ factors i ≠ j, ∀ rows r of the table:  some chosen row c has  cᵢ = rᵢ  and  cⱼ = rⱼ,

find all of these, and they are about as many as the product of the two largest factors: 8 bases × 7 models × 5 methods
× 2 forms are 560 cases, and 56 rows. The table need not be a whole product: of the pairs, those that occur in it count.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import Any

import pytest

BIG = 30  # a law with more cases than these is covered pairwise
Pair = tuple[int, int, Hashable, Hashable]


def pairs(row: Sequence[Hashable]) -> set[Pair]:
    """Which two factors have which two values, for every two of them; a factor that is alone is paired with itself.

    >>> sorted(pairs([5, 7, 9]))
    [(0, 1, 5, 7), (0, 2, 5, 9), (1, 2, 7, 9)]
    """
    places = list(combinations(range(len(row)), 2)) or [(0, 0)]
    return {(i, j, row[i], row[j]) for i, j in places}


def covering(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    """The numbers of the rows to take, in order: greedily, the first of those that hold the most pairs still missing.

    The same table always gives the same rows. Of one factor or two it takes all.

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


def mark_full_products(items: list[pytest.Item]) -> None:
    """Marks with `full` whatever a big law does not need for every pair of its parameters' values to run.

    What needs a CUDA device is a table of its own: where it is skipped, every pair still runs on the CPU.
    """
    tables = defaultdict[tuple[str, bool], list[Any]](list)
    for item in items:
        if hasattr(item, "callspec"):
            tables[item.nodeid.partition("[")[0], item.get_closest_marker("cuda") is not None].append(item)
    for cases in tables.values():
        if len(cases) > BIG:
            # dicts and arrays have no hash: a value is told by its identity, which all cases with it share
            chosen = set(covering([[id(value) for value in case.callspec.params.values()] for case in cases]))
            for number, case in enumerate(cases):
                if number not in chosen:
                    case.add_marker(pytest.mark.full)
