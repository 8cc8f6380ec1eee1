"""Plans: which rank does what for each layer.

| system   | statistics from | factors stored by  | inverted by    | preconditioned by |
|----------|-----------------|--------------------|----------------|-------------------|
| KAISA    | every rank      | every rank, or the | one rank, or   | a row of the grid |
|          |                 | inverse rank       | one per factor | of ranks          |
| DPKFAC   | the owner       | the owner          | the owner      | the owner         |
| DistKFAC | every rank, or  | every rank, or the | one rank, on   | every rank        |
|          | stats workers   | inverse rank       | threads        |                   |

    a planner         (layer dimensions, world size) -> Plan, a pure function: every
                      rank computes the same plan without messages
    Plan              a LayerPlan per layer: its inverse ranks, workers and owners
    compile_step      Plan -> StepPlan: this rank's work, as data that steps loop over
    sum_statistics    adds statistics over the ranks, as the plan says

Layers are planned when they change, and the plan is compiled once for the steps that
follow. ``compile_step`` and ``sum_statistics`` are collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
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
from second_order.distributed.world import PendingReduction, World
from second_order.kronecker.block import KroneckerBlock, LayerBatch, batch_layers
from second_order.kronecker.factors import StatisticsSums
from second_order.kronecker.gradient import GradientBlock
from second_order.kronecker.layers import Approximation
from second_order.kronecker.model_blocks import BlockRules
from second_order.optimizers.config import KFACOptions

__all__ = [
    "FactorKey",
    "LayerPlan",
    "Plan",
    "StepPlan",
    "System",
    "assign_gradient_owners",
    "block_rules",
    "compile_step",
    "contributes",
    "distkfac_plan",
    "dpkfac_plan",
    "kaisa_plan",
    "layer_dims",
    "sum_statistics",
    "with_one_worker",
]

MAX_EXACT_DIM = 256
"""Largest norm layer, in entries, with a full exact block; a larger one is diagonal."""

FactorKey: TypeAlias = tuple[KroneckerBlock, str]
"""A layer, and the name of one of its factors."""


def block_rules(
    options: KFACOptions,
    doubly_factored: Mapping[str, tuple[int, int]] | str | None = None,
) -> BlockRules:
    """Return the rules that decide which modules become layers."""
    max_exact_dim: int | None = None
    if options.precondition_norms:
        max_exact_dim = MAX_EXACT_DIM
    return BlockRules(
        max_factor_dim=options.max_factor_dim,
        doubly_factored=doubly_factored or {},
        max_exact_dim=max_exact_dim,
        unsupported_layers=options.unsupported_layers,
        approximation=options.kfac_approx,
    )


# ------------------------------------------------------------------- plans of all ranks


@dataclass(frozen=True)
class LayerPlan:
    """The ranks that work on a layer.

    Attributes:
        inverse_ranks: The ranks that decompose A and G.
        workers: The gradient workers, which precondition the layer's gradient.
        factors_everywhere: Whether all ranks store A and G; if not, inverse ranks do.
        batch_rank: The only rank whose batches enter the statistics; None if all do.
    """

    inverse_ranks: tuple[int, int]
    workers: range
    factors_everywhere: bool
    batch_rank: int | None = None

    def inverse_rank(self, factor: str) -> int:
        """Return the rank that decomposes a factor.

        That of A also decomposes a third factor L.
        """
        a_rank, g_rank = self.inverse_ranks
        return g_rank if factor == "G" else a_rank

    def factor_owner(self, factor: str) -> int | None:
        """Return the rank that stores a factor; None if all do."""
        return None if self.factors_everywhere else self.inverse_rank(factor)

    @property
    def row(self) -> int:
        """The row of the gradient workers in the grid of ranks."""
        return self.workers[0] // len(self.workers)

    def contributors(self, ranks: int) -> int:
        """Return how many of the ranks contribute statistics."""
        return ranks if self.batch_rank is None else 1

    def __str__(self) -> str:
        if self.batch_rank is not None:
            return f"owner {self.batch_rank}"
        inverse_ranks = "+".join(map(str, dict.fromkeys(self.inverse_ranks)))
        workers = "+".join(map(str, self.workers))
        if len(self.workers) > 2:
            workers = f"{self.workers[0]}-{self.workers[-1]}"
        return f"solve {inverse_ranks}, precondition {workers}"


def contributes(layer_plan: LayerPlan | None, rank: int) -> bool:
    """Return whether a rank's batches contribute to a layer's statistics.

    A layer that has never trained has no plan yet. All ranks capture it, so that its
    future owner will have statistics.
    """
    return layer_plan is None or layer_plan.batch_rank in (None, rank)


@dataclass(frozen=True)
class Plan:
    """The plan of all layers.

    Attributes:
        grid: The grid of ranks. One row of it preconditions a layer.
        layers: The plan of each layer.
    """

    grid: Grid
    layers: Sequence[LayerPlan]


def kaisa_plan(
    layers: Sequence[LayerDims],
    ranks: int,
    *,
    fraction: float,
    cost: AssignmentCost,
    colocate: bool,
    factors_everywhere: bool,
) -> Plan:
    """Plan as KAISA does: by longest processing time, with rows of gradient workers.

    Args:
        layers: The dimensions of each layer.
        ranks: Number of ranks.
        fraction: Share of the ranks that precondition a layer.
        cost: What the assignment balances.
        colocate: Whether one rank decomposes both factors of a layer.
        factors_everywhere: As in :class:`LayerPlan`.
    """
    columns = gradient_worker_count(ranks, fraction)
    grid = Grid(ranks // columns, columns)
    plans = []
    for assigned in assign_layers(layers, grid, cost=cost, colocate_factors=colocate):
        plan = LayerPlan(
            inverse_ranks=(assigned.a_inverse_rank, assigned.g_inverse_rank),
            workers=grid.row(assigned.row),
            factors_everywhere=factors_everywhere,
        )
        plans.append(plan)
    return Plan(grid, plans)


def dpkfac_plan(
    layers: Sequence[LayerDims], ranks: int, *, assignment: OwnerAssignment
) -> Plan:
    """Plan as DPKFAC does: a layer's owner does all the work on it."""
    plans = []
    for owner in assign_owners(layers, ranks, assignment):
        plan = LayerPlan(
            inverse_ranks=(owner, owner),
            workers=range(owner, owner + 1),
            factors_everywhere=False,
            batch_rank=owner,
        )
        plans.append(plan)
    return Plan(Grid(ranks, 1), plans)


