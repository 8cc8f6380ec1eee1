"""FSDP2 in combination: resharding, offloading, layers used twice, accumulation, Muon.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ranks import OPTIONS, agreed, assert_same_trajectory
from reference import half_squared_error
from shards import MOMENTUM, fsdp, go_on, narrow, shares, whole
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Muon

from second_order import DPKFAC, KAISA, DistKFAC

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


def over_muon(rank: int, world_size: int, sharded: bool, System: Any) -> tuple[Tensor, Tensor]:
    """What Muon is given at a step, and where it goes; without a system, by Muon alone."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 7, bias=False), nn.Tanh(), nn.Linear(7, 4, bias=False)
    model: Any = nn.Sequential(*layers).double()
    x, y = torch.randn(8, 6).double(), torch.randn(8, 4).double()
    trained = fully_shard(model) if sharded else DistributedDataParallel(model)
    if System is None:
        optimizer = Muon(trained.parameters(), lr=0.05)
    else:
        options = {"inv_update_steps": 1, "damping": 0.1, "relative_damping": False}
        optimizer = System(trained, lr=0.05, base=Muon, **options)
    half_squared_error(trained(x[rank::world_size]), y[rank::world_size]).backward()
    optimizer.step()
    gradients = [p.grad for p in model.parameters()]
    whole_ones = [getattr(g, "full_tensor", lambda g=g: g)().flatten() for g in gradients]
    return torch.cat(whole_ones), whole(model)


@pytest.mark.parametrize("System", [KAISA, DPKFAC, DistKFAC])
def test_muon_is_given_the_same_on_shards(world: World, System: Any) -> None:
    """It orthogonalises in bfloat16, and rounds shards' products otherwise, alone too."""
    options: dict[Any, Any] = {"async_inverse": False} if System is DistKFAC else {}
    made = partial(System, **options)
    found, expected = (world.run(over_muon, 2, sharded, made)[0] for sharded in (True, False))
    torch.testing.assert_close(found[0], expected[0], rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(found[1], expected[1], rtol=0.0, atol=5e-3)
    alone, by_whole = (world.run(over_muon, 2, sharded, None)[0] for sharded in (True, False))
    assert torch.equal(alone[0], by_whole[0])
    assert float((alone[1] - by_whole[1]).abs().max()) > 1e-5, "Muon's own rounding"
    assert float((found[0] - alone[0]).abs().max()) > 1e-3, "preconditioned"
