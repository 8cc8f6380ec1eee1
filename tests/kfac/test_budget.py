"""Intervals by budget: what is measured, and what is chosen."""

from __future__ import annotations

import re
import time
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from budgeted import CHOSEN, MEASURED, MLP, Run, each_system
from contract import make
from hypothesis import given
from hypothesis import strategies as st
from ranks import agreed, vector
from torch import Tensor
from torch.nn import functional

from second_order import DPKFAC, KAISA, DistKFAC, SecondOrderWarning
from second_order.budget import LONGEST, intervals
from second_order.kfac import curvature, solve_async

if TYPE_CHECKING:
    from pathlib import Path

    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


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


def test_nobody_looks_at_a_clock_without_auto_or_afterwards() -> None:
    run = Run(factor_update_steps=2, inv_update_steps=4, overhead=3.0).go(6)
    assert run.optimizer._training.meter.watch is None
    assert run.budget.chosen == {}
    assert run.optimizer.summary().intervals == ""
    assert "overhead" not in run.saved()["optimizer"]["state"][0]["curvature"]
    run = Run().go(MEASURED - 1)
    assert run.optimizer._training.meter.watch is not None
    assert run.go(1).optimizer._training.meter.watch is None


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
    (told,) = [str(w.message) for w in caught if "overhead" in str(w.message)]
    # (5/4 + 40/4) / 100
    assert re.search(r"overhead=0\.05 cannot be kept: .* cost 0\.11[23] of a step of SGD", told)


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
    ((step, message),) = told(System, 1001.0, 22, solver="inverse")
    assert step == 0
    assert message.startswith(
        "a refresh of the inverses took 1e+03 s, and a step of SGD alone 1e+02"
    )


def test_a_device_is_waited_for_where_a_refresh_is_due_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its queue is emptied, lest the passes count as the refresh's."""
    waits: list[int] = []

    run = Run(**NO_BUDGET)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(curvature, "settle", lambda _: waits.append(run.steps))
    run.go(22)
    assert waits == [0, 10, 20]


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
    # Each rank watches two layers: the first one its own and the last, which shows the loss terms.
    S = 3 * (1 + 3) / 2 + 2 / 3 * (2 * 1 + 2 * 3) / 2 if name == "DPKFAC" else 10.0
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
        ("inv_update_steps", 2.5, r"is 2\.5, and|and 2\.5 for another"),
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
