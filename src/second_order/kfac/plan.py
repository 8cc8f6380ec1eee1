"""Plans: which rank does what for each layer, found alike on every rank without messages.

| system   | statistics from | factors kept by   | solved by        | preconditioned by            |
|----------|-----------------|-------------------|------------------|------------------------------|
| KAISA    | every rank      | every rank, or    | one rank, or one | a row of the grid of ranks   |
|          |                 | its solver        | for each factor  |                              |
| DPKFAC   | the owner       | the owner         | the owner        | the owner                    |
| DistKFAC | every rank, or  | every rank, or    | one rank, on     | every rank                   |
|          | stats workers   | its solver        | threads          |                              |

Where layers have changed, the plan is compiled into a :class:`StepPlan`: what this rank does, as
data, which steps loop over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.distributed.assignment import (
    AssignmentCost,
    Grid,
    LayerDims,
    OwnerAssignment,
    assign_layers,
    assign_owners,
    balance_costs,
    gradient_worker_count,
)
from second_order.distributed.world import World
from second_order.kronecker.block import KroneckerBlock, LayerBatch, batch_layers
from second_order.kronecker.factors import StatisticsSums
from second_order.kronecker.gradient import GradientBlock
from second_order.kronecker.layers import Approximation
from second_order.kronecker.model_blocks import BlockRules
from second_order.optimizers.config import KFACOptions

__all__ = [
    "Item",
    "LayerPlan",
    "Plan",
    "Planner",
    "StepPlan",
    "System",
    "block_rules",
    "compile_step",
    "dims_of",
    "distkfac_plan",
    "dpkfac_plan",
    "gradient_owners",
    "kaisa_plan",
    "sum_statistics",
    "with_one_worker",
]

MAX_EXACT_DIM = 256
"""Entries up to which the exact block of a norm is a full matrix; above, it is the diagonal."""


def block_rules(
    options: KFACOptions, doubly_factored: Mapping[str, tuple[int, int]] | str | None = None
) -> BlockRules:
    """The rules for which modules become blocks."""
    return BlockRules(
        max_factor_dim=options.max_factor_dim,
        doubly_factored={} if doubly_factored is None else doubly_factored,
        max_exact_dim=MAX_EXACT_DIM if options.precondition_norms else None,
        unsupported_layers=options.unsupported_layers,
        approximation=options.kfac_approx,
    )


Item: TypeAlias = tuple[KroneckerBlock, str]
"""A factor of a layer, by its letter."""


@dataclass(frozen=True)
class LayerPlan:
    """The ranks that work on a layer."""

    solvers: tuple[int, int]  # the ranks that decompose A and G
    workers: range  # the gradient workers: the ranks that precondition the layer's gradient
    keeps_all: bool  # whether every rank keeps A and G, and not the ranks alone that decompose them
    source: int | None = None  # the rank whose batches alone make the statistics; None if all do

    def solver(self, letter: str) -> int:
        """The rank that decomposes a factor, by its letter."""
        return self.solvers[letter == "G"]

    def keeper(self, letter: str) -> int | None:
        """The rank that keeps a factor, by its letter; None if every rank does."""
        return None if self.keeps_all else self.solver(letter)

    @property
    def row(self) -> int:
        """The number of the gradient workers' row in the grid of ranks."""
        return self.workers[0] // len(self.workers)

    def contributors(self, ranks: int) -> int:
        """Of so many ranks, the number whose batches make the statistics."""
        return ranks if self.source is None else 1

    def __str__(self) -> str:
        if self.source is not None:
            return f"owner {self.source}"
        solvers = "+".join(map(str, dict.fromkeys(self.solvers)))
        workers = "+".join(map(str, self.workers))
        if len(self.workers) > 2:
            workers = f"{self.workers[0]}-{self.workers[-1]}"
        return f"solve {solvers}, precondition {workers}"


