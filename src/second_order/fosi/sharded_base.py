"""A base optimizer on pieces: what one process has of a parameter.

A base that works element by element steps its process's own pieces, and keeps their state, n/P
elements of each kind. Checkpoints hold whole tensors, gathered for them, and cut again after a
load, for any number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from second_order.contract.training import unhooked
from second_order.distributed.world import World
from second_order.sharded import is_dtensor, local

__all__ = ["ELEMENTWISE", "ParamPiece", "ShardedBase", "cut_state", "gather_parts", "gather_state"]

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
"""The bases known to step each element by itself, so that parts of tensors can be stepped."""


@dataclass(frozen=True, eq=False)
class ParamPiece:
    """Elements ``start`` to ``stop`` of a flattened parameter."""

    param: Tensor
    group: int  # index of the parameter's
    start: int
    stop: int
    rank: int  # the process that has the piece
    at: int  # index of its first element in the vector of all parameters

    @cached_property
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
        if not tensor.is_contiguous():  # ``mine`` was a copy
            whole = tensor.detach().reshape(-1)
            whole[self.start : self.stop] = mine
            tensor.copy_(whole.view(tensor.shape))


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
        unhooked(self._base)()
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
    params = list(dict.fromkeys(piece.param for piece in pieces))
    number = {p: i for i, p in enumerate(params)}
    of = {(number[piece.param], piece.rank): piece for piece in pieces}
    cut: dict[tuple[int, str], torch.dtype] = {}
    small: dict[tuple[int, str], Any] = {}
    for (i, rank), piece in of.items():
        for key, value in state.get(params[i], {}).items() if rank == world.rank else ():
            if isinstance(value, Tensor) and value.shape == (piece.size,) and key != "step":
                cut[i, key] = value.dtype
            else:  # a count may live on the device, and each process has its own
                on_device = isinstance(value, Tensor) and value.device.type != "cpu"
                small[i, key] = value.cpu() if on_device else value, on_device
    everybody = world.all_gather_object((cut, small))
    whole: dict[Tensor, dict[str, Any]] = {}
    for _, values in reversed(everybody):  # the first process's count
        for (i, key), (value, on_device) in values.items():
            here = value.to(params[i].device) if on_device else value
            whole.setdefault(params[i], {})[key] = here
    for dtype in sorted({kind for kinds, _ in everybody for kind in kinds.values()}, key=str):
        parts = [
            (of[i, rank], key)
            for rank, (kinds, _) in enumerate(everybody)
            for (i, key), kind in kinds.items()
            if kind == dtype
        ]
        flats = world.gather_items(
            sources=[piece.rank for piece, _ in parts],
            sizes=[piece.size for piece, _ in parts],
            contents=[state.get(piece.param, {}).get(key) for piece, key in parts],
            empty=torch.empty(0, dtype=dtype, device=params[0].device),
        )
        for (piece, key), flat in zip(parts, flats, strict=True) if world.rank in to else ():
            into = whole.setdefault(piece.param, {})
            if key not in into:
                into[key] = torch.zeros(piece.param.shape, dtype=dtype, device=params[0].device)
            into[key].view(-1)[piece.start : piece.stop] = flat
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
    received = world.all_gather(mine.reshape(-1), [math.prod(shape) for shape in shapes])
    if world.rank not in to:
        return mine.new_empty(0)
    parts = [flat.view(shape) for flat, shape in zip(received, shapes, strict=True)]
    return torch.cat(parts, dim)
