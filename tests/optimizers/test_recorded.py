"""All five systems step as they did at commit c00e611."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from ranks import agreed, assert_same_trajectory
from recorded_runs import DATA, SCENES, alone, run

RECORDED = torch.load(DATA)
each_scene = pytest.mark.parametrize(
    ("name", "processes"), [(name, n) for name, (*_, worlds) in SCENES.items() for n in worlds]
)


def results(world: Any, processes: int, *arguments: Any) -> list[Any]:
    """Of those that train."""
    start = alone if processes == 1 else partial(world.run)
    found = start(run, processes, *arguments)
    return [trajectory for trajectory, _ in filter(None, found)]


def recorded(name: str, processes: int) -> Any:
    return RECORDED[f"{name}, {processes} process{'es' if processes > 1 else ''}"]


@each_scene
def test_steps_equal_the_recorded_steps(world: Any, name: str, processes: int) -> None:
    found = agreed(results(world, processes, name))
    assert_same_trajectory(found, recorded(name, processes)["trajectory"], rtol=1e-10)
