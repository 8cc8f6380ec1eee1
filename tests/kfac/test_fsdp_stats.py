"""DistKFAC with stats workers on a model that FSDP2 has sharded is refused, on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from fsdp_training import fsdp, narrow
from optimizer_cases import noted
from pool import World
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from second_order import DistKFAC

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Ranks for this file, because torch caches meshes of process groups that are destroyed."""
    ranks = World(has_other_seed=False)
    yield ranks
    ranks.close()


def refusals(rank: int, world_size: int) -> tuple[str, str]:
    """Of a model sharded before, on one rank alone; and of ranks that shard theirs later."""
    model: Any = narrow()
    if rank == 0:
        group = dist.new_group([0], use_local_synchronization=True)
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    with pytest.raises(ValueError, match="whole models") as before:
        DistKFAC(model, lr=0.1, stats_workers=1, gradient_averaging=False)
    model = narrow()
    with noted(), DistKFAC(model, lr=0.1, stats_workers=1) as optimizer:
        fsdp(model, mesh=DeviceMesh.from_group(optimizer.worker_group, "cpu"))
        with pytest.raises(ValueError, match="whole models") as after:
            optimizer.zero_grad()
    return str(before.value), str(after.value)


def test_fsdp_with_stats_workers_is_refused(world: World) -> None:
    for messages in world.run(refusals, 2):
        for text in messages:
            assert "DistKFAC: fully_shard (FSDP2) has sharded the model" in text
            assert "use stats_workers=0" in text
