"""All parameters that train as one vector: every process has the whole of it, or rows of its own.

rows spread   each process receives its rows of the mean gradient, the base steps them there, and
              all receive all rows: the volume of one all-reduce, and n/P of the base's state
whole         every process averages, and steps, the whole vector

The vector is the parameters group by group, each in the order of ``p.reshape(-1)``. This process's
rows are copied to buffers, where they lie one after the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from second_order.distributed.fsdp import is_dtensor, layout_of, local, reshard
from second_order.distributed.world import World
from second_order.lanczos.closure import CurvatureKind, LossFn
from second_order.lanczos.hvp import Hessian, ProductMode, ShardedHessian
from second_order.lanczos.spectrum import lanczos_dtype
from second_order.lanczos.vector_space import RowSpace, row_bounds
from second_order.training.averaging import Routed
from second_order.training.context import Training
from second_order.utils.stages import stage

__all__ = ["FlatParams", "ParamPiece"]

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
    """Elements ``start`` to ``stop`` of a flattened parameter, which one process steps."""

    param: Tensor
    group: int  # index of the parameter's
    start: int
    stop: int
    rank: int  # the process that has the piece
    at: int  # index of its first element in the vector of all parameters
    rows: slice  # its place among the elements of its process

    @property
    def size(self) -> int:
        """Number of elements of the piece."""
        return self.stop - self.start

    @cached_property
    def whole(self) -> bool:
        """Whether it is all of a parameter."""
        return self.size == self.param.numel() and not is_dtensor(self.param)

    def shaped(self, flat: Tensor) -> Tensor:
        """A view of flat values in the parameter's shape, if the piece is all of it."""
        return flat.view(self.param.shape) if self.whole else flat

    def of(self, tensor: Tensor) -> Tensor:
        """This piece of a tensor of the parameter's shape: flat, and a view where there is one."""
        if is_dtensor(tensor):  # what is here of it is the piece
            return local(tensor).detach().reshape(-1)
        return tensor.detach().reshape(-1)[self.start : self.stop]

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Write flat values to this piece of a tensor of the parameter's shape."""
        if self.whole:
            tensor.copy_(values.view(tensor.shape))
        elif tensor.is_contiguous():
            self.of(tensor).copy_(values)
        else:
            copy = tensor.detach().reshape(-1)
            copy[self.start : self.stop] = values
            tensor.copy_(copy.view(tensor.shape))


