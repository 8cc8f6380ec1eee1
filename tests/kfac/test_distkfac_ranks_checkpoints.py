"""Checkpoints and copies of DistKFAC on many processes, with and without stats workers."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from distkfac_training import BATCHES, CASE, LAYERS, LONG, Gate, distkfac, solving
from ranks import agreed, go, vector
from stats_worker_training import (
    factors_here,
    loss_of,
    owned_by,
    play,
    quiet,
    roles_of,
    shards,
    train_on,
    until_fed,
)
from torch import Tensor, nn

from second_order import SecondOrderError

if TYPE_CHECKING:
    from pool import World


def saved(rank: int, world_size: int, options: dict[str, Any]) -> bytes:
    """After four steps; the usual lines."""
    model = CASE.model()
    buffer = io.BytesIO()
    with distkfac(model, **options) as optimizer:
        go(model, optimizer, CASE, shards(BATCHES[:4], rank, world_size))
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, buffer)
    return buffer.getvalue()


def in_flight(
    rank: int, world_size: int, how: str, data: bytes
) -> tuple[list[Tensor], list[Tensor], dict[str, int]]:
    """Something is done in mid-flight; all ranks' solves are held until then and longer."""
    model = CASE.model()
    gate = Gate()
    batches = shards(BATCHES, rank, world_size)
    options = {"momentum": 0.9, "inverse_threads": 4}
    optimizer = distkfac(model, **options)
    found = go(model, optimizer, CASE, batches[:1])
    with solving(gate):
        found += go(model, optimizer, CASE, batches[1:3])
    assert len(optimizer._curvature.inverses.pending) == 3
    if how == "load":
        state = torch.load(io.BytesIO(data))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    else:
        model[2].requires_grad_(False)
    found += go(model, optimizer, CASE, batches[3:4])
    ages = optimizer.staleness
    gate.open()
    found += go(model, optimizer, CASE, batches[4:])
    optimizer.close()
    return found, ages


@pytest.mark.parametrize("how", ["load", "freeze"])
def test_a_checkpoint_resumes_with_pending_inverses(world: World, how: str) -> None:
    data = world.run(saved, 2, {"momentum": 0.9})[0] if how == "load" else b""
    results = world.run(in_flight, 2, how, data, timeout=LONG)
    agreed([found for found, _ in results])
    for _, ages in results:
        if how == "load":  # of the checkpoint's last step, or of the first one after it
            assert set(ages) == set(LAYERS)
            assert set(ages.values()) <= {1, 2}
        else:
            assert ages == {"0": 1, "4": 1}


def saves_worker(model: nn.Module, optimizer: Any) -> Any:
    with optimizer:
        until_fed(model, optimizer)
        train_on(model, optimizer, BATCHES[:4])
        refused = ""
        try:
            optimizer.state_dict()
        except SecondOrderError as error:
            refused = str(error)
        buffer = io.BytesIO()
        found = vector(model)
        optimizer.consolidate(to=0)
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, buffer)
        rank = optimizer._training.world.rank
        stored = {b.name for b, owner in owned_by(optimizer) if owner == rank}
        parts = {name: pair for name, pair in factors_here(optimizer).items() if name in stored}
    return buffer.getvalue(), refused, parts, found


def saves_stats(model: nn.Module, optimizer: Any, data: bytes = b"") -> int:
    with optimizer:
        return optimizer.serve(BATCHES, lambda batch: loss_of(model, batch))


def loads_worker(model: nn.Module, optimizer: Any, data: bytes) -> Any:
    with optimizer:
        state = torch.load(io.BytesIO(data))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        parts = factors_here(optimizer)
        found = vector(model)
        trajectory = train_on(model, optimizer, BATCHES[4:])
    return parts, found, trajectory


@pytest.mark.parametrize(
    ("before", "after"), [((3, 1), (4, 2)), ((4, 1), (3, 1)), ((4, 2), (2, 1))]
)
def test_a_checkpoint_resumes_with_stats_workers(
    world: World, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """Owners' factors need consolidate(), are refused without, and arrive where they belong."""
    options = {"stats_workers": before[1]}
    results = world.run(play, before[0], (saves_worker, saves_stats), options, timeout=2 * LONG)
    assert quiet(results)
    workers, _ = roles_of(results)
    whole: dict[str, Any] = {}
    for _, refused, parts, _ in workers:
        assert "DistKFAC.state_dict() would lack the factors" in refused
        assert "call optimizer.consolidate(to=0) on every process first" in refused
        whole |= parts
    assert sorted(whole) == list(LAYERS)
    options = {"stats_workers": after[1]}
    scene = (loads_worker, saves_stats)
    results = world.run(play, after[0], scene, options, workers[0][0], timeout=2 * LONG)
    assert quiet(results)
    loaded, _ = roles_of(results)
    agreed([trajectory for _, _, trajectory in loaded])
    names: list[str] = []
    for parts, found, _ in loaded:
        assert torch.equal(found, workers[0][3])
        for name, pair in parts.items():
            assert all(map(torch.equal, pair, whole[name]))
        names += parts
    assert sorted(names) == list(LAYERS)
