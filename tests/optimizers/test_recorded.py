"""All five systems step as they did at commit c00e611."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from ranks import agreed, assert_same_trajectory
from recorded_runs import DATA, SCENES, key_of, run

if TYPE_CHECKING:
    from pool import World

RECORDED = torch.load(DATA)
RUNS = [(name, processes) for name, (*_, sizes) in SCENES.items() for processes in sizes]


@pytest.mark.parametrize(("name", "processes"), RUNS)
def test_steps_equal_the_recorded_steps(world: World, name: str, processes: int) -> None:
    results = [run(0, 1, name)] if processes == 1 else world.run(run, processes, name)
    found = agreed([trajectory for trajectory in results if trajectory is not None])
    assert_same_trajectory(found, RECORDED[key_of(name, processes)], rtol=1e-10)
