"""Intervals by budget: what is measured, and that it is chosen once, by all alike.

Time is what the tests make it: `Time.spend` moves the clock that the budget reads, and nothing else
does. Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import time
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from contract import make, take
from models import ZOO
from ranks import agreed, shard, vector
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import functional

from second_order import DPKFAC, KAISA, DistKFAC, RankMismatchError, SecondOrderWarning
from second_order.kfac import budget as budgets
from second_order.kfac.budget import Account, DeviceClock, HostClock, Stopwatch
from second_order.kronecker.background import Ticket
from second_order.optimizers import base as contract

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
LAYERS = sum(isinstance(m, nn.Linear) for m in MLP.model().modules())
AUTO: dict[str, Any] = {"factor_update_steps": "auto", "inv_update_steps": "auto"}
each_system = pytest.mark.parametrize("System", [KAISA, DPKFAC, DistKFAC])


# What is measured.


class Time:
    """A clock that somebody has to move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looks = 0

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        self.looks += 1
        return self.now

    def before(self, function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        """The same function, which takes so long."""

        def slow(*args: Any, **kwargs: Any) -> Any:
            self.spend(seconds)
            return function(*args, **kwargs)

        return slow


class Run:
    """A training whose parts take as long as told: S = 5, R = 40, T = 100, the rest 1000.

    Attributes:
        updates: The steps of statistics.
        refreshes: The steps of refreshes.
        decays: Weights of the past, by step.
    """

    S, R, T = 5.0, 40.0, 100.0

    def __init__(
        self,
        System: Any = KAISA,
        *,
        scale: float = 1.0,
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        self.time, self.scale = Time(), scale
        self.model = MLP.model() if model is None else model
        auto = {} if "overhead" in options else {"overhead": 0.1}
        self.optimizer = make(System, self.model, **{**AUTO, **auto, **options})
        self.curvature = self.optimizer._curvature
        self.budget = self.curvature.budget
        self.budget.clock = HostClock(self.time)
        self.budget.begin()
        self.updates: list[int] = []
        self.refreshes: list[int] = []
        self.decays: dict[int, float] = {}
        curvature, layers, solves = self.curvature, self.curvature.layers, self.curvature.solves
        take_in, refresh, finish = layers.take_in, solves.refresh, curvature.gradients.finish
        consume = layers.collector.consume

        def taking(sums: Any, decay: float) -> None:
            self.time.spend(3 * self.scale)
            self.updates.append(self.steps)
            self.decays[self.steps] = decay
            take_in(sums, decay)

        def refreshing(due: bool, average: Any, news: Any = ()) -> Any:
            if due:
                self.time.spend(self.R * self.scale)
                self.refreshes.append(self.steps)
            return refresh(due, average, news)

        def consuming(*args: Any) -> None:
            self.time.spend(2 / LAYERS * self.scale)
            consume(*args)

        layers.take_in, solves.refresh = taking, refreshing
        curvature.gradients.finish = self.time.before(finish, 1000.0)
        layers.collector.consume = consuming

    @property
    def steps(self) -> int:
        return int(self.optimizer._training.steps)

    def go(self, steps: int, rank: int = 0, world_size: int = 1) -> Run:
        for step in range(self.steps, self.steps + steps):
            self.time.spend(self.T * self.scale)
            batch = shard(MLP.batch(12, seed=step), rank, world_size)
            take(self.model, self.optimizer, batch, MLP.loss)
        return self

    def saved(self) -> dict[str, Any]:
        buffer = io.BytesIO()
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], buffer)
        buffer.seek(0)
        model, optimizer = torch.load(buffer)
        return {"model": model, "optimizer": optimizer}

    def load(self, saved: dict[str, Any]) -> Run:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        return self


CHOSEN = {"factor_update_steps": 2, "inv_update_steps": 6}  # of S = 5, R = 40, T = 100, 0.1


