"""Plans: which rank does what for each layer, found alike on every rank without messages.

| system   | statistics from | factors kept by   | solved by        | preconditioned by            |
|----------|-----------------|-------------------|------------------|------------------------------|
| KAISA    | every rank      | every rank, or    | one rank, or one | a row of the grid of ranks   |
|          |                 | its solver        | for each factor  |                              |
| DPKFAC   | the owner       | the owner         | the owner        | the owner                    |
| DistKFAC | every rank, or  | every rank, or    | one rank, on     | every rank                   |
|          | stats workers   | its solver        | threads          |                              |
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from second_order.distributed.assignment import (
    AssignmentCost,
    Grid,
    LayerDims,
    OwnerAssignment,
    assign_layers,
    assign_owners,
    gradient_worker_count,
    spread_costs,
)
from second_order.kronecker.block import KroneckerBlock

__all__ = [
    "LayerPlan",
    "Plan",
    "Planner",
    "dims_of",
    "distkfac_plan",
    "dpkfac_plan",
    "gradient_owners",
    "kaisa_plan",
    "solve_cost_of",
    "with_one_worker",
]

Pair: TypeAlias = tuple[int, int]
"""A rank for A, and for G."""


@dataclass(frozen=True)
class LayerPlan:
    """The ranks that work on a layer.

    Attributes:
        source: The rank whose batches alone make the statistics; None if all ranks' do.
        keepers: The ranks that keep A and G; None if every rank keeps both.
        solvers: The ranks that decompose A and G.
        workers: The gradient workers: the ranks that precondition the layer's gradient. A range,
            so that a layer's plan is as small for many ranks as for few.
        said: The ranks in words, for :meth:`summary`.
    """

    source: int | None
    keepers: Pair | None
    solvers: Pair
    workers: range
    said: str

    def solver(self, letter: str) -> int:
        """The rank that decomposes a factor, by its letter."""
        return self.solvers[letter == "G"]

    def keeper(self, letter: str) -> int | None:
        """The rank that keeps a factor, by its letter; None if every rank does."""
        return None if self.keepers is None else self.keepers[letter == "G"]

    def keeps(self, rank: int) -> tuple[bool, bool]:
        """Whether a rank keeps A and G."""
        return (
            (True, True)
            if self.keepers is None
            else (
                self.keepers[0] == rank,
                self.keepers[1] == rank,
            )
        )


@dataclass(frozen=True)
class Plan:
    """The ranks that work on each layer.

    Attributes:
        grid: The ranks; a row of it preconditions a layer.
        layers: The plan of each layer, in order.
    """

    grid: Grid
    layers: tuple[LayerPlan, ...]


Planner: TypeAlias = Callable[[Sequence[LayerDims], int], Plan]
"""A plan for layers, in an order that all ranks share, and a number of ranks."""


def kaisa_plan(
    layers: Sequence[LayerDims],
    ranks: int,
    *,
    fraction: float,
    cost: AssignmentCost,
    colocate: bool,
    keeps_all: bool,
) -> Plan:
    """Plan as KAISA does: longest processing time first, rows of the grid as gradient workers.

    Args:
        layers: Sizes of the layers, in an order that all ranks share.
        ranks: Number of ranks.
        fraction: The share of the ranks that precondition a layer.
        cost: The cost that is balanced over the ranks.
        colocate: Whether one rank decomposes both factors of a layer.
        keeps_all: Whether every rank keeps every factor.
    """
    columns = gradient_worker_count(ranks, fraction)
    grid = Grid(ranks // columns, columns)
    plans = []
    for each in assign_layers(layers, grid, cost=cost, colocate_factors=colocate):
        solvers, workers = (each.a_solver, each.g_solver), grid.row(each.row)
        said = f"solve {_ranks(sorted(set(solvers), key=solvers.index))}, precondition "
        keepers = None if keeps_all else solvers
        plans.append(LayerPlan(None, keepers, solvers, workers, said + _ranks(workers)))
    return Plan(grid, tuple(plans))


def dpkfac_plan(layers: Sequence[LayerDims], ranks: int, *, assignment: OwnerAssignment) -> Plan:
    """Plan as DPKFAC does: a layer's owner does all the work on it.

    Args:
        layers: Sizes of the layers, in an order that all ranks share.
        ranks: Number of ranks.
        assignment: How layers are given to owners.
    """
    owners = assign_owners(layers, ranks, assignment)
    plans = (LayerPlan(o, (o, o), (o, o), _one(o), f"owner {o}") for o in owners)
    return Plan(Grid(ranks, 1), tuple(plans))


def distkfac_plan(layers: Sequence[LayerDims], ranks: int, *, keeps_all: bool) -> Plan:
    """Plan as DistKFAC does: solves spread over the ranks, all of which precondition everything.

    Args:
        layers: Sizes of the layers, in an order that all ranks share.
        ranks: Number of ranks.
        keeps_all: Whether every rank keeps every factor; only its solver otherwise.
    """
    everybody = range(ranks)
    plans = (
        LayerPlan(
            None, None if keeps_all else (o, o), (o, o), everybody, f"solve {o}, precondition all"
        )
        for o in spread_costs([layer.cost for layer in layers], ranks)
    )
    return Plan(Grid(1, ranks), tuple(plans))


def with_one_worker(plan: Plan) -> Plan:
    """A plan where one rank does all the work on each layer that the others have not to see.

    That suits gradients of which each rank has some rows: they come together on one rank anyway,
    and the others need no inverse. It is the rank that decomposes A.
    """
    layers = []
    for layer in plan.layers:
        rank = layer.solver("A")
        keepers = None if layer.keepers is None else (rank, rank)
        said = layer.said if layer.workers == _one(rank) else f"solve and precondition {rank}"
        layers.append(LayerPlan(layer.source, keepers, (rank, rank), _one(rank), said))
    return Plan(Grid(plan.grid.rows * plan.grid.columns, 1), tuple(layers))


def gradient_owners(sizes: Sequence[int], owners: Sequence[int | None], ranks: int) -> list[int]:
    """The owner of each gradient; for parameters of no layer, the rank that gets the least.

    Args:
        sizes: Elements of the gradients.
        owners: The owner of each gradient's layer; None for a gradient of no layer.
        ranks: Number of ranks.
    """
    load = [0] * ranks
    for size, owner in zip(sizes, owners, strict=True):
        if owner is not None:
            load[owner] += size
    queue = [(size, rank) for rank, size in enumerate(load)]
    heapq.heapify(queue)
    found = list(owners)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if found[i] is None:
            least, rank = queue[0]
            heapq.heapreplace(queue, (least + sizes[i], rank))
            found[i] = rank
    return [owner for owner in found if owner is not None]


def dims_of(block: KroneckerBlock) -> LayerDims:
    """The sizes of a layer that a plan is made from."""
    shape = block.shape
    cost = solve_cost_of(block)
    return LayerDims(shape.groups, shape.in_dim, shape.out_dim, shape.diagonal_a, cost)


def solve_cost_of(block: KroneckerBlock) -> float:
    """The cost of solving a layer: the sum of n³ over its factors."""
    shape = block.shape
    powers = {letter: 1 if shape.is_diagonal(letter) else 3 for letter in shape.letters}
    return float(sum(shape.groups * shape.dim(k) ** power for k, power in powers.items()))


def _one(rank: int) -> range:
    return range(rank, rank + 1)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks == range(ranks[0], ranks[-1] + 1):
        return f"{ranks[0]}-{ranks[-1]}"
    return "+".join(map(str, ranks))
