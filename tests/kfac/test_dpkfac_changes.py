"""DPKFAC: layers that come and go, decompositions that fail, and factors that are lost.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import io
import itertools
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import ZOO
from placed import DPKFAC_OWNER, FROZEN, letters, loaded_dcp, save_dcp, told, train_thawing
from ranks import OPTIONS, agreed, assert_same_trajectory, go, shard
from torch import Tensor

from second_order import DPKFAC

if TYPE_CHECKING:
    from pathlib import Path

    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
LAYERS = ("0", "2", "4")
BATCHES = MLP.batches(7, n=12)
ALL_REDUCE = {"gradient_exchange": "all_reduce"}


@pytest.mark.parametrize("first", [[], ["0.", "2."], ["0.", "2.", "4."]], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_layers_frozen_and_thawed_at_any_time_leave_the_ranks_together(
    world: World, world_size: int, first: list[str]
) -> None:
    """Biases too, which give a layer other factors; and layers frozen from the start."""
    frozen = {0: first, 1: first, **FROZEN}
    for how in ({}, ALL_REDUCE):
        options = {"inv_update_steps": 2, **how}
        results = world.run(
            train_thawing, world_size, DPKFAC_OWNER, frozen, BATCHES, options, timeout=20
        )
        found = agreed([trajectory for trajectory, _ in results])
        assert all(parameters.isfinite().all() for parameters in found)
        for before, after in itertools.pairwise(found):
            assert not torch.equal(before, after)


# Decompositions that fail.


# Checkpoints.

INTERVALS = {"inv_update_steps": 3}


def checkpoint_of(
    rank: int, world_size: int, System: Any, options: dict[str, Any], apart: bool = False
) -> bytes:
    """After three steps, by rank 0."""
    model = MLP.model()
    optimizer = System(model, **{**OPTIONS, **options})
    batches = [shard(b, rank, world_size) if apart else b for b in BATCHES[:3]]
    go(model, optimizer, MLP, batches)
    optimizer.consolidate(to=0)
    if rank != 0:
        return b""
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    return buffer.getvalue()


def resume_noting(
    rank: int, world_size: int, data: bytes, System: Any, options: dict[str, Any]
) -> tuple[list[Tensor], dict[str, Any], list[str], list[list[str]]]:
    """Parameters, factors kept here after loading, warnings, and layers without inverse."""
    state = torch.load(io.BytesIO(data))
    model = MLP.model(seed=5)
    optimizer = System(model, **{**OPTIONS, **options})
    model.load_state_dict(state["model"])
    trajectory, unsolved = [], []
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        optimizer.load_state_dict(state["optimizer"])
        kept = {
            block.name: block.factors.matrices(torch.float64)
            for block in optimizer._curvature.layers.blocks
            if block.factors is not None and block.factors.stored["A"] is not None
        }
        for batch in BATCHES[3:]:
            trajectory += go(model, optimizer, MLP, [batch])
            unsolved.append(
                [block.name for block in optimizer._curvature.layers.blocks if not block.solved]
            )
    return trajectory, kept, told(messages), unsolved


@pytest.mark.parametrize("assignment", ["balanced", "round_robin"])
def test_every_factor_arrives_at_its_new_owner(world: World, assignment: str) -> None:
    """From batches that differ by rank: bit for bit, each on one rank."""
    data = world.run(checkpoint_of, 4, DPKFAC, INTERVALS, apart=True)[0]
    whole = resume_noting(0, 1, data, DPKFAC, {})[1]
    assert sorted(whole) == list(LAYERS)
    for after in (2, 3, 4):
        results = world.run(resume_noting, after, data, DPKFAC, {"assignment": assignment})
        agreed([trajectory for trajectory, *_ in results])
        names = [name for _, kept, _, _ in results for name in kept]
        assert sorted(names) == list(LAYERS)
        for _, kept, _, _ in results:
            for name, pair in kept.items():
                assert all(torch.equal(a, b) for a, b in zip(pair, whole[name], strict=True))


def load_then(
    rank: int, world_size: int, path: str, options: dict[str, Any], then: str
) -> tuple[list[Tensor], int]:
    """`then`: what is done before the next step. With the number of factors that were collected."""
    model, optimizer = loaded_dcp(world_size, DPKFAC_OWNER, path, False, options)
    collected = 0
    if then == "consolidate":
        optimizer.consolidate(to=0)
        if rank == 0:
            collected = letters({"optimizer": optimizer.state_dict()}).total()
    else:
        for name in ("0", "4"):
            model.get_submodule(name).requires_grad_(False)
    return go(model, optimizer, MLP, BATCHES[3:]), collected


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("then", ["consolidate", "freeze"])
def test_after_a_distributed_load_the_ranks_move_and_collect_together(
    world: World, tmp_path: Path, then: str
) -> None:
    """Before new statistics, when each has heard of its own layers alone."""
    options = {"inv_update_steps": 4, "factor_update_steps": 4}
    path = str(tmp_path)
    world.run(save_dcp, 2, DPKFAC_OWNER, path, False, options)
    one, _ = world.run(load_then, 1, path, options, then)[0]
    for after in (2, 3):
        results = world.run(load_then, after, path, options, then, timeout=20)
        found = agreed([trajectory for trajectory, _ in results])
        assert_same_trajectory(found, one, hint=f"on {after}")
        if then == "consolidate":
            assert results[0][1] == 6
