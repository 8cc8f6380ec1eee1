"""All parameters that train as one vector: every process has the whole of it, or rows of its own.

rows spread   the mean gradient's rows come to their process, the base steps them there, and all get
              everybody's rows: the volume of one all-reduce, and n/P of the base's state
whole         every process averages, and steps, the whole vector

Checkpoints hold whole tensors in either case, and load on any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from second_order.contract.training import Routed, Training
from second_order.fosi.pieces import (
    FlatLayout,
    Room,
    ShardedBase,
    ShardedLayout,
    chunks_of,
    gather_state,
    works_by_element,
)
from second_order.lanczos.closure import CurvatureKind, LossFn
from second_order.lanczos.hvp import Hessian, ProductMode, ShardedHessian
from second_order.lanczos.vector_space import RowSpace
from second_order.sharded import is_dtensor, reshard

__all__ = ["ParameterVector"]

WITHOUT: AbstractContextManager[Any] = nullcontext()


class ParameterVector:
    """The vector of parameters, the rows of each process, and the base that steps them.

    Args:
        training: The training of the parameters.
        spread: Whether to spread rows over the processes, if there are several; as they are where
            FSDP2 has sharded them.
        dtype: Dtype of vectors; None for float64 where a parameter is, else float32.

    Attributes:
        spread: Whether rows are spread over the processes.
        sharded: Whether FSDP2 has spread them: it averages gradients, and shares rows.
        layout: The rows of all processes.
        pieces: This process's pieces.
        chunks: This process's pieces, cut into chunks.
        in_parts: Whether the base's state here is cut to this process's rows.

    Raises:
        ValueError: If rows are to be spread and the base needs whole tensors.
    """

    def __init__(self, training: Training, *, spread: bool, dtype: torch.dtype | None) -> None:
        self._training, self._dtype, self._wanted = training, dtype, spread
        self.restart()
        if self.spread and not self.sharded and not works_by_element(type(training.base)):
            raise ValueError(
                f"layout='row' on {training.world.size} processes steps {training.base_name} on "
                f"parts of the parameters, and it is not known to work element by element; use "
                f"layout='column'"
            )

    def restart(self) -> None:
        """Cut the vector anew, where the base's state is whole: in the beginning, after a load."""
        self.in_parts = False
        self._stepper: ShardedBase | None = None
        world = self._training.world
        groups = [[p for p in g["params"] if p.requires_grad] for g in self._training.groups]
        self.sharded = any(is_dtensor(p) for group in groups for p in group)
        self.spread = (self._wanted or self.sharded) and world.size > 1
        self.layout = (
            ShardedLayout(groups, world)
            if self.sharded
            else FlatLayout(groups, world.size if self.spread else 1)
        )
        self.pieces = self.layout.of(world.rank if self.spread else 0)
        self.chunks = chunks_of(self.pieces)

    def follow(self) -> bool:
        """Cut the vector anew where parameters were added, frozen or unfrozen; returns whether.

        A collective then, where the base's state is in parts.
        """
        now = [[id(p) for p in g["params"] if p.requires_grad] for g in self._training.groups]
        if now == self.layout.ids:
            return False
        whole = self.base_state(range(self._training.world.size)) if self.in_parts else {}
        self.restart()
        for p, part in whole.items():
            self._training.base.state[p] = part
        return True

    # ------------------------------------------------------------------------------- numbers

    @property
    def params(self) -> list[Tensor]:
        """The parameters, in order."""
        return self.layout.params

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which vectors are computed with."""
        return self._dtype or self.layout.dtype

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._training.device

    def plain(self) -> AbstractContextManager[Any]:
        """A context without autocast."""
        kind = self.device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else WITHOUT

    @property
    def sign(self) -> float:
        """The sign of the loss: −1 where it is maximized, else 1."""
        return -1.0 if self._training.groups[0].get("maximize") else 1.0

    @property
    def model(self) -> nn.Module | None:
        """The module whose train/eval mode is to be kept, if it is known."""
        return self._training.model if self._training.known else None

    def hessian(
        self, loss_fn: LossFn | Sequence[LossFn], hvp: ProductMode, curvature: CurvatureKind
    ) -> RowSpace:
        """The curvature of a loss at the parameters, over all processes' batches: a context."""
        world, params = self._training.world, self.params
        if self.sharded:
            reshard(self._training.model)
            sharded = ShardedHessian(loss_fn, params, world, self.model)
            mine = partial(self.layout.part, rank=world.rank)
            return RowSpace(sharded, world, self.dtype, self.sign, mine)
        hessian = Hessian(loss_fn, params, mode=hvp, model=self.model, curvature=curvature)
        return RowSpace(hessian, world, self.dtype, self.sign)

    def here(self, whole: Tensor) -> Tensor:
        """The elements that are here of whole vectors, ``(..., n)``."""
        return self.layout.part(whole, self._training.world.rank * self.spread)

    def values(self) -> list[Tensor]:
        """The parameters that are here, a tensor each chunk; until the next call, or the other."""
        return [chunk.values(self.dtype) for chunk in self.chunks]

    def gradients(self) -> list[Tensor]:
        """The gradients that are here, a tensor each chunk; as long as :meth:`values`."""
        return [chunk.gradients(self.dtype) for chunk in self.chunks]

    def keep(self, rooms: list[Room]) -> list[Tensor]:
        """A copy of the parameters that are here, a tensor each chunk.

        The first call fills ``rooms``, which the next ones are to be given, to copy to.
        """
        if not rooms:
            rooms += [Room(chunk.pieces, self.dtype) for chunk in self.chunks]
        return [chunk.keep(room) for chunk, room in zip(self.chunks, rooms, strict=True)]

    def flat(self) -> Tensor:
        """The parameters that are here as one tensor, which loses nothing of them."""
        dtype = self.layout.dtype
        if not self.chunks:  # a process may have no rows
            return torch.empty(0, dtype=dtype, device=self.device)
        return torch.cat([chunk.keep(Room(chunk.pieces, dtype)) for chunk in self.chunks])

    def overwrite(self, flat: Tensor) -> None:
        """Set the parameters that are here."""
        for chunk in self.chunks:
            chunk.overwrite(flat[chunk.columns])

    # ---------------------------------------------------------------------------------- a step

    def check_gradients(self) -> None:
        """Make gradients contiguous, so that their parts can be sent and received.

        Raises:
            TypeError: If a gradient is sparse.
        """
        gradients = [(p, g) for p in self.params if (g := p.grad) is not None]
        for p, gradient in gradients:
            if gradient.is_sparse:
                raise TypeError(
                    "a sparse gradient is no part of one vector of all parameters; use "
                    "sparse=False in the embedding"
                )
            if self.spread and not gradient.is_contiguous():
                p.grad = gradient.contiguous()

    def route(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Routed:
        """Each process's rows of the gradients, and that process; None if all get all."""
        if not self.spread or self.sharded:
            return None
        of = {id(p): gradient for p, gradient in zip(params, gradients, strict=True)}
        pieces = self.layout.pieces
        return [piece.of(of[id(piece.param)]) for piece in pieces], [piece.rank for piece in pieces]

    def step_base(self, step: Callable[[], None]) -> None:
        """Step the base on this process's pieces, to which its state is cut."""
        if not self.spread or self.sharded:
            step()
            return
        training = self._training
        if self._stepper is None:
            self._stepper = ShardedBase(training.base, training.groups, self.pieces)
            self.in_parts = True
        self._stepper.step(training.groups)

    def share(self) -> None:
        """Give every process all rows of the parameters; a collective if they are spread."""
        if not self.spread or self.sharded:
            return
        pieces = self.layout.pieces
        with self._training.meter.stage("exchange"):
            parts = [piece.of(piece.param) for piece in pieces]
            self._training.world.broadcast(parts, [piece.rank for piece in pieces])
            for piece, part in zip(pieces, parts, strict=True):
                piece.put(piece.param, part)

    def base_state(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, Any]]:
        """Gather the base's whole state on some ranks; a collective where it is in parts."""
        world, state = self._training.world, self._training.base.state
        if self.in_parts:
            return gather_state(world, self.layout.pieces, state, ranks)
        return dict(state) if world.rank in ranks else {}
