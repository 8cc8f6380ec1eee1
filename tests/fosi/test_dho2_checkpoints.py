"""Checkpoints of DHO2 that any number of processes write, and any other number reads.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import io
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dho2_training import BATCHES, KINDS, LAYOUTS, alone, go, network, shards, spread
from ranks import agreed, assert_same_trajectory
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pool import World

SAVED = [("momentum", 8), ("Adam", 5)]
MORE = [("SGD", 8), ("momentum", 4), ("momentum", 2)]  # nothing carried; in warm-up
AFTER = 3  # steps, one of which refreshes


def save(rank: int, world_size: int) -> list[bytes]:
    """On rank 0 a checkpoint for each layout and each of `SAVED`."""
    found = []
    for layout, (kind, at) in itertools.product(LAYOUTS, SAVED):
        model = network()
        optimizer = spread(model, rank, world_size, layout=layout, **KINDS[kind])
        batches = shards(BATCHES, rank, world_size)
        go(model, optimizer, batches[:at])
        optimizer.consolidate(to=0)
        if rank == 0:
            buffer = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
            found.append(buffer.getvalue())
        go(model, optimizer, batches[at : at + 1])
    return found


def resume(rank: int, world_size: int, data: Sequence[bytes]) -> list[list[Tensor]]:
    """Every other one in rows, the others in columns; which ones, changes with the writers."""
    found = []
    for i, content in enumerate(data):
        kind, at = SAVED[i % len(SAVED)]
        layout = LAYOUTS[(i + i // 4) % 2]
        state = torch.load(io.BytesIO(content))
        model = network(seed=5)
        optimizer = spread(model, rank, world_size, layout=layout, **KINDS[kind])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        found.append(go(model, optimizer, shards(BATCHES[at : at + AFTER], rank, world_size)))
    return found


def test_a_checkpoint_resumes_on_any_number_of_processes(world: World) -> None:
    expected = {kind: alone(**KINDS[kind]) for kind in KINDS}
    data = [blob for before in (1, 3) for blob in world.run(save, before)[0]]
    assert len(data) == 2 * 2 * len(SAVED)
    for after in (1, 2):
        results = world.run(resume, after, data)
        for i in range(len(data)):
            kind, at = SAVED[i % len(SAVED)]
            found = agreed([each[i] for each in results])
            assert_same_trajectory(
                found, expected[kind][at : at + AFTER], rtol=1e-8, hint=(after, i, kind)
            )


def parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def save_dcp(rank: int, world_size: int, path: str) -> None:
    for layout, (kind, at) in itertools.product(LAYOUTS, SAVED + MORE):
        model = network()
        optimizer = spread(model, rank, world_size, layout=layout, **KINDS[kind])
        go(model, optimizer, shards(BATCHES[:at], rank, world_size))
        optimizer.consolidate(to=None)
        dcp.save(parts(model, optimizer), checkpoint_id=f"{path}/{layout}{kind}{at}")


def load_dcp(rank: int, world_size: int, path: str) -> list[list[Tensor]]:
    """In the other layout."""
    found = []
    for saved_layout, (kind, at) in itertools.product(LAYOUTS, SAVED + MORE):
        model = network(seed=5)
        optimizer = spread(model, rank, world_size, layout=saved_layout, **KINDS[kind])
        state = parts(model, optimizer)
        where = f"{path}/{LAYOUTS[saved_layout == 'row']}{kind}{at}"
        dcp.load(state, checkpoint_id=where, no_dist=world_size == 1)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        found.append(go(model, optimizer, shards(BATCHES[at : at + AFTER], rank, world_size)))
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_all_processes_write_and_read_distributed_checkpoints(world: World, tmp_path: Path) -> None:
    expected = {kind: alone(**KINDS[kind]) for kind in KINDS}
    world.run(save_dcp, 2, str(tmp_path))
    for after in (1, 3):
        results = world.run(load_dcp, after, str(tmp_path))
        for i in range(2 * len(SAVED + MORE)):
            kind, at = (SAVED + MORE)[i % len(SAVED + MORE)]
            found = agreed([each[i] for each in results])
            assert_same_trajectory(
                found, expected[kind][at : at + AFTER], rtol=1e-8, hint=(after, i, kind)
            )