def distkfac_plan(
    layers: Sequence[LayerDims], ranks: int, *, factors_everywhere: bool
) -> Plan:
    """Plan as DistKFAC does: spread the inverses, and let all ranks precondition."""
    plans = []
    for rank in balance_costs([layer.cost for layer in layers], ranks):
        plan = LayerPlan(
            inverse_ranks=(rank, rank),
            workers=range(ranks),
            factors_everywhere=factors_everywhere,
        )
        plans.append(plan)
    return Plan(Grid(1, ranks), plans)


def with_one_worker(plan: Plan) -> Plan:
    """Return the plan in which A's inverse rank alone inverts and preconditions.

    This suits sharded gradients. The rows of a gradient must be collected on one rank
    anyway, and the other ranks then need no inverse.
    """
    plans = []
    for layer_plan in plan.layers:
        rank = layer_plan.inverse_rank("A")
        workers = range(rank, rank + 1)
        plans.append(replace(layer_plan, inverse_ranks=(rank, rank), workers=workers))
    return Plan(Grid(plan.grid.rows * plan.grid.columns, 1), plans)


def assign_gradient_owners(
    sizes: Sequence[int], owners: Sequence[int | None], ranks: int
) -> list[int]:
    """Return the owner of each gradient.

    Args:
        sizes: Elements of each gradient.
        owners: The owner of each gradient's layer. A gradient outside of layers has
            None: it goes to the rank with the fewest elements so far, the largest
            gradient first.
        ranks: Number of ranks.
    """
    load = [0] * ranks
    assigned: dict[int, int] = {}  # owner, by the gradient's index
    for i, owner in enumerate(owners):
        if owner is not None:
            assigned[i] = owner
            load[owner] += sizes[i]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if i not in assigned:
            rank = min(range(ranks), key=load.__getitem__)
            assigned[i] = rank
            load[rank] += sizes[i]
    return [assigned[i] for i in range(len(sizes))]


