"""The parameters' vector without a copy: which process has which rows, and work on them.

The vector is the parameters that train, group by group, each in the order of ``p.reshape(-1)``.
A piece is what one process has of one parameter; a chunk is a run of pieces that is worked on at
once, a large one in place, small ones packed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from second_order.distributed.shard_layout import layout_of
from second_order.distributed.world import World
from second_order.lanczos.spectrum import lanczos_dtype
from second_order.lanczos.vector_space import row_bounds
from second_order.sharded import is_dtensor, local

__all__ = ["Chunk", "FlatLayout", "Piece", "Room", "ShardedLayout", "chunks_of"]

PACKED_BELOW = 2**16
"""Elements: what is smaller travels with its neighbours."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Elements ``start`` to ``stop`` of a flattened parameter.

    Attributes:
        param: The parameter.
        group: Index of its group.
        start: The first element.
        stop: The element after the last.
        rank: The process that has the piece.
    """

    param: Tensor
    group: int
    start: int
    stop: int
    rank: int

    @property
    def size(self) -> int:
        """Number of elements of the piece."""
        return self.stop - self.start

    def of(self, tensor: Tensor) -> Tensor:
        """This piece of a tensor of the parameter's shape: a flat view where there is one."""
        if is_dtensor(tensor):  # what is here of it is the piece
            return local(tensor).detach().reshape(-1)
        flat = tensor.detach().reshape(-1)
        return flat if self.size == flat.numel() else flat[self.start : self.stop]

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Write flat values to this piece of a tensor of the parameter's shape."""
        mine = self.of(tensor)
        if mine.data_ptr() == values.data_ptr() and mine.dtype == values.dtype:
            return
        mine.copy_(values)
        if not tensor.is_contiguous():  # ``flat`` was a copy
            whole = tensor.detach().reshape(-1)
            whole[self.start : self.stop] = mine
            tensor.copy_(whole.view(tensor.shape))


class FlatLayout:
    """The rows of the parameters' vector, in equal parts for the processes.

    Args:
        groups: The parameters that train, group by group.
        processes: Number P of processes.

    Attributes:
        groups: The parameters that train, group by group.
        params: The parameters, in order.
        size: Number n of elements in all.
        pieces: The pieces of all processes, in order.
        bounds: The index of each process's first element, those of all processes one after the
            other, and n.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], processes: int) -> None:
        self.groups = groups
        self.params = [p for group in groups for p in group]
        self.size = sum(p.numel() for p in self.params)
        self.bounds = bounds = row_bounds(self.size, processes)
        self.pieces: list[Piece] = []
        offset = rank = 0
        for index, group in enumerate(groups):
            for p in group:
                start = 0
                while start < p.numel():
                    while bounds[rank + 1] <= offset + start:
                        rank += 1
                    stop = min(p.numel(), bounds[rank + 1] - offset)
                    self.pieces.append(Piece(p, index, start, stop, rank))
                    start = stop
                offset += p.numel()

    @cached_property
    def ids(self) -> list[list[int]]:
        """The ids of the parameters, group by group."""
        return [[id(p) for p in group] for group in self.groups]

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype in which vectors are computed with."""
        return lanczos_dtype(self.params)

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """A process's elements of whole vectors, ``(..., n)``."""
        return whole[..., self.bounds[rank] : self.bounds[rank + 1]]

    def in_order(self, parts: Tensor) -> Tensor:
        """Whole vectors ``(..., n)`` from all processes' elements, one after the other."""
        return parts

    def of(self, rank: int) -> list[Piece]:
        """The pieces of one process."""
        return [piece for piece in self.pieces if piece.rank == rank]


