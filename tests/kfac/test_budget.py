"""Intervals by budget: what is measured, and what is chosen."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from budgeted import CHOSEN, MEASURED, Run, each_system
from torch import Tensor
from torch.nn import functional

from second_order import KAISA, DistKFAC, SecondOrderWarning
from second_order.kfac import curvature, solve_async

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


# What is measured.


@each_system
def test_what_is_chosen_is_what_is_computed_by_hand(System: Any) -> None:
    run = Run(System).go(MEASURED - 1)
    assert run.budget.measuring
    assert run.budget.chosen == {}
    assert run.optimizer.statistics()["inv_update_steps"] == 1  # as long as it is measured
    run.go(1)
    assert run.budget.measured == pytest.approx((5, 40, 100))
    assert run.budget.chosen == CHOSEN
    run.go(12)
    assert run.updates == [*range(MEASURED), 20, 22, 24, 26, 28, 30]
    assert run.refreshes == [*range(MEASURED), 24, 30]


def test_first_steps_and_outliers_do_not_count() -> None:
    run = Run()
    for step in range(20):
        run.scale = 100.0 if step < 5 or step % 2 == 0 else 1.0  # 12 of 20, 7 of the last 15
        run.go(1)
    assert run.budget.measured == pytest.approx((5, 40, 100))
    assert run.budget.chosen == CHOSEN


def test_drawing_labels_is_of_the_statistics() -> None:
    def likelihood(outputs: Tensor) -> Tensor:
        run.time.spend(13)
        return functional.cross_entropy(outputs, outputs.argmax(-1), reduction="sum")

    run = Run(fisher="sampled", likelihood=likelihood)
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


def test_solves_on_threads_are_waited_for_while_they_are_measured() -> None:
    run = Run(DistKFAC, max_staleness=None, inverse_threads=1)
    for _ in range(MEASURED):
        run.go(1)
        assert set(run.optimizer.delays.values()) == {0}
        assert not run.curvature.solves.under_way
    assert run.budget.chosen == CHOSEN


def test_nobody_looks_at_a_clock_without_auto_or_afterwards() -> None:
    run = Run(factor_update_steps=2, inv_update_steps=4, overhead=3.0).go(6)
    assert run.optimizer._training.meter.watch is None
    assert run.budget.chosen == {}
    assert run.optimizer.summary().intervals == ""
    assert "overhead" not in run.saved()["optimizer"]["state"][0]["curvature"]
    run = Run().go(MEASURED - 1)
    assert run.optimizer._training.meter.watch is not None
    assert run.go(1).optimizer._training.meter.watch is None


# Accidents.


def test_nothing_is_measured_while_all_is_frozen() -> None:
    """Statistics and refreshes would seem to cost nothing."""
    run = Run()
    run.model.requires_grad_(False)
    for _ in range(9):
        run.time.spend(run.T)
        run.optimizer.step()
    assert run.budget.measuring
    run.model.requires_grad_(True)
    run.go(MEASURED - 1)
    assert run.budget.measuring
    assert run.go(1).budget.chosen == CHOSEN


def test_the_weight_of_the_past_follows_the_chosen_interval() -> None:
    """DistKFAC's default forgets as much a step, however rare updates are."""
    run = Run(DistKFAC, factor_decay=None, overhead=0.051).go(MEASURED)
    assert run.budget.chosen == {"factor_update_steps": 3, "inv_update_steps": 12}
    run.go(8)
    assert run.updates == [*range(MEASURED), 21, 24, 27]
    assert run.decays[21] == pytest.approx(0.95**2)  # since step 19
    assert run.decays[24] == run.decays[27] == pytest.approx(0.95**3)


def test_a_budget_that_cannot_be_kept_is_told_of_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = Run(inv_update_steps=4, overhead=0.05).go(MEASURED)
    assert run.budget.chosen == {"factor_update_steps": 4}
    told = [str(w.message) for w in caught if "overhead" in str(w.message)]
    assert len(told) == 1
    assert (
        "overhead=0.05 cannot be kept: with statistics every 4 steps and solves every 4, they "
        in (told[0])
    )
    assert re.search(r"cost 0\.11[23] of a step of SGD alone", told[0])  # (5/4 + 40/4) / 100
    with warnings.catch_warnings():
        warnings.simplefilter("error", SecondOrderWarning)
        Run().go(MEASURED)


# Options and the summary.


# A refresh that costs many steps is told of.

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


@each_system
def test_a_refresh_of_more_than_ten_steps_is_told_of_once(System: Any) -> None:
    assert told(System, 999.0, 3) == []
    assert told(System, 1001.0, 22, solver="inverse") == [
        (
            0,
            "a refresh of the inverses took 1e+03 s, and a step of SGD alone 1e+02 s: one comes "
            "every 10 steps; a larger inv_update_steps makes them rarer, skip_layers=[...] spares "
            "the widest layers",
        )
    ]


def test_a_refresh_that_nobody_feels_is_not_told_of() -> None:
    """Below half a second, be it a thousand steps of a tiny model."""
    assert told(KAISA, 0.49, 12, T=1e-4) == []
    ((step, message),) = told(KAISA, 0.51, 12, T=1e-4)
    assert step == 0
    assert message.startswith("a refresh of the inverses took 0.51 s, and a step of SGD alone 0.0")


def test_a_device_is_waited_for_where_a_refresh_is_due_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its queue is emptied, lest the passes count as the refresh's."""
    waits: list[int] = []

    run = Run(**NO_BUDGET)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(curvature, "settle", lambda _: waits.append(run.steps))
    run.go(22)
    assert waits == [0, 10, 20]