def layer_dims(block: KroneckerBlock) -> LayerDims:
    """Return a layer's dimensions for a plan, with the cost of its inverse.

    The cost is the sum of n³ over the factors. A diagonal factor costs n.
    """
    shape = block.shape
    cost = 0.0
    for factor in shape.factor_names:
        exponent = 1 if factor in shape.diagonals else 3
        cost += shape.groups * shape.dims[factor] ** exponent
    return LayerDims(shape.groups, shape.in_dim, shape.out_dim, shape.diagonal_a, cost)


@dataclass(frozen=True)
class System:
    """What distinguishes KAISA, DPKFAC and DistKFAC.

    Attributes:
        plan: Makes the plan from the layers, in an order that all ranks share, and the
            number of ranks.
        rules: The rules that decide which modules become layers.
        description: The system's own options as text, which ranks compare.
        from_owner: Whether only the owner's batches enter the statistics (DPKFAC).
        means_to_owners: Whether only the owner of a layer receives its mean gradient.
            Otherwise all ranks do.
        conv_approximation: Replaces the option ``kfac_approx`` for convolutions.
        inverter: Makes an inverter with threads. None: the step computes the inverses.
        pipelined: Whether statistics are sent while backward still runs (SPD-KFAC).
        exchange_dtype: Communication dtype of factors and
            decompositions; None for their own.
        auto_workers: Whether the cost model chooses the number of gradient workers,
            which the argument ``fraction`` of the plan sets.
    """

    plan: Callable[..., Plan]
    rules: BlockRules
    description: str = ""
    from_owner: bool = False
    means_to_owners: bool = False
    conv_approximation: Approximation | None = None
    inverter: Callable[..., Any] | None = None
    pipelined: bool = False
    exchange_dtype: torch.dtype | None = None
    auto_workers: bool = False


# ------------------------------------------------------------------- steps of this rank


@dataclass(frozen=True)
class StepPlan:
    """What this rank does at a step.

    Attributes:
        layers: The layers that train, with their plans.
        params: The trainable parameters of these layers.
        row: The ranks that precondition the same layers as this rank.
        column: The ranks, one of each row, that exchange preconditioned gradients.
        exchange_dtype: Communication dtype of decompositions; None for their own.
        contributing: Layers whose statistics this rank's passes contribute to.
        gradient_factored: Layers with factors computed from the weight gradient.
        reporting: Layers whose metrics this rank reports after a refresh.
        measured: Layers whose running averages this rank has, if one rank is chosen for
            each layer. It reports their mean curvature, and receives the statistics of
            stats workers.
        preconditioned: Layers that this rank preconditions, as inverse ranks always do.
        to_invert: The factors that this rank decomposes, by layer.
        sources: For each factor that this row preconditions with, the rank that
            decomposes it and sends it to the row, by its position in the row. For
            example 1 for rank 3 in the row of ranks 2 and 3.
        costs: Number of operations needed to compute each layer's inverse.
        batches: The layers that this rank preconditions, in batches of equal shape.
    """

    layers: Mapping[KroneckerBlock, LayerPlan]
    row: World
    column: World
    params: Set[Tensor] = frozenset()
    exchange_dtype: torch.dtype | None = None
    contributing: Sequence[KroneckerBlock] = ()
    gradient_factored: Sequence[GradientBlock] = ()
    reporting: Sequence[KroneckerBlock] = ()
    measured: Sequence[KroneckerBlock] = ()
    preconditioned: Set[KroneckerBlock] = frozenset()
    to_invert: Mapping[KroneckerBlock, Sequence[str]] = field(default_factory=dict)
    sources: Mapping[FactorKey, int] = field(default_factory=dict)
    costs: Mapping[KroneckerBlock, float] = field(default_factory=dict)
    batches: Sequence[LayerBatch] = ()


