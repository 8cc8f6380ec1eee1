"""Refreshes by budget: what they cost is measured, counted, and never more than asked.

Time is what the tests make it. In the unit of the fake clock a step of the base takes 64, a product
and an evaluation of the curvature batch 16 each: a refresh of ten products is 176, or 2.75 steps.
Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from budgeted import Time
from pairs import BATCHES, curvature, network, shards, spread, vector
from pairs import take as take_step
from ranks import agreed
from torch import Tensor

from second_order.budget import RefreshBudget
from second_order.lanczos.vector_space import RowSpace

if TYPE_CHECKING:
    from pool import World

AUTO: dict[str, Any] = {"curvature_interval": "auto", "overhead": 0.125, "warmup_steps": None}


class Run:
    """A training whose parts take as long as told.

    Attributes:
        asked: The steps at which the curvature closure was called.
        found: The steps of refreshes.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, **options: Any) -> None:
        self.time, self.rank, self.world_size = Time(), rank, world_size
        self.step, self.product, self.evaluation = 64.0, 16.0, 16.0
        self.asked: list[int] = []
        self.found: list[int] = []
        self.spent = 0.0
        self.model = network()
        self.optimizer = spread(self.model, rank, world_size, **{**AUTO, **options})
        self.attach()

    def attach(self) -> None:
        """Let the optimizer ask this run's closure, and read its clock."""
        loss = curvature(self.model, self.rank, self.world_size)

        def asking() -> Any:
            self.asked.append(self.steps)
            self.time.spend(self.evaluation)
            return loss()

        self.optimizer.curvature_closure = asking
        fosi: Any = self.optimizer._curvature
        self.budget = fosi.pairs.budget
        meter = self.optimizer._training.meter
        meter.now, meter._since = self.time, self.time.now
        self.budget.usual_probe = 1.25  # ten steps earn that
        fosi._split = self.time.before(fosi._split, 1000.0)
        fosi._correct = self.time.before(fosi._correct, 1000.0)

    @property
    def steps(self) -> int:
        return int(self.optimizer._training.steps)

    def go(self, steps: int) -> Run:
        apply = RowSpace.apply

        def slow(space: RowSpace, d: Tensor) -> Tensor:
            self.time.spend(self.product)
            return apply(space, d)

        with patch.object(RowSpace, "apply", slow):
            for _ in range(steps):
                self.time.spend(self.step)
                batch = BATCHES[self.steps % len(BATCHES)]
                (mine,) = shards([batch], self.rank, self.world_size)
                before = self.optimizer.curvature.refreshes
                at = self.steps
                take_step(self.model, self.optimizer, mine)
                if self.optimizer.curvature.refreshes > before:
                    self.found.append(at)
        return self

    def saved(self) -> dict[str, Any]:
        self.optimizer.consolidate(to=None)
        buffer = io.BytesIO()
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], buffer)
        buffer.seek(0)
        model, optimizer = torch.load(buffer)
        return {"model": model, "optimizer": optimizer}

    def load(self, saved: dict[str, Any]) -> Run:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        return self


# What is measured, and when refreshes come.


def test_refreshes_come_when_they_are_paid_for() -> None:
    """The probe, 48, is paid for after 6 steps, each refresh after 22."""
    run = Run().go(11)
    assert run.asked == [10]
    assert (run.budget.price, run.budget.cost, run.budget.spent) == (0.0, 2.75, 0.75)
    run.go(64)
    assert run.found == [28, 50, 72]
    assert run.asked == [10, 28, 50, 72]
    assert (run.budget.price, run.budget.cost, run.budget.spent) == (0.25, 2.75, 9.0)


def test_the_price_is_the_median_of_the_first_three_refreshes() -> None:
    """5.25 steps of the base and twice 2.75; the fourth, which costs more, is not measured."""
    run = Run()
    run.product = 32.0
    run.go(55)
    assert (run.found, run.budget.spent) == ([54], 1.25 + 5.25)
    assert run.budget.cost == 5.25
    run.product = 16.0
    run.go(94 - 54)
    assert (run.found, run.budget.spent) == ([54, 94], 6.5 + 2.75), (
        "what it took, not what was told"
    )
    assert run.budget.cost == pytest.approx((5.25 + 2.75) / 2)
    run.go(116 - 94)
    assert (run.found, run.budget.spent) == ([54, 94, 116], 9.25 + 2.75)
    assert (run.budget.price, run.budget.cost) == (0.25, 2.75)
    run.product = 1000.0
    run.go(146 - 116)
    assert run.found[3:] == [131, 146]
    assert run.budget.spent == 12 + 2 * 2.75


def test_a_warm_start_is_cheaper_than_the_first_refresh() -> None:
    """Of 48 products, the others of 24: the second one is due after what it takes itself."""
    run = Run(largest=12, smallest=0, lanczos_iterations=None, warmup_steps=0).go(6)
    assert run.optimizer.curvature.products == 48
    assert (run.budget.spent, run.budget.cost) == (12.25, 6.25)
    run.go(200)
    assert run.found == [0, 98 + 50, 98 + 100]
    assert run.budget.spent == 12.25 + 2 * 6.25


