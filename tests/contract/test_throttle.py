"""The throttle: the interval that it gives, by a clock that the tests move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timed_training import Time

from second_order.checkpoint.saved import SavedPart
from second_order.distributed.world import World as Processes
from second_order.training.throttle import (
    MAX_INTERVAL,
    THROTTLE_ENTRIES,
    TIMED_REFRESHES,
    Throttle,
    min_interval,
)

if TYPE_CHECKING:
    from pool import World

seconds = st.floats(0.01, 100)


class Steps:
    """Steps of T seconds, and refreshes of R seconds whenever the throttle allows them."""

    def __init__(self, overhead: float, fewest: int = 1, world: Any = None) -> None:
        self.time = Time()
        world = Processes.alone() if world is None else world
        training: Any = SimpleNamespace(world=world, device=torch.device("cpu"))
        self.throttle = Throttle(training, overhead, min_refreshes=fewest)
        self.throttle.clock = lambda _: self.time()
        self.throttle.begin_step()

    def take(self, T: float, R: float = 0.0) -> None:
        self.time.spend(T + R)
        self.throttle.end_step(refreshed=R > 0)


@given(seconds, seconds, st.floats(0.01, 10))
def test_refreshes_stay_within_the_overhead(T: float, R: float, overhead: float) -> None:
    steps = Steps(overhead)
    for _ in range(10):
        steps.take(T)
    for _ in range(TIMED_REFRESHES + 2):
        steps.take(T, R)
        n = steps.throttle.interval
        assert n == MAX_INTERVAL or overhead * n * T * (1 + 1e-9) >= R
        assert n == 1 or overhead * (n - 1) * T * (1 - 1e-6) < R  # none shorter would do
        for _ in range(min(n, 60)):
            steps.take(T)


def test_outliers_do_not_count() -> None:
    steps = Steps(0.1, fewest=5)
    for i in range(5):
        steps.take(1.0, 5000.0 if i == 0 else 20.0)  # the first one loads libraries
        assert steps.throttle.interval == (0 if i < 4 else 200)
        steps.take(300.0 if i == 2 else 1.0)


def test_a_refresh_at_the_first_step_counts_after_other_steps() -> None:
    steps = Steps(0.1)
    steps.take(1.0, 20.0)
    assert steps.throttle.interval == 0
    for _ in range(10):
        steps.take(1.0)
    assert steps.throttle.interval == 200


def test_nothing_is_timed_after_the_fifth_refresh() -> None:
    steps = Steps(0.1)
    for _ in range(TIMED_REFRESHES):
        steps.take(1.0)
        steps.take(1.0, 2.0)
    looks = steps.time.looks
    steps.take(1.0)
    steps.take(1.0, 1000.0)
    assert (steps.time.looks, steps.throttle.interval) == (looks, 20)


@pytest.mark.parametrize(
    ("R", "T", "expected"),
    [(0.0, 1.0, 1), (-1.0, 1.0, 1), (1.0, 0.0, MAX_INTERVAL), (3.0, 10.0, 3)],
)
def test_the_minimum_interval_follows_from_the_overhead(R: float, T: float, expected: int) -> None:
    assert min_interval(R, T, 0.1) == expected


def on_ranks(rank: int, world_size: int) -> list[int]:
    steps = Steps(0.1, world=Processes())
    found = []
    for _ in range(TIMED_REFRESHES):
        steps.take(1.0)
        steps.take(1.0, 2.0 + 3.0 * rank)
        found.append(steps.throttle.interval)
    return found


def test_all_ranks_take_the_largest_interval(world: World) -> None:
    assert world.run(on_ranks, 2) == [[50] * TIMED_REFRESHES] * 2


def saved(part: dict[str, Any]) -> Any:
    return {torch.zeros(1): SavedPart(0, "curvature", "w", part)}


def test_a_checkpoint_contains_the_interval() -> None:
    steps = Steps(0.1)
    for _ in range(3):
        steps.take(1.0)
        steps.take(1.0, 2.0)
    part = steps.throttle.saved()
    other = Steps(0.1)
    other.throttle.load(saved(part))
    assert part == dict(zip(THROTTLE_ENTRIES, (20, 3, 0.1), strict=True))
    assert other.throttle.saved() == part
    other.throttle.begin_step()
    other.take(100.0)
    other.take(100.0, 400.0)
    assert other.throttle.interval == 40  # by the machine that it is on
    for overhead, entries in ((0.2, part), (0.1, {})):
        again = Steps(overhead)
        again.throttle.load(saved(entries))
        assert (again.throttle.interval, again.throttle.refreshes) == (0, 0)


def test_without_an_interval_measurement_continues() -> None:
    """A checkpoint has no durations: the resumed run sees its fifth refresh before other steps."""
    part = dict(zip(THROTTLE_ENTRIES, (0, TIMED_REFRESHES - 1, 0.1), strict=True))
    steps = Steps(0.1)
    steps.throttle.load(saved(part))
    steps.throttle.begin_step()
    steps.take(1.0, 2.0)
    assert steps.throttle.interval == 0
    for _ in range(20):
        steps.take(1.0)
    assert steps.throttle.interval == 20
    looks = steps.time.looks
    steps.take(1.0, 2.0)
    assert steps.time.looks == looks
