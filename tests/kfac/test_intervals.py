"""The rule by which intervals are chosen: S/f + R/i <= overhead T, with f <= i."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from second_order.budget import LONGEST, intervals

seconds = st.floats(0.1, 100)
shares = st.floats(0.01, 10)


def cost(S: float, R: float, f: int, i: int) -> float:
    return S / f + R / i


@given(seconds, seconds, seconds, shares)
def test_the_bound_holds_unless_intervals_are_the_longest(
    S: float, R: float, T: float, overhead: float
) -> None:
    f, i = intervals(S, R, T, overhead)
    assert 1 <= f <= i <= LONGEST
    assert i == LONGEST or cost(S, R, f, i) <= overhead * T * (1 + 1e-9)


@given(seconds, seconds, seconds, shares, st.integers(1, 3000))
def test_beside_a_given_interval_the_bound_holds_where_it_can(
    S: float, R: float, T: float, overhead: float, fixed: int
) -> None:
    f, i = intervals(S, R, T, overhead, f=fixed)
    assert f == fixed <= i <= max(LONGEST, fixed)
    if i < LONGEST:
        assert i == fixed or cost(S, R, f, i - 1) > overhead * T  # none shorter would do
        assert cost(S, R, f, i) <= overhead * T * (1 + 1e-9)
    f, i = intervals(S, R, T, overhead, i=fixed)
    assert i == fixed >= f >= 1
    if f < min(fixed, LONGEST):
        assert cost(S, R, f, i) <= overhead * T * (1 + 1e-9)
    assert intervals(S, R, T, overhead, 7, fixed) == (7, fixed)


@given(st.floats(3.4, 300), st.floats(7, 600))
def test_no_more_is_left_of_the_budget_than_whole_numbers_leave(S: float, R: float) -> None:
    f, i = intervals(S, R, T=10.0, overhead=0.1)
    assert 10 <= f <= i < LONGEST
    assert 0.9 <= cost(S, R, f, i) <= 1 + 1e-9


@pytest.mark.parametrize(
    ("S", "R", "T", "overhead", "fixed", "expected"),
    [
        (5, 40, 100, 0.1, {}, (2, 6)),  # 3 · 5 / 10; 40 / (2/3 · 10)
        (1, 40, 100, 0.1, {}, (1, 5)),  # 40 / (10 − 1)
        (50, 100, 100, 0.1, {}, (15, 15)),  # (50 + 100) / 10
        (5, 40, 100, 0.1, {"f": 10}, (10, 10)),  # 40 / (10 − 0.5) is 5, and statistics are rarer
        (5, 400, 100, 0.1, {"f": 10}, (10, 43)),  # 400 / (10 − 0.5)
        (5, 40, 100, 0.1, {"f": 2000}, (2000, 2000)),
        (50, 40, 100, 0.1, {"i": 8}, (8, 8)),  # 50 / (10 − 5) is 10, and refreshes are not so rare
        (20, 40, 100, 0.1, {"i": 8}, (4, 8)),  # 20 / (10 − 5)
        (20, 40, 100, 0.1, {"i": 2}, (2, 2)),  # refreshes alone cost more
        (0, 0, 100, 0.1, {}, (1, 1)),
        (0, 0, 0, 0.1, {}, (1, 1)),
        (1, 1, 0, 0.1, {}, (LONGEST, LONGEST)),
        (0, 1, 1e-9, 0.1, {}, (1, LONGEST)),
    ],
)
def test_intervals_by_hand(
    S: float, R: float, T: float, overhead: float, fixed: dict[str, int], expected: tuple[int, int]
) -> None:
    assert intervals(S, R, T, overhead, **fixed) == expected