@each_system
def test_what_is_chosen_is_what_is_computed_by_hand(System: Any) -> None:
    run = Run(System).go(4)
    assert run.budget.measuring
    assert run.budget.chosen == {}
    run.go(1)
    assert run.budget.measured == pytest.approx((5, 40, 100))
    assert run.budget.chosen == CHOSEN
    run.go(15)
    assert run.updates == [0, 1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 18]
    assert run.refreshes == [0, 1, 2, 3, 4, 6, 12, 18]


@each_system
def test_the_warm_up_is_what_is_measured_up_to_twenty_steps(System: Any) -> None:
    for warmup, until in ((0, 5), (7, 7), (20, 20), (30, 20)):
        run = Run(System, refresh_warmup_steps=warmup).go(until - 1)
        assert run.budget.measuring
        run.go(1)
        assert run.budget.chosen == CHOSEN
        run.go(13)
        dense = max(warmup, until)
        late = range(dense, run.steps)
        assert run.refreshes == [*range(min(dense, run.steps)), *(s for s in late if s % 6 == 0)]


def test_first_steps_and_outliers_do_not_count() -> None:
    run = Run(refresh_warmup_steps=20)
    for step in range(20):
        run.scale = 100.0 if step < 5 or step % 2 == 0 else 1.0  # 12 of 20, 7 of the last 15
        run.go(1)
    assert run.budget.measured == pytest.approx((5, 40, 100))
    assert run.budget.chosen == CHOSEN


def test_one_interval_alone() -> None:
    assert Run(factor_update_steps=10).go(5).budget.chosen == {"inv_update_steps": 10}
    run = Run(factor_update_steps=3, overhead=0.02).go(5)
    assert run.budget.chosen == {"inv_update_steps": 120}  # 40 / (2 − 5/3)
    assert Run(inv_update_steps=20, overhead=0.05).go(5).budget.chosen == {
        "factor_update_steps": 2  # 5 / (5 − 40/20)
    }
    run = Run(inv_update_steps=lambda step: 8 if step > 3 else 100, overhead=0.06).go(5)
    assert run.budget.chosen == {"factor_update_steps": 5}  # 5 / (6 − 40/8)
    run = Run(factor_update_steps=3).go(12)
    assert run.updates == [0, 1, 2, 3, 4, 6, 9]


