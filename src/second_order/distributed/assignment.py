"""Assignment of layers to ranks that solve and precondition: pure functions of the costs."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = [
    "AssignmentCost",
    "Grid",
    "LayerAssignment",
    "LayerDims",
    "OwnerAssignment",
    "assign_layers",
    "assign_owners",
    "balance_costs",
    "factor_cost",
    "gradient_worker_count",
]

AssignmentCost: TypeAlias = Literal["compute", "memory"]
OwnerAssignment: TypeAlias = Literal["balanced", "round_robin"]


@dataclass(frozen=True)
class LayerDims:
    """The sizes of a layer that assignment depends on: ``groups`` pairs of factors A and G.

    ``cost`` is that of the solve, the sum of n³, where there may be a third factor.
    """

    groups: int
    in_dim: int
    out_dim: int
    diagonal_a: bool = False
    cost: float = 0.0


@dataclass(frozen=True)
class LayerAssignment:
    """The row of the grid whose ranks are gradient workers of a layer, and who solves A and G."""

    row: int
    a_inverse_rank: int
    g_inverse_rank: int


@dataclass(frozen=True)
class Grid:
    """P ranks as ``rows`` x ``columns`` (Pauloski et al. 2022, section 4).

    The ranks of a row are the gradient workers of that row's layers. A column holds one worker of
    every row, so that all columns broadcast preconditioned gradients at the same time.
    """

    rows: int
    columns: int

    def row_of(self, rank: int) -> int:
        """The row a rank is in."""
        return rank // self.columns

    def column_of(self, rank: int) -> int:
        """The column a rank is in."""
        return rank % self.columns

    def row(self, index: int) -> range:
        """The ranks of a row, in order."""
        return range(index * self.columns, (index + 1) * self.columns)

    def column(self, index: int) -> range:
        """The ranks of a column, in order: the worker of row 0 first."""
        return range(index, self.rows * self.columns, self.columns)


def gradient_worker_count(world_size: int, fraction: float) -> int:
    """Gradient workers a layer: max(1, fraction x world size).

    Raises:
        ValueError: If that is not an integer that divides the world size.
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(
            f"grad_worker_fraction={fraction} is outside 0..1; use 1.0 (every rank preconditions "
            f"every layer) or 0.0 (one rank a layer)"
        )
    workers = max(1.0, fraction * world_size)
    whole = round(workers)
    # A fraction such as 1/3, typed with six digits, is meant exactly.
    if abs(workers - whole) > 1e-6 * world_size or world_size % whole:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        choices = ", ".join(f"{n / world_size:.6g}" for n in divisors)
        raise ValueError(
            f"grad_worker_fraction={fraction:g} with {world_size} processes gives {workers:g} "
            f"gradient workers, which does not divide them evenly; use one of {choices}"
        )
    return whole


def factor_cost(groups: int, dim: int, cost: AssignmentCost) -> float:
    """Cost of one factor: n³ for computation, n² for memory, times its groups."""
    return float(groups * dim ** (3 if cost == "compute" else 2))


def assign_layers(
    layers: Sequence[LayerDims],
    grid: Grid,
    *,
    cost: AssignmentCost = "compute",
    colocate_factors: bool = True,
) -> list[LayerAssignment]:
    """Assign layers to rows, then factors to ranks of the row, longest processing time first.

    With ``colocate_factors`` one rank decomposes both factors of a layer; otherwise each factor
    goes to the rank of the row with the least to do. Layers are in an order that all ranks share,
    and ties go to the lowest row and rank, so that every rank arrives at the same answer.
    """
    a_costs = [
        float(layer.groups * layer.in_dim)
        if layer.diagonal_a
        else factor_cost(layer.groups, layer.in_dim, cost)
        for layer in layers
    ]
    g_costs = [factor_cost(layer.groups, layer.out_dim, cost) for layer in layers]
    rows = _idle(range(grid.rows))
    ranks: dict[int, _Loads] = {}
    assignments: dict[int, LayerAssignment] = {}
    for i in sorted(range(len(layers)), key=lambda i: (-(a_costs[i] + g_costs[i]), i)):
        row = _give(rows, a_costs[i] + g_costs[i])
        loads = ranks[row] = ranks.get(row) or _idle(grid.row(row))
        if colocate_factors:
            solver = _give(loads, a_costs[i] + g_costs[i])
            assignments[i] = LayerAssignment(row, solver, solver)
        else:  # the costlier one first
            costs = sorted([(-a_costs[i], 0), (-g_costs[i], 1)])
            solvers = {which: _give(loads, -cost) for cost, which in costs}
            assignments[i] = LayerAssignment(row, solvers[0], solvers[1])
    return [assignments[i] for i in range(len(layers))]


def assign_owners(
    layers: Sequence[LayerDims], world_size: int, assignment: OwnerAssignment
) -> list[int]:
    """Assign each layer to one rank, its owner.

    "round_robin" gives layer i to rank i mod P (Zhang et al. 2023); "balanced" the next largest to
    the rank with the least memory taken.
    """
    if assignment == "round_robin":
        return [i % world_size for i in range(len(layers))]
    assigned = assign_layers(layers, Grid(world_size, 1), cost="memory")
    return [each.row for each in assigned]


def balance_costs(costs: Sequence[float], world_size: int) -> list[int]:
    """Assign pieces of work of these costs to ranks, longest processing time first."""
    loads, ranks = _idle(range(world_size)), [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        ranks[i] = _give(loads, costs[i])
    return ranks


_Loads: TypeAlias = list[tuple[float, int]]
"""A heap of loads, each with its bearer: the least is the first, of equal ones the lowest."""


def _idle(bearers: range) -> _Loads:
    return [(0.0, bearer) for bearer in bearers]


def _give(loads: _Loads, work: float) -> int:
    """Give work to the bearer with the least to do; returns the bearer."""
    load, bearer = loads[0]
    heapq.heapreplace(loads, (load + work, bearer))
    return bearer
