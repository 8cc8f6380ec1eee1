"""`curvature_interval="auto"`: refreshes take no more time than `overhead` allows.

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
from dho2_training import BATCHES, curvature, network, shards, spread, vector
from dho2_training import take as take_step
from ranks import agreed
from timed_training import Time
from torch import Tensor

from second_order.lanczos.hvp import RowSpace

if TYPE_CHECKING:
    from pool import World

AUTO: dict[str, Any] = {"curvature_interval": "auto", "overhead": 0.125, "warmup_steps": None}


class Run:
    """A run whose parts take given times.

    Attributes:
        refresh_steps: The steps at which the curvature closure was called.
        found: The steps of refreshes.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, **options: Any) -> None:
        self.time = Time()
        self.rank = rank
        self.world_size = world_size
        self.step = 64.0
        self.product = 16.0
        self.evaluation = 16.0
        self.refresh_steps: list[int] = []
        self.found: list[int] = []
        self.model = network()
        self.optimizer = spread(self.model, rank, world_size, **{**AUTO, **options})
        self.attach()

    def attach(self) -> None:
        """Let the optimizer call this run's closure, and read its clock."""
        loss = curvature(self.model, self.rank, self.world_size)

        def asking() -> Any:
            self.refresh_steps.append(self.steps)
            self.time.spend(self.evaluation)
            return loss()

        self.optimizer.curvature_closure = asking
        fosi: Any = self.optimizer._curvature
        self.throttle = fosi.throttle
        if self.throttle is not None:
            self.throttle.clock = lambda _: self.time()

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
                (own_batch,) = shards([batch], self.rank, self.world_size)
                before = self.optimizer.curvature.refreshes
                at = self.steps
                take_step(self.model, self.optimizer, own_batch)
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


def test_the_first_refresh_assumes_that_a_product_takes_a_step() -> None:
    """Ten products, 0.125: after 80 steps; the others every 176 / (0.125 * 64) steps."""
    run = Run().go(130)
    assert run.found == [80, 102, 124]
    assert run.refresh_steps == run.found


def test_refreshes_take_no_more_than_the_overhead() -> None:
    """Negative control: a refresh every ten steps takes more than twice as much."""
    for options, share in (({}, 0.125), ({"curvature_interval": 10}, 0.275)):
        run = Run(**options).go(300)
        refreshes = len(run.found) - 1  # up to the last one
        steps = run.found[-1] - run.found[0]
        assert 176 * refreshes / (64 * steps) == pytest.approx(share)


def test_the_interval_follows_the_median_of_refreshes() -> None:
    run = Run(warmup_steps=20)
    run.product = 32.0  # 336: 42 steps
    run.go(20 + 42)
    run.product = 16.0
    run.go(200)
    assert run.found == [20, 62, 62 + 32, 94 + 22, 138, 160, 182, 204, 226, 248]


def test_without_warm_up_the_first_refresh_counts_later() -> None:
    run = Run(warmup_steps=0).go(70)
    # The first step's passes are not timed: 176 + 0 - 64 against 8 for each step.
    assert run.found == [0, 14, 14 + 18, 32 + 22, 54 + 22][: len(run.found)]


def test_a_fixed_interval_is_not_timed() -> None:
    run = Run(curvature_interval=7).go(15)
    assert run.throttle is None
    assert run.time.looks == 0
    assert run.found == [7, 14]


def on_ranks(rank: int, world_size: int, layout: str) -> Any:
    """Where a rank is three times as slow at everything but the passes."""
    run = Run(rank, world_size, layout=layout, warmup_steps=10)
    run.product = run.evaluation = 8.0 + 16.0 * rank
    trajectory = []
    for _ in range(60):
        run.go(1)
        trajectory.append(vector(run.model))
    return run.refresh_steps, run.found, run.throttle.interval, trajectory


@pytest.mark.parametrize("layout", ["row", "column"])
def test_ranks_with_different_clocks_choose_the_same_interval(world: World, layout: str) -> None:
    (refresh_steps, found, interval, a), (*others, b) = world.run(on_ranks, 2, layout)
    assert [refresh_steps, found, interval] == others == [[10, 43], [10, 43], 33]  # 264 / 8
    agreed([a, b])


def train_and_save(rank: int, world_size: int, steps: int) -> dict[str, Any]:
    return Run(rank, world_size, warmup_steps=10).go(steps).saved()


def load_and_train(rank: int, world_size: int, saved: dict[str, Any], steps: int) -> Any:
    """As a machine that is a hundred times as slow at everything but the passes."""
    run = Run(rank, world_size, warmup_steps=10)
    run.time.spend(12345.0)
    run.product = run.evaluation = 1600.0
    run.load(saved).go(steps)
    return run.found, run.refresh_steps, vector(run.model)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_resumed_run_repeats_refreshes_on_any_machine(
    world: World, before: int, after: int
) -> None:
    saved = world.run(train_and_save, before, 30)[0]
    for found, refresh_steps, _ in world.run(load_and_train, after, saved, 25):
        assert found == refresh_steps == [32]


def test_a_resumed_run_equals_the_uninterrupted_run() -> None:
    """Once five refreshes have been timed; before that the times of both machines count."""
    whole = Run(warmup_steps=10).go(100)
    saved = whole.saved()
    whole.go(45)
    found, _, weights = load_and_train(0, 1, saved, 45)
    assert found == [120, 142]
    assert torch.equal(weights, vector(whole.model))


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("throttle_interval", -1.0, "is -1.0, and|outside"),
        ("throttle_overhead", "much", "much"),
    ],
)
def test_invalid_intervals_raise(name: str, value: Any, match: str) -> None:
    saved = train_and_save(0, 1, 12)
    saved["optimizer"]["state"][0]["curvature"][name] = value
    run = Run(warmup_steps=10).go(12)
    with pytest.raises(ValueError, match=match):
        run.load(saved)
    assert run.throttle.interval == 22


def test_the_summary_and_the_metrics_show_the_interval() -> None:
    run = Run(warmup_steps=10).go(1)
    assert "overhead 0.125: being measured" in str(run.optimizer.summary())
    assert run.optimizer.metrics()["curvature_interval"] == 80
    run.go(20)
    assert "overhead 0.125: at least 22 steps between refreshes" in str(run.optimizer.summary())
    assert run.optimizer.metrics()["curvature_interval"] == 22
    fixed = Run(curvature_interval=7)
    assert fixed.optimizer.metrics()["curvature_interval"] == 7
    assert "overhead" not in str(fixed.optimizer.summary())
    assert not math.isnan(fixed.optimizer.metrics()["curvature_interval"])


def test_without_refreshes_the_interval_is_nan() -> None:
    closed = Run().go(1).optimizer
    closed.close()
    without_pairs = Run(num_largest=0, num_smallest=0).go(1).optimizer
    for optimizer in (closed, without_pairs):
        assert math.isnan(optimizer.metrics()["curvature_interval"])
