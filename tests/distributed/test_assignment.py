"""Who solves what: valid, the same on every rank, and balanced."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from second_order.distributed.assignment import (
    AssignmentCost,
    Grid,
    LayerAssignment,
    LayerDims,
    OwnerAssignment,
    assign_layers,
    assign_owners,
    balance_costs,
    factor_cost,
    gradient_worker_count,
)
from second_order.kfac.plan import assign_gradient_owners

COSTS: tuple[AssignmentCost, ...] = ("compute", "memory")
DIMS = st.builds(
    LayerDims,
    groups=st.integers(1, 4),
    in_dim=st.integers(1, 64),
    out_dim=st.integers(1, 64),
    diagonal_a=st.booleans(),
)
LAYERS = st.lists(DIMS, max_size=12)
GRIDS = st.builds(Grid, rows=st.integers(1, 4), columns=st.integers(1, 4))


# The grid.


@given(GRIDS)
def test_rows_and_columns_partition_the_ranks(grid: Grid) -> None:
    ranks = list(range(grid.rows * grid.columns))
    rows = [grid.row(i) for i in range(grid.rows)]
    columns = [grid.column(i) for i in range(grid.columns)]
    assert sorted(itertools.chain(*rows)) == ranks
    assert sorted(itertools.chain(*columns)) == ranks
    for row, column in itertools.product(rows, columns):
        assert len(set(row) & set(column)) == 1
    for rank in ranks:
        assert rank in grid.row(grid.row_of(rank))
        assert rank in grid.column(grid.column_of(rank))
        # The worker of row 0 first: a column's message of row i is its i-th.
        assert grid.column(grid.column_of(rank)).index(rank) == grid.row_of(rank)


# Gradient workers.


@pytest.mark.parametrize(
    ("processes", "fraction", "workers"),
    [(1, 1.0, 1), (1, 0.0, 1), (4, 1.0, 4), (4, 0.5, 2), (4, 0.25, 1), (4, 0.0, 1), (4, 0.1, 1),
     (6, 1 / 3, 2), (6, 0.5, 3), (7, 1 / 7, 1), (49, 1 / 49, 1), (96, 1 / 3, 32)],
)  # fmt: skip
def test_the_fraction_sets_the_number_of_gradient_workers(
    processes: int, fraction: float, workers: int
) -> None:
    assert gradient_worker_count(processes, fraction) == workers


def test_an_invalid_fraction_raises_with_the_valid_ones() -> None:
    expected = (
        "grad_worker_fraction=0.3 with 4 processes gives 1.2 gradient workers, which does not "
        "divide them evenly; use one of 0.25, 0.5, 1"
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        gradient_worker_count(4, 0.3)


# Layers.


def test_costs_follow_from_the_dimensions() -> None:
    assert factor_cost(1, 10, "compute") == 1000
    assert factor_cost(3, 10, "compute") == 3000
    assert factor_cost(3, 10, "memory") == 300


def test_computation_and_memory_are_balanced_differently() -> None:
    """One layer of 10³ + 10³ = 2000 against eight of 5³ + 5³ = 250; in n² it is 200 against 50."""
    layers = [LayerDims(1, 10, 10), *[LayerDims(1, 5, 5)] * 8]
    grid = Grid(1, 2)
    compute = [where.a_inverse_rank for where in assign_layers(layers, grid, cost="compute")]
    memory = [where.a_inverse_rank for where in assign_layers(layers, grid, cost="memory")]
    assert compute == [0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert sorted(memory) == [0] * 3 + [1] * 6


def test_work_is_assigned_longest_processing_time_first() -> None:
    assert balance_costs([1.0, 1.0, 1.0, 1.0, 4.0], 2) == [1, 1, 1, 1, 0]
    assert balance_costs([3.0, 3.0, 2.0, 2.0, 2.0], 2) == [0, 1, 0, 1, 0]


# Owners.

POLICIES: tuple[OwnerAssignment, ...] = ("balanced", "round_robin")


@given(LAYERS, st.integers(1, 8), st.sampled_from(POLICIES))
def test_each_layer_has_one_owner_equal_on_every_rank(
    layers: list[LayerDims], ranks: int, assignment: OwnerAssignment
) -> None:
    owners = assign_owners(layers, ranks, assignment)
    assert len(owners) == len(layers)
    assert all(0 <= owner < ranks for owner in owners)
    copies = tuple(LayerDims(d.groups, d.in_dim, d.out_dim, d.diagonal_a) for d in layers)
    assert owners == assign_owners(copies, ranks, assignment)
    assert len(set(owners)) == min(ranks, len(layers)), "nobody idles while another has two"
    if assignment == "round_robin":
        assert owners == [i % ranks for i in range(len(layers))]


# Many ranks: as by looking at every rank each time, and fast.


def plainly(
    layers: list[LayerDims], grid: Grid, cost: AssignmentCost, colocate: bool
) -> list[LayerAssignment]:
    """The definition: longest processing time first, each to the first with the least to do."""
    a_costs = [
        float(x.groups * x.in_dim) if x.diagonal_a else factor_cost(x.groups, x.in_dim, cost)
        for x in layers
    ]
    g_costs = [factor_cost(x.groups, x.out_dim, cost) for x in layers]
    row_load = [0.0] * grid.rows
    rank_load = [0.0] * (grid.rows * grid.columns)

    def give(row: int, work: float) -> int:
        rank = min(grid.row(row), key=lambda r: (rank_load[r], r))
        rank_load[rank] += work
        return rank

    found: dict[int, LayerAssignment] = {}
    for i in sorted(range(len(layers)), key=lambda i: (-(a_costs[i] + g_costs[i]), i)):
        row = min(range(grid.rows), key=lambda r: (row_load[r], r))
        row_load[row] += a_costs[i] + g_costs[i]
        if colocate:
            both = give(row, a_costs[i] + g_costs[i])
            found[i] = LayerAssignment(row, both, both)
        elif a_costs[i] >= g_costs[i]:
            a_inverse_rank = give(row, a_costs[i])
            found[i] = LayerAssignment(row, a_inverse_rank, give(row, g_costs[i]))
        else:
            g_inverse_rank = give(row, g_costs[i])
            found[i] = LayerAssignment(row, give(row, a_costs[i]), g_inverse_rank)
    return [found[i] for i in range(len(layers))]


@given(
    st.lists(DIMS, max_size=40),
    st.builds(Grid, rows=st.integers(1, 9), columns=st.integers(1, 9)),
    st.sampled_from(COSTS),
    st.booleans(),
)
def test_the_assignment_equals_its_definition(
    layers: list[LayerDims], grid: Grid, cost: AssignmentCost, colocate: bool
) -> None:
    found = assign_layers(layers, grid, cost=cost, colocate_factors=colocate)
    assert found == plainly(layers, grid, cost, colocate)


@given(st.lists(st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(0, 3))), max_size=9))
def test_gradients_without_a_layer_go_to_the_least_loaded_rank(
    gradients: list[tuple[int, int | None]],
) -> None:
    """The largest first, the lowest rank where several have the least."""
    sizes = [size for size, _ in gradients]
    expected = [owner for _, owner in gradients]
    load = [0] * 4
    for size, owner in gradients:
        if owner is not None:
            load[owner] += size
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        if expected[i] is None:
            rank = load.index(min(load))
            expected[i] = rank
            load[rank] += sizes[i]
    assert assign_gradient_owners(sizes, [owner for _, owner in gradients], 4) == expected