def test_a_probe_waits_until_it_is_earned_at_a_usual_price() -> None:
    for overhead, step in ((0.2, 50), (0.25, 40), (2.0, 10)):
        run = Run(overhead=overhead)
        run.budget.usual_probe = RefreshBudget.usual_probe
        assert run.go(step + 1).asked[0] == step


def test_a_warm_up_that_is_given_is_kept_and_paid_for_afterwards() -> None:
    run = Run(warmup_steps=0).go(70)
    assert run.found == [0, 44, 66]
    assert (run.budget.price, run.budget.spent) == (0.25, 8.25)
    late = Run(warmup_steps=40).go(125)
    assert late.found == [40, 55, 70, 88, 110], "what has not been spent comes not at once"
    assert late.asked == late.found, "no probe"


# Ranks.


def on_ranks(rank: int, world_size: int, layout: str) -> Any:
    """Where a rank is three times as slow at everything but the passes."""
    run = Run(rank, world_size, layout=layout)
    run.product = run.evaluation = 8.0 + 16.0 * rank
    run.step = 96.0 - 64.0 * rank
    trajectory = []
    for _ in range(40):
        run.go(1)
        trajectory.append(vector(run.model))
    return run.asked, run.found, run.budget.price, trajectory


@pytest.mark.parametrize("layout", ["row", "column"])
def test_ranks_with_different_clocks_do_the_same(world: World, layout: str) -> None:
    (asked, found, price, a), (*others, b) = world.run(on_ranks, 2, layout)
    assert [asked, found, price] == others == [[10, 28], [28], 0.25]
    agreed([a, b])


# Checkpoints.


def train_and_save(rank: int, world_size: int, steps: int) -> dict[str, Any]:
    return Run(rank, world_size).go(steps).saved()


def load_and_train(rank: int, world_size: int, saved: dict[str, Any], steps: int) -> Any:
    """As a machine that is a hundred times as slow at everything but the passes."""
    run = Run(rank, world_size)
    run.time.spend(12345.0)
    run.product = run.evaluation = 1600.0
    run.load(saved).go(steps)
    return run.found, run.asked, vector(run.model)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_resumed_run_repeats_refreshes_on_any_machine(
    world: World, before: int, after: int
) -> None:
    saved = world.run(train_and_save, before, 30)[0]
    for found, asked, _ in world.run(load_and_train, after, saved, 25):
        assert found == asked == [50]


def test_a_resumed_run_is_the_run_that_was_never_stopped() -> None:
    """Once all has been measured that ever is; before that, times of both machines count."""
    whole = Run().go(75)
    saved = whole.saved()
    whole.go(45)
    found, _, weights = load_and_train(0, 1, saved, 45)
    assert found == [94, 116]
    both = Run().load(Run().go(30).saved())
    both.product = 48.0
    both.go(25)
    assert both.found == [50]
    assert both.budget.prices == [0.25, pytest.approx((16 + 480) / 64 / 11)]
    assert torch.equal(weights, vector(whole.model))
    probed = Run().go(15).saved()
    assert Run().load(probed).go(15).asked == [28], "what the probe found is known"


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("product_price", -1.0, "is -1.0, and|outside"),
        ("refresh_cost", math.nan, "is nan"),
        ("refreshes_spent", "much", "much"),
        ("second_price", -2.0, "is -2.0, and|outside"),
        ("refresh_cost", 7.0, "is 7.0, and 2.75 elsewhere|is 2.75, and 7.0 elsewhere"),
        ("product_price", None, "is None, and|None elsewhere"),
    ],
)
def test_costs_that_cannot_be_are_refused(name: str, value: Any, match: str) -> None:
    saved = train_and_save(0, 1, 12)
    part = saved["optimizer"]["state"][0]["curvature"]
    if value is None:
        del part[name]
    else:
        part[name] = value
    run = Run().go(12)
    with pytest.raises(ValueError, match=match):
        run.load(saved)
    assert run.budget.cost == 2.75


# Options, and what is told.


def test_the_summary_and_the_statistics_tell_interval_and_share() -> None:
    run = Run().go(12)
    assert math.isnan(Run().optimizer.statistics()["curvature_interval"])
    line = "refreshes by budget, overhead 0.125: the next at step 28, for about 2.75 steps of SGD"
    assert line in str(run.optimizer.summary())
    assert run.optimizer.statistics()["curvature_interval"] == 28
    run.go(20)
    line = (
        "refreshes by budget, overhead 0.125: the next at step 50, for about 2.75 steps of SGD "
        "alone; a product costs 0.25, all so far 3.5"
    )
    assert line in str(run.optimizer.summary())
    told = run.optimizer.statistics()
    assert told["curvature_interval"] == 22
    of = {name: told[f"total_seconds/{name}"] for name in run.optimizer._curvature.accounts}
    base = sum(of.values()) - of["lanczos"] - of["split"] - of["newton"]
    assert told["refresh_share"] == pytest.approx(of["lanczos"] / base)
    assert told["refresh_share"] > 0
    fixed = Run(curvature_interval=7)
    assert fixed.optimizer.statistics()["curvature_interval"] == 7
    assert "budget" not in str(fixed.optimizer.summary())
