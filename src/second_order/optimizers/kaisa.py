"""KAISA: K-FAC with an adaptable split of memory and communication (Pauloski et al., 2022).

every factor_update_steps:  A, G of this rank's batch, summed over all ranks, into running averages
every inv_update_steps:     decompositions, one rank a factor, longest processing time first;
                            gathered among the layer's gradient workers, max(1, fP) of P ranks
every step:                 the layer's gradient workers precondition its gradient;
                            receivers get it from the worker in their own column of the grid;
                            all clip, and step the base
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from second_order.distributed.assignment import (
    AssignmentCost,
    Grid,
    LayerAssignment,
    LayerDims,
    assign_layers,
    gradient_worker_count,
)
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.fisher import Likelihood
from second_order.kronecker.layers import Approximation
from second_order.kronecker.solvers import Decomposition, SolverName
from second_order.kronecker.triangles import (
    pack_upper_triangular,
    packed_length,
    unpack_upper_triangular,
)
from second_order.optimizers.base import ParamsOrModel
from second_order.optimizers.kfac import KFACOptimizer
from second_order.optimizers.kfac_options import KFACOptions
from second_order.optimizers.options import (
    Interval,
    Schedule,
    check_choice,
    check_number,
    check_patterns,
)

__all__ = ["KAISA"]


class KAISA(KFACOptimizer):
    """K-FAC on one process or many, around any first-order optimizer.

    ``optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)`` becomes
    ``optimizer = KAISA(model, lr=0.1, momentum=0.9)``; the rest of the script stays as it is.
    """

    def __init__(
        self,
        params_or_model: ParamsOrModel,
        *,
        model: nn.Module | None = None,
        lr: float | Tensor,
        base: type[torch.optim.Optimizer] = torch.optim.SGD,
        damping: Schedule = 1.0,
        relative_damping: bool = False,
        factor_decay: Schedule = 0.95,
        kl_clip: Schedule | None = 1e-3,
        solver: SolverName = "eigen",
        factor_update_steps: Interval = 1,
        inv_update_steps: Interval = 1,
        fisher: str = "empirical",
        likelihood: Likelihood = "categorical",
        kfac_approx: Approximation = "expand",
        grad_worker_fraction: float = 1.0,
        assignment: AssignmentCost = "compute",
        colocate_factors: bool = True,
        symmetry_aware: bool = True,
        skip_layers: Sequence[str] = (),
        accumulation_steps: int = 1,
        loss_reduction: str = "mean",
        grad_scaler: Any = None,
        factor_dtype: torch.dtype = torch.float32,
        inv_dtype: torch.dtype = torch.float32,
        max_consecutive_failures: int = 3,
        gradient_averaging: str | bool = "auto",
        process_group: Any = None,
        **base_kwargs: Any,
    ) -> None:
        check_number(
            "grad_worker_fraction",
            grad_worker_fraction,
            low=0.0,
            high=1.0,
            remedy="1.0 is the default",
        )
        check_choice("assignment", assignment, ("compute", "memory"))
        options = KFACOptions(
            damping=damping,
            relative_damping=bool(relative_damping),
            factor_decay=factor_decay,
            kl_clip=kl_clip,
            solver=solver,
            factor_update_steps=factor_update_steps,
            inv_update_steps=inv_update_steps,
            fisher=fisher,
            likelihood=likelihood,
            kfac_approx=kfac_approx,
            symmetry_aware=symmetry_aware,
            skip_layers=check_patterns(skip_layers),
            accumulation_steps=accumulation_steps,
            loss_reduction=loss_reduction,
            factor_dtype=factor_dtype,
            inv_dtype=inv_dtype,
            max_consecutive_failures=max_consecutive_failures,
        )
        self._fraction = float(grad_worker_fraction)
        self._cost: AssignmentCost = assignment
        self._colocate = bool(colocate_factors)
        super().__init__(
            params_or_model,
            model=model,
            base=base,
            base_kwargs={"lr": lr, **base_kwargs},
            own_keywords=_OWN_KEYWORDS,
            options=options,
            gradient_averaging=gradient_averaging,
            grad_scaler=grad_scaler,
            process_group=process_group,
        )

    def _described_options(self) -> str:
        placement = f"{self._fraction} {self._cost} {self._colocate}"
        return f"{super()._described_options()} {placement}"

    # -------------------------------------------------------------------------------- placement

    def _place(self, blocks: Sequence[KroneckerBlock]) -> None:
        world = self._world
        columns = gradient_worker_count(world.size, self._fraction)
        self._grid = Grid(world.size // columns, columns)
        # Every rank asks for its own row and column, in this order.
        self._my_row = self._grid.row_of(world.rank)
        self._row_world = world.subgroup(self._grid.row(self._my_row))
        self._column_world = world.subgroup(self._grid.column(self._grid.column_of(world.rank)))
        dims = [
            LayerDims(b.shape.groups, b.shape.in_dim, b.shape.out_dim, b.shape.diagonal_a)
            for b in blocks
        ]
        self._assignments: list[LayerAssignment] = assign_layers(
            dims, self._grid, cost=self._cost, colocate_factors=self._colocate
        )

    def _solves(self, index: int) -> tuple[bool, bool]:
        assignment, rank = self._assignments[index], self._world.rank
        return assignment.a_solver == rank, assignment.g_solver == rank

    def _preconditions(self, index: int) -> bool:
        return self._assignments[index].row == self._my_row

    def _computed_by(self, index: int) -> str:
        assignment = self._assignments[index]
        solvers = dict.fromkeys((assignment.a_solver, assignment.g_solver))
        workers = self._grid.row(assignment.row)
        return f"solve {_ranks(tuple(solvers))}, precondition {_ranks(workers)}"

    # --------------------------------------------------------------------------------- exchange

    def _exchange_statistics(self, sums: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        self._world.start_sum([tensor for triple in sums for tensor in triple]).wait()

    def _exchange_decompositions(
        self, mine: dict[tuple[int, str], Decomposition], ready: Sequence[int]
    ) -> dict[tuple[int, str], Decomposition]:
        row = self._row_world
        if row.size == 1:
            return mine
        parcels = _Parcels(self, ready)
        outgoing = [parcels.pack(key, mine.get(key)) for key in parcels.solved_by(self._world.rank)]
        dtype, device = self._options.inv_dtype, self._device()
        flat = torch.cat(outgoing) if outgoing else torch.empty(0, dtype=dtype, device=device)
        ranks = self._grid.row(self._my_row)
        sizes = [sum(map(parcels.length, parcels.solved_by(rank))) for rank in ranks]
        received: dict[tuple[int, str], Decomposition] = {}
        for rank, buffer in zip(ranks, row.gather(flat, sizes), strict=True):
            start = 0
            for key in parcels.solved_by(rank):
                stop = start + parcels.length(key)
                received[key] = parcels.unpack(key, buffer[start:stop])
                start = stop
        return received

    def _exchange_gradients(
        self, mine: dict[int, Tensor], solved: Sequence[int]
    ) -> dict[int, Tensor]:
        column = self._column_world
        if column.size == 1:
            return mine
        results: dict[int, Tensor] = {}
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i in solved:
            by_dtype.setdefault(self._active[i].weight.dtype, []).append(i)
        for dtype, indices in by_dtype.items():
            rows = [
                [i for i in indices if self._assignments[i].row == row]
                for row in range(self._grid.rows)
            ]
            outgoing = [mine[i].reshape(-1) for i in rows[self._my_row]]
            empty = torch.empty(0, dtype=dtype, device=self._device())
            flat = torch.cat(outgoing) if outgoing else empty
            sizes = [sum(self._gradient_size(i)[0] for i in row) for row in rows]
            for row, buffer in zip(rows, column.gather(flat, sizes), strict=True):
                start = 0
                for i in row:
                    count, shape = self._gradient_size(i)
                    results[i] = buffer[start : start + count].view(shape)
                    start += count
        return results

    def _gradient_size(self, index: int) -> tuple[int, tuple[int, int, int]]:
        shape = self._active[index].shape
        size = (shape.groups, shape.out_dim, shape.in_dim)
        return size[0] * size[1] * size[2], size


class _Parcels:
    """How one row's decompositions are laid out in its members' flat messages."""

    def __init__(self, optimizer: KAISA, ready: Sequence[int]) -> None:
        self._optimizer = optimizer
        self._by_rank: dict[int, list[tuple[int, str]]] = {}
        for i in ready:
            assignment = optimizer._assignments[i]
            if assignment.row == optimizer._my_row:
                self._by_rank.setdefault(assignment.a_solver, []).append((i, "A"))
                self._by_rank.setdefault(assignment.g_solver, []).append((i, "G"))

    def solved_by(self, rank: int) -> list[tuple[int, str]]:
        """The (layer, factor) pairs in a rank's message, in order."""
        return self._by_rank.get(rank, [])

    def _shapes(self, key: tuple[int, str]) -> tuple[tuple[int, ...], ...]:
        index, which = key
        shape = self._optimizer._active[index].shape
        if which == "A" and shape.diagonal_a:
            return ((shape.groups, shape.in_dim),)
        dim = shape.in_dim if which == "A" else shape.out_dim
        return self._optimizer._solver.payload_shapes(shape.groups, dim)

    def _as_triangle(self, dims: int) -> bool:
        """Whether a part of so many dimensions travels as a triangle."""
        symmetric = self._optimizer._solver.symmetric and self._optimizer._options.symmetry_aware
        return symmetric and dims == 3

    def _lengths(self, key: tuple[int, str]) -> Iterator[int]:
        for shape in self._shapes(key):
            if self._as_triangle(len(shape)):
                yield shape[0] * packed_length(shape[-1])
            else:
                yield torch.Size(shape).numel()

    def length(self, key: tuple[int, str]) -> int:
        """Elements of one decomposition in a message."""
        return sum(self._lengths(key))

    def pack(self, key: tuple[int, str], decomposition: Decomposition | None) -> Tensor:
        """One decomposition as a flat tensor; zeros for a failed one, which nobody will use."""
        dtype, device = self._optimizer._options.inv_dtype, self._optimizer._device()
        if decomposition is None:
            return torch.zeros(self.length(key), dtype=dtype, device=device)
        parts = [
            pack_upper_triangular(part) if self._as_triangle(part.dim()) else part
            for part in decomposition
        ]
        return torch.cat([part.to(dtype).reshape(-1) for part in parts])

    def unpack(self, key: tuple[int, str], flat: Tensor) -> Decomposition:
        """Undo :meth:`pack`."""
        parts = []
        pieces = flat.split(list(self._lengths(key)))
        for shape, piece in zip(self._shapes(key), pieces, strict=True):
            if self._as_triangle(len(shape)):
                parts.append(unpack_upper_triangular(piece.view(shape[0], -1), shape[-1]))
            else:
                parts.append(piece.view(shape))
        return tuple(parts)


_OWN_KEYWORDS = tuple(
    name
    for name in KAISA.__init__.__annotations__
    if name not in ("params_or_model", "base_kwargs", "return")
)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return "+".join(map(str, ranks))
