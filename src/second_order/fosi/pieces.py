"""The parameters' vector without a copy: which process has which rows, and work on them.

The vector is the parameters that train, group by group, each in the order of ``p.reshape(-1)``.
A piece is what one process has of one parameter; a chunk is a run of pieces that is worked on at
once, a large one in place, small ones packed together. A base that works element by element steps
its process's own pieces, and keeps their state, n/P elements of each kind; checkpoints hold whole
tensors, gathered for them, and cut again after a load, for any number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor

from second_order.distributed.shard_layout import layout_of
from second_order.distributed.world import Delivery, World
from second_order.lanczos.spectrum import lanczos_dtype
from second_order.lanczos.vector_space import row_bounds
from second_order.sharded import is_dtensor, local

__all__ = [
    "Chunk",
    "FlatLayout",
    "ParamPiece",
    "Room",
    "ShardedBase",
    "ShardedLayout",
    "chunks_of",
    "cut_state",
    "gather_parts",
    "gather_state",
    "works_by_element",
]

PACKED_BELOW = 2**16
"""Elements: what is smaller travels with its neighbours."""


@dataclass(frozen=True, eq=False)
class ParamPiece:
    """Elements ``start`` to ``stop`` of a flattened parameter."""

    param: Tensor
    group: int  # index of the parameter's
    start: int
    stop: int
    rank: int  # the process that has the piece

    @property
    def size(self) -> int:
        """Number of elements of the piece."""
        return self.stop - self.start

    @cached_property
    def whole(self) -> bool:
        """Whether it is all of a parameter."""
        return self.size == self.param.numel() and not is_dtensor(self.param)

    def of(self, tensor: Tensor) -> Tensor:
        """This piece of a tensor of the parameter's shape: a flat view where there is one."""
        if is_dtensor(tensor):  # what is here of it is the piece
            return local(tensor).detach().reshape(-1)
        flat = tensor.detach().reshape(-1)
        return flat if self.whole else flat[self.start : self.stop]

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

    Attributes:
        params: The parameters that train, group by group, in order.
        size: Number n of elements in all.
        pieces: The pieces of all processes, in order.
        bounds: The index of each process's first element, those of all processes one after the
            other, and n.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], processes: int) -> None:
        self.ids = [[id(p) for p in group] for group in groups]
        self.params = [p for group in groups for p in group]
        self.size = sum(p.numel() for p in self.params)
        self.bounds = bounds = row_bounds(self.size, processes)
        self.pieces: list[ParamPiece] = []
        offset = rank = 0
        for index, group in enumerate(groups):
            for p in group:
                start = 0
                while start < p.numel():
                    while bounds[rank + 1] <= offset + start:
                        rank += 1
                    stop = min(p.numel(), bounds[rank + 1] - offset)
                    self.pieces.append(ParamPiece(p, index, start, stop, rank))
                    start = stop
                offset += p.numel()

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

    def of(self, rank: int) -> list[ParamPiece]:
        """The pieces of one process."""
        return [piece for piece in self.pieces if piece.rank == rank]


