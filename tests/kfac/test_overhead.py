"""`overhead=` of the K-FAC systems: refreshes at the intervals that the throttle allows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from ranks import agreed, vector
from timed_training import LEAST, TIMED, Run, each_system

from second_order import DPKFAC, KAISA, DistKFAC, PerStep
from second_order.kfac.schedule import CosineThresholds

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")

TIMED_AT = [0, 2, 4, 6, 8]


def drifting(System: Any = KAISA, **options: Any) -> Run:
    """A run whose layers drift so fast that they want to be refreshed at every step."""
    run = Run(System, **options)
    run.curvature.drift._thresholds = CosineThresholds(2.0, 3.0, 1)
    return run


@each_system
def test_every_other_step_refreshes_until_five_are_timed(System: Any) -> None:
    run = drifting(System).go(TIMED - 1)
    assert run.throttle.interval == LEAST
    run.go(16)
    assert run.refreshes == [*TIMED_AT, 16, 24]  # multiples of a power of two
    assert run.updates == run.refreshes


def test_refreshes_take_no_more_than_the_overhead() -> None:
    """Negative control: without it they come at every step and take almost half of the time."""
    for overhead, share in ((0.1, 45 / 800), (None, 0.45)):
        run = drifting(overhead=overhead).go(16)
        before = len(run.refreshes)
        run.go(160)
        spent = (run.R + run.S) * (len(run.refreshes) - before) / (160 * run.T)
        assert spent == pytest.approx(share)
        assert (spent <= 0.1) == (overhead is not None)


def test_a_fixed_statistics_interval_does_not_change() -> None:
    run = drifting(factor_update_steps=1).go(20)
    assert run.updates == [*range(20)]
    assert run.throttle.interval == 4  # 40 / (0.1 * 105)
    assert run.refreshes == [*TIMED_AT, 12, 16]


def test_nothing_is_timed_without_an_overhead() -> None:
    run = Run(overhead=None).go(6)
    assert run.throttle is None
    assert run.time.looks == 0
    assert "overhead" not in str(run.optimizer.summary())
    assert "throttle_interval" not in run.saved()["optimizer"]["state"][0]["curvature"]


def test_the_summary_shows_the_interval() -> None:
    run = drifting().go(TIMED - 2)
    assert "overhead 0.1: being measured" in run.optimizer.summary().lines
    run.go(2)
    line = "overhead 0.1: at least 5 steps between refreshes"
    assert line in run.optimizer.summary().lines


def test_the_decay_of_factors_follows_the_interval() -> None:
    """DistKFAC's default forgets as much per step, however rare updates are."""
    run = drifting(DistKFAC, factor_decay=PerStep(0.95)).go(26)
    assert run.decays[8] == pytest.approx(0.95**2)
    assert run.decays[16] == run.decays[24] == pytest.approx(0.95**8)


def on_ranks(rank: int, world_size: int, name: str) -> Any:
    """The interval where a rank is three times as slow, and the parameters."""
    systems: dict[str, Any] = {"KAISA": KAISA, "DPKFAC": DPKFAC, "DistKFAC": DistKFAC}
    run = drifting(systems[name], scale=1.0 + 2 * rank)
    trajectory = []
    if rank == 1:
        run.T = 20.0
    for _ in range(TIMED + 10):
        run.go(1, rank, world_size)
        trajectory.append(vector(run.model))
    return run.throttle.interval, run.refreshes, trajectory


@pytest.mark.parametrize("name", ["KAISA", "DPKFAC", "DistKFAC"])
def test_ranks_with_different_clocks_choose_the_same_interval(world: World, name: str) -> None:
    (first, refreshes, a), (second, others, b) = world.run(on_ranks, 2, name)
    assert first == second > LEAST
    assert refreshes == others
    agreed([a, b])


def train_and_save(
    rank: int, world_size: int, steps: int, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    run = drifting(**(options or {})).go(steps, rank, world_size)
    run.optimizer.consolidate(to=None)
    return run.saved()


def load_and_train(
    rank: int, world_size: int, saved: dict[str, Any], options: dict[str, Any] | None = None
) -> Any:
    """As a machine that is a hundred times as slow at everything but the passes."""
    run = drifting(**(options or {}))
    run.time.spend(12345.0)
    run.scale = 100.0
    run.T = 1.0
    run.load(saved)
    run.go(10, rank, world_size)
    return run.throttle.interval, run.refreshes, vector(run.model)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("exchange", ["all_reduce", "reduce"])
def test_a_resumed_run_repeats_the_intervals(
    world: World, before: int, after: int, exchange: str
) -> None:
    options = {"factor_exchange": exchange}
    saved = world.run(train_and_save, before, TIMED + 1, options)[0]
    for interval, refreshes, _ in world.run(load_and_train, after, saved, options):
        assert interval == LEAST
        assert refreshes == [16]


def test_a_resumed_run_equals_the_uninterrupted_run() -> None:
    whole = drifting().go(14)
    saved = whole.saved()
    whole.go(10)
    *_, weights = load_and_train(0, 1, saved)
    torch.testing.assert_close(weights, vector(whole.model), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("throttle_interval", 2.5, r"is 2\.5, which is not an integer|and 2\.5 for another"),
        ("throttle_overhead", "much", "is 'much', which is not a finite number"),
    ],
)
def test_invalid_intervals_raise(name: str, value: Any, match: str) -> None:
    saved = train_and_save(0, 1, 14)
    saved["optimizer"]["state"][0]["curvature"][name] = value
    run = drifting().go(14)
    with pytest.raises(ValueError, match=match):
        run.load(saved)
    assert run.throttle.interval == LEAST
