"""Seconds by size and of messages: curves and collectives against numbers worked out by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from second_order import Interconnect, Machine
from second_order.planning.machine import Curve, Level

# One teraflop a second, one GB a second: seconds are easy to count.
MACHINE = Machine.given(
    1e12, eigh={10: 1e-3, 100: 1e-1}, inverse={10: 1e-4, 100: 1e-2}, bandwidth=1e9, launch=1e-9,
    python=0.0, device="cpu",
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


def test_sums_along_a_ring_and_over_a_tree() -> None:
    n, ranks = 4e6, range(4)
    ring = 2 * 3 * (1e-3 + 1e6 / 1e6)
    assert math.isclose(FLAT.all_reduce(n, ranks), ring)
    assert math.isclose(FLAT.all_reduce(4, ranks), 2 * 2 * (1e-3 + 4e-6)), "a tree for little"
    assert FLAT.all_reduce(n, [3]) == FLAT.all_to_all(n, n, [3]) == 0


def test_exchanges() -> None:
    assert math.isclose(FLAT.all_to_all(3e6, 1e6, range(4)), 3e-3 + 3)
    assert math.isclose(FLAT.all_gather(1e6, range(4)), 3 * (1e-3 + 1))
    near, far = NODES.levels
    parts = far.latency + 1e6 / far.bandwidth, near.latency + 2e6 / near.bandwidth
    assert math.isclose(NODES.all_gather(1e6, range(8)), parts[0] + 3 * parts[1])
    quick = Interconnect((Level(1e-3, 1e6, gap=1e-4),))
    assert math.isclose(quick.all_to_all(0, 3e6, range(4)), 1e-3 + 2e-4 + 3)


def test_sums_come_together_inside_of_nodes_first() -> None:
    assert [g for _, g in NODES.parties(range(8))] == [4, 2]
    assert [g for _, g in NODES.parties(range(0, 8, 4))] == [1, 2], "strided: one of each node"
    assert [g for _, g in NODES.parties(range(2, 6))] == [2, 2]
    assert [g for _, g in NODES.parties(range(4, 8))] == [4, 1]
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
    assert 0 <= links.all_reduce(n, ranks) <= links.all_reduce(n * more, ranks)
    assert math.isclose(slower.all_reduce(n, ranks), 2 * links.all_reduce(n, ranks))
    assert links.all_to_all(n, 0, ranks) <= links.all_to_all(n * more, n, ranks)
    assert links.all_to_all(n, n, ranks) <= links.all_to_all(n, n, range(count + 1)) * 1.000001


@given(st.floats(1, 1e5), st.floats(1, 10), st.lists(st.floats(1e-6, 1), min_size=1, max_size=5))
def test_larger_matrices_are_never_faster(n: float, more: float, seconds: list[float]) -> None:
    curve = Curve(tuple((10.0 ** (i + 1), s) for i, s in enumerate(sorted(seconds))))
    assert curve.at(n) <= curve.at(n * more) * 1.000001
    assert MACHINE.dense(n) <= MACHINE.dense(n * more) * 1.000001


def test_machines_and_networks_are_json() -> None:
    machine = Machine("x", "cpu", *[MACHINE.eigh] * 3, 1e9, 1e-6, 1e-5, 10**9, 2)
    for each in (MACHINE, machine):
        assert Machine.of_json(json.loads(json.dumps(each.as_json()))) == each
    links = Interconnect((Level(1e-6, 1e9, 8, gap=1e-7), Level(1e-5, 1e8)), measured=True)
    assert Interconnect.of_json(json.loads(json.dumps(links.as_json()))) == links
    numbers = {"flops": 1e12, "eigh": {"10": 1e-3}, "inverse": {"10": 1e-4}, "bandwidth": 1e9}
    flops = 2 * 1024**3
    assert Machine.of_json(numbers).dense(flops) == pytest.approx(flops / 1e12)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Curve(()), "one size at least"),
        (lambda: Curve(((8.0, 1.0), (16.0, 0.5))), "do not fall"),
        (lambda: Curve(((8.0, 1.0), (8.0, 2.0))), "each once"),
        (lambda: Curve(((8.0, 0.0),)), "above 0"),
        (lambda: Level(1e-6, math.inf), "bandwidth=inf is not a number above 0"),
        (lambda: Level(1e-6, 1e9, 0), "ranks=0 is not a number above 0"),
        (lambda: Interconnect(()), "None for the last"),
        (lambda: Interconnect((Level(1, 1, 8),)), "None for the last"),
        (lambda: Interconnect((Level(1, 1, 8), Level(1, 1, 12), Level(1, 1))), "whole multiples"),
        (lambda: Machine.given(1e12, eigh={8: 1.0}, inverse={8: 1.0}, bandwidth=-1), "above 0"),
        (lambda: Machine.of_json({"name": "x"}), "products"),
        (lambda: Machine.of_json({"flops": 1e12}), "eigh"),
        (lambda: Interconnect.of_json({}), "None for the last"),
        (lambda: Interconnect.of_json({"levels": [{"speed": 1}]}), "speed"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        make()
