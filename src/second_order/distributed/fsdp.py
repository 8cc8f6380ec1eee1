"""What wraps a training: FSDP2's sharded parameters, DDP's forward, and torch's checkpoints.

Outside of passes a module has the sharded parameter, a ``DTensor`` of which this process has some
rows. During its forward and backward the module has the whole one, a leaf of its own, whose
gradient FSDP2 averages over the processes into the sharded one's. Nothing here imports
``torch.distributed.tensor``, which takes seconds: where it is not loaded there is no ``DTensor``.
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
"""The module without which nothing in this process can be a ``DTensor``."""


def is_dtensor(value: Any) -> bool:
    """Whether a value is a ``DTensor``."""
    loaded = sys.modules.get(DTENSORS)
    return loaded is not None and isinstance(value, loaded.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a tensor that is here: a DTensor's local one, which shares its memory."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return cast(Tensor, cast(Any, tensor).to_local())


def mesh_ranks(tensor: Tensor) -> list[int]:
    """The ranks over which a DTensor is spread, in the order of its mesh."""
    ranks: list[int] = cast(Any, tensor).device_mesh.mesh.flatten().tolist()
    return ranks


def chunk_bounds(rows: int, parts: int, index: int) -> tuple[int, int]:
    """The first row of a part and the one after its last, as ``torch.chunk`` cuts: ⌈rows / parts⌉.

    The last parts may have fewer, or none.
    """
    each = -(-rows // parts)
    return min(index * each, rows), min((index + 1) * each, rows)


def shard_replicas(tensor: Tensor) -> list[list[int]]:
    """The ranks that together have every row of a DTensor, in the order of rows; one list a copy.

    Rows of a DTensor with one ``Shard(0)`` go to the ranks of a mesh as ``torch.chunk`` cuts them.
    Other dimensions of the mesh have copies.
    """
    dtensor = cast(Any, tensor)
    (at,) = (i for i, place in enumerate(dtensor.placements) if place.is_shard())
    mesh = dtensor.device_mesh.mesh.movedim(at, -1)
    replicas: list[list[int]] = mesh.reshape(-1, mesh.shape[-1]).tolist()
    return replicas


def shard_like(p: Tensor, value: Tensor) -> Tensor:
    """A tensor laid out as a parameter: cut to this process's rows where FSDP2 has sharded that.

    A value that is a DTensor, or that has another shape, stays as it is.
    """
    if not is_dtensor(p) or is_dtensor(value) or value.shape != p.shape:
        return value
    rank = dist.get_rank()
    (replica,) = (ranks for ranks in shard_replicas(p) if rank in ranks)
    start, stop = chunk_bounds(p.shape[0], len(replica), replica.index(rank))
    rows = value.detach()[start:stop].to(local_tensor(p).device, copy=True)
    return dtensor_from_rows(p, rows)


def dtensor_from_rows(p: Tensor, rows: Tensor) -> Tensor:
    """This process's rows of a tensor as a DTensor, if a parameter of its shape is one."""
    if not is_dtensor(p):
        return rows
    spread = cast(Any, p)
    kind, mine = sys.modules[DTENSORS].DTensor, (spread.device_mesh, spread.placements)
    made = kind.from_local(rows, *mine, run_check=False, shape=p.shape, stride=p.stride())
    return cast(Tensor, made)


def active_ddp() -> Any:
    """The DistributedDataParallel whose forward runs now, if one does."""
    return cast(Any, DistributedDataParallel)._get_active_ddp_module()


def _fsdp_module() -> Any:
    """FSDP2's class of modules; None where it is not loaded."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def _param_groups(model: nn.Module) -> Iterator[Any]:
    """FSDP2's own records of the modules that it shards together."""
    fsdp = _fsdp_module()
    for module in model.modules() if fsdp is not None else ():
        if not isinstance(module, fsdp):
            continue
        state = cast(Any, module)._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # one or none before torch 2.11
        for group in [state._fsdp_param_group] if groups is None else groups:
            if group is not None:
                yield group


def compute_dtypes(model: nn.Module) -> set[torch.dtype]:
    """The dtypes in which passes compute by FSDP2's mixed-precision policies, where there are."""
    found = {group.mp_policy.param_dtype for group in _param_groups(model)}
    return {dtype for dtype in found if dtype is not None}


def sharded_params(model: nn.Module) -> list[Tensor]:
    """The sharded parameters that FSDP2 manages in a model."""
    return [p.sharded_param for group in _param_groups(model) for p in group.fsdp_params]


def reshard(model: nn.Module) -> None:
    """Give modules their sharded parameters back: a root keeps whole ones after a lone forward."""
    fsdp = _fsdp_module()
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp):
            cast(Any, module).reshard()


