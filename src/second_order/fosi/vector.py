"""All parameters that train as one vector: every process has the whole of it, or rows of its own.

rows spread   the mean gradient's rows come to their process, the base steps them there, and all get
              everybody's rows: the volume of one all-reduce, and n/P of the base's state
whole         every process averages, and steps, the whole vector

The vector is the parameters group by group, each in the order of ``p.reshape(-1)``. It is nowhere
copied together: a chunk is a run of pieces that is worked on at once, a large one in place, small
ones packed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, groupby
from typing import Any, cast

import torch
from torch import Tensor

from second_order.contract.training import Routed, Training
from second_order.distributed.shard_layout import layout_of
from second_order.fosi.sharded_base import ELEMENTWISE, ParamPiece, ShardedBase, gather_state
from second_order.lanczos.closure import CurvatureKind, LossFn
from second_order.lanczos.hvp import Hessian, ProductMode, ShardedHessian
from second_order.lanczos.spectrum import lanczos_dtype
from second_order.lanczos.vector_space import RowSpace, row_bounds
from second_order.sharded import is_dtensor, reshard
from second_order.stages import stage

__all__ = ["Chunk", "ParameterVector"]

WITHOUT: AbstractContextManager[Any] = nullcontext()

PACKED_BELOW = 2**16
"""Elements: what is smaller travels with its neighbours."""


class Chunk:
    """Neighbouring pieces: on the CPU of one group, and a large one alone.

    Many small parameters are most of a small network, and a call for each most of a step: they are
    copied by one call to a room, where they lie one after the other. Its columns in the vector of
    all pieces that were cut into chunks begin at ``start``; ``spans`` are those of each group.
    """

    def __init__(self, pieces: Sequence[ParamPiece], start: int) -> None:
        self.pieces = pieces
        self.params = [piece.param for piece in pieces]
        self._sizes = [piece.size for piece in pieces]
        self.columns = slice(start, start + sum(self._sizes))
        self.spans: list[tuple[int, slice]] = []
        for group, run in groupby(pieces, lambda piece: piece.group):
            stop = start + sum(piece.size for piece in run)
            self.spans.append((group, slice(start, stop)))
            start = stop
        self._whole = all(piece.whole for piece in pieces)
        self._rooms: dict[str, tuple[Tensor, list[Tensor]]] = {}

    def values(self, dtype: torch.dtype) -> Tensor:
        """The parameters, flat: a view of a single one with a gradient of this dtype, or a copy.

        A copy is good until the next call, or one of :meth:`gradients`.
        """
        if len(self.pieces) > 1:
            return self.take(self.params, dtype)
        (p,) = self.params
        return self.pieces[0].of(p).to(dtype, copy=p.grad is None)

    def gradients(self, dtype: torch.dtype) -> Tensor:
        """The gradients, flat, a view or a copy as :meth:`values`; zeros without a gradient."""
        found = [p.grad for p in self.params]
        if len(found) > 1 or found[0] is None:
            return self.take(found, dtype)
        return self.pieces[0].of(found[0]).to(dtype)

    def take(
        self, tensors: Sequence[Tensor | None], dtype: torch.dtype, use: str = "step"
    ) -> Tensor:
        """Copy pieces of tensors to the room for a use, or a new one for ""; zeros for None."""
        flat, views = self._rooms.get(use, (None, []))
        if flat is None or flat.dtype != dtype or flat.device != self.params[0].device:
            flat = torch.empty(sum(self._sizes), dtype=dtype, device=self.params[0].device)
            views = self._views(flat)
            if use:
                self._rooms[use] = flat, views
        if self._whole and all(t is not None for t in tensors):
            torch._foreach_copy_(views, cast(list[Tensor], tensors))
            return flat
        there = list(zip(self.pieces, views, tensors, strict=True))
        if absent := [view for _, view, tensor in there if tensor is None]:
            torch._foreach_zero_(absent)
        if found := [(b, view, tensor) for b, view, tensor in there if tensor is not None]:
            parts = [tensor if b.whole else b.of(tensor) for b, _, tensor in found]
            torch._foreach_copy_([view for _, view, _ in found], parts)
        return flat

    def put(self, flat: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Copy flat values to pieces of tensors, but to None."""
        views = self._views(flat)
        if len(views) > 1 and self._whole and all(t is not None for t in tensors):
            torch._foreach_copy_(cast(list[Tensor], tensors), views)
            return
        found = zip(self.pieces, views, tensors, strict=True)
        pairs = [(b, view, tensor) for b, view, tensor in found if tensor is not None]
        if len(pairs) > 1 and all(tensor.is_contiguous() for _, _, tensor in pairs):
            parts = [b.of(tensor) for b, _, tensor in pairs]
            torch._foreach_copy_(parts, [view.reshape(-1) for _, view, _ in pairs])
            return
        for piece, view, tensor in pairs:
            piece.put(tensor, view.reshape(-1))

    def _views(self, flat: Tensor) -> list[Tensor]:
        for room, views in self._rooms.values():
            if room is flat:
                return views
        parts = zip(self.pieces, flat.split(self._sizes), strict=True)
        return [part.view(b.param.shape) if b.whole else part for b, part in parts]


