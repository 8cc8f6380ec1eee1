"""Parameters that are sharded: which of them are taken, and how they take others' places.

FSDP2's ``fully_shard`` keeps the rows of each parameter apart on the ranks. It replaces the
parameters of the modules that it is applied to, so that an optimizer made before has those from
before; it goes on with their shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from second_order.contract.base_state import BASE
from second_order.contract.groups import members_of
from second_order.contract.training import Training
from second_order.distributed.shard_layout import layout_of
from second_order.distributed.world import World
from second_order.sharded import (
    dtensors_exist,
    is_dtensor,
    like,
    mesh_ranks,
    reshard,
    sharded_params,
)

__all__ = [
    "Places",
    "agree_on_shards",
    "check_mesh",
    "check_sharding",
    "moved_state",
    "replaced_in",
    "trouble_with_mesh",
]


def check_sharding(model: nn.Module) -> None:
    """Raise TypeError unless FSDP2 has sharded what is sharded of a model, by rows.

    A root that has its whole parameters since a forward without a backward shards them again.
    """
    reshard(model)
    found = {name: p for name, p in model.named_parameters() if is_dtensor(p)}
    if not found:
        return
    managed = {id(p) for p in sharded_params(model)}
    for name, p in found.items():
        placements = cast(Any, p).placements
        layer, _, leaf = name.rpartition(".")
        if id(p) not in managed or any(place.is_partial() for place in placements):
            raise TypeError(
                f"layer {layer or '(model)'!r} is parallelised over tensors: its parameter "
                f"{leaf!r} is a DTensor with placements {_said(placements)} that no fully_shard "
                f"made, and each rank sees a part of its activations; leave the layer out of "
                f"parallelize_module (ColwiseParallel, RowwiseParallel) and shard it by "
                f"torch.distributed.fsdp.fully_shard"
            )
        shards = [place for place in placements if not place.is_replicate()]
        if len(shards) != 1 or type(shards[0]).__name__ != "Shard":
            raise TypeError(
                f"layer {layer or '(model)'!r} is sharded by fully_shard and parallelised over "
                f"tensors, too: its parameter {leaf!r} has placements {_said(placements)}; leave "
                f"the layer out of parallelize_module (ColwiseParallel, RowwiseParallel)"
            )
        if p.device.type != cast(Any, p).device_mesh.device_type:
            raise TypeError(
                f"parameter {name!r} is kept on the {p.device.type} (CPUOffloadPolicy), and its "
                f"layer's activations are on {cast(Any, p).device_mesh.device_type}, where factors "
                f"are made; shard the model without offload_policy"
            )
        if shards[0].dim != 0:
            raise TypeError(
                f"parameter {name!r} is sharded along dimension {shards[0].dim}; rows are sent to "
                f"who preconditions them, so shard dimension 0, as fully_shard does without "
                f"shard_placement_fn"
            )


def _said(placements: Iterable[Any]) -> str:
    return ", ".join(map(repr, placements))


def check_mesh(
    params: Mapping[str, Tensor], world: World, team: Sequence[int] | None = None
) -> None:
    """Raise ValueError unless parameters are sharded over the ranks that train, all of them.

    Args:
        params: The model's parameters, by name.
        world: The ranks that the optimizer works with.
        team: Those of them, as torch numbers them, that do what this one does; None for all.
    """
    everybody = world.global_ranks
    ranks = sorted(everybody if team is None else team)
    apart = world.whole is not None or len(ranks) < len(everybody)
    for name, p in params.items():
        if is_dtensor(p):
            mesh = sorted(mesh_ranks(p))
            if mesh != ranks:
                remedy = (
                    "make the optimizer of the plain model, and shard it on workers and helpers "
                    "apart, by fully_shard(model, mesh=DeviceMesh.from_group("
                    "optimizer.worker_group, device_type))"
                    if apart
                    else "shard over a mesh of all these ranks, or pass process_group= a group of "
                    "the mesh's"
                )
                raise ValueError(
                    f"parameter {name!r} is sharded over the ranks {mesh}, and the optimizer works "
                    f"with the ranks {ranks}; {remedy}"
                )
            layout_of(p, world)


def trouble_with_mesh(model: nn.Module, world: World, team: Sequence[int] | None) -> str | None:
    """What is wrong with the mesh of one kind of ranks, for all to hear of; "" for nothing.

    None where all ranks do the same: they raise.

    Args:
        model: The model.
        world: The ranks that the optimizer works with.
        team: As for :func:`check_mesh`.
    """
    apart = team is not None and len(team) < world.size
    try:
        check_mesh(dict(model.named_parameters()), world, team)
    except ValueError as error:
        if not apart:
            raise
        return str(error)
    return "" if apart else None


def agree_on_shards(training: Training, trouble: str) -> None:
    """Raise ValueError on every rank if what one has of shards cannot be. A collective.

    FSDP2 averages the gradients where it has sharded all, and the optimizer does not.

    Args:
        training: The training, some of whose ranks help the others.
        trouble: What is wrong with this rank's mesh; "" for nothing.
    """
    world, averages = training.world, training.averages
    sharded = any(map(is_dtensor, members_of(training.groups)))
    found = world.all_gather_object((trouble, sharded))
    troubles = [text for text, _ in found if text]
    if troubles:
        raise ValueError(troubles[0])
    some = [rank for rank, (_, has) in enumerate(found) if has]
    if averages and 0 < len(some) < len(found):
        rest = [rank for rank in range(len(found)) if rank not in some]
        raise ValueError(
            f"fully_shard has sharded the model on ranks {some} and not on {rest}, so that only "
            f"some would average gradients: make the optimizer of the plain model on every rank, "
            f"and shard it then, or use gradient_averaging=False where FSDP2 or DDP averages"
        )
    training.averages = averages and not sharded


class Places:
    """The modules' entries that parameters of an optimizer had when it last looked.

    Args:
        model: The model.
        params: The parameters of the optimizer.
    """

    def __init__(self, model: nn.Module, params: Iterable[Tensor]) -> None:
        ours = {id(p): p for p in params if not is_dtensor(p)}
        self._entries = [
            (module, name, p)
            for module in model.modules()
            if not isinstance(module, torch.jit.ScriptModule)
            for name, p in module._parameters.items()
            if p is not None and id(p) in ours
        ]

    def replaced(self) -> dict[Tensor, Tensor]:
        """The parameters that have been sharded since, with their shards."""
        found: dict[Tensor, Tensor] = {}
        if not dtensors_exist():
            return found
        for module, name, p in self._entries:
            new = module._parameters.get(name)
            if new is not p and new is not None and is_dtensor(new) and new.shape == p.shape:
                found[p] = new
        return found


def moved_state(state: dict[Tensor, dict[str, Any]], others: Mapping[Tensor, Tensor]) -> None:
    """Let shards take over the base's state of the parameters in whose place they are."""
    for p, shard in others.items():
        if p in state:
            parts = state.pop(p)
            base = parts.get(BASE, {})
            for key, value in base.items():
                if isinstance(value, Tensor):
                    base[key] = like(shard, value)
            state[shard] = parts


def replaced_in(groups: Sequence[dict[str, Any]], others: Mapping[Tensor, Tensor]) -> None:
    """Put shards in the place of parameters in groups."""
    for group in groups:
        group["params"][:] = [others.get(p, p) for p in group["params"]]