class FlatParams:
    """The vector of parameters, the rows of each process, and the base that steps them.

    Attributes:
        params: The parameters that train, group by group, in order: n elements, the ``size``.
        spread: Whether rows are spread over the processes.
        sharded: Whether FSDP2 has spread them: it averages gradients, and gathers rows.
        steps_rows: Whether they are spread, and not by FSDP2.
        pieces: The pieces of all processes, by rank; those here are ``mine``.
        group_spans: The slice of this process's rows that each group has.
    """

    def __init__(self, training: Training, *, spread: bool, dtype: torch.dtype | None) -> None:
        self._training = training
        self._spread_wanted = spread
        self._dtype_wanted = dtype
        self.model = training.model if training.known else None
        self.restart()
        if self.steps_rows and type(training.base) not in ELEMENTWISE:
            raise ValueError(
                f"layout='row' on {training.world.size} processes steps {training.base_name} on "
                f"parts of the parameters, and it is not known to work element by element; use "
                f"layout='column'"
            )

    def restart(self) -> None:
        """Cut the vector again, from a base whose state is whole: at first, and after a load."""
        self._row_base: RowBase | None = None
        self._buffers: dict[str, tuple[Tensor, list[Tensor]]] = {}
        world = self._training.world
        groups = [[p for p in g["params"] if p.requires_grad] for g in self._training.groups]
        self.params = [p for group in groups for p in group]
        self.size = sum(p.numel() for p in self.params)
        self.dtype = self._dtype_wanted or lanczos_dtype(self.params)
        self.sharded = any(is_dtensor(p) for p in self.params)
        self.spread = (self._spread_wanted or self.sharded) and world.size > 1
        self.steps_rows = self.spread and not self.sharded

        # Cut parameters where the rows of a process end.
        even = row_bounds(self.size, world.size if self.spread else 1)
        by_rank: list[list[ParamPiece]] = [[] for _ in even[1:]]
        filled = [0 for _ in even[1:]]
        at = 0
        for index, group in enumerate(groups):
            for p in group:
                layout = layout_of(p, world) if self.sharded else None
                for rank, (first, last) in enumerate(pairwise(even)):
                    if layout is None:
                        start, stop = max(first - at, 0), min(last - at, p.numel())
                    else:
                        start, stop = (row * layout.width for row in layout.bounds(rank))
                    empty = not p.numel() and first == 0  # its state is that of a piece as well
                    if start < stop or empty:
                        rows = slice(filled[rank], filled[rank] + stop - start)
                        piece = ParamPiece(p, index, start, stop, rank, at + start, rows)
                        by_rank[rank].append(piece)
                        filled[rank] = rows.stop
                at += p.numel()
        self.pieces = [piece for pieces in by_rank for piece in pieces]
        self.mine = by_rank[world.rank if self.spread else 0]
        self.group_spans = [self._rows_of(index) for index in range(len(groups))]

    def _rows_of(self, group: int) -> slice:
        """This process's rows of a group of parameters."""
        rows = [piece.rows for piece in self.mine if piece.group == group]
        return slice(rows[0].start, rows[-1].stop) if rows else slice(0, 0)

    @property
    def in_parts(self) -> bool:
        """Whether the base's state here is cut to this process's rows."""
        return self._row_base is not None

    @property
    def unchanged(self) -> bool:
        """Whether the parameters train that the vector is cut for."""
        now = self._training.training_params()
        return len(now) == len(self.params) and all(map(operator.is_, now, self.params))

    def follow(self) -> bool:
        """Cut the vector again if other parameters train than before; returns whether they do.

        A collective then.
        """
        if self.unchanged:
            return False
        whole = self.base_state(range(self._training.world.size)) if self.in_parts else {}
        self.restart()
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

    def plain(self) -> AbstractContextManager[Any]:
        """A context without autocast."""
        kind = self._training.device.type
        if torch.is_autocast_enabled(kind):
            return torch.autocast(kind, enabled=False)
        return nullcontext()

    @property
    def sign(self) -> float:
        """The sign of the loss: −1 where it is maximized, else 1."""
        return -1.0 if self._training.groups[0].get("maximize") else 1.0

    def hessian(
        self, loss_fn: LossFn | Sequence[LossFn], hvp: ProductMode, curvature: CurvatureKind
    ) -> RowSpace:
        """The curvature of a loss at the parameters, over all processes' batches: a context."""
        world = self._training.world
        if self.sharded:
            reshard(self._training.model)
            sharded = ShardedHessian(loss_fn, self.params, world, self.model)
            return RowSpace(sharded, world, self.dtype, self.sign, self.here)
        hessian = Hessian(loss_fn, self.params, mode=hvp, model=self.model, curvature=curvature)
        return RowSpace(hessian, world, self.dtype, self.sign)

    def here(self, whole: Tensor) -> Tensor:
        """The elements that are here of whole vectors, ``(..., n)``."""
        parts = [whole[..., piece.at : piece.at + piece.size] for piece in self.mine]
        return torch.cat(parts, -1) if parts else whole[..., :0]

    def flat(self) -> Tensor:
        """A copy of the parameters that are here, which loses nothing of them."""
        dtype = lanczos_dtype(self.params)
        parts = [piece.of(piece.param).to(dtype) for piece in self.mine]
        return torch.cat([torch.empty(0, dtype=dtype, device=self._training.device), *parts])

    def overwrite(self, flat: Tensor) -> None:
        """Set the parameters that are here."""
        for piece in self.mine:
            piece.put(piece.param, flat[piece.rows])

    def read(self, tensors: Sequence[Tensor | None], buffer: str = "rows") -> Tensor:
        """Copy the pieces that are here of tensors, one for each, to a buffer; zeros for None.

        What is returned is good until that buffer is filled again.
        """
        flat, views = self._buffers.get(buffer, (None, []))
        if flat is None or flat.device != self._training.device:
            size = sum(piece.size for piece in self.mine)
            flat = torch.empty(size, dtype=self.dtype, device=self._training.device)
            views = [piece.shaped(flat[piece.rows]) for piece in self.mine]
            self._buffers[buffer] = flat, views
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for piece, view, tensor in zip(self.mine, views, tensors, strict=True):
            if tensor is None:
                view.zero_()
            else:
                targets.append(view)
                sources.append(tensor if piece.whole else piece.of(tensor))
        if targets:
            torch._foreach_copy_(targets, sources)
        return flat

    def write(self, tensors: Sequence[Tensor | None], buffer: str = "rows") -> None:
        """Copy a buffer to the pieces that are here of tensors, but to None."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for piece, view, tensor in zip(self.mine, self._buffers[buffer][1], tensors, strict=True):
            if tensor is None:
                continue
            if piece.whole or tensor.is_contiguous():
                targets.append(tensor if piece.whole else piece.of(tensor))
                sources.append(view)
            else:
                piece.put(tensor, view)
        if targets:
            torch._foreach_copy_(targets, sources)

    # ------------------------------------------------------------------------ whole parameters

    def whole_state(
        self, entries: Callable[[ParamPiece], Mapping[str, Any]], to: Sequence[int]
    ) -> dict[Tensor, dict[str, Any]]:
        """Each parameter's state, from the entries of all processes' pieces; a collective.

        Tensors are those of whole parameters then, and views where one process has all of it; of
        numbers the first process's is taken. Ranks that are not among ``to`` get none.
        """
        number = {p: i for i, p in enumerate(self.params)}
        here = [(number[piece.param], dict(entries(piece))) for piece in self.mine]
        everybody = gathered(self._training.world, here) if self.spread else [here]
        if self._training.world.rank not in to:
            return {}
        found: dict[Tensor, dict[str, list[Any]]] = {p: {} for p in self.params}
        for i, values in [each for rank in everybody for each in rank]:
            for key, value in values.items():
                found[self.params[i]].setdefault(key, []).append(value)
        return {
            p: {key: _joined(values, p) for key, values in parts.items()}
            for p, parts in found.items()
        }

    def cut(self, tensors: Mapping[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        """The elements that are here of whole parameters' tensors ``(..., *p.shape)``."""
        parts = []
        for p in self.params:
            tensor = tensors[p].to(p.device, dtype)
            parts.append(tensor.reshape(*tensor.shape[: tensor.dim() - p.dim()], -1))
        return self.here(torch.cat(parts, -1))

    def by_param(self, flat: Tensor) -> dict[Tensor, Tensor]:
        """Each parameter's part of whole vectors ``(..., n)``, as views."""
        parts = flat.split([p.numel() for p in self.params], -1) if self.params else ()
        pairs = zip(self.params, parts, strict=True)
        return {p: part.view((*flat.shape[:-1], *p.shape)) for p, part in pairs}

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
        if not self.steps_rows:
            return None
        of = {id(p): gradient for p, gradient in zip(params, gradients, strict=True)}
        parts = [piece.of(of[id(piece.param)]) for piece in self.pieces]
        return parts, [piece.rank for piece in self.pieces]

    def step_base(self, step: Callable[[], None]) -> None:
        """Step the base on this process's pieces, to which its state is cut."""
        if not self.steps_rows:
            step()
            return
        training = self._training
        if self._row_base is None:
            self._row_base = RowBase(training.base, self.mine)
        self._row_base.step(training.groups, step)

    def share(self) -> None:
        """Give every process all rows of the parameters; a collective if they are stepped apart."""
        if not self.steps_rows:
            return
        with stage("exchange"):
            parts = [piece.of(piece.param) for piece in self.pieces]
            self._training.world.broadcast(parts, [piece.rank for piece in self.pieces])
            for piece, part in zip(self.pieces, parts, strict=True):
                if not piece.param.is_contiguous():  # ``part`` is a copy
                    piece.put(piece.param, part)

    def base_state(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, Any]]:
        """The base's whole state on some ranks; a collective where it is in parts."""
        world, state = self._training.world, self._training.base.state
        if self.in_parts:
            return self.whole_state(lambda piece: state.get(piece.param, {}), ranks)
        return dict(state) if world.rank in ranks else {}


