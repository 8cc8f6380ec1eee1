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
    gradient_worker_count,
    solve_cost,
    spread_costs,
)

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


def factor_costs(layer: LayerDims, cost: AssignmentCost) -> tuple[float, float]:
    power = 3 if cost == "compute" else 2
    in_power = 1 if layer.diagonal_a else power
    return layer.groups * layer.in_dim**in_power, layer.groups * layer.out_dim**power


def rank_loads(
    layers: list[LayerDims], assigned: list[LayerAssignment], grid: Grid, cost: AssignmentCost
) -> list[float]:
    loads = [0.0] * (grid.rows * grid.columns)
    for layer, where in zip(layers, assigned, strict=True):
        a, g = factor_costs(layer, cost)
        loads[where.a_solver] += a
        loads[where.g_solver] += g
    return loads


def optimum(items: list[float], machines: int) -> float:
    """The smallest possible largest load, by trying everything."""
    best = float("inf")
    for choice in itertools.product(range(machines), repeat=len(items)):
        loads = [0.0] * machines
        for item, machine in zip(items, choice, strict=True):
            loads[machine] += item
        best = min(best, max(loads))
    return best


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
def test_gradient_workers(processes: int, fraction: float, workers: int) -> None:
    assert gradient_worker_count(processes, fraction) == workers


def test_a_fraction_that_gives_no_whole_number_is_refused_with_those_that_do() -> None:
    expected = (
        "grad_worker_fraction=0.3 with 4 processes gives 1.2 gradient workers, which does not "
        "divide them evenly; use one of 0.25, 0.5, 1"
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        gradient_worker_count(4, 0.3)


def test_workers_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="gives 4 gradient workers, which does not divide"):
        gradient_worker_count(6, 4 / 6)


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan")])
def test_a_fraction_outside_its_bounds_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"is outside 0\.\.1; use 1\.0"):
        gradient_worker_count(4, fraction)


@given(st.integers(1, 128), st.integers(1, 128))
def test_every_divisor_of_the_processes_can_be_asked_for(rows: int, columns: int) -> None:
    assert gradient_worker_count(rows * columns, columns / (rows * columns)) == columns


@given(st.integers(2, 600), st.floats(0.01, 1.0))
def test_whatever_the_message_advises_is_accepted(processes: int, fraction: float) -> None:
    try:
        workers = gradient_worker_count(processes, fraction)
    except ValueError as refusal:
        advised = str(refusal).split("use one of ")[1].split(", ")
        divisors = [n for n in range(1, processes + 1) if processes % n == 0]
        assert [gradient_worker_count(processes, float(f)) for f in advised] == divisors
    else:
        assert processes % workers == 0


# Layers.


def test_costs() -> None:
    assert solve_cost(1, 10, "compute") == 1000
    assert solve_cost(3, 10, "compute") == 3000
    assert solve_cost(3, 10, "memory") == 300


@given(LAYERS, GRIDS, st.sampled_from(COSTS), st.booleans())
def test_a_layer_is_solved_by_ranks_of_its_row(
    layers: list[LayerDims], grid: Grid, cost: AssignmentCost, colocate: bool
) -> None:
    assigned = assign_layers(layers, grid, cost=cost, colocate_factors=colocate)
    assert len(assigned) == len(layers)
    for where in assigned:
        assert 0 <= where.row < grid.rows
        assert {where.a_solver, where.g_solver} <= set(grid.row(where.row))
        assert not colocate or where.a_solver == where.g_solver


@given(LAYERS, GRIDS, st.sampled_from(COSTS), st.booleans())
def test_every_rank_arrives_at_the_same_assignment(
    layers: list[LayerDims], grid: Grid, cost: AssignmentCost, colocate: bool
) -> None:
    """Nothing goes in but layers and grid, and the layers' values, not their identities."""
    copies = [LayerDims(d.groups, d.in_dim, d.out_dim, d.diagonal_a) for d in layers]
    first = assign_layers(layers, grid, cost=cost, colocate_factors=colocate)
    assert first == assign_layers(
        tuple(copies), Grid(grid.rows, grid.columns), cost=cost, colocate_factors=colocate
    )


