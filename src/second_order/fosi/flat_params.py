"""All parameters that train as one vector: every process has the whole of it, or rows of its own.

rows spread   each process receives its rows of the mean gradient, the base steps them there, and
              all receive all rows: the volume of one all-reduce, and n/P of the base's state
whole         every process averages, and steps, the whole vector

The vector is the parameters group by group, each in the order of ``p.reshape(-1)``. This process's
rows are copied to buffers, where they lie one after the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from second_order.distributed.fsdp import is_dtensor, local_tensor, reshard, shard_layout
from second_order.distributed.world import World
from second_order.lanczos.closure import LossFn
from second_order.lanczos.hvp import Hessian, ShardedHessian
from second_order.lanczos.spectrum import check_one_device, lanczos_dtype
from second_order.lanczos.vector_space import RowSpace, row_bounds
from second_order.optimizers.config import FOSIOptions
from second_order.training.context import Training
from second_order.training.curvature import Routed

__all__ = ["FlatParams", "ParamPiece", "all_gather_on_cpu", "check_one_vector"]

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
)
"""The bases that update each element by itself, so that rows of the parameters can be stepped."""


@dataclass(frozen=True, eq=False)
class ParamPiece:
    """``size`` elements from ``start`` on of a flattened parameter, which one process steps."""

    param: Tensor
    group: int  # index of the parameter's
    rank: int  # the process that has the piece
    start: int
    size: int
    at: int  # index of its first element in the vector of all parameters
    whole: bool  # whether it is all of a parameter

    def view_of(self, tensor: Tensor) -> Tensor:
        """A view of this piece of a tensor of the parameter's shape; flat, unless it is whole."""
        if self.whole:
            return tensor.detach()
        if is_dtensor(tensor):  # what is here of it is the piece
            return local_tensor(tensor).detach().reshape(-1)
        return tensor.detach().view(-1)[self.start : self.start + self.size]


