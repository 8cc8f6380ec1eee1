"""An optimizer that sees all parameters as one vector, whole or in rows spread over processes.

rows split   the mean gradient's rows come to their process, the base steps them there, and all get
             everybody's rows: the volume of one all-reduce, and n/P of the base's state
not split    every process averages, and steps, the whole vector

Checkpoints hold whole tensors in either case, and load on any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.profiler import record_function

from second_order.contract.averaging import Routed
from second_order.contract.base_state import BASE, CURVATURE
from second_order.contract.notices import warns_at_its_end
from second_order.contract.saved import SavedPart
from second_order.errors import SecondOrderError
from second_order.fosi.sharded_base import ShardedBase, gather_state, works_by_element
from second_order.fosi.vector import Chunk, FlatLayout, Piece, chunks_of
from second_order.optimizers.base import ParamsOrModel, SecondOrderOptimizer
from second_order.options import PEAK_LR, check_rank

__all__ = ["FlatOptimizer"]


class FlatOptimizer(SecondOrderOptimizer):
    """The vector, who has which rows of it, and the base on them.

    Args:
        split_rows: Whether to spread rows over processes, if there are several.

    Raises:
        ValueError: If rows are to be spread and the base needs whole tensors.
    """

    _needs_model = False

    def __init__(
        self,
        params_or_model: ParamsOrModel,
        *,
        model: nn.Module | None,
        base: type,
        base_kwargs: dict[str, Any],
        own_keywords: Iterable[str],
        split_rows: bool,
        gradient_averaging: str | bool,
        grad_scaler: Any,
        process_group: Any,
    ) -> None:
        self._layout: FlatLayout | None = None
        self._signature: tuple[Any, ...] | None = None
        self._pieces: list[Piece] = []
        self._chunks: list[Chunk] = []
        self._sharded: ShardedBase | None = None
        self._whole: dict[Tensor, dict[str, dict[str, Any]]] | None = None
        self._gathered_to: int | None = None
        self._stepping = False
        super().__init__(
            params_or_model,
            model=model,
            base=base,
            base_kwargs=base_kwargs,
            own_keywords=own_keywords,
            gradient_averaging=gradient_averaging,
            grad_scaler=grad_scaler,
            process_group=process_group,
            group_defaults={PEAK_LR: 0.0},
        )
        self._split_rows = split_rows and self._world.size > 1
        if self._split_rows and not works_by_element(base):
            raise ValueError(
                f"layout='row' on {self._world.size} processes steps {base.__name__} on parts of "
                f"the parameters, and it is not known to work element by element; use "
                f"layout='column'"
            )

    @property
    def _scaler_matters(self) -> str:  # type: ignore[override]
        return "a step skipped on one process would leave the others waiting" * self._averages

    # ------------------------------------------------------------------------------- the vector

    def _vector_changed(self) -> None:
        """Parameters were added, frozen or unfrozen: what spans the vector is gone."""

    def _follow_layout(self) -> None:
        """Cut the vector anew where parameters were added, frozen or unfrozen."""
        groups = [[p for p in g["params"] if p.requires_grad] for g in self.param_groups]
        signature = tuple(tuple(map(id, group)) for group in groups)
        if signature == self._signature:
            return
        self._unshard()
        if self._signature is not None:
            self._vector_changed()
        self._signature = signature
        self._layout = FlatLayout(groups, self._world.size if self._split_rows else 1)
        self._pieces = self._layout.of(self._world.rank if self._split_rows else 0)
        self._chunks = chunks_of(self._pieces)

    def _shard(self) -> None:
        """The base's state goes to pieces, where this process has pieces only."""
        if self._split_rows and self._sharded is None:
            self._sharded = ShardedBase(
                self._base, self._base.state, self.param_groups, self._pieces
            )

    def _unshard(self) -> None:
        """Every process gets the base's whole state; a collective where it is in pieces."""
        if self._sharded is None:
            return
        assert self._layout is not None
        everybody = range(self._world.size)
        whole = gather_state(self._world, self._layout.pieces, self._base.state, everybody)
        self._sharded = None
        for p, part in whole.items():
            self._base.state[p] = part

    # -------------------------------------------------------------------------------- stepping

    def _facts(self) -> list[tuple[str, Any]]:
        return [("the base's state in parts", self._sharded is not None)]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: Evaluates the model, calls ``backward`` and returns the loss. Called once.

        Returns:
            What the closure returned, or None.
        """
        self._whole = None
        try:
            return super().step(closure)
        finally:
            self._stepping = False

    def _start_averaging(self) -> Callable[[], None]:
        self._follow_layout()
        if any(p.grad is not None and p.grad.is_sparse for p in self._averaged_params()):
            raise TypeError(
                "a sparse gradient is no part of one vector of all parameters; use sparse=False in "
                "the embedding"
            )
        if self._split_rows and self._averages:
            for p in self._averaged_params():  # parts of it are to be received in place
                if p.grad is not None and not p.grad.is_contiguous():
                    p.grad = p.grad.contiguous()
        return super()._start_averaging()

    def _route_gradients(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Routed:
        if not self._split_rows:
            return None
        assert self._layout is not None
        of = {id(p): gradient for p, gradient in zip(params, gradients, strict=True)}
        parts = [piece.of(of[id(piece.param)]) for piece in self._layout.pieces]
        return parts, [piece.rank for piece in self._layout.pieces]

    def _transform_gradients(self, average: Callable[[], None]) -> None:
        with record_function("second_order.average_gradients"):
            average()
        self._shard()
        self._stepping = True

    def _base_step(self) -> None:
        # Where checkpointing code brings state into being, it is that of whole parameters.
        if self._sharded is None or not self._stepping:
            super()._base_step()
        else:
            self._sharded.step(self.param_groups)

    def _share_parameters(self) -> None:
        """Everybody gets everybody's rows."""
        if self._sharded is None or not self._stepping:
            return
        assert self._layout is not None
        pieces = self._layout.pieces
        with record_function("second_order.exchange"):
            parts = [piece.of(piece.param) for piece in pieces]
            self._world.share(parts, [piece.rank for piece in pieces])
            for piece, part in zip(pieces, parts, strict=True):
                piece.put(piece.param, part)

    # ----------------------------------------------------------------------------- checkpoints

    def _is_spread(self) -> bool:
        """Whether other processes keep state that this one lacks."""
        return self._sharded is not None

    def _gather_curvature(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, Any]]:
        """The ``"curvature"`` parts, on the ranks that want them; a collective."""
        return {}

    @warns_at_its_end
    def consolidate(self, to: int | None = 0) -> None:
        """Collect what other processes keep, for the next :meth:`state_dict`.

        A collective: every process calls it. What is collected is let go at the next step. Nothing
        happens where every process keeps everything.

        Args:
            to: The rank that is going to save; None if all are.

        Raises:
            ValueError: If there is no such rank.
        """
        check_rank("consolidate", to, self._world.size)
        if not self._is_spread():
            return
        self._agree(f"consolidate(to={to})")
        assert self._layout is not None
        ranks = range(self._world.size) if to is None else [to]
        bases: dict[Tensor, dict[str, Any]] = {}
        if self._sharded is not None:
            bases = gather_state(self._world, self._layout.pieces, self._base.state, ranks)
        elif self._world.rank in ranks:
            bases = dict(self._base.state)
        curvature = self._gather_curvature(ranks)
        self._gathered_to = to
        self._whole = {
            p: {BASE: bases.get(p, {}), CURVATURE: curvature.get(p, {})}
            for p in self._layout.params
        }

    def state_dict(self) -> dict[str, Any]:
        """The state as primitives and tensors, as ``torch.load`` accepts with its defaults.

        Raises:
            SecondOrderError: If other processes keep some of it, and it has not been collected by
                :meth:`consolidate` since the last step.
        """
        if not self._is_spread():
            return super().state_dict()
        if self._whole is None:
            raise SecondOrderError(
                f"{type(self).__name__}.state_dict() would lack what other processes keep of the "
                f"eigenvectors and of the base's state; call optimizer.consolidate(to=0) on every "
                f"process first, or consolidate(to=None) for torch.distributed.checkpoint"
            )
        if self._gathered_to not in (None, self._world.rank) and self._first_time("partial"):
            self._warn(
                f"state_dict() on rank {self._world.rank} lacks the state: "
                f"consolidate(to={self._gathered_to}) collected it elsewhere; save it there, or "
                f"use to=None"
            )
        state = super().state_dict()
        params = [p for group in self.param_groups for p in group["params"]]
        for index, p in enumerate(params):
            if p in self._whole:
                parts, entry = self._whole[p], state["state"].get(index, {})
                curvature = entry.get(CURVATURE, {}) | parts[CURVATURE]
                state["state"][index] = {BASE: parts[BASE], CURVATURE: curvature}
        return state

    def _adopt_curvature(self, saved: Mapping[Tensor, SavedPart]) -> None:
        self._whole = self._sharded = None
        self._signature = None
        self._follow_layout()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return state | {"_whole": None, "_sharded": self._sharded is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_base" in self.__dict__ and isinstance(self._sharded, bool):
            if self._world.moved and self._sharded:
                raise SecondOrderError(
                    "this optimizer was pickled in parts, by another number of processes or on "
                    "another rank; use consolidate() and state_dict()"
                )
            in_pieces, self._sharded = self._sharded, None
            if in_pieces:
                self._shard()
            if self._layout is not None:
                groups = [[p for p in g["params"] if p.requires_grad] for g in self.param_groups]
                self._signature = tuple(tuple(map(id, group)) for group in groups)
