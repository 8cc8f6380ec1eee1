"""Seconds from counts: curves, collectives and stages against numbers worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from second_order import Interconnect, Machine
from second_order.budget import intervals
from second_order.planning.calibration import network_of
from second_order.planning.counts import Case
from second_order.planning.interconnect import Level
from second_order.planning.machine import Curve, Overhead, Surface
from second_order.planning.systems import PLANNED
from second_order.planning.times import (
    StepTimes,
    exchange_seconds,
    kernel_seconds,
    rank_costs,
    step_times,
)
from second_order.planning.work import Among, Compute, Transfer

# One teraflop a second, one GB a second: seconds are easy to count.
MACHINE = Machine.given(
    1e12, eigh={10: 1e-3, 100: 1e-1}, inverse={10: 1e-4, 100: 1e-2}, bandwidth=1e9, launch=1e-9,
    layer=0.0, step=0.0, device="cpu",
)  # fmt: skip
FLAT = Interconnect.flat(1e-3, 1e6)
NODES = Interconnect.of_nodes(4, (1e-5, 1e8), (1e-3, 1e6))
sizes = st.floats(1, 1e9)


def test_a_curve_goes_straight_in_logarithms_and_on_by_its_power() -> None:
    curve = Curve(((100.0, 1e-1), (10.0, 1e-3)))
    assert curve.at(10) == curve.at(1) == 1e-3
    assert curve.at(100) == 1e-1
    assert math.isclose(curve.at(10**1.5), 1e-2)
    assert math.isclose(curve.at(1000), 1e2)
    assert math.isclose(replace(curve, power=2.0).at(1000), 10)


def test_a_surface_lies_between_its_curves() -> None:
    surface = Surface(((100.0, Curve(((8.0, 4.0),))), (1.0, Curve(((8.0, 1.0),)))))
    found = [surface.at(rows, 8) for rows in (0.5, 1, 10, 100, 200)]
    assert found == pytest.approx([1, 1, 2, 4, 8])


def test_sums_along_a_ring_and_over_a_tree() -> None:
    n, ranks = 4e6, range(4)
    ring = 2 * 3 * (1e-3 + 1e6 / 1e6)
    assert math.isclose(FLAT.all_reduce(n, ranks), ring)
    assert math.isclose(FLAT.all_reduce(4, ranks), 2 * 2 * (1e-3 + 4e-6)), "a tree for little"
    assert FLAT.all_reduce(n, [3]) == FLAT.all_to_all(n, n, [3]) == FLAT.broadcast(n, [3]) == 0


def test_broadcasts_and_exchanges() -> None:
    assert math.isclose(FLAT.broadcast(4e6, range(4)), (2 + 3) * 1e-3 + 1.5 * 4)
    assert math.isclose(FLAT.broadcast(4, range(4)), 2 * (1e-3 + 4e-6))
    assert FLAT.reduce(4e6, range(4)) == FLAT.broadcast(4e6, range(4))
    assert math.isclose(FLAT.all_to_all(3e6, 1e6, range(4)), 3e-3 + 3)
    assert math.isclose(FLAT.all_gather(1e6, range(4)), 3 * (1e-3 + 1))
    near, far = NODES.levels
    parts = far.latency + 1e6 / far.bandwidth, near.latency + 2e6 / near.bandwidth
    assert math.isclose(NODES.all_gather(1e6, range(8)), parts[0] + 3 * parts[1])
    quick = Interconnect((Level(1e-3, 1e6, gap=1e-4),))
    assert math.isclose(quick.all_to_all(0, 3e6, range(4)), 1e-3 + 2e-4 + 3)


def test_sums_come_together_inside_of_nodes_first() -> None:
    assert NODES.parties(range(8)) == [4, 2]
    assert NODES.parties(range(0, 8, 4)) == [1, 2], "strided: one of each node"
    assert NODES.parties(range(2, 6)) == [2, 2]
    assert NODES.parties(range(4, 8)) == [4, 1]
    inside = 2 * 3 * (1e-5 + 1e6 / 1e8)
    between = 2 * 1 * (1e-3 + 0.5e6 / 1e6)
    assert math.isclose(NODES.all_reduce(4e6, range(8)), inside + between)
    assert math.isclose(NODES.all_reduce(4e6, range(4)), inside)
    exchanged = 3 * 1e-5 + 3e6 / 1e8 + 4 * 1e-3 + 4e6 / 1e6
    assert math.isclose(NODES.all_to_all(7e6, 0, range(8)), exchanged)


@given(sizes, st.floats(1, 10), st.integers(1, 40), st.sampled_from([FLAT, NODES]))
def test_more_bytes_are_never_faster_nor_is_a_slower_network(
    n: float, more: float, count: int, links: Interconnect
) -> None:
    ranks = range(count)
    slower = Interconnect(
        tuple(Level(2 * x.latency, x.bandwidth / 2, x.ranks) for x in links.levels)
    )
    for verb in ("all_reduce", "broadcast", "reduce"):
        seconds = links.timed(verb)
        assert 0 <= seconds(n, ranks) <= seconds(n * more, ranks)
        assert math.isclose(slower.timed(verb)(n, ranks), 2 * seconds(n, ranks))
    assert links.all_to_all(n, 0, ranks) <= links.all_to_all(n * more, n, ranks)
    assert links.all_to_all(n, n, ranks) <= links.all_to_all(n, n, range(count + 1)) * 1.000001


@given(st.floats(1, 1e5), st.floats(1, 10), st.lists(st.floats(1e-6, 1), min_size=1, max_size=5))
def test_larger_matrices_are_never_faster(n: float, more: float, seconds: list[float]) -> None:
    curve = Curve(tuple((10.0 ** (i + 1), s) for i, s in enumerate(sorted(seconds))))
    assert curve.at(n) <= curve.at(n * more) * 1.000001
    assert MACHINE.product(n, n, n) <= MACHINE.product(n, n * more, n) * 1.000001
    assert MACHINE.statistics(n, 7) <= MACHINE.statistics(n * more, 7) * 1.000001


def test_kernels_by_hand() -> None:
    def seconds(kind: Any, *sizes: int, dtype: torch.dtype = torch.float32) -> float:
        return kernel_seconds(Compute("solve", kind, sizes, 3, dtype), MACHINE)

    product = 2 * 100 * 200 * 50 / 1e12
    assert math.isclose(seconds("matmul", 100, 200, 50), 3 * product)
    assert math.isclose(seconds("gram", 50, 100), 3 * 2 * 50 * 100**2 / 1e12)
    assert seconds("eigh", 100) == pytest.approx(0.3)
    assert seconds("cholesky_inverse", 100) == pytest.approx(0.03)
    assert seconds("cholesky_inverse", 100, dtype=torch.float64) == pytest.approx(0.06)
    assert math.isclose(seconds("qr", 100), 3 * 4 / 3 * 2 * 100**3 / 1e12)


def test_messages_by_hand() -> None:
    world = Among("world", 4)
    summed = Transfer("average_gradients", "all_reduce", world, 4000000, 6e6, 6e6, 4000000, 2)
    copies = 4e6 / 5e8 + 2 * 6e6 / 1e9
    wire = 2 * (2 * 3 * (1e-3 + 0.5e6 / 1e6))
    assert exchange_seconds(summed, MACHINE, FLAT) == pytest.approx(wire + copies)
    gathered = Transfer("solve_exchange", "all_gather", world, 10**6, 3e6, 3e6, 5 * 10**6, 1)
    wire = 3 * (1e-3 + 1) + 1e6 / 5e8 + 6e6 / 1e9
    assert exchange_seconds(gathered, MACHINE, FLAT) == pytest.approx(wire)
    column = Among("column", 2, 4)
    sent = Transfer("precondition_exchange", "all_to_all", column, 10**6, 1e6, 2e6, 3 * 10**6, 1)
    found = exchange_seconds(sent, MACHINE, NODES)
    assert found == pytest.approx(1e-3 + 2 + 1e6 / 5e8 + 4e6 / 1e9), "between nodes"


def case(system: str, ranks: int, solver: str = "inverse", **keywords: Any) -> Case:
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 10), nn.Linear(10, 10))
    planned = PLANNED[system](solver=solver, **keywords)
    return Case(planned.network(model, example=(torch.ones(8, 40),)), planned, ranks, examples=8)


def test_a_step_by_hand() -> None:
    """One rank: stages are their kernels, what is linear, and overheads."""
    machine = replace(MACHINE, overheads={"inverse": Overhead(1.0, 0.25), "base": Overhead(0, 2)})
    times = step_times(rank_costs(case("KAISA", 1), machine, FLAT, passes=7.0))
    solves = sum(machine.inverse.at(n) for n in (41, 60, 61, 10, 11, 10))
    assert times.due["solve"] == pytest.approx(solves + 1 + 3 * 0.25)
    elements = 60 * 41 + 10 * 61 + 10 * 11
    assert times.due["base"] == pytest.approx(6 * 2 + 8 * 4 * elements / 1e9)
    pairs = [(60, 41), (10, 61), (10, 11)]
    products = sum(machine.product(o, o, i) + machine.product(o, i, i) for o, i in pairs)
    linear = (3 + 6) * 4 * elements / 1e9
    assert times.due["precondition"] == pytest.approx(products + linear)
    assert times.due["passes"] == 7.0
    assert "average_gradients" not in times.due, "one rank sends nothing"
    device = replace(machine, device="cuda")
    waits = step_times(rank_costs(case("KAISA", 1), device, FLAT)).due["solve"]
    assert waits == pytest.approx(max(solves, 1.75)), "kernels run while Python goes on"


def test_measured_statistics_take_the_place_of_products() -> None:
    names = [layer.name for layer in case("DPKFAC", 2).network.layers]
    costs = rank_costs(case("DPKFAC", 2), MACHINE, FLAT, captured=dict.fromkeys(names, 1.0))
    assert sorted(round(c.times.due["statistics"]) for c in costs) == [1, 2], "each its own layers"
    partly = rank_costs(case("KAISA", 1), MACHINE, FLAT, captured={names[0]: 1.0})
    assert partly[0].times.due["statistics"] < 0.1, "all of a rank's are measured, or none"


def test_intervals_share_out_what_is_not_due_at_every_step() -> None:
    times = StepTimes(
        {"passes": 8.0, "statistics": 4.0, "statistics_exchange": 2.0, "solve": 30.0, "base": 1.0}
    )
    assert list(times.amortised(2, 10).values()) == [8.0, 2.0, 1.0, 3.0, 1.0]
    assert times.step(2, 10) == 15.0
    assert times.costs == (6.0, 30.0, 9.0)
    f, i = intervals(*times.costs, 0.5)
    assert 6 / f + 30 / i <= 0.5 * 9
    threads = StepTimes({"passes": 8.0}, hidden=100.0)
    assert threads.step(1, 10) == 10.0, "a solve that is longer than its interval is waited for"
    assert threads.step(1, 50) == 8.0
    assert threads.costs == (0.0, 0.0, 8.0)
    shared = replace(threads, beside=False)
    assert shared.step(1, 50) == 10.0, "without a core of its own it is work of the step"
    assert shared.amortised(1, 50) == {"passes": 8.0, "solve": 2.0}
    assert shared.costs == (0.0, 100.0, 8.0)


@pytest.mark.parametrize("system", PLANNED)
def test_solves_fall_with_ranks_and_messages_rise(system: str) -> None:
    found = [step_times(rank_costs(case(system, n), MACHINE, FLAT)) for n in (1, 2, 3)]
    hidden = system == "DistKFAC"
    solves = [t.hidden if hidden else t.due["solve"] for t in found]
    assert solves[0] > solves[1] >= solves[2] > 0, "the largest layer is not divided"
    sent = [t.due.get("average_gradients", 0.0) for t in found]
    assert 0 == sent[0] < sent[1] < sent[2]


def test_the_slowest_rank_decides_stage_by_stage() -> None:
    costs = rank_costs(case("DPKFAC", 3), MACHINE, FLAT)
    assert sum(cost.ranks for cost in costs) == 3
    times = step_times(costs)
    each = [cost.times.due["solve"] for cost in costs]
    assert times.due["solve"] == max(each) > min(each)


def test_machines_and_networks_are_json() -> None:
    full = replace(
        MACHINE,
        gram=Surface(((8.0, MACHINE.eigh), (64.0, MACHINE.eigh))),
        copies=3e8,
        spare_cores=2,
        memory=10**9,
        overheads={"solve": Overhead(1.0, 2.0)},
    )
    for machine in (MACHINE, full):
        assert Machine.of_json(json.loads(json.dumps(machine.as_json()))) == machine
    links = Interconnect((Level(1e-6, 1e9, 8, gap=1e-7), Level(1e-5, 1e8)), measured=True)
    assert Interconnect.of_json(json.loads(json.dumps(links.as_json()))) == links
    numbers = {"flops": 1e12, "eigh": {"10": 1e-3}, "inverse": {"10": 1e-4}, "bandwidth": 1e9}
    assert Machine.of_json(numbers).product(1024, 1024, 1024) == pytest.approx(2 * 1024**3 / 1e12)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Curve(()), "without points"),
        (lambda: Curve(((8.0, 1.0), (16.0, 0.5))), "seconds may not fall"),
        (lambda: Curve(((8.0, 1.0), (8.0, 2.0))), "given twice"),
        (lambda: Curve(((8.0, 0.0),)), "is not a number above 0"),
        (lambda: Surface(()), "give one at least"),
        (lambda: Level(1e-6, math.inf), "bandwidth=inf is not a number above 0"),
        (lambda: Level(1e-6, 1e9, 0), "1 or more"),
        (lambda: Interconnect(()), "without levels"),
        (lambda: Interconnect((Level(1, 1, 8),)), "give it ranks=None"),
        (lambda: Interconnect((Level(1, 1, 8), Level(1, 1, 12), Level(1, 1))), "whole multiples"),
        (lambda: FLAT.timed("gather"), "no formula for 'gather'"),
        (lambda: MACHINE.decomposition("qr", 3), "not one of eigen and inverse"),
        (lambda: replace(MACHINE, device="tpu"), "use 'cpu' or 'cuda'"),
        (lambda: replace(MACHINE, spare_cores=-1), "0 where all are busy"),
        (lambda: replace(MACHINE, overheads={"solve": Overhead(-1.0)}), "below 0"),
        (lambda: Machine.of_json({"name": "x"}), "a machine without device, products"),
        (lambda: Machine.of_json({"flops": 1e12}), "a machine without eigh"),
        (lambda: Interconnect.of_json({}), "without levels"),
        (lambda: Interconnect.of_json({"levels": [{"speed": 1}]}), "speed"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_a_measured_network_gives_back_what_was_measured() -> None:
    for ranks in (2, 3, 8):
        links = network_of(4e-4, 0.1, 1e-3, 2**24, ranks)
        assert links.all_reduce(0, range(ranks)) == pytest.approx(4e-4, rel=1e-6)
        assert links.all_reduce(2**24, range(ranks)) == pytest.approx(0.1, rel=0.05)
        assert links.measured
    assert links.all_to_all(0, 0, range(8)) == pytest.approx(1e-3, rel=0.1)
    noisy = network_of(1e-3, 1e-4, 1e-9, 2**24, 4)
    assert noisy.levels[0].bandwidth > 0, "noise gives no negative bandwidth"
