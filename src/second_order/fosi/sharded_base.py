"""The base optimizer on a part of the parameters' vector, for bases that work element by element.

Each process steps its own pieces and keeps their state, n/P elements of each kind. Checkpoints hold
whole tensors: pieces are gathered for them and cut again after a load, for any number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from second_order.distributed.collectives import Delivery, World
from second_order.fosi.pieces import Piece

__all__ = ["ShardedBase", "cut_state", "gather_parts", "gather_state", "works_by_element"]

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
        pieces: Sequence[Piece],
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


def cut_state(part: dict[str, Any], piece: Piece) -> dict[str, Any]:
    """The base's state of a whole parameter, cut to a piece of it."""
    return {
        key: piece.of(value).clone()
        if isinstance(value, Tensor) and value.shape == piece.param.shape and key != "step"
        else value
        for key, value in part.items()
    }


def gather_state(
    world: World,
    pieces: Sequence[Piece],
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
