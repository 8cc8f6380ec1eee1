"""FSDP2 in combination: resharding, offloading, layers used twice, accumulation, Muon.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from ranks import OPTIONS, agreed, assert_same_trajectory
from reference import half_squared_error
from shards import MOMENTUM, fsdp, go_on, narrow, shares, whole
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn.parallel import DistributedDataParallel

from second_order import KAISA

if TYPE_CHECKING:
    from pool import World
    from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
WAYS: dict[str, dict[str, Any]] = {
    "kept": {"reshard_after_forward": False},
    "in twos": {"reshard_after_forward": 2},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def train(rank: int, world_size: int, way: str, twice: bool, **options: Any) -> list[Tensor]:
    """By DistributedDataParallel if the way is "ddp"."""
    model: Any = narrow()
    if twice:
        model.middle = nn.Sequential(model.middle[0], nn.Tanh(), model.middle[2])
        model.norm = nn.Sequential(model.norm, square := nn.Linear(8, 8).double(), square)
        torch.nn.init.eye_(square.weight)
        torch.nn.init.zeros_(square.bias)
    if way == "ddp":
        model = DistributedDataParallel(model)
    else:
        fsdp(model, "layers", **WAYS.get(way, {}))
    with KAISA(model, **{**OPTIONS, **MOMENTUM, **options}) as optimizer:
        return go_on(model, optimizer, shares(rank, world_size))


@pytest.mark.parametrize("way", [*WAYS, "a layer used twice"])
def test_trajectories_are_those_of_ddp(world: World, way: str) -> None:
    """And not those of the base alone."""
    twice = way == "a layer used twice"
    expected = agreed(world.run(train, 2, "ddp", twice))
    base = agreed(world.run(train, 2, "ddp", twice, skip_layers=["*"]))
    found = agreed(world.run(train, 2, way, twice))
    assert_same_trajectory(found, expected, rtol=1e-10)
    assert float((base[-1] - expected[-1]).abs().max()) > 1e-3


def accumulated(rank: int, world_size: int, told: bool) -> list[Tensor]:
    """Two micro-batches to a step; FSDP2 is told which is the last if `told`."""
    model, trajectory = fsdp(narrow(), "layers"), []
    optimizer = KAISA(model, **{**OPTIONS, **MOMENTUM})
    for first, second in zip(*[iter(shares(rank, world_size, 4))] * 2, strict=True):
        optimizer.zero_grad()
        for x, y in (first, second):
            if told:
                model.set_requires_gradient_sync(x is second[0])
                model.set_is_last_backward(x is second[0])
            (half_squared_error(model(x), y) / 2).backward()
        optimizer.step()
        trajectory.append(whole(model))
    return trajectory


def test_a_last_backward_that_is_told_changes_nothing(world: World) -> None:
    expected = agreed(world.run(accumulated, 2, False))
    assert_same_trajectory(agreed(world.run(accumulated, 2, True)), expected, rtol=1e-10)