class FlatParams:
    """The vector of parameters, the rows of each process, and the base that steps them.

    Attributes:
        params: The parameters that train, group by group, in order: n elements, the ``size``.
        row_sharded: Whether rows are spread over the processes.
        by_rows: Whether eigenvectors are kept in rows here, and not as whole vectors.
        fsdp_sharded: Whether FSDP2 has spread them: it averages gradients, and gathers rows.
        base_steps_rows: Whether they are spread, and not by FSDP2.
        base_state_in_rows: Whether the base's state here is cut to this process's rows.
        pieces: The pieces of all processes, by rank; those here are ``local_pieces``.
        local_params: The parameters that have a piece here, in order.
        group_spans: The slice of this process's rows that each group has.
    """

    def __init__(self, training: Training, options: FOSIOptions) -> None:
        self._training = training
        self._options = options
        self.model = training.model if training.owns_params else None
        self.lay_out()
        if self.base_steps_rows and type(training.base) not in ELEMENTWISE:
            raise ValueError(
                f"layout='row' on {training.world.size} processes steps {training.base_name} on "
                f"parts of the parameters, and it is not known to work element by element; use "
                f"layout='column'"
            )

    def lay_out(self) -> None:
        """Cut the vector again, from a base whose state is whole: at first, and after a load."""
        self.base_state_in_rows = False
        self._buffers: dict[str, tuple[Tensor, list[Tensor]]] = {}
        world = self._training.world
        groups = [[p for p in g["params"] if p.requires_grad] for g in self._training.groups]
        self.params = [p for group in groups for p in group]
        self.size = sum(p.numel() for p in self.params)
        self.dtype = self._options.lanczos_dtype or lanczos_dtype(self.params)
        self.fsdp_sharded = any(is_dtensor(p) for p in self.params)
        self.row_sharded = (self._options.layout == "row" or self.fsdp_sharded) and world.size > 1
        self.by_rows = self.row_sharded or world.size == 1
        self.base_steps_rows = self.row_sharded and not self.fsdp_sharded

        # Cut parameters where the rows of a process end.
        even = row_bounds(self.size, world.size if self.row_sharded else 1)
        pieces: list[ParamPiece] = []
        at = 0
        for index, group in enumerate(groups):
            for p in group:
                layout = shard_layout(p, world) if self.fsdp_sharded else None
                for rank, (first, last) in enumerate(pairwise(even)):
                    if layout is None:
                        start = max(first - at, 0)
                        size = min(last - at, p.numel()) - start
                    else:
                        start = layout.bounds(rank)[0] * layout.width
                        size = layout.size(rank)
                    if size > 0:
                        whole = size == p.numel() and layout is None
                        pieces.append(ParamPiece(p, index, rank, start, size, at + start, whole))
                at += p.numel()
        self.pieces = sorted(pieces, key=lambda piece: piece.rank)
        own_rank = world.rank if self.row_sharded else 0
        self.local_pieces = [piece for piece in self.pieces if piece.rank == own_rank]
        self.local_params = [piece.param for piece in self.local_pieces]

        # Groups follow each other in the rows here.
        sizes = [0] * len(groups)
        for piece in self.local_pieces:
            sizes[piece.group] += piece.size
        self.group_spans = [slice(a, b) for a, b in pairwise([0, *accumulate(sizes)])]

    def update_layout(self) -> bool:
        """Cut the vector again if other parameters train than before; returns whether they do.

        A collective then.
        """
        now = self._training.trainable_params()
        if len(now) == len(self.params) and all(map(operator.is_, now, self.params)):
            return False
        world = self._training.world
        whole = self.gather_base_state(range(world.size)) if self.base_state_in_rows else {}
        self.lay_out()
        for group in self._training.groups:
            for p in group["params"]:
                if p not in whole:
                    continue
                on_device = group.get("capturable") or group.get("fused")
                if on_device and "step" in whole[p]:  # a count
                    whole[p]["step"] = whole[p]["step"].to(p.device)
                self._training.base.state[p] = whole[p]
        return True

    # ------------------------------------------------------------------------------- numbers

    def without_autocast(self) -> AbstractContextManager[Any]:
        """A context without autocast."""
        kind = self._training.device.type
        if torch.is_autocast_enabled(kind):
            return torch.autocast(kind, enabled=False)
        return nullcontext()

    @property
    def sign(self) -> float:
        """The sign of the loss: −1 where it is maximized, else 1."""
        return -1.0 if self._training.groups[0].get("maximize") else 1.0

    def hessian(self, loss_fn: LossFn | Sequence[LossFn]) -> RowSpace:
        """The curvature of a loss at the parameters, over all processes' batches: a context."""
        world = self._training.world
        options = self._options
        if self.fsdp_sharded:
            reshard(self._training.model)
            sharded = ShardedHessian(loss_fn, self.params, world, self.model)
            return RowSpace(sharded, world, self.dtype, self.sign, self.local_rows)
        hessian = Hessian(
            loss_fn, self.params, mode=options.hvp, model=self.model, curvature=options.curvature
        )
        return RowSpace(hessian, world, self.dtype, self.sign)

    def local_rows(self, whole: Tensor) -> Tensor:
        """The elements that are here of whole vectors, ``(..., n)``."""
        parts = [whole[..., piece.at : piece.at + piece.size] for piece in self.local_pieces]
        return torch.cat(parts, -1) if parts else whole[..., :0]

    def gather(self, rows: Tensor) -> Tensor:
        """Whole vectors ``(..., n)`` of the rows of all processes; a collective if spread."""
        if not self.row_sharded:
            return rows
        whole = rows.new_empty((*rows.shape[:-1], self.size))
        everybody = all_gather_on_cpu(self._training.world, self._cut(rows))
        for piece, part in zip(self.pieces, chain(*everybody), strict=True):
            whole[..., piece.at : piece.at + piece.size] = part
        return whole

    def _cut(self, rows: Tensor) -> list[Tensor]:
        """The pieces of rows that are here."""
        if not self.local_pieces:
            return []
        return list(rows.split([piece.size for piece in self.local_pieces], -1))

    def read(self, tensors: Sequence[Tensor | None], buffer: str = "rows") -> Tensor:
        """Copy the pieces that are here of tensors, one for each, to a buffer; zeros for None.

        What is returned is good until that buffer is filled again.
        """
        flat, views = self._buffer(buffer)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for piece, view, tensor in zip(self.local_pieces, views, tensors, strict=True):
            if tensor is None:
                view.zero_()
            else:
                targets.append(view)
                sources.append(piece.view_of(tensor))
        if targets:
            torch._foreach_copy_(targets, sources)
        return flat

    def write(self, tensors: Sequence[Tensor | None], buffer: str = "rows") -> None:
        """Copy a buffer to the pieces that are here of tensors, but to None."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        _, views = self._buffer(buffer)
        for piece, view, tensor in zip(self.local_pieces, views, tensors, strict=True):
            if tensor is not None:
                targets.append(piece.view_of(tensor))
                sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _buffer(self, name: str) -> tuple[Tensor, list[Tensor]]:
        """A vector of the rows here, and its views that the pieces are copied to."""
        flat, views = self._buffers.get(name, (None, []))
        if flat is None or flat.device != self._training.device:
            size = sum(piece.size for piece in self.local_pieces)
            flat = torch.empty(size, dtype=self.dtype, device=self._training.device)
            views = self._cut(flat)
            for i, piece in enumerate(self.local_pieces):
                if piece.whole:
                    views[i] = views[i].view(piece.param.shape)
            self._buffers[name] = flat, views
        return flat, views

    # ---------------------------------------------------------------------------------- a step

    def check_gradients(self) -> None:
        """Make gradients contiguous, to send parts of; raise if a parameter cannot be cut."""
        for p in self.params:
            gradient = p.grad
            if gradient is not None and gradient.is_sparse:
                raise TypeError(
                    "a sparse gradient is no part of one vector of all parameters; use "
                    "sparse=False in the embedding"
                )
            if self.base_steps_rows and gradient is not None and not gradient.is_contiguous():
                p.grad = gradient.contiguous()
        for piece in self.pieces if self.base_steps_rows else ():
            if not (piece.whole or piece.param.is_contiguous()):
                raise ValueError(
                    f"layout='row' cuts a parameter of shape {tuple(piece.param.shape)} whose "
                    f"elements are in another order (channels_last, or transposed); use "
                    f"layout='column', or make it contiguous"
                )

    def route(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Routed:
        """Each process's rows of the gradients, and that process; None if all get all."""
        if not self.base_steps_rows:
            return None
        of = dict(zip(params, gradients, strict=True))
        parts = [piece.view_of(of[piece.param]) for piece in self.pieces]
        return parts, [piece.rank for piece in self.pieces]

    def step_base(self, step: Callable[[], None]) -> None:
        """Let the base step this process's piece of each parameter in the parameter's place."""
        if not self.base_steps_rows:
            step()
            return
        here = {piece.param: piece for piece in self.local_pieces}
        if not self.base_state_in_rows:
            self._cut_state(here)
        whole = [(p, p.data, p.grad) for p in self.params]
        try:
            for p, data, gradient in whole:
                p.grad = None
                if p in here and gradient is not None:
                    p.data = here[p].view_of(data)
                    p.grad = here[p].view_of(gradient)
            step()
        finally:
            for p, data, gradient in whole:
                p.grad = None
                p.data = data
                p.grad = gradient

    def _cut_state(self, here: dict[Tensor, ParamPiece]) -> None:
        """Cut the base's state to this process's pieces: n/P elements of each kind."""
        state = self._training.base.state
        for p in list(state):
            if p in here:
                for key, value in state[p].items():
                    if isinstance(value, Tensor) and value.shape == p.shape and key != "step":
                        state[p][key] = here[p].view_of(value.contiguous()).clone()
            elif p.requires_grad:  # a frozen parameter's state stays whole, until it trains again
                del state[p]
        self.base_state_in_rows = True

    def broadcast_rows(self) -> None:
        """Give every process all rows of the parameters, which processes have stepped apart."""
        parts = [piece.view_of(piece.param) for piece in self.pieces]
        self._training.world.broadcast(parts, [piece.rank for piece in self.pieces])

    def gather_base_state(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, Any]]:
        """The base's whole state on some ranks; a collective where it is in parts."""
        world = self._training.world
        state = self._training.base.state
        if not self.base_state_in_rows:
            return dict(state) if world.rank in ranks else {}
        everybody = all_gather_on_cpu(world, [dict(state.get(p, {})) for p in self.local_params])
        if world.rank not in ranks:
            return {}
        parts: dict[Tensor, dict[str, list[Any]]] = {p: {} for p in self.params}
        for piece, entries in zip(self.pieces, chain(*everybody), strict=True):
            for key, value in entries.items():
                parts[piece.param].setdefault(key, []).append(value)
        return {
            p: {key: _joined(values, p) for key, values in entries.items()}
            for p, entries in parts.items()
        }


