"""What FSDP2 may shard, over which ranks, and the shards that replace parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from second_order.distributed.shard_layout import layout_of
from second_order.distributed.world import World
from second_order.sharded import is_dtensor, mesh_ranks, reshard, sharded_params

__all__ = ["ParamPlaces", "check_mesh", "check_sharding"]


class ParamPlaces:
    """The modules that hold parameters, to see later what ``fully_shard`` replaces them by."""

    def __init__(self, model: nn.Module, params: Iterable[Tensor]) -> None:
        whole = {id(p) for p in params if not is_dtensor(p)}
        self._places: list[tuple[nn.Module, str, Tensor]] = []
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                for name, p in module._parameters.items():
                    if p is not None and id(p) in whole:
                        self._places.append((module, name, p))

    def new_shards(self) -> dict[Tensor, Tensor]:
        """The shards in the places of parameters, by these parameters."""
        found: dict[Tensor, Tensor] = {}
        for module, name, p in self._places:
            new = module._parameters.get(name)
            if new is not None and new is not p and is_dtensor(new) and new.shape == p.shape:
                found[p] = new
        return found


def check_sharding(model: nn.Module) -> None:
    """Raise TypeError unless FSDP2 has sharded what is sharded of a model, by rows.

    A root that has its whole parameters since a forward without a backward shards them again.
    """
    reshard(model)
    found = {name: p for name, p in model.named_parameters() if is_dtensor(p)}
    managed = {id(p) for p in sharded_params(model)} if found else set()
    for name, p in found.items():
        placements, mesh = cast(Any, p).placements, cast(Any, p).device_mesh
        shards = [place for place in placements if not place.is_replicate()]
        layer, _, leaf = name.rpartition(".")
        if id(p) not in managed or len(shards) != 1 or type(shards[0]).__name__ != "Shard":
            raise TypeError(
                f"layer {layer or '(model)'!r} is parallelised over tensors: its parameter "
                f"{leaf!r} is a DTensor with placements {placements} that no fully_shard alone "
                f"made, and each rank sees a part of its activations; leave the layer out of "
                f"parallelize_module (ColwiseParallel, RowwiseParallel) and shard it by "
                f"torch.distributed.fsdp.fully_shard"
            )
        if p.device.type != mesh.device_type:
            raise TypeError(
                f"parameter {name!r} is kept on the {p.device.type} (CPUOffloadPolicy), and its "
                f"layer's activations are on {mesh.device_type}, where factors are made; shard the "
                f"model without offload_policy"
            )
        if shards[0].dim != 0:
            raise TypeError(
                f"parameter {name!r} is sharded along dimension {shards[0].dim}; rows are sent to "
                f"who preconditions them, so shard dimension 0, as fully_shard does without "
                f"shard_placement_fn"
            )


def check_mesh(model: nn.Module, world: World) -> None:
    """Raise ValueError unless parameters are sharded over the ranks that train, all of them."""
    ranks = sorted(world.global_ranks)
    for name, p in model.named_parameters():
        if is_dtensor(p):
            mesh = sorted(mesh_ranks(p))
            if mesh != ranks:
                raise ValueError(
                    f"parameter {name!r} is sharded over the ranks {mesh}, and the optimizer works "
                    f"with the ranks {ranks}; shard over a mesh of all these ranks, or pass "
                    f"process_group= a group of the mesh's"
                )
            layout_of(p, world)
