"""What wraps a training: FSDP2's sharded parameters, DDP's forward, and torch's checkpoints.

Outside of passes a module has the sharded parameter, a ``DTensor`` of which this process has some
rows. During its forward and backward the module has the whole one, a leaf of its own, whose
gradient FSDP2 averages over the processes into the sharded one's. Nothing here imports
``torch.distributed.tensor``, which takes seconds: where it is not loaded there is no ``DTensor``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "DTENSORS",
    "FSDPParams",
    "caller",
    "chunk",
    "ddp_under_way",
    "dtypes_of_passes",
    "is_checkpointing",
    "is_dtensor",
    "like",
    "local",
    "mesh_ranks",
    "plain_type",
    "reshard",
    "shard_replicas",
    "sharded_like",
    "sharded_params",
]


DTENSORS = "torch.distributed.tensor"
"""The module without which nothing in this process can be a ``DTensor``."""


def is_dtensor(value: Any) -> bool:
    """Whether a value is a ``DTensor``."""
    loaded = sys.modules.get(DTENSORS)
    return loaded is not None and isinstance(value, loaded.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is here: a DTensor's local one, which shares its memory."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return cast(Tensor, cast(Any, tensor).to_local())


def mesh_ranks(tensor: Tensor) -> list[int]:
    """The ranks over which a DTensor is spread, in the order of its mesh."""
    ranks: list[int] = cast(Any, tensor).device_mesh.mesh.flatten().tolist()
    return ranks


def chunk(rows: int, parts: int, index: int) -> tuple[int, int]:
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


def like(p: Tensor, value: Tensor) -> Tensor:
    """A tensor laid out as a parameter: cut to this process's rows where FSDP2 has sharded that.

    A value that is a DTensor, or that has another shape, stays as it is.
    """
    if not is_dtensor(p) or is_dtensor(value) or value.shape != p.shape:
        return value
    rank = dist.get_rank()
    (replica,) = (ranks for ranks in shard_replicas(p) if rank in ranks)
    start, stop = chunk(p.shape[0], len(replica), replica.index(rank))
    rows = value.detach()[start:stop].to(local(p).device, copy=True)
    return sharded_like(p, rows)


def sharded_like(p: Tensor, rows: Tensor) -> Tensor:
    """This process's rows of a tensor as a DTensor, if a parameter of its shape is one."""
    if not is_dtensor(p):
        return rows
    spread = cast(Any, p)
    kind, mine = sys.modules[DTENSORS].DTensor, (spread.device_mesh, spread.placements)
    made = kind.from_local(rows, *mine, run_check=False, shape=p.shape, stride=p.stride())
    return cast(Tensor, made)


def ddp_under_way() -> Any:
    """The DistributedDataParallel whose forward runs now, if one does."""
    return cast(Any, DistributedDataParallel)._get_active_ddp_module()


def _fsdp_module() -> Any:
    """FSDP2's class of modules; None where it is not loaded."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def plain_type(module: nn.Module) -> type[nn.Module]:
    """The class of a module before ``fully_shard`` gave it another: Linear, not FSDPLinear."""
    fsdp, kind = _fsdp_module(), type(module)
    if fsdp is None or fsdp not in kind.__mro__[1:]:
        return kind
    return cast(type[nn.Module], kind.__mro__[kind.__mro__.index(fsdp) + 1])


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


def dtypes_of_passes(model: nn.Module) -> set[torch.dtype]:
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

    def in_pass(self, module: nn.Module) -> dict[str, Tensor]:
        """The parameters of a module that the graph of a pass ends in, those without any left out.

        A module that is a group of its own may have them back only after hooks of ours.
        """
        params: dict[str, Tensor | None] = {}
        for name, p in module._parameters.items():
            record = self._record(module, name, True) if is_dtensor(p) else None
            params[name] = p if record is None else getattr(record, "_unsharded_param", None)
        return {name: p for name, p in params.items() if p is not None}

    def unreduced(self, module: nn.Module) -> bool:
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


def caller(module: str = "", function: str = "") -> FrameType | None:
    """The nearest frame above of a module whose name begins so, or of a function of a name."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        where, code = frame.f_globals.get("__name__", ""), frame.f_code
        if (module and where.startswith(module)) or code.co_name == function:
            return frame
        frame = frame.f_back
    return None


def is_checkpointing(part: bool = False) -> bool:
    """Whether torch.distributed.checkpoint is calling; ``part``: for what is this rank's alone.

    Like any other caller, it calls state_dict() without arguments; but it wants each rank's part,
    and gathers the rest itself, unless the full state on one rank has been asked for. torch has no
    other sign of the caller than the stack.
    """
    frame = caller("torch.distributed.checkpoint")
    full = frame is not None and getattr(frame.f_locals.get("info"), "full_state_dict", False)
    return frame is not None and not (part and full)