def compile_step(
    world: World,
    grid: Grid,
    layers: Mapping[KroneckerBlock, LayerPlan],
    exchange_dtype: torch.dtype | None,
    inversion_cost: float,
    has_stats_workers: bool,
) -> StepPlan:
    """List what this rank does. Collective: makes the groups of its row and its column.

    The inverse of an n × n factor takes ``inversion_cost`` n³ operations. Stats workers
    send the statistics of a layer only to the rank that decomposes its A.

    For example, let four ranks form two rows of two columns. Ranks 2 and 3 are a row:
    both precondition the layers of this row. Rank 1, in the other row, is in the column
    of rank 3, and receives these layers' preconditioned gradients from it. ::

        0  1
        2  3
    """
    rank = world.rank
    row = grid.row(grid.row_of(rank))
    contributing: list[KroneckerBlock] = []
    gradient_factored: list[GradientBlock] = []
    reporting: list[KroneckerBlock] = []
    measured: list[KroneckerBlock] = []
    to_invert: dict[KroneckerBlock, list[str]] = {}
    sources: dict[FactorKey, int] = {}
    preconditioned: list[KroneckerBlock] = []
    for block, layer_plan in layers.items():
        # Sort the layer into the work of this rank.
        if block.hooked_modules and contributes(layer_plan, rank):
            contributing.append(block)
        if isinstance(block, GradientBlock):
            gradient_factored.append(block)
        reporting_rank = layer_plan.workers[0]
        if reporting_rank == rank:
            reporting.append(block)
        measuring_rank = reporting_rank
        if has_stats_workers:
            measuring_rank = layer_plan.inverse_rank("A")
        if measuring_rank == rank:
            measured.append(block)
        if rank in layer_plan.workers:
            preconditioned.append(block)
        if rank in layer_plan.inverse_ranks:
            to_invert[block] = []

        # A factor's inverse comes from the rank that computes it. All planners place
        # the inverse ranks of a layer in the row of its gradient workers.
        for factor in block.shape.factor_names:
            inverse_rank = layer_plan.inverse_rank(factor)
            if inverse_rank == rank:
                to_invert[block].append(factor)
            if rank in layer_plan.workers:
                sources[block, factor] = row.index(inverse_rank)
    return StepPlan(
        layers=layers,
        row=world.subgroup(row),
        column=world.subgroup(grid.column(grid.column_of(rank))),
        params={p for block in layers for p in block.params},
        exchange_dtype=exchange_dtype,
        contributing=contributing,
        gradient_factored=gradient_factored,
        reporting=reporting,
        measured=measured,
        preconditioned=set(preconditioned),
        to_invert=to_invert,
        sources=sources,
        costs={block: inversion_cost * layer_dims(block).cost for block in layers},
        batches=batch_layers(preconditioned),
    )


def sum_statistics(
    world: World,
    layers: Mapping[KroneckerBlock, LayerPlan],
    sums: Mapping[KroneckerBlock, StatisticsSums],
    dtype: torch.dtype | None = None,
) -> None:
    """Add statistics over the ranks that contribute, in place. Collective.

    Args:
        world: The ranks.
        layers: The plan of each layer.
        sums: The statistics of this rank.
        dtype: Communication dtype of the factors; None for their own.
    """
    # The head of a layer has its number of examples and its mean eigenvalues, which all
    # ranks need. A factor is needed by its owner, or by all ranks.
    heads: list[Tensor] = []
    factors: list[Tensor] = []
    owners: list[int | None] = []  # of each factor
    for block, layer_sums in sums.items():
        layer_plan = layers[block]
        if layer_plan.batch_rank is not None:
            # This rank's statistics are those of the only rank that contributes.
            continue
        heads.append(layer_sums.head)
        for factor, tensor in layer_sums.factors.items():
            factors.append(tensor)
            owners.append(layer_plan.factor_owner(factor))

    # A narrow dtype would round numbers of examples, so send the heads separately.
    pending: list[PendingReduction] = []
    with_factors = heads
    if dtype is not None:
        pending.append(world.all_reduce(heads))
        with_factors = []
    tensors = [*with_factors, *factors]
    if any(owner is not None for owner in owners):
        everyone: list[int | None] = [None] * len(with_factors)
        pending.append(world.reduce(tensors, [*everyone, *owners], dtype))
    else:
        pending.append(world.all_reduce(tensors, dtype=dtype))
    for message in pending:
        message.wait()
