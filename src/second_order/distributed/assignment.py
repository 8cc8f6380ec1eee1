"""Assign layers to the ranks that invert factors and precondition gradients.

The functions are pure: every rank computes the same assignment from the same layer
sizes. They use the longest-processing-time rule: in the order of decreasing cost, each
item goes to the rank with the smallest load (Graham 1969).
"""

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
    """The sizes of a layer's factors.

    Attributes:
        groups: Number of pairs of factors A and G.
        in_dim: Number of rows of A.
        out_dim: Number of rows of G.
        diagonal_a: Whether A is diagonal.
        cost: Cost of the inverse: the sum of groups · n³ over the two or three factors.
            A diagonal factor counts as groups · n.
    """

    groups: int
    in_dim: int
    out_dim: int
    diagonal_a: bool = False
    cost: float = 0.0


@dataclass(frozen=True)
class LayerAssignment:
    """The ranks of a layer.

    Attributes:
        row: The row of the grid whose ranks are the layer's gradient workers.
        a_inverse_rank: The rank that decomposes A.
        g_inverse_rank: The rank that decomposes G.
    """

    row: int
    a_inverse_rank: int
    g_inverse_rank: int


@dataclass(frozen=True)
class Grid:
    """The ranks in ``rows`` x ``columns`` (Pauloski et al. 2022, section 4).

    The ranks of a row are the gradient workers of the row's layers. A column has one
    rank of every row, so all columns can broadcast preconditioned gradients at once.
    """

    rows: int
    columns: int

    def row_of(self, rank: int) -> int:
        """Return the row of a rank."""
        return rank // self.columns

    def column_of(self, rank: int) -> int:
        """Return the column of a rank."""
        return rank % self.columns

    def row(self, index: int) -> range:
        """Return the ranks of a row, in order."""
        return range(index * self.columns, (index + 1) * self.columns)

    def column(self, index: int) -> range:
        """Return the ranks of a column, in the order of the rows."""
        return range(index, self.rows * self.columns, self.columns)


def gradient_worker_count(world_size: int, fraction: float) -> int:
    """Return the number of gradient workers per layer: max(1, fraction · world_size).

    Raises:
        ValueError: If the fraction is outside 0..1, or the number does not divide
            ``world_size``.
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(
            f"grad_worker_fraction={fraction} is outside 0..1; use 1.0 (every rank preconditions "
            f"every layer) or 0.0 (one rank per layer)"
        )
    workers = max(1.0, fraction * world_size)
    num_workers = round(workers)
    # The tolerance accepts fractions such as 1/3 that are written with six digits.
    if abs(workers - num_workers) > 1e-6 * world_size or world_size % num_workers:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        choices = ", ".join(f"{n / world_size:.6g}" for n in divisors)
        raise ValueError(
            f"grad_worker_fraction={fraction:g} with {world_size} processes gives {workers:g} "
            f"gradient workers, which does not divide them evenly; use one of {choices}"
        )
    return num_workers


def factor_cost(groups: int, dim: int, cost: AssignmentCost) -> float:
    """Return a factor's cost: groups · n³ for computation, groups · n² for memory."""
    power = 2
    if cost == "compute":
        power = 3
    return float(groups * dim**power)


def assign_layers(
    layers: Sequence[LayerDims],
    grid: Grid,
    *,
    cost: AssignmentCost = "compute",
    colocate_factors: bool = True,
) -> list[LayerAssignment]:
    """Assign each layer to a row of the grid, then its factors to ranks of the row.

    If costs or loads are equal, the first layer and the lowest row and rank come first.

    Args:
        layers: The layers, in the same order on every rank.
        grid: The ranks.
        cost: Whether to balance computation or memory.
        colocate_factors: Whether one rank decomposes both factors of a layer.

    Returns:
        The assignment of each layer, in the order of ``layers``.
    """
    # Compute the cost of each factor.
    a_costs: list[float] = []
    for layer in layers:
        if layer.diagonal_a:
            a_costs.append(float(layer.groups * layer.in_dim))
        else:
            a_costs.append(factor_cost(layer.groups, layer.in_dim, cost))
    g_costs = [factor_cost(layer.groups, layer.out_dim, cost) for layer in layers]

    # Assign the layers, the most expensive first.
    row_loads = _empty_loads(range(grid.rows))
    rank_loads: dict[int, _Loads] = {}  # by row
    assignments: dict[int, LayerAssignment] = {}
    for i in sorted(range(len(layers)), key=lambda i: (-(a_costs[i] + g_costs[i]), i)):
        row = _add_to_smallest(row_loads, a_costs[i] + g_costs[i])
        if row not in rank_loads:
            rank_loads[row] = _empty_loads(grid.row(row))
        loads = rank_loads[row]
        if colocate_factors:
            a_rank = g_rank = _add_to_smallest(loads, a_costs[i] + g_costs[i])
        elif a_costs[i] >= g_costs[i]:
            a_rank = _add_to_smallest(loads, a_costs[i])
            g_rank = _add_to_smallest(loads, g_costs[i])
        else:
            g_rank = _add_to_smallest(loads, g_costs[i])
            a_rank = _add_to_smallest(loads, a_costs[i])
        assignments[i] = LayerAssignment(row, a_rank, g_rank)
    return [assignments[i] for i in range(len(layers))]


def assign_owners(
    layers: Sequence[LayerDims], world_size: int, assignment: OwnerAssignment
) -> list[int]:
    """Return the rank that owns each layer.

    "round_robin" assigns layer i to rank i mod P (Zhang et al. 2023).
    "balanced" balances memory.
    """
    if assignment == "round_robin":
        return [i % world_size for i in range(len(layers))]
    assigned = assign_layers(layers, Grid(world_size, 1), cost="memory")
    return [layer.row for layer in assigned]


def balance_costs(costs: Sequence[float], world_size: int) -> list[int]:
    """Return the rank that each of several tasks with these costs is assigned to."""
    loads = _empty_loads(range(world_size))
    ranks = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        ranks[i] = _add_to_smallest(loads, costs[i])
    return ranks


_Loads: TypeAlias = list[tuple[float, int]]
"""A heap of loads with ranks or rows: the smallest load first, then the lowest rank."""


def _empty_loads(ranks: range) -> _Loads:
    return [(0.0, rank) for rank in ranks]


def _add_to_smallest(loads: _Loads, cost: float) -> int:
    """Add a cost to the smallest load. Returns the rank that has it."""
    load, rank = loads[0]
    heapq.heapreplace(loads, (load + cost, rank))
    return rank
