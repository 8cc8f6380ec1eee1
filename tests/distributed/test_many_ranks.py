"""Worlds of a thousand ranks: plans, groups and memory do not grow with them.

One rank is real, in torch's fake process group, with the tools of the benchmark of many ranks.
"""

from __future__ import annotations

import time
import tracemalloc
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

import many_ranks
from second_order.distributed.assignment import LayerDims
from second_order.distributed.world import World
from second_order.kfac.plan import Plan, distkfac_plan, dpkfac_plan, kaisa_plan

LAYERS = [LayerDims(1, 65 + i % 7 * 64, 64 + i % 5 * 64, cost=float(i % 11)) for i in range(1000)]
RANKS = 4096

PLANNERS: dict[str, Any] = {
    **{
        f"KAISA, 1/{rows}{suffix}": partial(
            kaisa_plan,
            fraction=1 / rows,
            cost="compute",
            colocate=not suffix,
            factors_everywhere=False,
        )
        for rows in (1, 2, 64, 4096)
        for suffix in ("", ", apart")
    },
    "DPKFAC": partial(dpkfac_plan, assignment="balanced"),
    "DPKFAC, in turn": partial(dpkfac_plan, assignment="round_robin"),
    "DistKFAC": partial(distkfac_plan, factors_everywhere=False),
}


@pytest.mark.parametrize("name", PLANNERS)
def test_a_thousand_layers_are_planned_quickly_on_4096_ranks(name: str) -> None:
    tracemalloc.start()
    try:
        start = time.process_time()
        plan: Plan = PLANNERS[name](LAYERS, RANKS)
        seconds = time.process_time() - start
        (retained, _) = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seconds < 2.0
    assert retained < 2e6, "a few hundred bytes for each layer, whatever the number of its workers"
    used = {rank for layer in plan.layers for rank in layer.inverse_ranks}
    assert len(used) >= 900, "work is spread"


def step(system: many_ranks.System, ranks: int, rank: int) -> dict[str, Any]:
    task = partial(many_ranks.narrow_task, 6, 16, 400)
    return many_ranks.run(system, task, ranks, rank, counts_memory=True)


PLACES = [(system, 0) for system in many_ranks.SYSTEMS] + [(many_ranks.SYSTEMS[1], 7)]


@pytest.mark.parametrize(
    ("system", "rank"), PLACES, ids=[f"{system.name}, rank {rank}" for system, rank in PLACES]
)
def test_memory_and_messages_do_not_grow_with_ranks(system: many_ranks.System, rank: int) -> None:
    """The first rank owns the largest layer; of a thousand ranks, most own nothing."""
    most = 512 if system.closure else 1024  # Lanczos takes dozens of messages
    few, many = (step(system, ranks, rank) for ranks in (64, most))
    assert many["groups"] == few["groups"] <= 2
    if not system.closure:  # Lanczos stops where the pretended products make it
        assert many["collectives"] <= few["collectives"]
        assert many["state_mb"] == pytest.approx(few["state_mb"], rel=0.02)
        assert few["state_mb"] > 0
    # Each rank says a word of itself, and its part of the clip's sum: some dozen bytes.
    for name in ("construction_mb", "step_mb"):
        assert many[name] <= 1.05 * few[name] + 100e-6 * most, name
    # A list of the ranks is some dozen bytes for each; one for each layer would be megabytes.
    assert many["step_python_mb"] <= few["step_python_mb"] + 1.5


def test_large_messages_are_detected_by_this_test() -> None:
    """Directly, the largest owner's memory does grow."""
    task = partial(many_ranks.narrow_task, 6, 16, 400)
    with patch.object(World, "_is_uneven", lambda *_: False):
        few, many = (
            many_ranks.run(many_ranks.SYSTEMS[0], task, ranks, 0, counts_memory=True)
            for ranks in (64, 1024)
        )
    assert many["step_mb"] > 2 * few["step_mb"] + 10
