"""MRDHO2 over time: what it reports, schedules, copies, and parameters that change.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import copy
import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerated import (
    BATCHES,
    CASE,
    CURVED,
    EPOCH,
    STEPS,
    gradient,
    loss_of,
    mrdho2,
    reference,
    worker,
)
from ranks import assert_same_trajectory, replaced, vector
from scripted import MOMENTUM, play, serve, trajectory_of
from torch import Tensor, nn

if TYPE_CHECKING:
    from pool import World


# Time.


def slow_verdict(rank: int, world_size: int, seconds: float) -> Any:
    model = CASE.model()
    optimizer = mrdho2(model, final_update="guarded")
    if optimizer.role == "accelerator":
        judge = optimizer._curvature._judge

        def late(*args: Any) -> None:
            time.sleep(seconds)
            judge(*args)

        with replaced(optimizer._curvature, {"_judge": late}):
            return serve(model, optimizer)
    with optimizer:
        worker(model, optimizer, rank, 1, BATCHES[:EPOCH])
    return [report.waited for report in optimizer.epochs]


def test_a_worker_reports_how_long_it_has_waited_for_a_verdict(world: World) -> None:
    (waited,), _ = world.run(slow_verdict, 2, 0.3)
    assert waited >= 0.25


# Schedulers, copies, and parameters that change.


def scheduled(rank: int, world_size: int) -> Any:
    model = CASE.model()
    optimizer = mrdho2(model, final_update="paper", **MOMENTUM)
    if optimizer.role == "accelerator":
        return serve(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, EPOCH, gamma=0.5)
    trajectory = []
    with optimizer:
        for batch in BATCHES:
            gradient(model, optimizer, batch)
            optimizer.step()
            scheduler.step()
            trajectory.append(vector(model))
    return trajectory


def test_schedules_reach_the_base_and_scale_the_newton_step(world: World) -> None:
    found, _ = world.run(scheduled, 2)
    expected, _ = reference("paper", decay=0.5, **MOMENTUM)
    assert_same_trajectory(found, expected, rtol=1e-7)


def freeze(model: nn.Module) -> None:
    first = next(model.parameters())
    first.requires_grad_(False)
    first.grad = None


def frozen_worker(
    model: nn.Module, optimizer: Any, rank: int, where: str, sign: Path
) -> list[Tensor]:
    def change(step: int) -> None:
        if step == 6:
            freeze(model)
        while step == 2 * EPOCH and where == "everywhere" and not sign.exists():
            time.sleep(0.005)

    with optimizer:
        return worker(model, optimizer, rank, 2, before=change)


def frozen_accelerator(model: nn.Module, optimizer: Any, rank: int, where: str, sign: Path) -> None:
    if where == "workers":
        serve(model, optimizer)
        return
    with optimizer:
        for step in range(STEPS):
            if step == 6:
                freeze(model)
                sign.touch()
            optimizer.step(curvature_closure=lambda: loss_of(model, CURVED[0]))


@pytest.mark.parametrize("where", ["workers", "everywhere"])
def test_parameters_frozen_in_mid_epoch(world: World, tmp_path: Path, where: str) -> None:
    """That epoch has no final update; in the next the accelerators know of it, told or not."""
    results = world.run(play, 3, (frozen_worker, frozen_accelerator), where, tmp_path / "frozen")
    trajectory_of(results)
    for result in results[:2]:
        applied = [applied for applied, _ in result["reports"]]
        assert applied == [True, False, True]
        (line,) = result["warned"]
        assert "the parameters that train have changed" in line


def grouped(rank: int, world_size: int) -> Any:
    """The second group's rate falls to nothing at step 2."""
    model = CASE.model()
    params = list(model.parameters())
    groups = [{"params": params[:3], "lr": 0.05}, {"params": params[3:], "lr": 0.05}]
    optimizer = mrdho2(model, groups, final_update="additive", momentum=0.9)
    with optimizer:
        if optimizer.role == "accelerator":
            return optimizer.serve(CURVED, lambda batch: loss_of(model, batch))
        found = []
        for step, batch in enumerate(BATCHES[:8]):
            if step == 2:
                optimizer.param_groups[1]["lr"] *= 0.0
            gradient(model, optimizer, batch)
            optimizer.step()
            found.append([p.detach().clone() for p in params])
        return found


def test_each_group_has_its_own_newton_scale_in_a_final_update(world: World) -> None:
    found, _ = world.run(grouped, 2)
    for before, after in itertools.pairwise(found[1:]):
        assert all(map(torch.equal, before[3:], after[3:])), "a group of lr 0 does not move"
        assert not torch.equal(before[0], after[0])


def reloaded(rank: int, world_size: int) -> Any:
    """In the middle of an epoch, into the optimizer that has saved it, a step later."""
    model = CASE.model()
    optimizer = mrdho2(model, final_update="paper", **MOMENTUM, helper_timeout=10.0)
    with optimizer:
        if optimizer.role == "accelerator":
            return optimizer.serve(CURVED, lambda batch: loss_of(model, batch))
        found = worker(model, optimizer, 0, 1, BATCHES[:6])
        weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        worker(model, optimizer, 0, 1, BATCHES[6:7])
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        return found + worker(model, optimizer, 0, 1, BATCHES[6:])


def test_a_checkpoint_of_the_epoch_under_way_is_taken_back(world: World) -> None:
    found, _ = world.run(reloaded, 2)
    assert_same_trajectory(found, reference("paper", **MOMENTUM)[0], rtol=1e-7)
