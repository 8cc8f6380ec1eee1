"""Lightning on two processes: its DDP, and checkpoints of what processes keep apart."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from framework_training import BATCHES, CASE, launched, optimizer_of, usual_loop
from optimizer_cases import base_only, make
from ranks import shard, vector
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC

if TYPE_CHECKING:
    from pathlib import Path

    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


def fit(rank: int, world_size: int, module: Any, batches: Any, **more: Any) -> Any:
    import lightning_training
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    parts = [shard(batch, rank, world_size) for batch in batches]
    options = {"devices": world_size, "strategy": "ddp", "plugins": [TorchElasticEnvironment()]}
    options["use_distributed_sampler"] = False  # batches are shared out already
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lightning_training.fit(module, parts, **{**options, **more})


def under_ddp(rank: int, world_size: int, System: Any, folder: Path) -> list[torch.Tensor]:
    """Trained by Lightning, by Lightning from a checkpoint at half of it, and by the usual loop."""
    import lightning_training

    options = {"momentum": 0.9}
    whole, first, second = (lightning_training.Lit(System, **options) for _ in range(3))
    path = folder / f"{System.__name__}.ckpt"
    resumed = {"ckpt_path": path, "weights_only": True, "max_epochs": 2}
    with launched(rank, world_size):
        fit(rank, world_size, whole, BATCHES)
        fit(rank, world_size, first, BATCHES[:3]).save_checkpoint(path)
        fit(rank, world_size, second, BATCHES[3:], **resumed)
    wrapped = DistributedDataParallel(CASE.model())
    parts = [shard(batch, rank, world_size) for batch in BATCHES]
    usual_loop(wrapped, optimizer_of(System, wrapped, **options), parts)
    return [vector(each) for each in (whole.net, second.net, wrapped.module)]


@pytest.mark.works("Lightning DDP")
@pytest.mark.parametrize("System", [KAISA, DPKFAC, DistKFAC, DHO2])
def test_lightning_with_ddp_equals_the_usual_loop_and_resumes(
    world: World, System: Any, tmp_path: Path
) -> None:
    pytest.importorskip("lightning.pytorch")
    found = world.run(under_ddp, 2, System, tmp_path, timeout=240)
    for own_value, first in zip(found[1], found[0], strict=True):
        assert torch.equal(own_value, first)
    whole, resumed, usual = found[0]
    torch.testing.assert_close(whole, usual, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(resumed, usual, rtol=1e-10, atol=1e-12)
    alone = CASE.model()
    usual_loop(alone, make(System, alone, momentum=0.9, **base_only(System)), BATCHES)
    assert float((usual - vector(alone)).abs().max()) > 1e-3


def under_fsdp(rank: int, world_size: int, System: Any) -> list[torch.Tensor]:
    """Trained by Lightning on shards, and by the usual loop under DDP."""
    import lightning_training
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Sharded(lightning_training.Lit):
        def configure_model(self) -> None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    module = Sharded(System, momentum=0.9)
    strategy = ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    with launched(rank, world_size):
        fit(rank, world_size, module, BATCHES, strategy=strategy)
    parts = [shard(batch, rank, world_size) for batch in BATCHES]
    found = [torch.cat([p.full_tensor().detach().flatten() for p in module.net.parameters()])]
    for only in ({}, base_only(System)):
        wrapped = DistributedDataParallel(CASE.model())
        usual_loop(wrapped, optimizer_of(System, wrapped, momentum=0.9, **only), parts)
        found.append(vector(wrapped.module))
    return found


@pytest.mark.works("Lightning FSDP2")
@pytest.mark.parametrize("System", [KAISA, DPKFAC, DistKFAC, DHO2])
def test_lightning_with_fsdp2_equals_the_usual_loop(world: World, System: Any) -> None:
    pytest.importorskip("lightning.pytorch")
    for found, usual, alone in world.run(under_fsdp, 2, System, timeout=240):
        torch.testing.assert_close(found, usual, rtol=1e-9, atol=1e-11)
        assert float((usual - alone).abs().max()) > 1e-3


def with_helpers(rank: int, world_size: int, System: Any, sharded: bool) -> str:
    """Return the error of a module whose optimizer would have helpers among the ranks."""
    import lightning_training
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Sharded(lightning_training.Lit):
        def configure_model(self) -> None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    more: dict[str, Any] = {}
    if sharded:
        more["strategy"] = ModelParallelStrategy(
            data_parallel_size=world_size, tensor_parallel_size=1
        )
    options = {"stats_workers": 1} if System is DistKFAC else {"helper_ranks": 1}
    module = (Sharded if sharded else lightning_training.Lit)(System, **options)
    with launched(rank, world_size), pytest.raises((TypeError, ValueError)) as error:
        fit(rank, world_size, module, BATCHES[:2], **more)
    return str(error.value)


@pytest.mark.refused(
    "Lightning DDP",
    "MRDHO2",
    when="with accelerators",
    message="with a model in DistributedDataParallel",
)
@pytest.mark.refused(
    "Lightning DDP",
    "DistKFAC",
    when="with stats workers",
    message="with a model in DistributedDataParallel",
)
@pytest.mark.parametrize("System", [MRDHO2, DistKFAC])
def test_ddp_over_helpers_is_refused_on_every_rank(world: World, System: Any) -> None:
    pytest.importorskip("lightning.pytorch")
    for messages in world.run(with_helpers, 2, System, False, timeout=240):
        assert (
            "with a model in DistributedDataParallel, which would wait for the gradients"
            in messages
        )
        assert "optimizer.worker_group" in messages


@pytest.mark.refused(
    "Lightning FSDP2", "MRDHO2", when="with accelerators", message="hold whole models"
)
def test_shards_over_accelerators_are_refused(world: World) -> None:
    """Lightning makes one mesh of all ranks."""
    pytest.importorskip("lightning.pytorch")
    for messages in world.run(with_helpers, 2, MRDHO2, True, timeout=240):
        assert "helpers and their workers hold whole models; use helper_ranks=0" in messages
