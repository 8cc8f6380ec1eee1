"""The benchmark of the options: each kind of section at a small size."""

from __future__ import annotations

import math

import settings


def test_steps_to_a_target_are_counted_one_by_one_and_by_seed() -> None:
    row = settings.steps_to("mlp", "defaults", 2, {}, steps=6, targets=("loss 2.2", "loss 0.001"))
    assert row["batch"] == 64
    assert all(step is not None and 1 <= step <= 6 for step in row["steps"]["loss 2.2"])
    assert row["steps"]["loss 0.001"] == [None, None]


def test_never_is_later_than_any_step() -> None:
    assert settings.median([3, None, 5]) == 5
    assert math.isinf(settings.median([3, None, None]))
    assert settings.shown([3, None, None]) == "never"


def test_the_clip_binds_at_first_with_the_defaults() -> None:
    (row,) = settings.binding(1, steps=3, models=("mlp",))
    assert row["bound"] == row["bound at first"] == 3


def test_few_directions_hold_most_of_the_curvature() -> None:
    for row in settings.spectrum(1):
        assert row["largest over mean"] > 2
        assert 0 < row["share above twice the mean"] < row["curvature of those"] <= 1


def test_a_large_factor_is_timed_in_processor_seconds() -> None:
    record = settings.large(64)
    assert record["rows"] == 64
    assert record["inverse"] >= 0


def test_the_highest_loss_of_the_last_steps() -> None:
    (row, *others) = settings.late(1, steps=15, models=("mlp",))
    assert len(others) == len(settings.LATE) - 1
    assert 0 < row["highest"][0] < 3
