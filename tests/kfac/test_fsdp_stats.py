"""DistKFAC whose workers' model FSDP2 has sharded, beside stats workers, whose copies are whole.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from accelerated import noted
from pool import World
from ranks import agreed, replaced
from reference import half_squared_error
from shards import batches, fsdp, narrow, whole
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from workers import everywhere

from second_order import DistKFAC, SecondOrderError
from second_order.distributed.mailbox import Mailbox
from second_order.kfac import stats_workers as module

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = 60.0
OPTIONS: dict[str, Any] = {
    "async_inverse": False,
    "inv_update_steps": 1,
    "factor_decay": 0.0,
    "damping": 0.1,
    "relative_damping": False,
    "momentum": 0.0,
    "helper_timeout": LONG,
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Ranks for this file: a mesh of some of them is, to torch's caches, one of earlier runs."""
    ranks = World()
    yield ranks
    ranks.close()


def made(model: Any, sharded: bool, **chosen: Any) -> DistKFAC:
    optimizer = DistKFAC(model, **{**OPTIONS, **chosen})
    if sharded and optimizer.role == "worker":
        fsdp(model, mesh=DeviceMesh.from_group(optimizer.worker_group, "cpu"))
    return optimizer


def step(model: Any, optimizer: DistKFAC, rank: int) -> None:
    workers = dist.get_world_size(optimizer.worker_group)
    x, y = batches(1)[0]
    optimizer.zero_grad()
    half_squared_error(model(x[rank::workers]), y[rank::workers]).backward()
    optimizer.step()


def serve(model: Any, optimizer: DistKFAC) -> int:
    batch = batches(2)[1]
    return optimizer.serve([batch], lambda batch: half_squared_error(model(batch[0]), batch[1]))


def still(rank: int, world_size: int, sharded: bool, count: int) -> dict[str, Any]:
    """P of a model that stands still, by the stats workers' batch and by the workers' own."""
    model: Any = narrow()
    optimizer = made(model, sharded, lr=0.0, stats_workers=count)
    with noted() as warned, optimizer:
        if optimizer.role == "stats":
            return {"served": serve(model, optimizer), "warned": warned}
        helpers: Any = optimizer._curvature.helpers  # type: ignore[union-attr]
        step(model, optimizer, rank)
        own = [p.grad.clone() for p in model.parameters()]
        end = time.monotonic() + LONG
        while everywhere(optimizer, not helpers.own_passes and helpers.messages > 3) == 0.0:
            assert time.monotonic() < end
            step(model, optimizer, rank)
        step(model, optimizer, rank)
        found = [p.grad for p in model.parameters()]
        flat = [
            torch.cat([getattr(g, "full_tensor", lambda g=g: g)().flatten() for g in gradients])
            for gradients in (own, found)
        ]
        summary = str(optimizer.summary())
    return {"own": flat[0], "found": flat[1], "warned": warned, "summary": summary}


@pytest.mark.parametrize(("world_size", "count"), [(3, 1), (4, 2)])
def test_statistics_of_helpers_precondition_shards(
    world: World, world_size: int, count: int
) -> None:
    """As they do a whole model; they are of another batch than the workers' own."""
    workers = world_size - count
    results = world.run(still, world_size, True, count, timeout=120)[:workers]
    plain = world.run(still, world_size, False, count, timeout=120)[:workers]
    found, expected = agreed([[r["found"]] for r in results]), agreed([[r["found"]] for r in plain])
    torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-12)
    own, by_whole = results[0]["own"], plain[0]["own"]
    torch.testing.assert_close(own, by_whole, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(own, found[0], rtol=1e-3)
    for result in results:
        assert result["warned"] == []
        assert "middle.0" in result["summary"]


def moving(rank: int, world_size: int) -> list[Tensor]:
    """The workers' model after each step, or the points that a stats worker gets."""
    model: Any = narrow()
    model.register_buffer("steps", torch.zeros(1, dtype=torch.float64))
    points: list[Tensor] = []
    taken = module.unpack_by_dtype

    def noting(flats: Any, into: Any) -> None:
        taken(flats, into)
        points.append(torch.cat([whole(model), model.steps]))

    with replaced(module, {"unpack_by_dtype": noting}):
        optimizer = made(model, True, lr=0.05, stats_workers=1)
        with optimizer, noted():
            if optimizer.role == "stats":
                serve(model, optimizer)
                return points
            helpers: Any = optimizer._curvature.helpers  # type: ignore[union-attr]
            end = time.monotonic() + LONG
            while everywhere(optimizer, helpers.messages > 3) == 0.0:
                assert time.monotonic() < end
                model.steps += 1
                step(model, optimizer, rank)
                points.append(torch.cat([whole(model), model.steps]))
    return points


def test_a_point_is_of_one_step_whoever_has_sent_its_rows(world: World) -> None:
    *workers, points = world.run(moving, 4, timeout=120)
    trajectory = agreed(workers)
    assert len(points) > 3
    for point in points:
        assert any(torch.equal(point, there) for there in trajectory)
    assert not torch.equal(points[0], points[-1])


def spoilt(rank: int, world_size: int) -> tuple[str, int, list[str]]:
    """A run in which one worker's rows of a point are no vector; the stats worker asks again."""
    post = Mailbox.post

    def spoiling(me: Mailbox, called: str, tensors: Any, **note: Any) -> None:
        post(me, called, [t[None] for t in tensors] if called == "point/1/1" else tensors, **note)

    model: Any = narrow()
    with replaced(Mailbox, {"post": spoiling}), noted() as warned:
        optimizer = made(model, True, lr=0.05, stats_workers=1)
        with optimizer:
            if optimizer.role == "stats":
                served = serve(model, optimizer)
                return "stats", served, warned
            helpers: Any = optimizer._curvature.helpers  # type: ignore[union-attr]
            end = time.monotonic() + LONG
            while everywhere(optimizer, helpers.messages > 4) == 0.0:
                assert time.monotonic() < end
                step(model, optimizer, rank)
    return "worker", helpers.messages, warned


def test_one_workers_malformed_rows_cost_one_statistic(world: World) -> None:
    *workers, (_, served, warned) = world.run(spoilt, 3, timeout=120)
    assert all(messages > 4 for _, messages, _ in workers)
    assert served >= 3
    (line,) = [line for line in warned if line.startswith("refused: ")]
    assert "point/1" in line


def refusals(rank: int, world_size: int) -> tuple[str, str]:
    """Of a model sharded before, on one rank alone; and of a stats worker that shards later."""
    model: Any = narrow()
    if rank == 0:
        group = dist.new_group([0], use_local_synchronization=True)
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    with pytest.raises(ValueError, match="stats workers pass batches through whole") as before:
        DistKFAC(model, lr=0.1, stats_workers=1, gradient_averaging=False)
    model = narrow()
    optimizer = made(model, False, lr=0.1, stats_workers=1)
    after = ""
    with optimizer, noted():
        if optimizer.role == "stats":
            fsdp(model, mesh=DeviceMesh.from_group(optimizer.worker_group, "cpu"))
            with pytest.raises((ValueError, SecondOrderError)) as caught:
                serve(model, optimizer)
            after = str(caught.value)
    return str(before.value), after


def test_shards_on_stats_workers_are_refused(world: World) -> None:
    results = world.run(refusals, 2)
    for before, _ in results:
        assert "optimizer.role is 'worker'" in before
    assert "whole copies of the model" in results[1][1]
