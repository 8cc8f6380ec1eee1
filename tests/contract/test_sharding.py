"""Sharded parameters that are refused, each in a line that names the layer and the remedy."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from framework_training import BATCHES, CASE, loss_of, optimizer_of
from fsdp_training import fsdp, go_on, mesh_of, narrow, shares
from ranks import replaced
from reference import half_squared_error
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
SYSTEMS = (KAISA, DPKFAC, DistKFAC, DHO2, MRDHO2)


def refusal(System: Any, model: nn.Module, **options: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        System(model, lr=0.1, **options)
    return str(caught.value)


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def parallel_over_tensors(rank: int, world_size: int) -> dict[str, list[str]]:
    mesh = init_device_mesh("cpu", (world_size,))
    first = perceptron()
    second = perceptron()
    parallelize_module(first, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    parallelize_module(second, mesh, {"2": RowwiseParallel()})
    both = perceptron()
    grid = mesh_of(1, world_size)
    parallelize_module(both, grid["shard"], {"0": ColwiseParallel()})
    fully_shard(both, mesh=grid["replicate"])
    return {
        "columns": [refusal(System, first) for System in SYSTEMS],
        "rows": [refusal(System, second) for System in SYSTEMS],
        "both": [refusal(System, both) for System in SYSTEMS],
    }


@pytest.mark.refused(
    "tensor parallelism",
    *("KAISA", "DPKFAC", "DistKFAC", "DHO2", "MRDHO2"),
    message="parallelized over tensors",
)
def test_tensor_parallel_layers_raise_with_their_name(world: World) -> None:
    for found in world.run(parallel_over_tensors, 2):
        for name, layer in (("columns", "0"), ("rows", "2"), ("both", "0")):
            for message in found[name]:
                assert message.startswith(f"layer {layer!r} is "), message
                assert "parallelized over tensors" in message
                assert "ColwiseParallel, RowwiseParallel" in message
                assert "\n" not in message


def other_shards(rank: int, world_size: int) -> dict[str, str]:
    columns = perceptron()
    fully_shard(columns, shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else None)
    offloaded = fully_shard(perceptron(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    with replaced(DeviceMesh, {"device_type": "cuda"}):
        elsewhere = refusal(KAISA, offloaded)
    alone = perceptron()
    fully_shard(alone, mesh=mesh_of(world_size, 1)["shard"])
    return {
        "columns": refusal(KAISA, columns),
        "alone": refusal(DPKFAC, alone),
        "elsewhere": elsewhere,
        "helpers": refusal(DistKFAC, fully_shard(perceptron()), stats_workers=1),
        "MRDHO2": refusal(MRDHO2, fully_shard(perceptron())),
        "matrices": refusal(
            KAISA, fully_shard(perceptron()), unsupported_layers="gradient_factors"
        ),
    }


def test_unsupported_shards_raise_with_the_remedy(world: World) -> None:
    for rank, found in enumerate(world.run(other_shards, 2)):
        assert "parameter '0.weight' is sharded along dimension 1" in found["columns"]
        assert f"'0.weight' is sharded over the ranks [{rank}]" in found["alone"]
        assert "works with the ranks [0, 1]" in found["alone"]
        assert "process_group=" in found["alone"]
        assert "use stats_workers=0, or Distributed" in found["helpers"]
        assert "'0.weight' is kept on the cpu (CPUOffloadPolicy)" in found["elsewhere"]
        assert "use helper_ranks=0, or Distributed" in found["MRDHO2"]
        assert "use unsupported_layers='base_optimizer'" in found["matrices"]


def sharded_in_a_later_group(rank: int, world_size: int) -> list[str]:
    model = perceptron()
    fully_shard(model[2])
    first = [*model[0].parameters()]
    optimizer = KAISA(first, model=model, lr=0.1, unsupported_layers="gradient_factors")
    with pytest.raises(ValueError, match="use unsupported_layers='base_optimizer'"):
        optimizer.add_param_group({"params": [*model[2].parameters()]})
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    return [row.name for row in optimizer.summary().rows]


def test_a_refused_group_leaves_the_layers_as_they_were(world: World) -> None:
    for names in world.run(sharded_in_a_later_group, 2):
        assert names == ["0"]


def order_of_state(rank: int, world_size: int) -> list[int]:
    """The positions in the groups of the parameters that have state, after `fully_shard`."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    optimizer = KAISA(model, lr=0.1, momentum=0.9)
    for shards in (False, True):
        if shards:
            fully_shard(model)
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
    positions = {p: i for i, p in enumerate(optimizer.param_groups[0]["params"])}
    return [positions[p] for p in optimizer.state]