def _joined(values: Sequence[Any], p: Tensor) -> Any:
    """An entry for a whole parameter from those of its pieces, in their order; or a number."""
    if not isinstance(values[0], Tensor) or values[0].dim() == 0:
        return values[0]
    return torch.cat([value.reshape(-1) for value in values]).view(p.shape).to(p.device)


def all_gather_on_cpu(world: World, value: Any) -> list[Any]:
    """Every rank's value of nested dictionaries and lists with tensors; a collective.

    Tensors travel, and arrive, on the CPU.
    """
    on_cpu = tree_map_only(Tensor, Tensor.cpu, value)
    return world.on_cpu().all_gather_object(on_cpu)


def check_one_vector(training: Training, options: FOSIOptions) -> None:
    """Raise unless the parameters can be one vector with a Hessian, whose steps are corrected."""
    groups, base, name = training.groups, training.base, training.name
    params = [p for group in groups for p in group["params"]]
    check_one_device(params)
    if len({bool(group.get("maximize")) for group in groups}) > 1:
        raise ValueError("maximize differs between the groups; eigenvectors span all of them")
    if all(callable(getattr(base, method, None)) for method in ("train", "eval")):
        raise TypeError(
            f"{name} corrects the parameters after its base's step, and {training.base_name}, "
            f"which has train() and eval(), keeps averages of them that the correction does not "
            f"reach; use another base, or KAISA, DPKFAC or DistKFAC"
        )

    # FSDP2 leaves rows, and first derivatives.
    shards = [p for p in params if is_dtensor(p)]
    if not shards:
        return
    if len(shards) < len(params):
        raise TypeError(
            f"{name}: fully_shard has sharded {len(shards)} of {len(params)} parameters, and one "
            f"vector spans all; shard the rest, too, without ignored_params"
        )
    if any(cast(Any, p).device_mesh.ndim > 1 for p in shards):
        raise TypeError(
            f"{name}: the parameters are sharded over a mesh with replicas (HSDP), and each "
            f"process is to have rows of its own; shard over a mesh of one dimension"
        )
    if options.hvp not in ("auto", "differences") or options.curvature != "hessian":
        raise TypeError(
            f"{name}: hvp={options.hvp!r} with curvature={options.curvature!r} takes other "
            f"derivatives than the first ones of a loss, which is what FSDP2 has; use "
            f"hvp='differences' and curvature='hessian', or DistributedDataParallel"
        )
