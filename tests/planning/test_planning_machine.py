"""Seconds by size and of messages against numbers by hand, and what is measured."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from second_order import Interconnect, Machine, calibrate
from second_order.planning.machine import ASSUMED_NETWORKS, interpolate

if TYPE_CHECKING:
    from pool import World


def test_seconds_between_two_sizes_are_a_power_of_n() -> None:
    seconds = {100: 1e-1, 10: 1e-3}
    assert interpolate(seconds, 10) == interpolate(seconds, 1) == 1e-3
    assert interpolate(seconds, 100) == pytest.approx(1e-1)
    assert interpolate(seconds, 10**1.5) == pytest.approx(1e-2)
    assert interpolate(seconds, 1000) == pytest.approx(1e2)


@given(st.floats(1, 1e5), st.floats(1, 10), st.lists(st.floats(1e-6, 1), min_size=1, max_size=5))
def test_larger_matrices_are_never_faster(n: float, more: float, seconds: list[float]) -> None:
    table = {10 ** (i + 1): s for i, s in enumerate(sorted(seconds))}
    assert interpolate(table, n) <= interpolate(table, n * more) * 1.000001


def test_seconds_of_messages() -> None:
    """Two rounds among four ranks, and three of four parts of the bytes."""
    links = Interconnect(latency=1e-3, bandwidth=1e6)
    assert links.gather_seconds(4e6, 4) == pytest.approx(2 * 1e-3 + 3)
    assert links.gather_seconds(8, 5) == pytest.approx(3 * 1e-3, rel=0.01)


def test_a_machine_is_measured() -> None:
    machine, links = calibrate()
    assert links is ASSUMED_NETWORKS["cpu"]
    assert machine.device == "cpu"
    for table in (machine.matmul, machine.eigh, machine.inverse):
        assert 0 < table[64] < table[1024]
    assert machine.eigh[256] > machine.inverse[256]
    with pytest.raises(ValueError, match="device=meta cannot be measured"):
        calibrate("meta")


def measured(rank: int, size: int) -> tuple[float, ...]:
    machine, links = calibrate(torch.device("cpu"))
    assert links.origin == "measured"
    return (*machine.matmul.values(), links.latency, links.bandwidth)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"device": "cuda:0"}, "device='cuda:0' is not one of 'cpu', 'cuda'"),
        ({"eigh": {}}, "eigh={} does not give positive seconds"),
        ({"matmul": {64: 0.0}}, "does not give positive seconds"),
    ],
)
def test_a_machine_without_numbers_is_refused(wrong: dict[str, Any], message: str) -> None:
    tables = {name: {64: 1e-3} for name in ("matmul", "eigh", "inverse")}
    with pytest.raises(ValueError, match=message):
        Machine("given", **{**tables, **wrong})


def test_all_ranks_get_the_same_measurements(world: World) -> None:
    first, second = world.run(measured, 2)
    assert first == second
    assert all(0 < number < math.inf for number in first)