def test_state_has_the_order_of_the_groups_after_sharding(world: World) -> None:
    """torch.distributed.checkpoint gathers the shards in this order, a collective for each."""
    for positions in world.run(order_of_state, 2):
        assert positions == list(range(12))


def made_from_meta(
    rank: int, world_size: int, system: int
) -> tuple[str, list[torch.Tensor], list[torch.Tensor]]:
    """FSDP2's own order: shard on meta, materialise, fill; then the optimizer."""
    System = SYSTEMS[system]
    options = {"lr": 0.1, "momentum": 0.9}
    if System is MRDHO2:
        options |= {"helper_ranks": 0, "epoch_steps": 2, "num_largest": 2}
    found = []
    message = ""
    data = shares(rank, world_size)
    x, y = data[0]
    for late in (False, True):
        model = narrow()
        values = model.state_dict()
        fsdp(model.to("meta") if late else model)
        if late:
            message = refusal(System, model)
            model.to_empty(device="cpu")
            how = StateDictOptions(full_state_dict=True)
            set_model_state_dict(model, values, options=how)
        optimizer = System(model, **options)
        optimizer.curvature_closure = lambda model=model: half_squared_error(model(x), y)
        found.append(go_on(model, optimizer, data))
    return message, *found


@pytest.mark.parametrize("system", range(len(SYSTEMS)))
def test_a_model_sharded_on_the_meta_device_trains_after_materialization(
    world: World, system: int
) -> None:
    for message, expected, found in world.run(made_from_meta, 2, system):
        assert "is on the meta device and has no data: first call" in message
        assert "with FSDP2: fully_shard(model), model.to_empty(device=...), then " in message
        assert "CPUOffloadPolicy" not in message
        assert len(found) == 3
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)


def sharded_too_late(rank: int, world_size: int) -> list[str]:
    """The optimizer was made before; what is wrong is said at the step."""
    found = []
    x, y = shares(rank, world_size, 1)[0]
    second = {"helper_ranks": 0, "epoch_steps": 2, "hvp": "retained"}
    for System, options in ((MRDHO2, second), (KAISA, {})):
        model = narrow()
        optimizer = System(model, lr=0.1, **options)
        if System is KAISA:
            mesh = init_device_mesh("cpu", (world_size,))
            parallelize_module(model, mesh, {"middle.0": ColwiseParallel()})
        else:
            fsdp(model)
        if System is MRDHO2:
            half_squared_error(model(x), y).backward()
        with pytest.raises(TypeError) as caught:
            optimizer.step()
        found.append(str(caught.value))
    return found


def test_unsupported_later_sharding_raises_at_the_step(world: World) -> None:
    for sharded, parallel in world.run(sharded_too_late, 2):
        assert "use hvp='differences'" in sharded
        assert "layer 'middle.0' is parallelized over tensors" in parallel


HELPED = {MRDHO2: {"helper_ranks": 1}, DistKFAC: {"stats_workers": 1}}
each_with_helpers = pytest.mark.parametrize("System", list(HELPED))


def passes(rank: int, world_size: int, System: Any) -> float:
    """What a DDP over all ranks meets, one over its kind alone, copies, and a closed one."""
    model = CASE.model()
    optimizer = optimizer_of(System, model, gradient_averaging=False, **HELPED[System])
    own = DistributedDataParallel(model, process_group=optimizer.worker_group)
    whole = DistributedDataParallel(model)
    assert pickle.loads(pickle.dumps(copy.deepcopy(model)))
    with optimizer.hooks_removed():
        assert not model._forward_pre_hooks
    assert model._forward_pre_hooks
    with torch.no_grad():  # a look at the model before training decides nothing
        whole(BATCHES[0][0])
    with pytest.raises(
        ValueError, match=r"over ranks \[0, 1, 2\], but .*makes helpers of ranks \[2\]"
    ):
        loss_of(whole, BATCHES[0])
    loss_of(own, BATCHES[0])
    optimizer.close()
    return float(loss_of(whole, BATCHES[0]))


@each_with_helpers
def test_ddp_over_helper_ranks_raises_at_the_first_training_pass(world: World, System: Any) -> None:
    assert min(world.run(passes, 3, System)) > 0


def dropped(rank: int, world_size: int, System: Any) -> list[int]:
    """The hooks on the model with one optimizer, and after several that were garbage collected."""
    model = CASE.model()

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    found = []
    for _ in range(3):
        optimizer = optimizer_of(System, model, gradient_averaging=False, **HELPED[System])
        found.append(hooks())
        del optimizer
        gc.collect()
    return [found[0], found[-1], hooks()]


@each_with_helpers
def test_hooks_are_removed_with_an_unreferenced_optimizer(world: World, System: Any) -> None:
    """On helpers too, where no pass may ever train."""
    for first, last, left in world.run(dropped, 2, System):
        assert (last, left) == (first, 0)