def _chunks_of(pieces: Sequence[ParamPiece]) -> list[Chunk]:
    """Cut pieces into chunks: a large one by itself, runs of small ones together.

    Off the CPU all of a dtype together: a launch costs more there than another copy.
    """
    runs: list[list[ParamPiece]] = []
    for piece in pieces:
        last = runs[-1] if runs else None
        if (
            last
            and last[-1].param.dtype == piece.param.dtype
            and (
                piece.param.device.type != "cpu"
                or (max(piece.size, last[-1].size) < PACKED_BELOW and last[-1].group == piece.group)
            )
        ):
            last.append(piece)
        else:
            runs.append([piece])
    starts = accumulate((sum(piece.size for piece in run) for run in runs), initial=0)
    return [Chunk(run, start) for run, start in zip(runs, starts, strict=False)]


class ParameterVector:
    """The vector of parameters, the rows of each process, and the base that steps them.

    Attributes:
        params: The parameters that train, group by group, in order: n elements, the ``size``.
        spread: Whether rows are spread over the processes.
        sharded: Whether FSDP2 has spread them: it averages gradients, and shares rows.
        pieces: The pieces of all processes, by rank; those here are ``mine``, cut into ``chunks``.
        bounds: The index of each process's first element, those of all one after the other, and n.
        in_parts: Whether the base's state here is cut to this process's rows.
    """

    def __init__(self, training: Training, *, spread: bool, dtype: torch.dtype | None) -> None:
        self._training, self._wanted = training, (spread, dtype)
        self.model = training.model if training.known else None
        self.restart()
        if self.spread and not self.sharded and type(training.base) not in ELEMENTWISE:
            raise ValueError(
                f"layout='row' on {training.world.size} processes steps {training.base_name} on "
                f"parts of the parameters, and it is not known to work element by element; use "
                f"layout='column'"
            )

    def restart(self) -> None:
        """Cut the vector anew, where the base's state is whole: in the beginning, after a load."""
        self.in_parts = False
        self._stepper: ShardedBase | None = None
        world, (spread, self._dtype) = self._training.world, self._wanted
        groups = [[p for p in g["params"] if p.requires_grad] for g in self._training.groups]
        self._ids = [(i, id(p)) for i, group in enumerate(groups) for p in group]
        self.params = [p for group in groups for p in group]
        self.size = sum(p.numel() for p in self.params)
        self.sharded = any(is_dtensor(p) for p in self.params)
        self.spread = (spread or self.sharded) and world.size > 1
        even = row_bounds(self.size, world.size if self.spread else 1)
        self.pieces, at = list[ParamPiece](), 0
        for index, group in enumerate(groups):
            for p in group:
                if self.sharded:
                    rows, ranks = layout_of(p, world), range(world.size)
                    cuts = [[row * rows.width for row in rows.bounds(rank)] for rank in ranks]
                else:
                    stop = at + p.numel()
                    ranks = range(bisect_right(even, at) - 1, bisect_left(even, stop))
                    cuts = [[max(even[r], at) - at, min(even[r + 1], stop) - at] for r in ranks]
                self.pieces += [
                    ParamPiece(p, index, start, stop, rank, at + start)
                    for rank, (start, stop) in zip(ranks, cuts, strict=True)
                    if stop > start
                ]
                at += p.numel()
        self.pieces.sort(key=lambda piece: piece.rank)
        sizes = [0] * (len(even) - 1)
        for piece in self.pieces:
            sizes[piece.rank] += piece.size
        self.bounds = list(accumulate(sizes, initial=0))
        here = world.rank * self.spread
        self.mine = [piece for piece in self.pieces if piece.rank == here]
        self.chunks = _chunks_of(self.mine)

    @property
    def unchanged(self) -> bool:
        """Whether the parameters train that the vector is cut for."""
        groups = enumerate(self._training.groups)
        return self._ids == [(i, id(p)) for i, g in groups for p in g["params"] if p.requires_grad]

    def follow(self) -> bool:
        """Cut the vector anew, a collective, where others train than before; returns whether."""
        if self.unchanged:
            return False
        whole = self.base_state(range(self._training.world.size)) if self.in_parts else {}
        self.restart()
        for p, part in whole.items():
            self._training.base.state[p] = part
        return True

    # ------------------------------------------------------------------------------- numbers

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which vectors are computed with."""
        if self._dtype is None:
            self._dtype = lanczos_dtype(self.params)
        return self._dtype

    def plain(self) -> AbstractContextManager[Any]:
        """A context without autocast."""
        kind = self._training.device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else WITHOUT

    @property
    def sign(self) -> float:
        """The sign of the loss: −1 where it is maximized, else 1."""
        return -1.0 if self._training.groups[0].get("maximize") else 1.0

    def hessian(
        self, loss_fn: LossFn | Sequence[LossFn], hvp: ProductMode, curvature: CurvatureKind
    ) -> RowSpace:
        """The curvature of a loss at the parameters, over all processes' batches: a context."""
        world, params = self._training.world, self.params
        if self.sharded:
            reshard(self._training.model)
            sharded = ShardedHessian(loss_fn, params, world, self.model)
            return RowSpace(sharded, world, self.dtype, self.sign, self.here)
        hessian = Hessian(loss_fn, params, mode=hvp, model=self.model, curvature=curvature)
        return RowSpace(hessian, world, self.dtype, self.sign)

    def here(self, whole: Tensor) -> Tensor:
        """The elements that are here of whole vectors, ``(..., n)``."""
        if not self.sharded:
            rank = self._training.world.rank * self.spread
            return whole[..., self.bounds[rank] : self.bounds[rank + 1]]
        parts = [whole[..., piece.at : piece.at + piece.size] for piece in self.mine]
        return torch.cat(parts, -1) if parts else whole[..., :0]

    def in_order(self, parts: Tensor) -> Tensor:
        """Whole vectors ``(..., n)`` from all processes' elements, one after the other."""
        if not self.sharded:
            return parts
        whole = torch.empty_like(parts)
        each = parts.split([piece.size for piece in self.pieces], -1)
        for piece, part in zip(self.pieces, each, strict=True):
            whole[..., piece.at : piece.at + piece.size] = part
        return whole

    def flat(self) -> Tensor:
        """The parameters that are here as one tensor, which loses nothing of them."""
        dtype = lanczos_dtype(self.params)
        if not self.chunks:  # a process may have no rows
            return torch.empty(0, dtype=dtype, device=self._training.device)
        return torch.cat([chunk.take(chunk.params, dtype, use="") for chunk in self.chunks])

    def overwrite(self, flat: Tensor) -> None:
        """Set the parameters that are here."""
        for chunk in self.chunks:
            chunk.put(flat[chunk.columns], chunk.params)

    # ---------------------------------------------------------------------------------- a step

    def check_gradients(self) -> None:
        """Make gradients contiguous, to send parts of; raise TypeError if one is sparse."""
        for p in self.params:
            gradient = p.grad
            if gradient is not None and gradient.is_sparse:
                raise TypeError(
                    "a sparse gradient is no part of one vector of all parameters; use "
                    "sparse=False in the embedding"
                )
            if self.spread and gradient is not None and not gradient.is_contiguous():
                p.grad = gradient.contiguous()

    def route(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Routed:
        """Each process's rows of the gradients, and that process; None if all get all."""
        if not self.spread or self.sharded:
            return None
        of = {id(p): gradient for p, gradient in zip(params, gradients, strict=True)}
        parts = [piece.of(of[id(piece.param)]) for piece in self.pieces]
        return parts, [piece.rank for piece in self.pieces]

    def step_base(self, step: Callable[[], None]) -> None:
        """Step the base on this process's pieces, to which its state is cut."""
        if not self.spread or self.sharded:
            step()
            return
        training = self._training
        if self._stepper is None:
            self._stepper = ShardedBase(training.base, training.groups, self.mine)
            self.in_parts = True
        self._stepper.step(training.groups)

    def share(self) -> None:
        """Give every process all rows of the parameters; a collective if they are spread."""
        if not self.spread or self.sharded:
            return
        with stage("exchange"):
            parts = [piece.of(piece.param) for piece in self.pieces]
            self._training.world.broadcast(parts, [piece.rank for piece in self.pieces])
            for piece, part in zip(self.pieces, parts, strict=True):
                piece.put(piece.param, part)

    def base_state(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, Any]]:
        """Gather the base's whole state on some ranks; a collective where it is in parts."""
        world, state = self._training.world, self._training.base.state
        if self.in_parts:
            return gather_state(world, self.pieces, state, ranks)
        return dict(state) if world.rank in ranks else {}