def test_the_mean_of_gradients_is_the_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a refresh, too, where it is waited for."""
    run = Run()
    monkeypatch.setattr(contract, "start_average", lambda *_: lambda: run.time.spend(11))
    run.go(5)
    assert run.budget.measured == pytest.approx((5, 40, 122))


def test_the_bases_own_step_is_the_bases() -> None:
    run = Run()
    run.optimizer._base_step = run.time.before(run.optimizer._base_step, 7.0)
    assert run.go(5).budget.measured == pytest.approx((5, 40, 107))


def test_drawing_labels_is_of_the_statistics() -> None:
    def likelihood(outputs: Tensor) -> Tensor:
        run.time.spend(13)
        return functional.cross_entropy(outputs, outputs.argmax(-1), reduction="sum")

    run = Run(fisher="sampled", likelihood=likelihood)
    assert run.go(5).budget.measured == pytest.approx((18, 40, 100))


@pytest.mark.parametrize(("staleness", "counted"), [(0, True), (None, False), (3, False)])
def test_waiting_for_threads_counts_where_all_solves_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, staleness: int | None, counted: bool
) -> None:
    run = Run(DistKFAC, max_staleness=staleness, inverse_threads=1)
    wait, waited_for = Ticket.wait, []

    def waiting(ticket: Any) -> None:
        if ticket not in waited_for:
            run.time.spend(17.0)
            waited_for.append(ticket)
        wait(ticket)

    monkeypatch.setattr(Ticket, "wait", waiting)
    run.go(5)
    waited = 17 * len(run.curvature.plan) if counted else 0
    assert run.budget.measured == pytest.approx((5, 40 + waited, 100))


def test_solves_on_threads_are_waited_for_while_they_are_measured() -> None:
    run = Run(DistKFAC, max_staleness=None, inverse_threads=1)
    for _ in range(5):
        run.go(1)
        assert set(run.optimizer.delays.values()) == {0}
        assert not run.curvature.solves.flights
    assert run.budget.chosen == CHOSEN


def test_nobody_looks_at_a_clock_without_auto_or_afterwards() -> None:
    run = Run(factor_update_steps=2, inv_update_steps=4, overhead=3.0).go(6)
    assert run.time.looks == 0
    assert run.budget.chosen == {}
    assert run.optimizer.summary().intervals == ""
    assert "overhead" not in run.saved()["optimizer"]["state"][0]["curvature"]
    run = Run().go(5)
    looks = run.time.looks
    run.go(10)
    assert run.time.looks == looks > 0


def test_a_devices_clock_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device, waits, moments = torch.device("cuda", 0), [], iter(range(1000, 100_000, 1000))

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any) -> None:
            assert stream == "current"
            self.at = next(moments)  # in milliseconds

        def elapsed_time(self, end: Event) -> float:
            assert waits
            return float(end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "current")
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    watch = Stopwatch(DeviceClock(device))
    for _ in range(3):
        with watch.on(Account.REFRESH), watch.on(Account.BASE):
            pass
        watch.lap()
    assert waits == []
    expected = {Account.REFRESH: 2, Account.BASE: 3, Account.STATISTICS: 0, Account.APART: 0}
    assert watch.read() == [expected] * 3
    assert waits == [device]


def test_an_account_is_closed_by_an_exception() -> None:
    clock = Time()
    watch = Stopwatch(HostClock(clock))

    def fail() -> None:
        with watch.on(Account.REFRESH):
            clock.spend(1)
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    clock.spend(2)
    watch.lap()
    (lap,) = watch.read()
    assert (lap[Account.REFRESH], lap[Account.BASE]) == (1, 2)


# Accidents.


def test_steps_that_a_scaler_skips() -> None:
    """Their passes are part of the next lap, which is one of several."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run = Run(grad_scaler=scaler, refresh_warmup_steps=12)
    for step in range(16):
        run.time.spend(run.T)
        x, y = MLP.batch(12, seed=step)
        loss = MLP.loss(run.model(x), y) * (math.inf if step in (0, 4, 8, 9) else 1)
        run.optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
    assert run.steps == 12
    assert run.budget.measured == pytest.approx((5, 40, 100))
    assert run.budget.chosen == CHOSEN


def test_freezing_and_other_layers_change_nothing_that_is_chosen() -> None:
    run = Run().go(5)
    first = next(iter(run.model.parameters()))
    first.requires_grad_(False)
    run.go(3)
    first.requires_grad_(True)
    run.scale = 100.0
    run.go(8)
    assert run.budget.chosen == CHOSEN
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    run.go(2)
    run.optimizer.close()
    run.go(8)
    assert run.budget.chosen == CHOSEN


def test_nothing_is_measured_while_all_is_frozen() -> None:
    """Statistics and refreshes would seem to cost nothing."""
    run = Run()
    run.model.requires_grad_(False)
    for _ in range(9):
        run.time.spend(run.T)
        run.optimizer.step()
    assert run.budget.measuring
    run.model.requires_grad_(True)
    run.go(4)
    assert run.budget.measuring
    assert run.go(1).budget.chosen == CHOSEN


def test_closed_before_it_is_chosen() -> None:
    run = Run().go(2)
    run.optimizer.close()
    run.go(10)
    assert run.budget.chosen == {}