class ShardedLayout(FlatLayout):
    """The rows that FSDP2 has left each process of the parameters, as parts of their vector.

    Args:
        groups: The parameters that train, group by group; sharded, without replicas.
        world: The processes.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], world: World) -> None:
        super().__init__(groups, 1)
        starts = accumulate((p.numel() for p in self.params), initial=0)
        self._starts = dict(zip(self.params, starts, strict=False))
        rows = {p: layout_of(p, world) for p in self.params}
        self.pieces = [
            Piece(p, index, start * rows[p].width, stop * rows[p].width, rank)
            for rank in range(world.size)
            for index, group in enumerate(groups)
            for p in group
            for start, stop in [rows[p].bounds(rank)]
            if stop > start
        ]
        sizes = [0] * world.size
        for piece in self.pieces:
            sizes[piece.rank] += piece.size
        self.bounds = list(accumulate(sizes, initial=0))

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """A process's elements of whole vectors, ``(..., n)``."""
        parts = [whole[..., self._columns(piece)] for piece in self.of(rank)]
        return torch.cat(parts, -1) if parts else whole[..., :0]

    def in_order(self, parts: Tensor) -> Tensor:
        """Whole vectors ``(..., n)`` from all processes' elements, one after the other."""
        whole = torch.empty_like(parts)
        each = parts.split([piece.size for piece in self.pieces], -1)
        for piece, part in zip(self.pieces, each, strict=True):
            whole[..., self._columns(piece)] = part
        return whole

    def _columns(self, piece: Piece) -> slice:
        start = self._starts[piece.param]
        return slice(start + piece.start, start + piece.stop)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Neighbouring pieces of one group.

    Attributes:
        pieces: The pieces, in order.
        start: Index of the first element in the vector of all pieces that were cut into chunks.
    """

    pieces: Sequence[Piece]
    start: int

    @cached_property
    def sizes(self) -> list[int]:
        """Number of elements of each piece."""
        return [piece.size for piece in self.pieces]

    @cached_property
    def columns(self) -> slice:
        """The chunk's columns in the vector of all pieces that were cut into chunks."""
        return slice(self.start, self.start + sum(self.sizes))

    @property
    def group(self) -> int:
        """Index of the parameters' group."""
        return self.pieces[0].group

    @cached_property
    def whole(self) -> list[Tensor]:
        """The parameters, if there are several and all of each is in the chunk; else nothing."""
        params = [piece.param for piece in self.pieces]
        sizes = [p.numel() for p in params]
        alone = len(params) < 2 or sizes != self.sizes or any(map(is_dtensor, params))
        return [] if alone else params

    def room(self, dtype: torch.dtype) -> Room | None:
        """Room for :attr:`whole` tensors, the same at each call; None if there are none."""
        if not self.whole:
            return None
        room: Room | None = self.__dict__.get("_room")
        if room is None or room.flat.dtype != dtype or room.flat.device != self.whole[0].device:
            room = self.__dict__["_room"] = Room(self.whole, dtype)
        return room

    def values(self, dtype: torch.dtype, room: Room | None = None) -> Tensor:
        """The parameters, flat: a view of a single one with a gradient of this dtype, or a copy.

        Args:
            dtype: The dtype of the result.
            room: Where to put copies; None for a new tensor.
        """
        if room is not None:
            return room.take(self.whole)
        if self.whole:
            return _flat([p.detach() for p in self.whole], dtype)
        parts = [piece.of(piece.param) for piece in self.pieces]
        if len(parts) == 1 and self.pieces[0].param.grad is None:
            return parts[0].to(dtype, copy=True)
        return self._flat(parts, dtype)

    def put_values(self, flat: Tensor) -> None:
        """Write the parameters that have a gradient: the others stay, as with any optimizer."""
        room = self._taken(flat)
        if room is not None and all(p.grad is not None for p in self.whole):
            room.put(self.whole)
            return
        here = [piece for piece in self.pieces if piece.param.grad is not None]
        if self.whole and len(here) == len(self.pieces):
            _put_whole(self.whole, flat)
            return
        _put(here, [piece.param for piece in here], self._parts(flat, here))

    def overwrite(self, flat: Tensor) -> None:
        """Write all the parameters."""
        _put(self.pieces, [piece.param for piece in self.pieces], self._parts(flat, self.pieces))

    def gradients(self, dtype: torch.dtype, room: Room | None = None) -> Tensor:
        """The gradients, flat, a view or a copy as :meth:`values`; zeros without a gradient."""
        gradients = self._whole_gradients()
        if gradients and room is not None:
            return room.take(gradients)
        if gradients:
            return _flat([gradient.detach() for gradient in gradients], dtype)
        parts = [
            torch.zeros(piece.size, dtype=dtype, device=piece.param.device)
            if piece.param.grad is None
            else piece.of(piece.param.grad)
            for piece in self.pieces
        ]
        return self._flat(parts, dtype)

    def put_gradients(self, flat: Tensor) -> None:
        """Write the gradients of the parameters that have one."""
        whole = self._whole_gradients()
        if whole:
            room = self._taken(flat)
            _put_whole(whole, flat) if room is None else room.put(whole)
            return
        here = [piece for piece in self.pieces if piece.param.grad is not None]
        gradients = [g for piece in here if (g := piece.param.grad) is not None]
        _put(here, gradients, self._parts(flat, here))

    def _parts(self, flat: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
        if len(self.pieces) == 1:
            return [flat] * len(pieces)
        parts = flat.split(self.sizes)
        if len(pieces) == len(parts):
            return list(parts)
        here = {piece.param for piece in pieces}
        return [part for piece, part in zip(self.pieces, parts, strict=True) if piece.param in here]

    @staticmethod
    def _flat(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype)

    def _taken(self, flat: Tensor) -> Room | None:
        """The chunk's room, if it is this tensor."""
        room: Room | None = self.__dict__.get("_room")
        return room if room is not None and flat is room.flat else None

    def _whole_gradients(self) -> list[Tensor]:
        """The gradients of :attr:`whole` parameters, if all have one."""
        found = [g for p in self.whole if (g := p.grad) is not None]
        return found if len(found) == len(self.whole) else []


class Room:
    """Room for whole tensors one after the other, which are copied in, or out, by one call.

    Args:
        tensors: Tensors of the shapes that are copied.
        dtype: Dtype of the room.

    Attributes:
        flat: The room.
    """

    def __init__(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
        sizes = [t.numel() for t in tensors]
        self.flat = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device)
        parts = self.flat.split(sizes)
        self._views = [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]

    def take(self, tensors: list[Tensor]) -> Tensor:
        """Copy tensors in; returns the room."""
        with torch.no_grad():
            torch._foreach_copy_(self._views, tensors)
        return self.flat

    def put(self, tensors: list[Tensor]) -> None:
        """Copy to tensors what is in the room."""
        with torch.no_grad():
            torch._foreach_copy_(tensors, self._views)


# Many small parameters are most of a small network, and a call for each most of a step: these are
# one call for all.


def _flat(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Whole tensors as a flat copy."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).to(dtype)


def _put_whole(tensors: list[Tensor], flat: Tensor) -> None:
    """Write flat values to whole tensors."""
    with torch.no_grad():
        parts = flat.split([tensor.numel() for tensor in tensors])
        shaped = [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
        torch._foreach_copy_(tensors, shaped)


def _put(pieces: Sequence[Piece], tensors: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Write flat values to pieces of tensors, those that are views all at once."""
    if len(pieces) > 1 and all(tensor.is_contiguous() for tensor in tensors):
        views = [piece.of(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
        torch._foreach_copy_(views, list(parts))
        return
    for piece, tensor, part in zip(pieces, tensors, parts, strict=True):
        piece.put(tensor, part)


def chunks_of(pieces: Sequence[Piece]) -> list[Chunk]:
    """Cut pieces into chunks: a large one by itself, runs of small ones together."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        small = piece.size < PACKED_BELOW
        last = runs[-1] if runs else None
        if (
            last
            and small
            and last[-1].size < PACKED_BELOW
            and last[-1].group == piece.group
            and last[-1].param.dtype == piece.param.dtype
        ):
            last.append(piece)
        else:
            runs.append([piece])
    sizes = [sum(piece.size for piece in run) for run in runs]
    return [
        Chunk(run, start) for run, start in zip(runs, accumulate(sizes, initial=0), strict=False)
    ]
