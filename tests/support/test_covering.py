"""A covering array against brute force: every pair of every table, few rows, and the same ones every time."""

import random
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, product
from math import prod
from types import SimpleNamespace
from typing import cast

import pytest

from tests.support.covering import BIG, covering, mark_full_products


def table(sizes: list[int]) -> list[tuple[int, ...]]:
    return list(product(*map(range, sizes)))


def lacks(rows: list[tuple[int, ...]], chosen: list[int]) -> list[tuple[int, ...]]:
    """The rows of which some pair is in no chosen row."""
    return [
        row
        for row in rows
        if not all(
            any(rows[number][i] == row[i] and rows[number][j] == row[j] for number in chosen)
            for i, j in combinations_with_replacement(range(len(row)), 2)
        )
    ]


@pytest.mark.parametrize("seed", range(12))
def test_every_pair_of_a_product_is_in_some_row(seed: int) -> None:
    draw = random.Random(seed)
    rows = table([draw.randint(1, 6) for _ in range(draw.randint(2, 5))])
    assert lacks(rows, covering(rows)) == []


@pytest.mark.parametrize("seed", range(12))
def test_of_a_table_with_gaps_every_pair_that_occurs_is_in_some_row(seed: int) -> None:
    draw = random.Random(seed)
    rows = table([draw.randint(2, 5) for _ in range(4)])
    rows = draw.sample(rows, len(rows) // 2)
    chosen = covering(rows)
    assert lacks(rows, chosen) == []
    assert len(chosen) < len(rows)


@pytest.mark.parametrize("sizes", [[8, 7, 5, 2], [8, 5, 7], [2] * 10, [3, 3, 3, 2], [5, 2, 2, 2, 2]])
def test_there_are_few_rows(sizes: list[int]) -> None:
    """As many as the two largest factors have pairs, which is the least, or a tenth more; for small factors ten."""
    rows, least = table(sizes), prod(sorted(sizes)[-2:])
    assert least <= len(covering(rows)) <= max(1.1 * least, 10)


def test_the_rows_depend_on_the_table_alone() -> None:
    rows = table([5, 4, 3, 2])
    named = [tuple(f"value {value}" for value in row) for row in rows]
    assert covering(rows) == covering(named) == covering(list(rows))
    assert covering(rows) == sorted(set(covering(rows)))


def test_of_one_factor_or_two_or_a_table_of_columns_nothing_is_left_out() -> None:
    assert covering(table([40])) == list(range(40))
    assert covering(table([4, 3])) == list(range(12))
    assert covering([(i, -i, i * i) for i in range(9)]) == list(range(9))


@dataclass
class Case:
    """As much of a pytest item as its marking needs."""

    nodeid: str
    values: tuple[int, ...]
    marks: list[str] = field(default_factory=list)

    @property
    def callspec(self) -> SimpleNamespace:
        return SimpleNamespace(params=dict(enumerate(self.values)))

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.name)


def test_of_a_big_law_every_pair_runs_without_the_mark_on_each_device() -> None:
    spread = [Case(f"spread[{row}]", row, ["cuda"] if row[0] else []) for row in table([2, 6, 5, 4])]
    small = [Case(f"small[{row}]", row) for row in table([BIG // 6, 3, 2])]
    mark_full_products(cast("list[pytest.Item]", spread + small))
    assert not any(case.marks for case in small)
    for device in (0, 1):
        rows = [case.values for case in spread if case.values[0] == device]
        chosen = [n for n, case in enumerate(spread[device * len(rows) :][: len(rows)]) if "full" not in case.marks]
        assert lacks(rows, chosen) == []
        assert len(chosen) < len(rows) / 3
