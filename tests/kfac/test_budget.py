"""Intervals by budget: what is measured, and what is chosen."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from budgeted import MEASURED, MLP, Run
from contract import make
from hypothesis import given
from hypothesis import strategies as st
from ranks import vector
from torch import Tensor
from torch.nn import functional

from second_order import DPKFAC, KAISA, DistKFAC, SecondOrderWarning
from second_order.budget import LONGEST, intervals
from second_order.kfac import solve_async

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


def test_drawing_labels_is_of_the_statistics() -> None:
    def likelihood(outputs: Tensor) -> Tensor:
        run.time.spend(13)
        return functional.cross_entropy(outputs, outputs.argmax(-1), reduction="sum")

    run = Run(fisher=likelihood)
    assert run.go(MEASURED).budget.measured == pytest.approx((18, 40, 100))


@pytest.mark.parametrize(("staleness", "counted"), [(0, True), (None, False), (3, False)])
def test_waiting_for_threads_counts_where_all_solves_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, staleness: int | None, counted: bool
) -> None:
    run = Run(DistKFAC, max_staleness=staleness, inverse_threads=1)
    wait, waited_for = solve_async.wait, []

    def waiting(tickets: Any) -> None:
        if tickets[0] not in waited_for:
            run.time.spend(17.0)
            waited_for.append(tickets[0])
        wait(tickets)

    monkeypatch.setattr(solve_async, "wait", waiting)
    run.go(MEASURED)
    waited = 17 * len(run.curvature.plan) if counted else 0
    assert run.budget.measured == pytest.approx((5, 40 + waited, 100))


NO_BUDGET: dict[str, Any] = {"factor_update_steps": 1, "inv_update_steps": 10, "overhead": 0.1}


def told(
    System: Any, R: float, steps: int, T: float = 100.0, **options: Any
) -> list[tuple[int, str]]:
    """The warnings of a training whose refreshes take R seconds, each with its step."""
    run = Run(System, **{**NO_BUDGET, **options})
    run.R, run.T = R, T
    found = []
    for step in range(steps):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", SecondOrderWarning)
            run.go(1)
        found += [(step, str(w.message)) for w in caught if "a refresh of" in str(w.message)]
    return found


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


def test_a_resumed_run_is_the_run_that_was_never_stopped() -> None:
    whole = Run().go(24)
    saved = whole.saved()
    whole.go(10)
    *_, weights = load_and_train(0, 1, saved)
    torch.testing.assert_close(weights, vector(whole.model), rtol=1e-10, atol=1e-12)


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