class FSDPParams:
    """What FSDP2 puts in the place of sharded parameters of a model while a pass runs."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._of: dict[tuple[int, str], Any] = {}

    def unsharded_params(self, module: nn.Module) -> dict[str, Tensor]:
        """The parameters of a module that the graph of a pass ends in, those without any left out.

        A module that is a group of its own may have them back only after hooks of ours.
        """
        params: dict[str, Tensor | None] = {}
        for name, p in module._parameters.items():
            record = self._record(module, name, True) if is_dtensor(p) else None
            params[name] = p if record is None else getattr(record, "_unsharded_param", None)
        return {name: p for name, p in params.items() if p is not None}

    def has_unreduced_gradients(self, module: nn.Module) -> bool:
        """Whether passes have left gradients that FSDP2 is to average after a later pass."""
        if _fsdp_module() is None:
            return False
        own = module._parameters
        records = [self._record(module, name) for name, p in own.items() if p is not None]
        return any(
            record is not None
            and (
                getattr(record, "unsharded_accumulated_grad", None) is not None
                or getattr(getattr(record, "_unsharded_param", None), "grad", None) is not None
            )
            for record in records
        )

    def _record(self, module: nn.Module, name: str, sharded: bool = False) -> Any:
        """FSDP2's record of a module's parameter, or None; looked for again if it is sharded."""
        key, model = (id(module), name), self._model()
        unknown = key not in self._of or (sharded and self._of[key] is None)
        if unknown and model is not None:
            # All at once, and what has no record is remembered: to look through a model takes long.
            # By items: of TorchScript's parameters nothing else is an iterator.
            self._of = {(id(m), n): None for m in model.modules() for n, _ in m._parameters.items()}
            self._of[key] = None
            for record in (r for group in _param_groups(model) for r in group.fsdp_params):
                info = record._module_info
                self._of[id(info.module), info.param_name] = record
                shared = zip(info.shared_modules, info.shared_param_names, strict=True)
                self._of |= {(id(m), n): record for m, n in shared}
        return self._of.get(key)


# ----------------------------------------------------------------------------- rows on each rank

Replica: TypeAlias = tuple[int, ...]
"""Ranks that together have every row once, in the order of rows."""


@dataclass(frozen=True)
class ShardLayout:
    """The rows of a tensor, its parts along the first dimension, by rank.

    A rank is among its own replica, and no rank in two. Replicas and positions are shared by all
    tensors that lie alike: there may be thousands of both.
    """

    total: int  # number of rows
    width: int  # number of elements of a row
    replicas: tuple[Replica, ...]  # by rank
    positions: tuple[int, ...]  # by rank, which of its replica it is

    def bounds(self, rank: int) -> tuple[int, int]:
        """The first row that a rank has, and the one after its last."""
        parts = len(self.replicas[rank])
        return chunk_bounds(self.total, parts, self.positions[rank]) if parts else (0, 0)

    def size(self, rank: int) -> int:
        """Number of elements that a rank has."""
        start, stop = self.bounds(rank)
        return (stop - start) * self.width

    def in_same_replica(self, rank: int, other: int) -> bool:
        """Whether two ranks are in one replica."""
        return self.replicas[rank][:1] == self.replicas[other][:1]


def shard_layout(tensor: Tensor, world: World) -> ShardLayout:
    """The rows of a parameter that is whole on every rank, or that FSDP2 has sharded.

    All ranks of the world are in the DTensor's mesh.

    Raises:
        TypeError: If the DTensor has other rows than that on this rank.
    """
    shape = tensor.shape or torch.Size([1])
    total, width = shape[0], shape[1:].numel()
    if not is_dtensor(tensor):
        alone = tuple((rank,) for rank in range(world.size))
        return ShardLayout(total, width, *_by_rank(alone, world.size))
    here = {rank: i for i, rank in enumerate(world.global_ranks)}
    replicas = shard_replicas(tensor)
    within = tuple(tuple(here[rank] for rank in replica) for replica in replicas)
    layout = ShardLayout(total, width, *_by_rank(within, world.size))
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
    """Each rank's replica, and its position there."""
    of, positions = [()] * size, [0] * size  # type: list[Replica], list[int]
    for ranks in replicas:
        for i, rank in enumerate(ranks):
            of[rank], positions[rank] = ranks, i
    return tuple(of), tuple(positions)


# ------------------------------------------------------------------- what fully_shard may have done


class ParamLocations:
    """The modules that hold parameters, to see later what ``fully_shard`` replaces them by."""

    def __init__(self, model: nn.Module, params: Iterable[Tensor]) -> None:
        whole = {id(p) for p in params if not is_dtensor(p)}
        self._places: list[tuple[nn.Module, str, Tensor]] = []
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                for name, p in module._parameters.items():
                    if p is not None and id(p) in whole:
                        self._places.append((module, name, p))

    def find_new_shards(self) -> dict[Tensor, Tensor]:
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
            shard_layout(p, world)