class RowBase:
    """An elementwise base that steps this process's pieces of the parameters.

    Each piece has a stand-in, a flat view of the parameter, which the base steps in its place. The
    base's state is cut to the pieces: n/P elements of each kind.
    """

    def __init__(self, base: torch.optim.Optimizer, pieces: Sequence[ParamPiece]) -> None:
        state: Any = base.state
        self._base = base
        self._stand_ins = [(piece, piece.of(piece.param)) for piece in pieces]
        here = {piece.param: piece for piece in pieces}
        for p in list(state):
            if p in here:
                for key, value in state[p].items():
                    if isinstance(value, Tensor) and value.shape == p.shape and key != "step":
                        state[p][key] = here[p].of(value).clone()
            elif p.requires_grad:  # a frozen parameter's state stays whole, until it trains again
                del state[p]
        # Bases take an entry to mean that their state for a parameter has been made.
        self._state = {s: state[piece.param] for piece, s in self._stand_ins}

    def step(self, groups: Sequence[dict[str, Any]], step: Callable[[], None]) -> None:
        """Step the pieces, with the hyperparameters of the groups as they are now."""
        for piece, stand_in in self._stand_ins:
            # The parameter may have been moved or cast; if it is not contiguous, this is a copy.
            stand_in.data = piece.of(piece.param)
            gradient = piece.param.grad
            stand_in.grad = None if gradient is None else piece.of(gradient)

        state = self._base.state
        params = [group["params"] for group in groups]
        try:
            self._base.state = self._state  # type: ignore[assignment]
            for i, group in enumerate(groups):
                group["params"] = [s for piece, s in self._stand_ins if piece.group == i]
            step()
        finally:
            self._base.state = state
            for group, whole in zip(groups, params, strict=True):
                group["params"] = whole

        for piece, stand_in in self._stand_ins:
            stand_in.grad = None
            if not piece.param.is_contiguous():
                piece.put(piece.param, stand_in)


def _joined(values: Sequence[Any], p: Tensor) -> Any:
    """An entry for a whole parameter from those of its pieces, in their order."""
    first = values[0]
    if not isinstance(first, Tensor) or first.dim() == 0:
        return first
    whole = first if len(values) == 1 else torch.cat(list(values), -1)
    return whole.to(p.device).view((*first.shape[:-1], *p.shape))


def gathered(world: World, value: Any) -> list[Any]:
    """Every rank's value of nested dictionaries and lists with tensors; a collective.

    Tensors travel, and arrive, on the CPU.
    """
    return world.on_cpu().all_gather_object(_to_cpu(value))


def _to_cpu(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_cpu(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_cpu(each) for each in value]
    return value.cpu() if isinstance(value, Tensor) else value