@dataclass(frozen=True)
class Plan:
    """The ranks, a row of whose grid preconditions a layer, and the plan of each layer in order."""

    grid: Grid
    layers: Sequence[LayerPlan]


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
    """Plan as KAISA does: longest processing time first, rows of the grid as gradient workers."""
    columns = gradient_worker_count(ranks, fraction)
    grid = Grid(ranks // columns, columns)
    plans = []
    for each in assign_layers(layers, grid, cost=cost, colocate_factors=colocate):
        solvers = (each.a_inverse_rank, each.g_inverse_rank)
        plans.append(LayerPlan(solvers, grid.row(each.row), keeps_all))
    return Plan(grid, plans)


def dpkfac_plan(layers: Sequence[LayerDims], ranks: int, *, assignment: OwnerAssignment) -> Plan:
    """Plan as DPKFAC does: a layer's owner does all the work on it."""
    plans = []
    for owner in assign_owners(layers, ranks, assignment):
        workers = range(owner, owner + 1)
        plans.append(LayerPlan((owner, owner), workers, keeps_all=False, source=owner))
    return Plan(Grid(ranks, 1), plans)


def distkfac_plan(layers: Sequence[LayerDims], ranks: int, *, keeps_all: bool) -> Plan:
    """Plan as DistKFAC does: solves spread over the ranks, all of which precondition everything."""
    solvers = balance_costs([layer.cost for layer in layers], ranks)
    plans = [LayerPlan((rank, rank), range(ranks), keeps_all) for rank in solvers]
    return Plan(Grid(1, ranks), plans)


def with_one_worker(plan: Plan) -> Plan:
    """A plan where one rank does all the work on each layer that the others have not to see.

    That suits gradients of which each rank has some rows: they come together on one rank anyway,
    and the others need no inverse. It is the rank that decomposes A.
    """
    layers = []
    for layer in plan.layers:
        rank = layer.solver("A")
        layers.append(replace(layer, solvers=(rank, rank), workers=range(rank, rank + 1)))
    return Plan(Grid(plan.grid.rows * plan.grid.columns, 1), layers)


def gradient_owners(sizes: Sequence[int], owners: Sequence[int | None], ranks: int) -> list[int]:
    """The owner of each gradient, by its elements and the owner of its layer.

    For a gradient of no layer, whose owner is None, it is the rank that gets the least.
    """
    load = [0] * ranks
    for size, owner in zip(sizes, owners, strict=True):
        if owner is not None:
            load[owner] += size
    found = list(owners)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if found[i] is None:
            rank = min(range(ranks), key=load.__getitem__)
            load[rank] += sizes[i]
            found[i] = rank
    return [owner for owner in found if owner is not None]


def dims_of(block: KroneckerBlock) -> LayerDims:
    """The sizes of a layer that a plan is made from, and the cost of its solve.

    That is the sum of n³ over its factors, of n for a diagonal one.
    """
    shape, cost = block.shape, 0.0
    for k in shape.factor_names:
        cost += shape.groups * shape.dims[k] ** (1 if k in shape.diagonals else 3)
    return LayerDims(shape.groups, shape.in_dim, shape.out_dim, shape.diagonal_a, cost)


@dataclass(frozen=True)
class System:
    """The choices in which the systems with Kronecker factors differ."""

    plan: Callable[..., Plan]  # a Planner: makes the plan of the layers: which rank does what
    rules: BlockRules  # for which modules become blocks
    said: str = ""  # the system's own options, for comparison between ranks
    # Where mean gradients go: "owner", to the layers' owners alone; "all_reduce", to all ranks
    # although layers have owners; None without owners.
    owners: str | None = None
    conv_approximation: Approximation | None = None  # None for that of other layers
    # Makes an inverter on threads; None: inverses are computed in the step.
    inverter: Callable[..., Any] | None = None
    pipelined: bool = False  # statistics leave for the other ranks while backward still runs
    exchange_dtype: torch.dtype | None = None  # of factors and decompositions; None for their own
    # Whether the cost model chooses the number of gradient workers: the ``fraction`` of the plan.
    auto_workers: bool = False


@dataclass(frozen=True)
class StepPlan:
    """What this rank does at a step."""

    layers: Mapping[KroneckerBlock, LayerPlan]  # the plan of each layer that trains
    row: World  # the ranks that precondition the same layers as this one
    column: World  # those it exchanges preconditioned gradients with, one of each row
    wire: torch.dtype | None = None  # in which decompositions travel; None for their own
    taken: Sequence[KroneckerBlock] = ()  # into whose factors the passes of this rank go
    of_gradients: Sequence[GradientBlock] = ()  # whose factors are made of gradients
    reporting: Sequence[KroneckerBlock] = ()  # whose changes this rank reports after a refresh
    # The factors that this rank decomposes, by layer.
    to_solve: Mapping[KroneckerBlock, Sequence[str]] = field(default_factory=dict)
    # Of the layers that this row preconditions, the position in it of the factor's solver.
    to_send: Mapping[Item, int] = field(default_factory=dict)
    costs: Mapping[KroneckerBlock, float] = field(default_factory=dict)  # of the layers' solves
    banks: Sequence[LayerBatch] = ()  # of layers that this rank preconditions, those alike in one


def compile_step(
    world: World,
    grid: Grid,
    layers: Mapping[KroneckerBlock, LayerPlan],
    wire: torch.dtype | None,
) -> StepPlan:
    """List what this rank does; a collective, for the groups of its row and its column."""
    rank = world.rank
    row = grid.row(grid.row_of(rank))
    taken: list[KroneckerBlock] = []
    to_solve: dict[KroneckerBlock, list[str]] = {}
    to_send: dict[Item, int] = {}
    for block, layer in layers.items():
        letters = block.shape.factor_names
        if block.hooked_modules and layer.source in (None, rank):
            taken.append(block)
        if rank in layer.solvers:
            to_solve[block] = [k for k in letters if layer.solver(k) == rank]
        if layer.workers == row:
            to_send |= {(block, k): row.index(layer.solver(k)) for k in letters}
    return StepPlan(
        layers=layers,
        row=world.subgroup(row),
        column=world.subgroup(grid.column(grid.column_of(rank))),
        wire=wire,
        taken=taken,
        of_gradients=[block for block in layers if isinstance(block, GradientBlock)],
        reporting=[block for block, layer in layers.items() if layer.workers[0] == rank],
        to_solve=to_solve,
        to_send=to_send,
        costs={block: dims_of(block).cost for block in layers},
        banks=batch_layers(block for block, layer in layers.items() if rank in layer.workers),
    )


def sum_statistics(
    world: World,
    layers: Mapping[KroneckerBlock, LayerPlan],
    sums: Mapping[KroneckerBlock, StatisticsSums],
    wire: torch.dtype | None = None,
) -> None:
    """Add statistics over the ranks that contribute, in place."""
    heads: list[Tensor] = []
    factors: list[Tensor] = []
    keepers: list[int | None] = []
    for block, each in sums.items():
        if layers[block].source is None:
            heads.append(each.head)
            factors += each.factors.values()
            keepers += [layers[block].keeper(letter) for letter in each.factors]
    pending = []
    if wire is not None:  # numbers of examples are not rounded
        pending.append(world.all_reduce(heads))
        heads = []
    everyone: list[int | None] = [None] * len(heads)
    if any(keeper is not None for keeper in keepers):
        pending.append(world.reduce([*heads, *factors], everyone + keepers, wire))
    else:
        pending.append(world.all_reduce([*heads, *factors], dtype=wire))
    for message in pending:
        message.wait()
