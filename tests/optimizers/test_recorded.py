"""All five systems step as they did at commit c00e611, and take up its checkpoints."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from ranks import agreed, assert_same_trajectory
from recorded import DATA, SCENES, alone, run

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
def test_steps_are_those_that_were_recorded(world: Any, name: str, processes: int) -> None:
    found = agreed(results(world, processes, name))
    assert_same_trajectory(found, recorded(name, processes)["trajectory"], rtol=1e-10)


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        (name, n)
        for name, (*_, worlds) in SCENES.items()
        for n in worlds
        if not name.startswith("DHO2")  # its checkpoints had no trust region then
    ],
)
def test_recorded_checkpoints_are_taken_up(world: Any, name: str, processes: int) -> None:
    expected = recorded(name, processes)
    found = agreed(results(world, processes, name, expected["saved"]))
    assert_same_trajectory(found, expected["resumed"], rtol=1e-10)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, (*_, worlds) in SCENES.items()
        if worlds == (1, 2) and not name.startswith("DHO2")
    ],
)
def test_recorded_checkpoints_of_two_processes_load_on_one(world: Any, name: str) -> None:
    """Not where statistics are those of some processes' own batches."""
    expected = recorded(name, 2)
    (found,) = results(world, 1, name, expected["saved"])
    if not name.startswith("DPKFAC"):
        assert_same_trajectory(found, expected["resumed"], rtol=1e-8)
    assert all(bool(w.isfinite().all()) for w in found)