def test_ties_go_to_the_lowest_row_and_rank() -> None:
    equal = [LayerDims(1, 5, 5)] * 5
    assigned = assign_layers(equal, Grid(rows=2, columns=2))
    assert [(where.row, where.a_solver) for where in assigned] == [
        (0, 0), (1, 2), (0, 1), (1, 3), (0, 0),
    ]  # fmt: skip


@given(LAYERS, GRIDS, st.sampled_from(COSTS), st.booleans())
def test_no_row_and_no_rank_is_ahead_by_more_than_one_item(
    layers: list[LayerDims], grid: Grid, cost: AssignmentCost, colocate: bool
) -> None:
    """What giving each item to the least loaded guarantees: max <= mean + largest item."""
    assigned = assign_layers(layers, grid, cost=cost, colocate_factors=colocate)
    pairs = [factor_costs(layer, cost) for layer in layers]
    wholes = [a + g for a, g in pairs]
    largest_layer = max(wholes, default=0.0)
    largest_item = largest_layer if colocate else max(itertools.chain(*pairs), default=0.0)

    row_loads = [0.0] * grid.rows
    for where, whole in zip(assigned, wholes, strict=True):
        row_loads[where.row] += whole
    assert max(row_loads) <= sum(row_loads) / grid.rows + largest_layer

    loads = rank_loads(layers, assigned, grid, cost)
    for i, row_load in enumerate(row_loads):
        in_row = [loads[rank] for rank in grid.row(i)]
        assert sum(in_row) == row_load
        assert max(in_row) <= row_load / grid.columns + largest_item


@given(st.lists(DIMS, min_size=1, max_size=6), st.integers(1, 3), st.sampled_from(COSTS))
def test_the_largest_load_is_within_a_third_of_the_optimum(
    layers: list[LayerDims], ranks: int, cost: AssignmentCost
) -> None:
    """Graham's bound for longest processing time first: 4/3 - 1/(3m)."""
    items = [sum(factor_costs(layer, cost)) for layer in layers]
    bound = (4 / 3 - 1 / (3 * ranks)) * optimum(items, ranks) * (1 + 1e-12)
    for grid in (Grid(1, ranks), Grid(ranks, 1)):
        assigned = assign_layers(layers, grid, cost=cost)
        assert max(rank_loads(layers, assigned, grid, cost)) <= bound


