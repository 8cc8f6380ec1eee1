"""FSDP2's sharded parameters, and DistributedDataParallel's running forward.

Outside of passes, a module that FSDP2 shards has sharded parameters: ``DTensor``s of
which each rank stores some rows. During its forward and backward the module has
unsharded parameters instead. They are separate leaves, whose gradients FSDP2 averages
over the ranks into ``grad`` of the sharded parameters.

This module does not import ``torch.distributed.tensor``, because the import takes
seconds. If no other code has imported it, no tensor is a ``DTensor``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from second_order.distributed.world import World

__all__ = [
    "DTENSORS",
    "FSDPParams",
    "ParamLocations",
    "ShardLayout",
    "active_ddp",
    "check_mesh",
    "check_sharding",
    "chunk_bounds",
    "compute_dtypes",
    "dtensor_from_rows",
    "is_dtensor",
    "local_tensor",
    "mesh_ranks",
    "reshard",
    "shard_layout",
    "shard_like",
    "shard_replicas",
    "sharded_params",
]


DTENSORS = "torch.distributed.tensor"
"""The module that defines ``DTensor``."""


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a ``DTensor``."""
    loaded = sys.modules.get(DTENSORS)
    return loaded is not None and isinstance(value, loaded.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor's local rows, without a copy, or any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return cast(Tensor, cast(Any, tensor).to_local())


def mesh_ranks(tensor: Tensor) -> list[int]:
    """List the global ranks of a DTensor's mesh, in the order of the mesh."""
    ranks: list[int] = cast(Any, tensor).device_mesh.mesh.flatten().tolist()
    return ranks


def chunk_bounds(rows: int, parts: int, index: int) -> tuple[int, int]:
    """Return the first row of a part, and the row after its last one.

    As in ``torch.chunk``, parts have ⌈rows / parts⌉ rows, the last ones fewer or none.
    """
    size = -(-rows // parts)
    return min(index * size, rows), min((index + 1) * size, rows)


def shard_replicas(tensor: Tensor) -> list[list[int]]:
    """List the replicas of a DTensor that is sharded by rows along one mesh dimension.

    A replica is a list of global ranks that together store every row once, in the order
    of the rows. The other mesh dimensions store copies, as in HSDP.
    """
    dtensor = cast(Any, tensor)
    placements = enumerate(dtensor.placements)
    (shard_dim,) = (i for i, placement in placements if placement.is_shard())
    mesh = dtensor.device_mesh.mesh.movedim(shard_dim, -1)
    replicas: list[list[int]] = mesh.reshape(-1, mesh.shape[-1]).tolist()
    return replicas


def shard_like(p: Tensor, value: Tensor) -> Tensor:
    """Shard a whole tensor like a parameter; copy this rank's rows to a DTensor.

    Return ``value`` itself if the parameter is not sharded, if ``value`` is a DTensor
    already, or if it has another shape.
    """
    if not is_dtensor(p) or is_dtensor(value) or value.shape != p.shape:
        return value

    # Copy the rows that this rank stores in its replica.
    rank = dist.get_rank()
    (replica,) = (ranks for ranks in shard_replicas(p) if rank in ranks)
    start, stop = chunk_bounds(p.shape[0], len(replica), replica.index(rank))
    rows = value.detach()[start:stop].to(local_tensor(p).device, copy=True)
    return dtensor_from_rows(p, rows)


def dtensor_from_rows(p: Tensor, rows: Tensor) -> Tensor:
    """Return a DTensor with the layout of a parameter from this rank's rows.

    Returns ``rows`` if the parameter is not sharded.
    """
    if not is_dtensor(p):
        return rows
    dtensor = sys.modules[DTENSORS].DTensor.from_local(
        rows,
        device_mesh=cast(Any, p).device_mesh,
        placements=cast(Any, p).placements,
        run_check=False,
        shape=p.shape,
        stride=p.stride(),
    )
    return cast(Tensor, dtensor)


def active_ddp() -> Any:
    """Return the DistributedDataParallel whose forward is running, or None."""
    return cast(Any, DistributedDataParallel)._get_active_ddp_module()


def _fsdp_module() -> Any:
    """Return FSDP2's class of sharded modules, or None if FSDP2 is not imported."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def _param_groups(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's parameter groups, each of parameters that are sharded together."""
    for module in _sharded_modules(model):
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.11, which has at most one group per module
            groups = [state._fsdp_param_group]
        for group in groups:
            if group is not None:
                yield group


def _sharded_modules(model: nn.Module) -> Iterator[Any]:
    """Yield the modules that ``fully_shard`` was called on."""
    fsdp_module = _fsdp_module()
    if fsdp_module is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp_module):
            yield module


def compute_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Return the dtypes in which passes compute under FSDP2's mixed precision."""
    dtypes = {group.mp_policy.param_dtype for group in _param_groups(model)}
    return {dtype for dtype in dtypes if dtype is not None}


def sharded_params(model: nn.Module) -> list[Tensor]:
    """List the sharded parameters of a model that FSDP2 manages."""
    params: list[Tensor] = []
    for group in _param_groups(model):
        params += [p.sharded_param for p in group.fsdp_params]
    return params


def reshard(model: nn.Module) -> None:
    """Restore the sharded parameters, which a standalone forward leaves unsharded."""
    for module in _sharded_modules(model):
        module.reshard()


class FSDPParams:
    """The unsharded parameters that FSDP2 puts into a model's modules during passes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        # FSDP2's records, or None, by the module's id and the parameter's name.
        self._records: dict[tuple[int, str], Any] = {}

    def unsharded_params(self, module: nn.Module) -> dict[str, Tensor]:
        """Return a module's parameters that are leaves of the running pass, by name.

        If FSDP2 shards the module as a group of its own, it may have put the sharded
        parameters back before our hook runs. FSDP2's records then have the unsharded
        ones.
        """
        params: dict[str, Tensor] = {}
        for name, p in module._parameters.items():
            leaf = p
            if is_dtensor(p):
                record = self._record(module, name, is_sharded=True)
                if record is not None:
                    leaf = getattr(record, "_unsharded_param", None)
            if leaf is not None:
                params[name] = leaf
        return params

    def has_unreduced_gradients(self, module: nn.Module) -> bool:
        """Return whether a module has gradients that FSDP2 will average later."""
        if _fsdp_module() is None:
            return False
        for name, p in module._parameters.items():
            record = None if p is None else self._record(module, name)
            # FSDP2 keeps gradients in its record or in the unsharded parameter.
            if getattr(record, "unsharded_accumulated_grad", None) is not None:
                return True
            unsharded = getattr(record, "_unsharded_param", None)
            if getattr(unsharded, "grad", None) is not None:
                return True
        return False

    def _record(self, module: nn.Module, name: str, is_sharded: bool = False) -> Any:
        """Return FSDP2's record of a module's parameter, or None.

        A sharded parameter without a record was sharded after the last search.
        """
        key = (id(module), name)
        model = self._model()
        lacks_record = is_sharded and self._records.get(key) is None
        is_unknown = key not in self._records or lacks_record
        if is_unknown and model is not None:
            self._find_records(model)
            self._records.setdefault(key, None)
        return self._records.get(key)

    def _find_records(self, model: nn.Module) -> None:
        """Find the records of all parameters in one pass over the model."""
        self._records = {}
        for module in model.modules():
            # A TorchScript module supports only ``items()``.
            names = [name for name, _ in module._parameters.items()]
            self._records |= {(id(module), name): None for name in names}
        for group in _param_groups(model):
            for record in group.fsdp_params:
                info = record._module_info
                self._records[id(info.module), info.param_name] = record
                # A shared parameter has several places.
                shared = zip(info.shared_modules, info.shared_param_names, strict=True)
                for module, name in shared:
                    self._records[id(module), name] = record


# -------------------------------------------------------------------- rows on each rank

Replica: TypeAlias = tuple[int, ...]
"""Ranks that together store every row once, in the order of the rows."""


@dataclass(frozen=True)
class ShardLayout:
    """The rows of a parameter that each rank stores.

    Each rank is in one replica. Tensors with the same layout share their tuples of
    replicas and positions, because there may be thousands of tensors.
    """

    total: int  # number of rows
    width: int  # number of elements of a row
    replicas: tuple[Replica, ...]  # the replica of each rank
    positions: tuple[int, ...]  # the index of each rank in its replica

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the first row that a rank stores, and the row after its last one."""
        parts = len(self.replicas[rank])
        if parts == 0:
            return 0, 0
        return chunk_bounds(self.total, parts, self.positions[rank])

    def size(self, rank: int) -> int:
        """Return the number of elements that a rank stores."""
        start, stop = self.bounds(rank)
        return (stop - start) * self.width

    def in_same_replica(self, rank: int, other: int) -> bool:
        """Return whether two ranks are in the same replica."""
        return self.replicas[rank][:1] == self.replicas[other][:1]


def shard_layout(tensor: Tensor, world: World) -> ShardLayout:
    """Return the layout of a parameter.

    If it is not sharded, every rank stores every row. Otherwise all ranks of ``world``
    must be in the DTensor's mesh.

    Raises:
        TypeError: If the DTensor does not have the rows on this rank that
            ``torch.chunk`` leaves.
    """
    shape = tensor.shape or torch.Size([1])
    total = shape[0]
    width = shape[1:].numel()
    if not is_dtensor(tensor):
        single_ranks = tuple((rank,) for rank in range(world.size))
        return ShardLayout(total, width, *_by_rank(single_ranks, world.size))

    # Number the ranks of the mesh as the world does.
    world_rank = {rank: i for i, rank in enumerate(world.global_ranks)}
    replicas = tuple(
        tuple(world_rank[rank] for rank in replica)
        for replica in shard_replicas(tensor)
    )
    layout = ShardLayout(total, width, *_by_rank(replicas, world.size))
    start, stop = layout.bounds(world.rank)
    if local_tensor(tensor).shape[0] != stop - start:
        raise TypeError(
            f"a parameter of shape {tuple(tensor.shape)} has {local_tensor(tensor).shape[0]} rows "
            f"on rank {world.rank}, where torch.chunk would leave {stop - start}; shard it by "
            f"fully_shard"
        )
    return layout


@lru_cache(maxsize=8)
def _by_rank(
    replicas: tuple[Replica, ...], size: int
) -> tuple[tuple[Replica, ...], tuple[int, ...]]:
    """Return each rank's replica, and its index in the replica."""
    replica_of: list[Replica] = [()] * size
    positions = [0] * size
    for replica in replicas:
        for i, rank in enumerate(replica):
            replica_of[rank] = replica
            positions[rank] = i
    return tuple(replica_of), tuple(positions)


# ---------------------------------------------------------- changes made by fully_shard


class ParamLocations:
    """Places of parameters in a model, to find the shards that replace them later."""

    def __init__(self, model: nn.Module, params: Iterable[Tensor]) -> None:
        unsharded = {id(p) for p in params if not is_dtensor(p)}
        self._locations: list[tuple[nn.Module, str, Tensor]] = []
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                for name, p in module._parameters.items():
                    if p is not None and id(p) in unsharded:
                        self._locations.append((module, name, p))

    def find_new_shards(self) -> dict[Tensor, Tensor]:
        """Return the parameters that ``fully_shard`` replaced, with their shards."""
        shards: dict[Tensor, Tensor] = {}
        for module, name, p in self._locations:
            new = module._parameters.get(name)
            if new is None or new is p:
                continue
            # ``fully_shard`` replaces a parameter by a DTensor of the same shape.
            if is_dtensor(new) and new.shape == p.shape:
                shards[p] = new
        return shards


def check_sharding(model: nn.Module) -> None:
    """Check that every sharded parameter was sharded by ``fully_shard``, by rows.

    The function reshards the model first, because a root stays unsharded after a
    forward without a backward.

    Raises:
        TypeError: If a parameter is sharded in another way, or offloaded to the CPU.
    """
    # Find the sharded parameters, and those that fully_shard manages.
    reshard(model)
    dtensors = {name: p for name, p in model.named_parameters() if is_dtensor(p)}
    managed = {id(p) for p in sharded_params(model)} if dtensors else set()
    for name, p in dtensors.items():
        # Tensor parallelism and offloading hide a part of each layer from this rank.
        placements = cast(Any, p).placements
        device_type = cast(Any, p).device_mesh.device_type
        shards = [placement for placement in placements if not placement.is_replicate()]
        layer, _, param_name = name.rpartition(".")
        has_one_shard = len(shards) == 1 and type(shards[0]).__name__ == "Shard"
        if id(p) not in managed or not has_one_shard:
            raise TypeError(
                f"layer {layer or '(model)'!r} is parallelized over tensors: its parameter "
                f"{param_name!r} is a DTensor with placements {placements} that fully_shard alone "
                f"does not make, and each rank sees a part of its activations; leave the layer out "
                f"of parallelize_module (ColwiseParallel, RowwiseParallel) and shard it with "
                f"torch.distributed.fsdp.fully_shard"
            )
        if p.device.type != device_type:
            raise TypeError(
                f"parameter {name!r} is kept on the {p.device.type} (CPUOffloadPolicy), but its "
                f"layer's activations and factors are on {device_type}; shard the model without "
                f"offload_policy"
            )
        if shards[0].dim != 0:
            raise TypeError(
                f"parameter {name!r} is sharded along dimension {shards[0].dim}; shard dimension "
                f"0, as fully_shard does without shard_placement_fn"
            )


def check_mesh(model: nn.Module, world: World) -> None:
    """Check that parameters are sharded over all ranks of ``world``.

    Raises:
        ValueError: If the mesh of a parameter has other ranks.
    """
    ranks = sorted(world.global_ranks)
    for name, p in model.named_parameters():
        if is_dtensor(p):
            mesh = sorted(mesh_ranks(p))
            if mesh != ranks:
                raise ValueError(
                    f"parameter {name!r} is sharded over the ranks {mesh}, but the optimizer works "
                    f"with the ranks {ranks}; shard over a mesh of all these ranks, or pass a "
                    f"group of the mesh's ranks as process_group="
                )
            shard_layout(p, world)
