"""DHO2 on parameters that FSDP2 has sharded: products by differences, vectors in its rows.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import agreed, assert_same_trajectory
from reference import half_squared_error
from shards import batches, fsdp, go_on, mesh_of, narrow, shares
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from second_order import DHO2

if TYPE_CHECKING:
    from pathlib import Path

    from pool import World
    from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
ROUNDED = 1e-6  # differences of gradients keep a third of the digits fewer
OPTIONS: dict[str, Any] = {
    "lr": 0.05,
    "momentum": 0.9,
    "weight_decay": 0.01,
    "largest": 2,
    "smallest": 1,
    "curvature_interval": 2,
    "warmup_steps": 1,
    "lanczos_iterations": 12,
    "lanczos_tol": 1e-12,
    "hvp": "differences",
}


def made(rank: int, world_size: int, how: str, **options: Any) -> tuple[Any, DHO2]:
    """The ranks' curvature batches are of unlike sizes."""
    model = narrow()
    trained: Any = DistributedDataParallel(model) if how == "ddp" else model
    if how not in ("ddp", "", "before"):
        fsdp(model, how)
    optimizer = DHO2(trained, **{**OPTIONS, **options})
    if how == "before":
        fsdp(model)
    x, y = batches(4)[-1]
    mine = slice(5) if rank == 0 else slice(5 + (rank - 1) * 3, 5 + rank * 3)
    x, y = (x, y) if world_size == 1 else (x[mine], y[mine])
    optimizer.curvature_closure = lambda: (half_squared_error(model(x), y), len(x))
    return trained, optimizer


def train(rank: int, world_size: int, how: str, **options: Any) -> tuple[list[Tensor], Tensor]:
    model, optimizer = made(rank, world_size, how, **options)
    trajectory = go_on(model, optimizer, shares(rank, world_size, 4))
    return trajectory, optimizer.curvature.eigenvalues


@pytest.mark.works("FSDP2", "DHO2")
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_sharded_trajectory_is_that_of_ddp(world: World, world_size: int) -> None:
    expected = world.run(train, world_size, "ddp")
    exact = world.run(train, world_size, "ddp", hvp="retained")
    base = world.run(train, world_size, "ddp", largest=0, smallest=0)
    by_ddp = agreed([trajectory for trajectory, _ in expected])
    for how in ("blocks", "before"):
        found = world.run(train, world_size, how)
        trajectory = agreed([each for each, _ in found])
        assert_same_trajectory(trajectory, by_ddp, rtol=ROUNDED, hint=how)
        torch.testing.assert_close(found[0][1], expected[0][1], rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(found[0][1], exact[0][1], rtol=1e-4, atol=1e-6)
    assert float((base[0][0][-1] - by_ddp[-1]).abs().max()) > 1e-3


def state_of(model: Any, optimizer: DHO2) -> dict[str, Any]:
    optimizer.consolidate(to=None)
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def saved(rank: int, world_size: int, folder: str) -> list[Tensor]:
    model, optimizer = made(rank, world_size, "blocks")
    data = shares(rank, world_size, 4)
    go_on(model, optimizer, data[:2])
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    return go_on(model, optimizer, data[2:3])


def resumed(rank: int, world_size: int, folder: str, how: str) -> list[Tensor]:
    model, optimizer = made(rank, world_size, how)
    # A state with room for eigenpairs, which are read in place.
    data = shares(rank, world_size, 4)
    go_on(model, optimizer, data[:2])
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return go_on(model, optimizer, data[2:3])


def test_eigenpairs_go_on_elsewhere(world: World, tmp_path: Path) -> None:
    """By the vectors that were saved: the next refresh comes later."""
    expected = agreed(world.run(saved, 2, str(tmp_path)))
    for size, how in ((2, "ddp"), (3, "blocks")):
        found = agreed(world.run(resumed, size, str(tmp_path), how))
        assert_same_trajectory(found, expected, rtol=1e-8, hint=(size, how))


def refusals(rank: int, world_size: int) -> dict[str, str]:
    def refusal(System: Any, model: Any, **options: Any) -> str:
        with pytest.raises(TypeError) as caught:
            System(model, lr=0.1, **options)
        return str(caught.value)

    partly = narrow()
    fully_shard(partly, ignored_params=set(partly.head.parameters()))
    replicas = fsdp(narrow(), "root", mesh=mesh_of(world_size, 1))
    sharded = fsdp(narrow(), "root")
    return {
        "partly": refusal(DHO2, partly),
        "replicas": refusal(DHO2, replicas),
        "column": refusal(DHO2, sharded, layout="column"),
        "retained": refusal(DHO2, sharded, hvp="retained"),
        "outputs": refusal(DHO2, sharded, curvature="gauss-newton"),
    }


@pytest.mark.refused("HSDP", "DHO2", message="shard over a mesh of one dimension")
def test_what_is_not_one_vector_in_rows_is_refused_with_the_remedy(world: World) -> None:
    for found in world.run(refusals, 2):
        assert "sharded 8 of 10 parameters" in found["partly"]
        assert "use layout='row'" in found["column"]
        assert "use hvp='differences'" in found["retained"]
        assert re.search("gauss-newton.*use curvature='hessian'", found["outputs"])
        assert re.search("replicas.*one dimension", found["replicas"])