class ShardedLayout(FlatLayout):
    """The rows that FSDP2, without replicas, has left each process, as parts of their vector."""

    def __init__(self, groups: Sequence[Sequence[Tensor]], world: World) -> None:
        super().__init__(groups, 1)
        starts = accumulate((p.numel() for p in self.params), initial=0)
        self._starts = dict(zip(self.params, starts, strict=False))
        rows = {p: layout_of(p, world) for p in self.params}
        self.pieces = [
            ParamPiece(p, index, start * rows[p].width, stop * rows[p].width, rank)
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

    def _columns(self, piece: ParamPiece) -> slice:
        start = self._starts[piece.param]
        return slice(start + piece.start, start + piece.stop)


class Room:
    """Room for pieces one after the other, which are copied in, or out, by one call.

    Many small parameters are most of a small network, and a call for each most of a step. It is
    for where gradients are off.

    Attributes:
        flat: The room.
    """

    def __init__(
        self, pieces: Sequence[ParamPiece], dtype: torch.dtype, flat: Tensor | None = None
    ):
        sizes = [piece.size for piece in pieces]
        if flat is None:
            flat = torch.empty(sum(sizes), dtype=dtype, device=pieces[0].param.device)
        self.flat, self._pieces = flat, pieces
        self._whole = all(piece.whole for piece in pieces)
        parts = zip(pieces, flat.split(sizes), strict=True)
        self._views = [part.view(b.param.shape) if b.whole else part for b, part in parts]

    def take(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Copy pieces of tensors in, zeros for None; returns the room."""
        if self._whole and all(t is not None for t in tensors):
            torch._foreach_copy_(self._views, cast(list[Tensor], tensors))
            return self.flat
        for piece, view, tensor in zip(self._pieces, self._views, tensors, strict=True):
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor if piece.whole else piece.of(tensor))
        return self.flat

    def put(self, tensors: Sequence[Tensor | None]) -> None:
        """Copy what is in the room to pieces of tensors, but to None."""
        if self._whole and all(t is not None for t in tensors):
            torch._foreach_copy_(cast(list[Tensor], tensors), self._views)
            return
        for piece, view, tensor in zip(self._pieces, self._views, tensors, strict=True):
            if tensor is not None:
                piece.put(tensor, view.reshape(-1))


class Chunk:
    """Neighbouring pieces of one group, a large one alone.

    Args:
        pieces: The pieces, in order.
        start: Index of the first element in the vector of all pieces that were cut into chunks.

    Attributes:
        columns: The chunk's columns in that vector.
        group: Index of the parameters' group.
    """

    def __init__(self, pieces: Sequence[ParamPiece], start: int) -> None:
        self.pieces, self.group = pieces, pieces[0].group
        self.columns = slice(start, start + sum(piece.size for piece in pieces))
        self._params = [piece.param for piece in pieces]
        self._room: Room | None = None

    def values(self, dtype: torch.dtype) -> Tensor:
        """The parameters, flat: a view of a single one with a gradient of this dtype, or a copy.

        A copy is good until the next call, or one of :meth:`gradients`.
        """
        if len(self.pieces) > 1:
            return self._in_room(dtype).take(self._params)
        (p,) = self._params
        return self.pieces[0].of(p).to(dtype, copy=p.grad is None)

    def gradients(self, dtype: torch.dtype) -> Tensor:
        """The gradients, flat, a view or a copy as :meth:`values`; zeros without a gradient."""
        found = [p.grad for p in self._params]
        if len(found) > 1 or found[0] is None:
            return self._in_room(dtype).take(found)
        return self.pieces[0].of(found[0]).to(dtype)

    def put_values(self, flat: Tensor) -> None:
        """Write the parameters that have a gradient: the others stay, as with any optimizer."""
        self._put(flat, [None if p.grad is None else p for p in self._params])

    def put_gradients(self, flat: Tensor) -> None:
        """Write the gradients of the parameters that have one."""
        self._put(flat, [p.grad for p in self._params])

    def overwrite(self, flat: Tensor) -> None:
        """Write all the parameters."""
        self._put(flat, self._params)

    def keep(self, room: Room) -> Tensor:
        """Copy the parameters to a room."""
        return room.take(self._params)

    def _in_room(self, dtype: torch.dtype) -> Room:
        room = self._room
        here = self._params[0].device
        if room is None or room.flat.dtype != dtype or room.flat.device != here:
            room = self._room = Room(self.pieces, dtype)
        return room

    def _put(self, flat: Tensor, tensors: Sequence[Tensor | None]) -> None:
        if len(self.pieces) == 1:
            if tensors[0] is not None:
                self.pieces[0].put(tensors[0], flat)
        elif self._room is not None and flat is self._room.flat:
            self._room.put(tensors)
        else:
            Room(self.pieces, flat.dtype, flat).put(tensors)


def chunks_of(pieces: Sequence[ParamPiece]) -> list[Chunk]:
    """Cut pieces into chunks: a large one by itself, runs of small ones together."""
    runs: list[list[ParamPiece]] = []
    for piece in pieces:
        last = runs[-1] if runs else None
        if (
            last
            and max(piece.size, last[-1].size) < PACKED_BELOW
            and last[-1].group == piece.group
            and last[-1].param.dtype == piece.param.dtype
        ):
            last.append(piece)
        else:
            runs.append([piece])
    starts = accumulate((sum(piece.size for piece in run) for run in runs), initial=0)
    return [Chunk(run, start) for run, start in zip(runs, starts, strict=False)]


# The base on pieces.

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


def works_by_element(base: type[torch.optim.Optimizer]) -> bool:
    """Whether a base steps each element by itself, so that parts of tensors can be stepped."""
    return base in ELEMENTWISE


class ShardedBase:
    """A base optimizer made for whole parameters, stepping this process's pieces of them.

    Its state is cut to the pieces here.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        groups: Sequence[dict[str, Any]],
        pieces: Sequence[ParamPiece],
    ) -> None:
        state: Any = base.state
        self._both = [(piece, piece.of(piece.param)) for piece in pieces]
        here = {piece.param: piece for piece in pieces}
        for p in list(state):
            if p in here:
                state[p] = cut_state(state[p], here[p])
            elif p.requires_grad:  # a frozen parameter's state stays whole, until it trains again
                del state[p]
        own = [
            {**group, "params": [s for piece, s in self._both if piece.group == i]}
            for i, group in enumerate(groups)
        ]
        known = {s: state[piece.param] for piece, s in self._both if piece.param in state}
        self._base = type(base).__new__(type(base))
        self._base.__setstate__({"defaults": base.defaults, "state": known, "param_groups": own})
        shared = {s: state[piece.param] for piece, s in self._both}
        self._base.state = shared  # type: ignore[assignment]

    def step(self, groups: Sequence[dict[str, Any]]) -> None:
        """Step the pieces, with the hyperparameters of the groups as they are now."""
        for own, group in zip(self._base.param_groups, groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
        for piece, stand_in in self._both:
            gradient, current = piece.param.grad, piece.of(piece.param)
            if stand_in.dtype != current.dtype:  # the user has cast the model
                stand_in.data = current
            stand_in.grad = None if gradient is None else piece.of(gradient)
            if stand_in.data_ptr() != current.data_ptr():  # not contiguous, or moved
                stand_in.copy_(current)
        step = type(self._base).step
        while getattr(step, "hooked", False):
            step = step.__wrapped__  # type: ignore[attr-defined]
        step(self._base)
        for piece, stand_in in self._both:
            stand_in.grad = None
            piece.put(piece.param, stand_in)


def cut_state(part: dict[str, Any], piece: ParamPiece) -> dict[str, Any]:
    """The base's state of a whole parameter, cut to a piece of it."""
    return {
        key: piece.of(value).clone()
        if isinstance(value, Tensor) and value.shape == piece.param.shape and key != "step"
        else value
        for key, value in part.items()
    }


def gather_state(
    world: World,
    pieces: Sequence[ParamPiece],
    state: Mapping[Tensor, dict[str, Any]],
    to: Sequence[int],
) -> dict[Tensor, dict[str, Any]]:
    """The base's state of whole parameters, from all processes' pieces; a collective.

    Ranks that are not among ``to`` get an empty one.
    """
    numbers = {p: i for i, p in enumerate(dict.fromkeys(piece.param for piece in pieces))}
    params = list(numbers)
    of = {(numbers[piece.param], piece.rank): piece for piece in pieces}
    cut: dict[torch.dtype, list[tuple[int, str, Tensor]]] = {}
    small: dict[tuple[int, str], Any] = {}
    for (i, rank), piece in of.items():
        for key, value in state.get(params[i], {}).items() if rank == world.rank else ():
            if isinstance(value, Tensor) and value.shape == (piece.size,) and key != "step":
                cut.setdefault(value.dtype, []).append((i, key, value))
            else:  # a count may live on the device, and each process has its own
                on_device = isinstance(value, Tensor) and value.device.type != "cpu"
                small[i, key] = value.cpu() if on_device else value, on_device
    listed = {dtype: [(i, key) for i, key, _ in parts] for dtype, parts in cut.items()}
    everybody = world.all_gather_object((listed, small))
    whole: dict[Tensor, dict[str, Any]] = {}
    for _, values in reversed(everybody):  # the first process's count
        for (i, key), (value, on_device) in values.items():
            local = value.to(params[i].device) if on_device else value
            whole.setdefault(params[i], {})[key] = local
    for dtype in sorted({d for lists, _ in everybody for d in lists}, key=str):
        lists = [lists.get(dtype, []) for lists, _ in everybody]
        lengths = [[of[i, rank].size for i, _ in parts] for rank, parts in enumerate(lists)]
        mine = torch.cat([value for _, _, value in cut[dtype]]) if dtype in cut else None
        items = [
            Delivery(rank, to, sum(each), mine if rank == world.rank else None)
            for rank, each in enumerate(lengths)
        ]
        received = world.all_to_all(items, dtype, params[0].device)
        for rank, flat in enumerate(received if world.rank in to else ()):
            flats = () if flat is None else flat.split(lengths[rank])
            for (i, key), values in zip(lists[rank], flats, strict=False):  # none of an empty one
                piece = of[i, rank]
                into = whole.setdefault(piece.param, {})
                if key not in into:
                    into[key] = values.new_zeros(piece.param.shape)
                into[key].view(-1)[piece.start : piece.stop] = values
    return whole if world.rank in to else {}


def gather_parts(
    world: World, mine: Tensor, bounds: Sequence[int], dim: int, to: Sequence[int]
) -> Tensor:
    """Gather a tensor from all processes' parts on the ranks ``to``; a collective.

    The parts are cut along a dimension, at ``bounds``. The other ranks get an empty tensor.
    """
    shapes = [list(mine.shape) for _ in range(world.size)]
    for shape, (start, stop) in zip(shapes, pairwise(bounds), strict=True):
        shape[dim] = stop - start
    items = [
        Delivery(rank, to, math.prod(shape), mine if rank == world.rank else None)
        for rank, shape in enumerate(shapes)
    ]
    received = world.all_to_all(items, mine.dtype, mine.device)
    if world.rank not in to:
        return mine.new_empty(0)
    parts = zip(received, shapes, strict=True)
    return torch.cat([flat.view(shape) for flat, shape in parts if flat is not None], dim)