def test_a_step_that_raises_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run().go(2)
    with monkeypatch.context() as patch:
        patch.setattr(run.curvature.gradients, "finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.go(1)
    assert run.go(3).budget.measured == pytest.approx((5, 40, 100))


@pytest.mark.parametrize("steps", [3, 8])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@each_system
def test_copies_measure_anew_or_know(System: Any, how: Any, steps: int) -> None:
    model = MLP.model()
    optimizer = make(System, model, **AUTO)
    for step in range(steps):
        take(model, optimizer, MLP.batch(12, seed=step))
    model, optimizer = how((model, optimizer))
    budget = optimizer._curvature.budget
    assert bool(budget.chosen) == (steps == 8)
    before = dict(budget.chosen)
    for step in range(5):
        take(model, optimizer, MLP.batch(12, seed=step))
    assert budget.chosen
    assert not before or budget.chosen == before


def test_the_weight_of_the_past_follows_the_chosen_interval() -> None:
    """DistKFAC's default forgets as much a step, however rare updates are."""
    run = Run(DistKFAC, factor_decay=None, overhead=0.05).go(5)
    assert run.budget.chosen == {"factor_update_steps": 3, "inv_update_steps": 12}
    run.go(8)
    assert run.updates == [0, 1, 2, 3, 4, 6, 9, 12]
    assert run.decays[6] == pytest.approx(0.95**2)  # since step 4
    assert run.decays[9] == run.decays[12] == pytest.approx(0.95**3)


def test_a_budget_that_cannot_be_kept_is_told_of_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = Run(inv_update_steps=4, overhead=0.05).go(5)
    assert run.budget.chosen == {"factor_update_steps": 4}
    told = [str(w.message) for w in caught if "overhead" in str(w.message)]
    assert len(told) == 1
    assert (
        "overhead=0.05 cannot be kept: with statistics every 4 steps and solves every 4, they "
        in (told[0])
    )
    assert "cost 0.112 of a step of SGD alone" in told[0]  # (5/4 + 40/4) / 100
    with warnings.catch_warnings():
        warnings.simplefilter("error", SecondOrderWarning)
        Run().go(5)


# Options and the summary.


def test_the_summary_names_the_intervals() -> None:
    run = Run()
    line = "intervals by budget, overhead 0.1: being measured until step 5"
    assert run.optimizer.summary().intervals == line
    run.go(5)
    line = (
        "intervals by budget, overhead 0.1: statistics every 2 steps, inverses every 6 steps; "
        "measured: statistics 5e+03 ms, a refresh 4e+04 ms, a step of the base 1e+05 ms"
    )
    assert line in str(run.optimizer.summary()).splitlines()
    assert "inverses every 6 steps" in str(Run(DistKFAC).go(5).optimizer.summary())


def test_statistics_of_others_have_no_interval_to_choose() -> None:
    with pytest.raises(ValueError, match=r"factor_update_steps='auto' .* stats_workers=1 .*number"):
        DistKFAC(MLP.model(), lr=0.1, stats_workers=1, factor_update_steps="auto")


def test_a_schedule_may_not_return_auto() -> None:
    run = Run(factor_update_steps=lambda step: "auto", inv_update_steps=1, refresh_warmup_steps=1)
    with pytest.raises(TypeError, match="at step 1: factor_update_steps='auto' is not a whole"):
        run.go(2)


# Ranks.


def on_ranks(rank: int, world_size: int, name: str) -> Any:
    """What is chosen where a rank is three times as slow, with less to do; and the parameters."""
    systems: dict[str, Any] = {"KAISA": KAISA, "DPKFAC": DPKFAC, "DistKFAC": DistKFAC}
    run, trajectory = Run(systems[name], scale=1.0 + 2 * rank), []
    if rank == 1:
        run.T = 20.0
    for _ in range(10):
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
        run.go(5)
        sign.touch()
        assert run.updates == [0, 1, 2, 3, 4]
    return run.budget.measured, run.budget.chosen


def test_what_stats_workers_send_is_not_of_the_budget(world: World, tmp_path: Path) -> None:
    """When it comes is no matter of intervals: refreshes have the whole budget."""
    measured, chosen = world.run(beside_a_stats_worker, 2, tmp_path / "sign")[0]
    assert measured == pytest.approx((0, 40, 100))
    assert chosen == {"inv_update_steps": 4}


def parted(rank: int, world_size: int) -> str:
    run = Run().go(5, rank, world_size)
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
    saved = world.run(train_and_save, before, 6, options)[0]
    for chosen, updates, refreshes, _ in world.run(load_and_train, after, saved, options):
        assert chosen == CHOSEN
        assert updates == [6, 8, 10, 12, 14]
        assert refreshes == [6, 12]


def test_a_resumed_run_is_the_run_that_was_never_stopped() -> None:
    whole = Run().go(6)
    saved = whole.saved()
    whole.go(10)
    *_, weights = load_and_train(0, 1, saved)
    torch.testing.assert_close(weights, vector(whole.model), rtol=1e-10, atol=1e-12)


def without_intervals(saved: dict[str, Any]) -> dict[str, Any]:
    for entry in saved["optimizer"]["state"].values():
        for name in budgets.SAVED:
            entry["curvature"].pop(name, None)
    return saved


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_without_them_has_them_measured_anew(world: World, ranks: int) -> None:
    old = without_intervals(train_and_save(0, 1, 8))
    for chosen, updates, refreshes in world.run(measure_after, ranks, old):
        assert chosen == CHOSEN
        assert updates == [8, 9, 10, 11, 12, 14, 16]
        assert refreshes == [8, 9, 10, 11, 12]


def measure_after(rank: int, world_size: int, saved: dict[str, Any]) -> Any:
    run = Run(refresh_warmup_steps=2).load(saved)
    assert run.budget.measuring
    run.go(10, rank, world_size)
    return run.budget.chosen, run.updates, run.refreshes


def test_other_options_or_an_unfinished_measurement_are_measured_anew() -> None:
    saved = train_and_save(0, 1, 6)
    assert Run(overhead=0.2).load(saved).budget.measuring
    fixed = Run(inv_update_steps=7).load(saved)
    assert fixed.budget.chosen == {"factor_update_steps": 2}
    neither = Run(factor_update_steps=3, inv_update_steps=7).load(saved)
    assert not neither.budget.measuring
    assert neither.budget.chosen == {}
    one = train_and_save(0, 1, 6, {"inv_update_steps": 7})
    assert Run().load(one).budget.measuring
    early = train_and_save(0, 1, 3)
    assert early["optimizer"]["state"][0]["curvature"]["inv_update_steps"] == 0
    run = Run().go(7).load(early)
    assert run.budget.measuring
    assert run.go(5).budget.chosen == CHOSEN


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("inv_update_steps", -1, "outside"),
        ("inv_update_steps", 2.5, "not a whole number"),
        ("factor_update_steps", "auto", "not a whole number"),
        ("overhead", "much", "not a number"),
        ("inv_update_steps", 7, "is 7, and 6 for another|is 6, and 7 for another"),
    ],
)
def test_intervals_that_cannot_be_are_refused(name: str, value: Any, match: str) -> None:
    saved = train_and_save(0, 1, 6)
    saved["optimizer"]["state"][0]["curvature"][name] = value
    run = Run().go(6)
    with pytest.raises(ValueError, match=match):
        run.load(saved)
    assert run.budget.chosen == CHOSEN


def test_they_go_through_a_distributed_checkpoint(tmp_path: Path) -> None:
    first = Run().go(6)
    dcp.save({"o": get_optimizer_state_dict(first.model, first.optimizer)}, checkpoint_id=tmp_path)
    second = Run()
    state = {"o": get_optimizer_state_dict(second.model, second.optimizer)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(second.model, second.optimizer, state["o"])
    assert second.steps == 6
    assert second.budget.chosen == CHOSEN