def test_computation_and_memory_are_balanced_differently() -> None:
    """One layer of 10³ + 10³ = 2000 against eight of 5³ + 5³ = 250; in n² it is 200 against 50."""
    layers = [LayerDims(1, 10, 10), *[LayerDims(1, 5, 5)] * 8]
    grid = Grid(1, 2)
    compute = [where.a_solver for where in assign_layers(layers, grid, cost="compute")]
    memory = [where.a_solver for where in assign_layers(layers, grid, cost="memory")]
    assert compute == [0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert sorted(memory) == [0] * 3 + [1] * 6


def test_work_is_spread_longest_first_to_whom_has_least() -> None:
    assert spread_costs([1.0, 1.0, 1.0, 1.0, 4.0], 2) == [1, 1, 1, 1, 0]
    assert spread_costs([3.0, 3.0, 2.0, 2.0, 2.0], 2) == [0, 1, 0, 1, 0]


def test_groups_count() -> None:
    """Eight groups of 5 are as much work as one of 10."""
    layers = [LayerDims(8, 5, 5), LayerDims(1, 10, 10), LayerDims(1, 2, 2), LayerDims(1, 2, 2)]
    assert [w.a_solver for w in assign_layers(layers, Grid(1, 2))] == [0, 1, 0, 1]


def test_a_vocabulary_is_cheap() -> None:
    """Its factor is diagonal: 8000 entries are the work of a matrix of 20, of 2 x 16 the rest."""
    layers = [LayerDims(1, 8000, 2, diagonal_a=True), LayerDims(1, 16, 16), LayerDims(1, 1, 1)]
    assert [w.a_solver for w in assign_layers(layers, Grid(1, 2))] == [1, 0, 1]


def test_factors_that_are_not_colocated_use_two_ranks() -> None:
    one = [LayerDims(1, 9, 10)]
    assert assign_layers(one, Grid(1, 2), colocate_factors=False) == [LayerAssignment(0, 1, 0)]
    assert assign_layers(one, Grid(1, 2), colocate_factors=True) == [LayerAssignment(0, 0, 0)]


# Owners.

POLICIES: tuple[OwnerAssignment, ...] = ("balanced", "round_robin")


def owned(layers: list[LayerDims], ranks: int, assignment: OwnerAssignment) -> list[float]:
    """What each rank's factors take."""
    loads = [0.0] * ranks
    for layer, owner in zip(layers, assign_owners(layers, ranks, assignment), strict=True):
        loads[owner] += sum(factor_costs(layer, "memory"))
    return loads


@given(LAYERS, st.integers(1, 8), st.sampled_from(POLICIES))
def test_each_layer_has_one_owner_the_same_on_every_rank(
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


@given(LAYERS, st.integers(1, 8))
def test_the_fullest_owner_is_ahead_of_the_mean_by_less_than_a_layer(
    layers: list[LayerDims], ranks: int
) -> None:
    loads = owned(layers, ranks, "balanced")
    largest = max((sum(factor_costs(layer, "memory")) for layer in layers), default=0.0)
    assert max(loads) <= sum(loads) / ranks + largest * (1 - 1 / ranks) + 1e-9


@given(st.lists(DIMS, min_size=1, max_size=6), st.integers(1, 3))
def test_the_fullest_owner_is_within_a_third_of_the_optimum(
    layers: list[LayerDims], ranks: int
) -> None:
    items = [sum(factor_costs(layer, "memory")) for layer in layers]
    bound = (4 / 3 - 1 / (3 * ranks)) * optimum(items, ranks) * (1 + 1e-12)
    assert max(owned(layers, ranks, "balanced")) <= bound


def resnet50() -> list[LayerDims]:
    """The convolutions of ResNet-50, and its classifier with a bias."""
    layers, channels = [LayerDims(1, 3 * 49, 64)], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers += [LayerDims(1, channels, width), LayerDims(1, width * 9, width)]
            layers.append(LayerDims(1, width, width * 4))
            if block == 0:
                layers.append(LayerDims(1, channels, width * 4))
            channels = width * 4
    return [*layers, LayerDims(1, 2049, 1000)]


def test_resnet_50_over_many_owners_leaves_the_fullest_with_what_it_must() -> None:
    """The larger of an even share and the largest layer; in turn, it has more."""
    layers = resnet50()
    assert len(layers) == 54
    sizes = [sum(factor_costs(layer, "memory")) for layer in layers]
    for ranks in (2, 4, 8, 16, 32, 64):
        needed = max(sum(sizes) / ranks, *sizes)
        assert max(owned(layers, ranks, "balanced")) <= 1.05 * needed
    assert max(owned(layers, 4, "round_robin")) > 1.05 * sum(sizes) / 4


# Many ranks: as by looking at every rank each time, and fast.


def plainly(
    layers: list[LayerDims], grid: Grid, cost: AssignmentCost, colocate: bool
) -> list[LayerAssignment]:
    """The definition: longest processing time first, each to the first with the least to do."""
    a_costs = [
        float(x.groups * x.in_dim) if x.diagonal_a else solve_cost(x.groups, x.in_dim, cost)
        for x in layers
    ]
    g_costs = [solve_cost(x.groups, x.out_dim, cost) for x in layers]
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
            a_solver = give(row, a_costs[i])
            found[i] = LayerAssignment(row, a_solver, give(row, g_costs[i]))
        else:
            g_solver = give(row, g_costs[i])
            found[i] = LayerAssignment(row, give(row, a_costs[i]), g_solver)
    return [found[i] for i in range(len(layers))]


@given(
    st.lists(DIMS, max_size=40),
    st.builds(Grid, rows=st.integers(1, 9), columns=st.integers(1, 9)),
    st.sampled_from(COSTS),
    st.booleans(),
)
def test_assignment_is_that_of_its_definition(
    layers: list[LayerDims], grid: Grid, cost: AssignmentCost, colocate: bool
) -> None:
    found = assign_layers(layers, grid, cost=cost, colocate_factors=colocate)
    assert found == plainly(layers, grid, cost, colocate)


@given(st.lists(st.floats(0, 1e9) | st.integers(0, 3).map(float), max_size=40), st.integers(1, 20))
def test_work_is_spread_as_its_definition_says(costs: list[float], ranks: int) -> None:
    load, expected = [0.0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        expected[i] = min(range(ranks), key=lambda r: (load[r], r))
        load[expected[i]] += costs[i]
    assert spread_costs(costs, ranks) == expected
