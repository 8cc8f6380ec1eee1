"""MRDHO2 on parameters that FSDP2 has sharded, on workers and accelerators, each over their own.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerated import noted
from ranks import agreed, assert_same_trajectory, replaced
from reference import half_squared_error
from shards import batches, fsdp, narrow, whole
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from second_order import MRDHO2
from second_order.fosi import worker_epochs as module

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pool import World
    from torch import Tensor

ROUNDED = 1e-6  # differences of gradients keep a third of the digits fewer
OPTIONS: dict[str, Any] = {
    "lr": 0.05,
    "momentum": 0.9,
    "epoch_steps": 2,
    "final_update": "paper",
    "largest": 2,
    "smallest": 1,
    "lanczos_iterations": 12,
    "lanczos_tol": 1e-12,
    "hvp": "differences",
    "helper_timeout": 30.0,
}
STEPS = 6
KINDS: list[dict[str, Any]] = [
    {"final_update": "paper"},
    {"final_update": "guarded"},
    {"final_update": "additive"},
    {"final_update": "within", "base": torch.optim.Adam, "momentum": None, "lr": 0.01},
]


def mesh_for(optimizer: MRDHO2) -> DeviceMesh:
    return DeviceMesh.from_group(optimizer.worker_group, "cpu")


def loss_of(model: Any, batch: Any) -> Tensor:
    return half_squared_error(model(batch[0]), batch[1])


def options_of(chosen: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in {**OPTIONS, **chosen}.items() if v is not None}


def one(rank: int, sharded: Sequence[str], workers: int, **chosen: Any) -> dict[str, Any]:
    """One rank of a run; ``sharded``: the roles of which the model is."""
    model: Any = narrow()
    with noted() as warned, MRDHO2(model, **options_of(chosen)) as optimizer:
        if optimizer.role in sharded:
            fsdp(model, mesh=mesh_for(optimizer))
        if optimizer.role == "accelerator":
            data = batches(9, 9)[6:]
            return {"served": optimizer.serve(data, lambda batch: loss_of(model, batch))}
        trajectory = []
        for x, y in batches(STEPS):
            optimizer.zero_grad()
            mine = slice(rank, None, workers)
            loss_of(model, (x[mine], y[mine])).backward()
            optimizer.step()
            trajectory.append(whole(model))
        reports = [(r.applied, r.reason, r.loss_before) for r in optimizer.epochs]
        found = optimizer.curvature.eigenvalues
    return {"trajectory": trajectory, "reports": reports, "warned": warned, "found": found}


def runs(
    rank: int, world_size: int, sharded: Sequence[str], accelerators: int
) -> list[dict[str, Any]]:
    workers = world_size - accelerators
    with replaced(module, {"LEAST_FALL": 0.0}):
        return [
            one(rank, sharded, workers, accelerators=accelerators, **kind) for kind in KINDS
        ]


@pytest.mark.works("FSDP2", "MRDHO2")
@pytest.mark.parametrize(("world_size", "accelerators"), [(3, 1), (4, 2)])
def test_the_sharded_trajectory_is_that_of_whole_models(
    world: World, world_size: int, accelerators: int
) -> None:
    """Whoever is sharded: the workers, the accelerators, or both; rows are uneven, some empty."""
    workers = world_size - accelerators
    plain = world.run(runs, world_size, (), accelerators, timeout=180)
    for sharded in (("worker", "accelerator"), ("worker",), ("accelerator",)):
        results = world.run(runs, world_size, sharded, accelerators, timeout=180)
        for i, kind in enumerate(KINDS):
            expected = [result[i] for result in plain[:workers]]
            found = [result[i] for result in results[:workers]]
            trajectory = agreed([each["trajectory"] for each in found])
            assert_same_trajectory(
                trajectory,
                agreed([each["trajectory"] for each in expected]),
                rtol=ROUNDED,
                hint=(sharded, kind),
            )
            for each in found:
                assert each["warned"] == []
                assert [r[:2] for r in each["reports"]] == [r[:2] for r in expected[0]["reports"]]
            assert any(applied for applied, *_ in found[0]["reports"])
