"""Intervals by budget are chosen once, by all ranks alike, and kept in checkpoints.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from budgeted import CHOSEN, MEASURED, MLP, Run
from contract import make
from ranks import agreed, vector
from torch import Tensor

from second_order import DPKFAC, KAISA, DistKFAC, RankMismatchError

if TYPE_CHECKING:
    from pathlib import Path

    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


# Ranks.


def on_ranks(rank: int, world_size: int, name: str) -> Any:
    """What is chosen where a rank is three times as slow, with less to do; and the parameters."""
    systems: dict[str, Any] = {"KAISA": KAISA, "DPKFAC": DPKFAC, "DistKFAC": DistKFAC}
    run, trajectory = Run(systems[name], scale=1.0 + 2 * rank), []
    if rank == 1:
        run.T = 20.0
    for _ in range(MEASURED + 5):
        run.go(1, rank, world_size)
        trajectory.append(vector(run.model))
    return run.budget.chosen, run.budget.measured, trajectory


@pytest.mark.parametrize("name", ["KAISA", "DPKFAC", "DistKFAC"])
def test_ranks_with_different_clocks_choose_the_same(world: World, name: str) -> None:
    (first, measured, a), (second, other, b) = world.run(on_ranks, 2, name)
    S = 3 * (1 + 3) / 2 + 2 / 3 * (1 * 1 + 2 * 3) / 2 if name == "DPKFAC" else 10.0  # 1, 2 layers
    assert measured == other == pytest.approx((S, 80, 80))  # the means
    assert first == second == {"factor_update_steps": 4, "inv_update_steps": 15}
    agreed([a, b])


def held(sign: Path, loss: Tensor) -> Tensor:
    end = time.monotonic() + 60
    while not sign.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return loss


def beside_a_stats_worker(rank: int, world_size: int, sign: Path) -> Any:
    """It says nothing while costs are measured: statistics are taken here."""
    options = {"stats_workers": 1, "factor_update_steps": 5, "helper_timeout": 60.0}
    if rank == 1:
        model = MLP.model()
        auto = {"inv_update_steps": "auto", "overhead": 0.1}
        with make(DistKFAC, model, **options, **auto) as optimizer:
            batches = [MLP.batch(12)]
            optimizer.serve(batches, lambda batch: held(sign, MLP.loss(model(batch[0]), batch[1])))
        return None
    run = Run(DistKFAC, **options)
    with run.optimizer:
        run.go(MEASURED)
        sign.touch()
        assert run.updates == list(range(MEASURED))
    return run.budget.measured, run.budget.chosen


def test_what_stats_workers_send_is_not_of_the_budget(world: World, tmp_path: Path) -> None:
    """When it comes is no matter of intervals: refreshes have the whole budget."""
    measured, chosen = world.run(beside_a_stats_worker, 2, tmp_path / "sign")[0]
    assert measured == pytest.approx((0, 40, 100))
    assert chosen == {"inv_update_steps": 4}


def parted(rank: int, world_size: int) -> str:
    run = Run().go(MEASURED, rank, world_size)
    run.budget.chosen["inv_update_steps"] += rank
    with pytest.raises(RankMismatchError) as error:
        run.go(1, rank, world_size)
    return str(error.value)


def test_ranks_compare_what_they_have_chosen(world: World) -> None:
    for said in world.run(parted, 2):
        assert "intervals by budget: statistics every 2 steps, inverses every 6 steps" in said


# Checkpoints.


def train_and_save(
    rank: int, world_size: int, steps: int, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    run = Run(**(options or {})).go(steps, rank, world_size)
    run.optimizer.consolidate(to=None)
    return run.saved()


def load_and_train(
    rank: int, world_size: int, saved: dict[str, Any], options: dict[str, Any] | None = None
) -> Any:
    """As a machine that is a hundred times as slow at everything but the passes."""
    run = Run(**(options or {}))
    run.time.spend(12345.0)
    run.scale, run.T = 100.0, 1.0
    run.load(saved)
    assert not run.budget.measuring
    run.go(10, rank, world_size)
    return run.budget.chosen, run.updates, run.refreshes, vector(run.model)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("exchange", ["all_reduce", "reduce"])
def test_a_resumed_run_repeats_them(world: World, before: int, after: int, exchange: str) -> None:
    options = {"factor_exchange": exchange}
    saved = world.run(train_and_save, before, MEASURED + 1, options)[0]
    for chosen, updates, refreshes, _ in world.run(load_and_train, after, saved, options):
        assert chosen == CHOSEN
        assert updates == [22, 24, 26, 28, 30]
        assert refreshes == [24, 30]


def test_a_resumed_run_is_the_run_that_was_never_stopped() -> None:
    whole = Run().go(24)
    saved = whole.saved()
    whole.go(10)
    *_, weights = load_and_train(0, 1, saved)
    torch.testing.assert_close(weights, vector(whole.model), rtol=1e-10, atol=1e-12)


def test_other_options_or_an_unfinished_measurement_are_measured_anew() -> None:
    saved = train_and_save(0, 1, 24)
    assert Run(overhead=0.2).load(saved).budget.measuring
    fixed = Run(inv_update_steps=7).load(saved)
    assert fixed.budget.chosen == {"factor_update_steps": 2}
    neither = Run(factor_update_steps=3, inv_update_steps=7).load(saved)
    assert not neither.budget.measuring
    assert neither.budget.chosen == {}
    one = train_and_save(0, 1, 24, {"inv_update_steps": 7})
    assert Run().load(one).budget.measuring
    early = train_and_save(0, 1, 3)
    assert early["optimizer"]["state"][0]["curvature"]["inv_update_steps"] == 0
    run = Run().go(7).load(early)
    assert run.budget.measuring
    assert run.go(MEASURED).budget.chosen == CHOSEN


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("inv_update_steps", -1, "outside|no whole number"),
        ("inv_update_steps", 2.5, r"is 2\.5, and|and 2\.5 for another"),
        ("factor_update_steps", "auto", "is .auto., and no"),
        ("overhead", "much", "is 'much', and no finite"),
        ("inv_update_steps", 7, "is 7, and 6 for another|is 6, and 7 for another"),
    ],
)
def test_intervals_that_cannot_be_are_refused(name: str, value: Any, match: str) -> None:
    saved = train_and_save(0, 1, 24)
    saved["optimizer"]["state"][0]["curvature"][name] = value
    run = Run().go(24)
    with pytest.raises(ValueError, match=match):
        run.load(saved)
    assert run.budget.chosen == CHOSEN
